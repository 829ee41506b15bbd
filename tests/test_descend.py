"""Gradient descent with a finite step, beside its continuous limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import (
    COVARIANCE,
    EPS,
    PROBLEMS,
    TARGET,
    arrays,
    largest_error,
    log_slope,
    problem,
    quartic_hole,
    run,
    start,
)

RATE = 0.02


def numpy_descent(weights, learning_rate, steps, momentum=0.0, decay=0.0, covariance=None):
    """Heavy-ball gradient descent on the quadratic loss, written out."""
    C = np.eye(4) if covariance is None else covariance
    W = [np.array(w) for w in weights]
    velocity = [np.zeros_like(w) for w in W]
    path = [[w.copy() for w in W]]
    for _ in range(steps):
        residual = TARGET - W[2] @ W[1] @ W[0] @ C
        gradients = [
            -(W[2] @ W[1]).T @ residual + decay * W[0],
            -W[2].T @ residual @ W[0].T + decay * W[1],
            -residual @ (W[1] @ W[0]).T + decay * W[2],
        ]
        for i in range(3):
            velocity[i] = momentum * velocity[i] - learning_rate * gradients[i]
        W = [w + v for w, v in zip(W, velocity, strict=True)]
        path.append([w.copy() for w in W])
    return path


@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["plain", "heavy_ball"])
@pytest.mark.parametrize("kind", ["whitened", "coloured"])
def test_descent_equals_a_plain_loop(kind, momentum):
    flow = gf.GradientFlow(problem(kind))
    traj = gf.descend(flow, start(), RATE, 40, momentum=momentum)
    covariance = COVARIANCE if kind == "coloured" else None
    path = numpy_descent(start().weights, RATE, 40, momentum, covariance=covariance)
    for i, expected in enumerate(path):
        # Round-off of 40 steps, with the sums taken in another order.
        assert largest_error(traj.network(i), expected) < 40 * 100 * EPS
    np.testing.assert_allclose(traj.ts, RATE * np.arange(41), rtol=1e-14)
    assert traj.status is gf.Status.REACHED_END


def test_descent_with_weight_decay_equals_a_plain_loop():
    flow = gf.GradientFlow(problem("whitened"), weight_decay=0.3)
    traj = gf.descend(flow, start(), RATE, 40)
    path = numpy_descent(start().weights, RATE, 40, decay=0.3)
    assert largest_error(traj.final, path[-1]) < 40 * 100 * EPS


@pytest.mark.parametrize("kind", PROBLEMS)
def test_each_step_changes_the_laws_by_the_square_of_the_rate_times_the_gradients_imbalance(kind):
    flow = gf.GradientFlow(problem(kind))
    traj = gf.descend(flow, start(), RATE, 40)
    for k in range(0, 40, 7):
        before, after = (gf.observables.imbalance(traj.network(k + j)) for j in (0, 1))
        G = [-g for g in arrays(flow.vector_field(0.0, traj.network(k)))]
        for i in range(2):
            expected = RATE**2 * (G[i + 1].T @ G[i + 1] - G[i] @ G[i].T)
            np.testing.assert_allclose(after[i] - before[i], expected, rtol=0, atol=50 * EPS)
            if k == 0:
                assert np.abs(expected).max() > 1e-5


def test_descent_converges_to_the_flow_at_first_order():
    flow = gf.GradientFlow(problem("whitened"))
    steps = np.array([400, 800, 1600])
    errors = [
        largest_error(gf.descend(flow, start(), 4.0 / n, int(n), save_every=int(n)).final,
                      arrays(run("whitened").final))
        for n in steps
    ]  # fmt: skip
    assert 0.9 < log_slope(4.0 / steps, errors) < 1.1


def test_rows_are_every_so_many_steps_the_start_and_the_last_step():
    flow = gf.GradientFlow(problem("whitened"))
    every = gf.descend(flow, start(), RATE, 40)
    for save_every, rows in ((1, range(41)), (10, [0, 10, 20, 30, 40]), (15, [0, 15, 30, 40])):
        traj = gf.descend(flow, start(), RATE, 40, save_every=save_every)
        np.testing.assert_allclose(traj.ts, RATE * np.array(rows), rtol=1e-14)
        for i, row in enumerate(rows):
            assert largest_error(traj.network(i), arrays(every.network(row))) < 1e-14
        np.testing.assert_allclose(traj.loss, np.asarray(every.loss)[list(rows)], rtol=1e-13)
        assert traj.stats.steps == 40


def test_interval_longer_than_the_run_keeps_the_start_and_the_end():
    traj = gf.descend(gf.GradientFlow(problem("whitened")), start(), RATE, 5, save_every=10)
    np.testing.assert_allclose(traj.ts, [0.0, 5 * RATE], rtol=1e-14)


def test_no_steps_keep_the_start():
    traj = gf.descend(gf.GradientFlow(problem("whitened")), start(), RATE, 0)
    np.testing.assert_array_equal(traj.ts, [0.0])
    assert largest_error(traj.final, arrays(start())) == 0
    assert traj.status is gf.Status.REACHED_END


@pytest.mark.parametrize("save_every", [1, 7])
def test_divergence_freezes_at_the_last_finite_state(save_every):
    flow = gf.GradientFlow(gf.Problem.from_loss(quartic_hole, (3, 4)))
    traj = gf.descend(flow, start(), 0.5, 60, save_every=save_every)
    assert traj.status is gf.Status.DIVERGED
    assert "learning_rate" in traj.status.message
    leaves = [traj.ts, traj.states, traj.recorded, traj.final, traj.final_loss]
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(leaves))
    last = round(float(traj.final_time) / 0.5)
    assert 0 < last < 60
    assert traj.stats.steps == last
    assert np.all(np.diff(traj.ts) > 0)
    # One step further and the loss or its gradient is lost.
    rate = flow.vector_field(0.0, traj.final)
    step = jax.tree.map(lambda w, f: w + 0.5 * f, traj.final, rate)
    lost = [flow.loss(step), sum(jnp.sum(f**2) for f in flow.vector_field(0.0, step).weights)]
    assert not np.all(np.isfinite(lost))


def test_norms_at_the_last_finite_state_are_finite():
    flow = gf.GradientFlow(problem("whitened"))
    traj = gf.descend(flow, start(), 2.0, 60)
    assert traj.status is gf.Status.DIVERGED
    assert np.isfinite(float(traj.final_gradient_norm))
    assert float(traj.ts[-1]) == float(traj.final_time)


def test_descent_is_stable_at_a_minimum_up_to_two_over_the_sharpness():
    # Balanced global minimum of depth 3: sharpness 3 s_1^{4/3}.
    minimum = gf.initialize.from_product(TARGET, (4, 3, 5, 3))
    limit = 2 / (3 * np.linalg.norm(TARGET, 2) ** (4 / 3))
    # A push along the sharpest direction: all layers' first mode together.
    pushed = jax.tree.map(lambda w: w * (1 + 1e-6), minimum)
    flow = gf.GradientFlow(problem("whitened"))
    first = float(flow.loss(pushed))
    stable = gf.descend(flow, pushed, 0.95 * limit, 60, save_every=60)
    unstable = gf.descend(flow, pushed, 1.05 * limit, 60, save_every=60)
    assert float(stable.final_loss) < first
    assert float(unstable.final_loss) > 10 * first


def test_vmap_over_learning_rates_equals_single_runs():
    flow = gf.GradientFlow(problem("whitened"))
    rates = jnp.array([0.01, 0.02])
    batch = jax.vmap(lambda rate: gf.descend(flow, start(), rate, 40))(rates)
    for i, rate in enumerate(rates):
        single = gf.descend(flow, start(), float(rate), 40)
        np.testing.assert_allclose(batch.lane(i).loss, single.loss, rtol=1e-12)
    assert batch.lane(1).network(3).widths == start().widths


def test_rows_without_states_hold_the_same_observables():
    flow = gf.GradientFlow(problem("whitened"))
    full, bare = (gf.descend(flow, start(), RATE, 40, save_states=s) for s in (True, False))
    assert bare.states is None
    np.testing.assert_allclose(bare.loss, full.loss, rtol=1e-13)
    assert largest_error(bare.final, arrays(full.final)) < 1e-14
