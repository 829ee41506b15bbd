"""What is measured, against closed forms and independent computations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import (
    TARGET,
    WIDTHS,
    arrays,
    dense,
    explicit,
    problem,
    random_network,
    start,
)

STRENGTHS = np.array([3.0, 2.0, 1.0])
START_STRENGTH = 1e-3


@pytest.fixture(scope="module")
def two_layers():
    """Decoupled balanced modes u' = 2u(s-u) from u_0 = 1e-3: logistic curves."""
    built = gf.Problem.from_singular_values(STRENGTHS)
    net = gf.initialize.decoupled(built, (3, 3, 3), np.sqrt(START_STRENGTH))
    return gf.simulate(gf.GradientFlow(built), net, 6.0, save=401, method=explicit(1e-10))


def logistic_time(s, fraction):
    u = fraction * s
    return np.log(u * (s - START_STRENGTH) / (START_STRENGTH * (s - u))) / (2 * s)


def test_balanced_two_layer_modes_follow_the_logistic_curve(two_layers):
    t = np.asarray(two_layers.ts)[:, None]
    u = STRENGTHS / (1 + (STRENGTHS / START_STRENGTH - 1) * np.exp(-2 * STRENGTHS * t))
    np.testing.assert_allclose(two_layers["modes"], u, rtol=0, atol=1e-7)
    # All modes are diagonal: they are the singular values too.
    np.testing.assert_allclose(
        two_layers.singular_values, -np.sort(-np.asarray(u), axis=1), rtol=0, atol=1e-7
    )
    np.testing.assert_allclose(two_layers.targets, STRENGTHS, rtol=1e-14)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_learning_times_follow_the_logistic_closed_form(two_layers, fraction):
    learnt = gf.observables.learning_times(two_layers, fraction)
    # Linear interpolation between saves 0.015 apart: error h²u''/(8u'), u''/u' <= 2s = 6.
    np.testing.assert_allclose(
        learnt.times, logistic_time(STRENGTHS, fraction), rtol=0, atol=0.015**2 * 6 / 8
    )
    np.testing.assert_array_equal(learnt.order, [0, 1, 2])


def test_modes_not_learnt_in_the_run_have_infinite_learning_time(two_layers):
    built = gf.Problem.from_singular_values(STRENGTHS)
    half = (logistic_time(STRENGTHS, 0.5)[0] + logistic_time(STRENGTHS, 0.5)[1]) / 2
    short = gf.simulate(
        gf.GradientFlow(built), two_layers.network(0), half, save=401, method=explicit(1e-10)
    )
    learnt = gf.observables.learning_times(short)
    assert np.isfinite(learnt.times[0])
    np.testing.assert_array_equal(learnt.times[1:], np.inf)
    np.testing.assert_array_equal(learnt.order, [0])


def test_order_of_learning_is_by_time_not_by_strength():
    built = gf.Problem.from_singular_values(STRENGTHS)
    net = gf.initialize.decoupled(built, (3, 3, 3), np.sqrt([1e-6, 1e-3, 0.3]))
    traj = gf.simulate(gf.GradientFlow(built), net, 8.0, save=401, method=explicit(1e-10))
    learnt = gf.observables.learning_times(traj)
    np.testing.assert_array_equal(learnt.order, [2, 1, 0])
    assert np.all(np.diff(learnt.times[learnt.order]) > 0)


def test_mode_of_strength_zero_is_never_learnt_and_learnt_start_is_learnt_at_once():
    built = gf.Problem.from_singular_values([2.0, 0.0, 0.0])
    net = gf.initialize.decoupled(built, (3, 3, 3), [1.3, 0.1, 0.0])
    traj = gf.simulate(gf.GradientFlow(built), net, 1.0, save=401, method=explicit(1e-10))
    learnt = gf.observables.learning_times(traj)
    assert learnt.times[0] == 0
    np.testing.assert_array_equal(learnt.times[1:], np.inf)


def test_alignment_of_a_decoupled_network_is_the_identity():
    net = gf.initialize.decoupled(problem("whitened"), WIDTHS, [0.9, 0.6, 0.3])
    found = gf.observables.alignment(net, problem("whitened"))
    for overlap in (found.left, found.right):
        np.testing.assert_allclose(overlap, np.eye(3), rtol=0, atol=1e-12)
    assert len(found.layers) == 2
    for overlap in found.layers:
        np.testing.assert_allclose(overlap[:3, :3], np.eye(3), rtol=0, atol=1e-12)


def test_alignment_is_in_the_whitened_frame():
    built = problem("coloured")
    net = gf.initialize.from_product(np.asarray(built.optimum), (4, 3, 5, 3))
    found = gf.observables.alignment(net, built)
    np.testing.assert_allclose(found.left, np.eye(3), rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.right, np.eye(3), rtol=0, atol=1e-10)


def test_alignment_of_a_random_network_is_a_matrix_of_cosines():
    found = gf.observables.alignment(start(), problem("whitened"))
    left = np.asarray(found.left)
    np.testing.assert_allclose(np.sum(left**2, axis=0), 1, rtol=1e-12)  # full basis of R³
    assert np.all((np.asarray(found.right) >= 0) & (np.asarray(found.right) <= 1 + 1e-12))
    assert np.abs(left - np.eye(3)).max() > 0.1
    assert [x.shape for x in found.layers] == [(3, 3), (3, 3)]


def test_training_aligns_the_network_with_the_data():
    built = gf.Problem.from_singular_values(STRENGTHS)
    net = gf.initialize.balanced(1, (3, 3, 3), 0.05)
    traj = gf.simulate(gf.GradientFlow(built), net, 20.0, save=401, method=explicit(1e-10))
    found = gf.observables.alignment(traj.final, built)
    np.testing.assert_allclose(found.left, np.eye(3), atol=1e-6)


