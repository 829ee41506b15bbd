"""Flows of the end-to-end map and of decoupled modes, against the flow of all layers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from gradflow.errors import BalanceWarning

TIGHT = gf.Method(solver="explicit", rtol=1e-11, atol=1e-13)
PROBLEM = gf.Problem(np.random.default_rng(3).standard_normal((3, 4)))


def _widths(depth):
    return (4, *[5] * (depth - 1), 3)


def _maps(traj):
    return jax.vmap(gf.LinearNetwork.end_to_end)(traj.states)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_end_to_end_flow_is_the_flow_of_a_balanced_network(depth):
    start = gf.initialize.balanced(depth, _widths(depth), 0.5)
    layers = gf.simulate(gf.GradientFlow(PROBLEM), start, 8.0, save=30, method=TIGHT)
    map_only = gf.simulate(gf.EndToEndFlow(PROBLEM, depth), start, 8.0, save=30, method=TIGHT)
    # Both are at solver tolerance, amplified at most by the saddles on the way.
    np.testing.assert_allclose(map_only.states, _maps(layers), rtol=0, atol=2e-8)
    np.testing.assert_allclose(map_only.loss, layers.loss, rtol=0, atol=2e-8)


def test_end_to_end_flow_of_another_loss_and_of_coloured_inputs():
    covariance = np.diag([2.0, 1.0, 0.5, 0.3])
    for problem in (
        gf.Problem(np.asarray(PROBLEM.target), covariance),
        gf.Problem.from_loss(gf.losses.Huber(PROBLEM.target), (3, 4)),
    ):
        start = gf.initialize.balanced(1, _widths(3), 0.5)
        layers = gf.simulate(gf.GradientFlow(problem), start, 4.0, save=9, method=TIGHT)
        map_only = gf.simulate(gf.EndToEndFlow(problem, 3), start, 4.0, save=9, method=TIGHT)
        np.testing.assert_allclose(map_only.states, _maps(layers), rtol=0, atol=2e-8)


def test_an_unbalanced_start_is_reported_and_moves_differently():
    start = gf.initialize.delta_balanced(0, _widths(3), 0.5, 0.3)
    flow = gf.EndToEndFlow(PROBLEM, 3)
    with pytest.warns(BalanceWarning, match="0.3 against .* will differ"):
        map_only = gf.simulate(flow, start, 4.0, save=9, method=TIGHT)
    layers = gf.simulate(gf.GradientFlow(PROBLEM), start, 4.0, save=9, method=TIGHT)
    assert float(jnp.abs(map_only.states - _maps(layers)).max()) > 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow.check_state(gf.initialize.balanced(0, _widths(3), 0.5))


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_end_to_end_flow_weights_residuals_by_the_difference_quotient(depth):
    rng = np.random.default_rng(depth)
    W, flow = rng.standard_normal((3, 4)), gf.EndToEndFlow(PROBLEM, depth)
    U, s, Vt = np.linalg.svd(W)
    s = np.append(s, 0.0)
    # (σ_r² − σ_k²)/(σ_r^{2/h} − σ_k^{2/h}), on the diagonal its limit h σ^{2−2/h}.
    with np.errstate(invalid="ignore"):
        square, root = s**2, s ** (2 / depth)
        K = (square[:, None] - square[None, :]) / (root[:, None] - root[None, :])
    np.fill_diagonal(K, depth * s ** (2 - 2 / depth))
    R = np.asarray(PROBLEM.residual(W))
    expected = U @ (K[:3] * (U.T @ R @ Vt.T)) @ Vt
    np.testing.assert_allclose(flow.vector_field(0.0, jnp.asarray(W)), expected, atol=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_derivatives_are_right_and_finite_where_singular_values_coincide_or_vanish(depth):
    flow, rng = gf.EndToEndFlow(PROBLEM, depth), np.random.default_rng(0)

    def rate(W):
        return flow.vector_field(0.0, W)

    direction, eps = jnp.asarray(rng.standard_normal((3, 4))), 1e-6
    generic, coincident = jnp.asarray(rng.standard_normal((3, 4))), 1.3 * jnp.eye(3, 4)
    for W in (generic, coincident):
        _, tangent = jax.jvp(rate, (W,), (direction,))
        quotient = (rate(W + eps * direction) - rate(W - eps * direction)) / (2 * eps)
        np.testing.assert_allclose(tangent, quotient, rtol=0, atol=1e-6)
        # Reverse mode transposes the same rule.
        cotangent = jnp.asarray(rng.standard_normal((3, 4)))
        _, pull = jax.vjp(rate, W)
        np.testing.assert_allclose(
            jnp.sum(pull(cotangent)[0] * direction), jnp.sum(cotangent * tangent), rtol=1e-10
        )
    for W in (jnp.zeros((3, 4)), jnp.eye(3, 4).at[1:].set(0.0)):
        assert bool(jnp.isfinite(rate(W)).all())
        assert bool(jnp.isfinite(jax.jacfwd(rate)(W)).all())


def test_singular_values_of_balanced_networks_move_at_their_own_rate():
    # σ̇_r = h σ_r^{2−2/h} ⟨R, u_r v_rᵀ⟩ from 100 random balanced starts, by five-point differences.
    flow = gf.GradientFlow(PROBLEM)
    step, times = 1e-3, np.array([0.2, 1.0, 2.0])
    grid = np.concatenate([t + step * np.arange(-2, 3) for t in times])

    def run(key):
        start = gf.initialize.balanced(key, _widths(3), 0.6)
        return gf.simulate(flow, start, float(grid[-1]), save=grid, method=TIGHT).states

    states = jax.vmap(run)(jax.random.split(jax.random.key(0), 100))
    maps = np.asarray(jax.vmap(jax.vmap(gf.LinearNetwork.end_to_end))(states))
    U, s, Vt = np.linalg.svd(maps, full_matrices=False)
    s = s.reshape(100, len(times), 5, -1)
    weights = np.array([1, -8, 0, 8, -1]) / (12 * step)
    measured = np.einsum("k,atkr->atr", weights, s)
    R = np.asarray(PROBLEM.target) - maps
    along = np.einsum("...ir,...ij,...rj->...r", U, R, Vt)
    predicted = 3 * s[:, :, 2] ** (4 / 3) * along.reshape(s.shape)[:, :, 2]
    # Where singular values avoid each other their derivatives in t grow like 1/gap: the quotient,
    # of fourth order in step/gap, is only asked for where the gap is 0.05 or more.
    apart = np.min(-np.diff(s[:, :, 2], axis=-1), axis=-1) > 0.05
    assert apart.mean() > 0.7
    np.testing.assert_allclose(measured[apart], predicted[apart], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("depth", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_decoupled_starts_stay_decoupled_and_follow_the_mode_flow(depth):
    rng = np.random.default_rng(depth)
    scales = rng.uniform(0.2, 0.6, (depth, 3))
    start = gf.initialize.decoupled(PROBLEM, _widths(depth), scales)
    method = gf.Method(solver="explicit", rtol=1e-12, atol=1e-14)
    full = gf.simulate(gf.GradientFlow(PROBLEM), start, 10.0, save=40, method=method)
    modes = gf.simulate(
        gf.ModeFlow(PROBLEM.singular_values, depth), scales, 10.0, save=40, method=method
    )
    np.testing.assert_allclose(full["modes"], modes["modes"], rtol=0, atol=1e-10)
    _, U, V = PROBLEM.canonical()
    turned = np.einsum("ji,tjk,kl->til", U, _maps(full), V)
    off = turned - np.einsum("tii->ti", turned[:, :, :3])[:, :, None] * np.eye(3, 4)
    assert np.abs(off).max() < 1e-14 * 50  # round-off of the steps taken
    assert modes.targets is not None
    gf.testing.assert_conserved(modes, atol=1e-10)


def test_mode_flow_is_minus_the_gradient_of_its_loss():
    flow = gf.ModeFlow([3.0, 1.0, 0.0], 4)
    a = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3))).at[1, 2].set(0.0)
    np.testing.assert_allclose(flow.vector_field(0.0, a), -jax.grad(flow.loss)(a), atol=1e-13)


def test_mode_flow_agrees_with_the_closed_form():
    flow, u0 = gf.ModeFlow([3.0, 2.0, 1.0], 3), np.array([1e-3, 2e-3, 5e-3])
    start = np.broadcast_to(u0 ** (1 / 3), (3, 3))
    traj = gf.simulate(flow, start, 6.0, save=50, method=TIGHT)
    exact = gf.exact.mode(np.array([[3.0, 2.0, 1.0]]), u0[None, :], np.asarray(traj.ts)[:, None], 3)
    np.testing.assert_allclose(traj["modes"], exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("depth", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_learning_times_grow_with_the_scale_of_the_start_as_predicted(depth):
    flow = gf.ModeFlow([2.0], depth)
    scales = np.array([1e-1, 1e-2, 1e-3, 1e-4])  # of every layer: u_0 = scale^h
    predicted = np.asarray(gf.exact.escape_time(2.0, scales**depth, depth))
    method = gf.Method(solver="implicit" if depth > 2 else "explicit", rtol=1e-9, atol=1e-12)
    measured = []
    for scale, t in zip(scales, predicted, strict=True):
        start = np.full((depth, 1), scale)
        near = t * np.linspace(0.999, 1.001, 401)
        traj = gf.simulate(flow, start, 1.001 * t, save=near, method=method)
        measured.append(gf.observables.learning_times(traj).times[0])
    np.testing.assert_allclose(measured, predicted, rtol=1e-4)
    # Logarithmic at depth 2, t = −ln(scale)/s; a power beyond, t ∝ scale^{−(h−2)}.
    if depth == 2:
        slope, law = np.polyfit(np.log(scales), measured, 1)[0], -1 / 2.0
    else:
        slope, law = np.polyfit(np.log(scales), np.log(measured), 1)[0], -(depth - 2)
    assert slope == pytest.approx(law, rel=0.02)


def test_weight_decay_shrinks_the_laws_exponentially():
    decay = 0.3
    flow = gf.GradientFlow(PROBLEM, weight_decay=decay)
    start = gf.initialize.gaussian(2, _widths(3), 0.8)
    traj = gf.simulate(flow, start, 5.0, save=21, method=TIGHT)
    for C in traj["imbalance"]:
        expected = np.exp(-2 * decay * np.asarray(traj.ts))[:, None, None] * C[:1]
        np.testing.assert_allclose(C, expected, rtol=0, atol=1e-8)


CASES = {
    "depth_0": (lambda: gf.EndToEndFlow(PROBLEM, 0), "depth"),
    "no_problem": (lambda: gf.EndToEndFlow(np.eye(3), 2), "problem"),
    "map_of_other_shape": (
        lambda: gf.simulate(gf.EndToEndFlow(PROBLEM, 2), np.eye(3), 1.0),
        "state",
    ),
    "other_depth": (
        lambda: gf.simulate(
            gf.EndToEndFlow(PROBLEM, 2), gf.initialize.balanced(0, _widths(3), 0.1), 1.0
        ),
        "state",
    ),
    "negative_strength": (lambda: gf.ModeFlow([1.0, -1.0], 2), "singular_values"),
    "modes_of_other_shape": (
        lambda: gf.simulate(gf.ModeFlow([1.0, 2.0], 2), np.ones((3, 2)), 1.0),
        "state",
    ),
    "cross_entropy_labels": (
        lambda: gf.losses.CrossEntropy(np.ones((4, 2)), np.ones((4, 3))),
        "Y",
    ),
    "huber_threshold": (lambda: gf.losses.Huber(np.eye(2), threshold=0.0), "threshold"),
    "empty_mask": (lambda: gf.losses.Masked(np.eye(2), np.zeros((2, 2), bool)), "mask"),
    "mask_of_floats": (lambda: gf.losses.Masked(np.eye(2), np.ones((2, 2))), "mask"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_by_name(case):
    call, argument = CASES[case]
    with pytest.raises(ValueError, match=f"^{argument}: "):
        call()


def test_losses_are_what_they_say():
    rng = np.random.default_rng(0)
    W, target = rng.standard_normal((2, 3)), rng.standard_normal((2, 3))
    error = np.abs(target - W)
    huber = np.where(error < 0.7, 0.5 * error**2, 0.7 * (error - 0.35)).sum()
    np.testing.assert_allclose(gf.losses.Huber(target, 0.7)(jnp.asarray(W)), huber, rtol=1e-14)
    mask = rng.random((2, 3)) < 0.5
    masked = 0.5 * ((target - W)[mask] ** 2).sum()
    np.testing.assert_allclose(gf.losses.Masked(target, mask)(jnp.asarray(W)), masked, rtol=1e-14)
    X, labels = rng.standard_normal((7, 3)), rng.integers(0, 2, 7)
    logits = X @ W.T
    entropy = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(7), labels])
    loss = gf.losses.CrossEntropy(X, np.eye(2)[labels])
    np.testing.assert_allclose(loss(jnp.asarray(W)), entropy, rtol=1e-13)


@pytest.mark.parametrize("name", ["cross_entropy", "huber", "masked"])
def test_conservation_laws_hold_for_every_loss(name):
    rng = np.random.default_rng(1)
    loss = {
        "cross_entropy": gf.losses.CrossEntropy(
            rng.standard_normal((20, 4)), np.eye(3)[rng.integers(0, 3, 20)]
        ),
        "huber": gf.losses.Huber(PROBLEM.target),
        "masked": gf.losses.Masked(PROBLEM.target, rng.random((3, 4)) < 0.6),
    }[name]
    start = gf.initialize.gaussian(0, _widths(3), 0.7)
    flow = gf.GradientFlow(gf.Problem.from_loss(loss, (3, 4)))
    traj = gf.simulate(flow, start, 20.0, save=40, method=gf.Method(solver="explicit"))
    gf.testing.assert_conserved(traj, atol=1e-7)
    gf.testing.assert_loss_decreases(traj)
    assert float(traj.loss[-1]) < 0.9 * float(traj.loss[0])