SPECTRA = {
    "flat": ([1.0, 1.0, 1.0], 3.0),
    "one": ([2.0, 0.0, 0.0], 1.0),
    "two": ([5.0, 5.0, 0.0], 2.0),
    "half_quarter": ([0.5, 0.25, 0.25], 2**1.5),
    "none": ([0.0, 0.0, 0.0], 0.0),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_effective_rank_is_the_exponential_of_the_entropy_of_the_spectrum(name):
    spectrum, expected = SPECTRA[name]
    net = gf.LinearNetwork([np.diag(spectrum), np.eye(3)])
    assert float(gf.observables.effective_rank(net)) == pytest.approx(expected, abs=1e-12)
    scaled = gf.LinearNetwork([10 * np.diag(spectrum), np.eye(3)])
    assert float(gf.observables.effective_rank(scaled)) == pytest.approx(expected, abs=1e-12)


def test_singular_values_are_those_of_the_map_and_of_the_layers():
    net = start()
    W = np.linalg.multi_dot(arrays(net)[::-1])
    np.testing.assert_allclose(
        gf.observables.singular_values(net), np.linalg.svd(W, compute_uv=False), rtol=1e-12
    )
    for found, w in zip(gf.observables.layer_singular_values(net), arrays(net), strict=True):
        np.testing.assert_allclose(found, np.linalg.svd(w, compute_uv=False), rtol=1e-12)


def test_imbalance_is_the_next_gram_matrix_minus_the_previous_one():
    W = arrays(start())
    for i, C in enumerate(gf.observables.imbalance(start())):
        expected = W[i + 1].T @ W[i + 1] - W[i] @ W[i].T
        np.testing.assert_allclose(C, expected, rtol=0, atol=1e-14)


def test_balancedness_is_the_largest_frobenius_norm_and_zero_for_one_layer():
    norms = [np.linalg.norm(C) for C in gf.observables.imbalance(start())]
    assert float(gf.observables.balancedness(start())) == pytest.approx(max(norms), rel=1e-13)
    assert float(gf.observables.balancedness(gf.LinearNetwork([TARGET]))) == 0


def jacobian_kernel(net, X):
    """J Jᵀ of the outputs, outputs slow and samples fast."""
    flat, rebuild = jax.flatten_util.ravel_pytree(net)
    J = jax.jit(jax.jacobian(lambda x: (rebuild(x).end_to_end() @ X.T).ravel()))(flat)
    return np.asarray(J @ J.T)


@pytest.mark.parametrize("widths", [(4, 3), WIDTHS], ids=["one_layer", "three_layers"])
def test_tangent_kernel_is_the_gram_matrix_of_the_jacobian_of_the_outputs(widths):
    rng = np.random.default_rng(0)
    net, X = random_network(rng, widths), rng.standard_normal((5, 4))
    kernel = gf.observables.tangent_kernel(net, X)
    np.testing.assert_allclose(kernel, jacobian_kernel(net, jnp.asarray(X)), rtol=0, atol=1e-12)


def test_two_layer_tangent_kernel_follows_its_formula():
    rng = np.random.default_rng(1)
    net, X = random_network(rng, (4, 5, 3)), rng.standard_normal((6, 4))
    W1, W2 = arrays(net)
    expected = np.kron(np.eye(3), X @ W1.T @ W1 @ X.T) + np.kron(W2 @ W2.T, X @ X.T)
    np.testing.assert_allclose(gf.observables.tangent_kernel(net, X), expected, rtol=0, atol=1e-12)


def test_kernel_distance_is_one_minus_the_cosine():
    rng = np.random.default_rng(2)
    A, B = (m @ m.T for m in rng.standard_normal((2, 4, 4)))
    cosine = np.sum(A * B) / np.linalg.norm(A) / np.linalg.norm(B)
    distance = gf.observables.kernel_distance
    assert float(distance(A, B)) == pytest.approx(1 - cosine, rel=1e-12)
    assert float(distance(A, 3 * A)) == pytest.approx(0, abs=1e-30)
    assert float(distance(np.diag([1.0, 0.0]), np.diag([0.0, 1.0]))) == pytest.approx(1, rel=1e-14)


def test_kernel_distance_of_nearly_equal_kernels_does_not_cancel():
    A, B = np.eye(2), np.diag([1.0, 1.0 + 1e-9])
    # 1 − cos = (1e-9)²/8 to first order.
    assert float(gf.observables.kernel_distance(A, B)) == pytest.approx(1.25e-19, rel=1e-5, abs=0)


@pytest.mark.parametrize("widths", [(4, 3), WIDTHS, (2, 3, 1, 4, 2)], ids=str)
def test_nonnormality_is_the_norm_of_the_commutator_of_the_adjacency_matrix(widths):
    net = random_network(np.random.default_rng(3), widths)
    A = dense(net)
    expected = np.linalg.norm(A @ A.T - A.T @ A)
    assert float(gf.observables.nonnormality(net)) == pytest.approx(expected, rel=1e-12)


def test_observables_work_under_vmap():
    stacked = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), start())
    ranks = jax.vmap(gf.observables.effective_rank)(stacked)
    np.testing.assert_allclose(ranks[0], ranks[1], rtol=1e-12)
    norms = jax.vmap(gf.observables.balancedness)(stacked)
    assert float(norms[1]) == pytest.approx(4 * float(norms[0]), rel=1e-12)
