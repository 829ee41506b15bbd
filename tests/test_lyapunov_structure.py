"""Invariant subspaces, the effect of shortcuts, backpropagated norms, and refused arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.stats

import gradflow as gf
from gradflow.lyapunov import effect
from lyapunov_cases import block_triangular, ly, optimised, positive_pair, rotation, two_point

pytestmark = pytest.mark.usefixtures("optimised")
assert optimised


# Filtration ------------------------------------------------------------------------------------


def basis(d, seed=0):
    return np.random.default_rng(seed).standard_normal((d, d))


def hidden(blocks, T):
    """Block-diagonal matrices in another basis."""
    return T @ scipy.linalg.block_diag(*blocks) @ np.linalg.inv(T)


def same_space(A, B):
    assert A.shape == B.shape
    assert np.abs(A @ A.T - B @ B.T).max() < 1e-8


def orthonormal(A):
    return np.linalg.qr(A)[0]


def test_two_starts_of_a_block_triangular_law_have_two_rates():
    found = ly.filtration(block_triangular(), 0, steps=500)
    assert [space.shape[1] for space in found.subspaces] == [2, 1]
    np.testing.assert_allclose(found.exponents, [0.5, 0.1], atol=0.02)
    same_space(found.subspaces[1], np.eye(2)[:, :1])
    assert found.exponent_along([1.0, 0.0]) == found.exponents[1]
    assert found.exponent_along([1.0, 1.0]) == found.exponents[0]
    assert "dimension 1" in repr(found)


def test_finite_triangular_matrices_have_exact_rates_in_any_basis():
    T = basis(2)
    pair = [[[np.exp(0.4), 1], [0, np.exp(0.9)]], [[np.exp(-0.2), -1], [0, np.exp(0.1)]]]
    found = ly.filtration(ly.Finite([T @ np.array(A) @ np.linalg.inv(T) for A in pair]), 0)
    np.testing.assert_allclose(found.exponents, [0.5, 0.1], atol=1e-10)
    np.testing.assert_allclose(found.standard_error, 0)
    same_space(found.subspaces[1], orthonormal(T[:, :1]))


def test_a_fast_invariant_subspace_slows_no_start():
    pair = [[[np.exp(0.9), 1], [0, np.exp(0.4)]], [[np.exp(0.1), -1], [0, np.exp(-0.2)]]]
    found = ly.filtration(ly.Finite(pair), 0)
    assert len(found.subspaces) == 1
    np.testing.assert_allclose(found.exponents, [0.5], atol=1e-12)
    # It is found all the same, with its rate; and so is the slower quotient.
    same_space(found.invariant[0].basis, np.eye(2)[:, :1])
    assert found.invariant[0].exponent == pytest.approx(0.5)
    assert sorted(float(f.exponents[0]) for f in found.factors) == pytest.approx([0.1, 0.5])


def test_direct_sums_are_taken_apart():
    T = basis(4)
    one = hidden([[[2.0]], [[0.5]], rotation(0.3, 1.1)], T)
    two = hidden([[[3.0]], [[0.7]], rotation(1.3, 1.2)], T)
    found = ly.filtration(ly.Finite([one, two]), 0, steps=300)
    rates = [0.5 * np.log(6), 0.5 * np.log(1.32), 0.5 * np.log(0.35)]
    np.testing.assert_allclose(found.exponents, rates, atol=2e-3)
    assert [space.shape[1] for space in found.subspaces] == [4, 3, 1]
    same_space(found.subspaces[1], orthonormal(T[:, 1:]))
    same_space(found.subspaces[2], orthonormal(T[:, 1:2]))
    assert found.exponent_along(T[:, 2] + T[:, 1]) == found.exponents[1]
    assert sorted(f.dimension for f in found.factors) == [1, 1, 2]


def test_copies_of_one_block_stay_together_and_glued_ones_do_not():
    rng = np.random.default_rng(3)
    A, C = rng.standard_normal((2, 2, 2)), rng.standard_normal((2, 2, 2))
    T = basis(4, 1)
    zero = np.zeros((2, 2))
    apart = [T @ np.block([[a, zero], [zero, a]]) @ np.linalg.inv(T) for a in A]
    glued = [
        T @ np.block([[a, c], [zero, a]]) @ np.linalg.inv(T) for a, c in zip(A, C, strict=True)
    ]
    found = ly.filtration(ly.Finite(apart), 0, steps=200)
    assert [(f.copies, f.dimension) for f in found.factors] == [(2, 2)]
    found = ly.filtration(ly.Finite(glued), 0, steps=200)
    assert [(f.copies, f.dimension) for f in found.factors] == [(1, 2), (1, 2)]
    assert len(found.subspaces) == 1
    same_space(found.invariant[0].basis, orthonormal(T[:, :2]))


def test_irreducible_laws_have_one_level():
    for ensemble in (ly.Gaussian(2, 1.0), positive_pair()):
        found = ly.filtration(ensemble, 0, steps=200)
        assert len(found.subspaces) == len(found.factors) == 1
        assert found.factors[0].dimension == ensemble.dimension


@pytest.mark.slow
def test_three_blocks_of_which_the_slowest_is_invariant():
    ensemble = ly.BlockTriangular([ly.Gaussian(2, 0.3), two_point(0.3), ly.Gaussian(2, 1.0)])
    found = ly.filtration(ensemble, 0, steps=1000)
    # γ_1 of the last block is below that of the middle one: it is slow, but no start is.
    assert [space.shape[1] for space in found.subspaces] == [5, 2]
    assert found.exponents[-1] == pytest.approx(ly.closed_form(ly.Gaussian(2, 0.3))[0], abs=0.01)
    assert found.exponents[0] == pytest.approx(0.3, abs=0.01)


def test_dull_filtrations():
    identity = ly.filtration(ly.Finite(np.eye(3)[None]), 0)
    assert [(f.copies, f.dimension) for f in identity.factors] == [(3, 1)]
    nilpotent = ly.filtration(ly.Finite([[[0.0, 1.0], [0.0, 0.0]]]), 0)
    assert nilpotent.exponents[0] == -np.inf
    partly = ly.filtration(ly.Finite([np.diag([2.0, 0.0])]), 0)
    np.testing.assert_allclose(partly.exponents, [np.log(2), -np.inf])
    assert partly.exponent_along([0.0, 1.0]) == -np.inf


# Effect of shortcuts ---------------------------------------------------------------------------


def test_verdicts_on_either_side_of_the_threshold():
    small = ly.residual_effect(ly.Gaussian(2, 0.5), 0, steps=500)
    assert small.verdict == ("shrank", "shrank")
    assert small.shrank.all()
    large = ly.residual_effect(ly.Gaussian(2, 1.0), 0, steps=500)
    assert large.verdict[0] == "grew"
    assert large.change[0] == pytest.approx(0.27988679738808 - 0.0579657578292062, abs=0.02)
    assert "grew" in repr(large)
    # At σ* itself no sample can tell.
    edge = ly.residual_effect(ly.Gaussian(2, ly.threshold(2) / 2**0.5), 0, steps=500)
    assert edge.verdict[0] == "undecided"


def test_the_identity_goes_from_zero_to_log_two():
    found = ly.residual_effect(ly.Finite(np.eye(3)[None]), 0, steps=20, chains=8)
    assert found.verdict == ("grew",) * 3
    np.testing.assert_allclose(found.residual.exponents, np.log(2))
    reflected = ly.residual_effect(ly.Finite(np.eye(3)[None]), 0, steps=20, chains=8, beta=2.0)
    assert reflected.residual.name.startswith("delta")


def test_verdicts_on_numbers():
    change, words = effect.compare(
        np.array([-1.0, 0.5, -np.inf, -np.inf, 0.1]),
        np.array([0.9, 0.7, -2.0, -np.inf, -0.1001]),
        np.array([0.01, 0.01, 0.01, 0.0, 0.01]),
        0.99,
        1000,
    )
    assert words == ("shrank", "grew", "shrank", "undecided", "undecided")
    np.testing.assert_allclose(change[:2], [-0.1, 0.2])
    assert scipy.stats.t.ppf(0.995, 1000) < 2.6


def test_phase_diagram_has_its_edge_at_the_threshold():
    scales = np.linspace(0.5, 1.5, 21)
    found = ly.phase_diagram([2, 4, 10], scales)
    assert found.exact.all()
    for row, d in zip(found.verdict, found.dimensions, strict=True):
        np.testing.assert_array_equal(row, np.where(scales < ly.threshold(int(d)), -1, 1))
    last = ly.phase_diagram([2, 3], [0.5, 1.0], which=2)
    assert last.plain[0, 1] == pytest.approx(ly.closed_form(ly.Gaussian(2, 1 / 2**0.5))[1])
    sampled = ly.phase_diagram(
        [2], [0.5], family=lambda d, s: ly.delta(ly.Gaussian(d, s), 0.5), steps=200, which=2
    )
    assert not sampled.exact.any()
    assert "shrank" in repr(found)


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 4])
def test_sampled_threshold_agrees_with_the_closed_form_within_its_error(d):
    found = ly.sampled_threshold(3, d)
    assert abs(found.sigma - ly.threshold(d)) < 4 * found.standard_error
    assert found.standard_error < 2e-3


# Backpropagated norms --------------------------------------------------------------------------

DEPTH, WIDTH = 60, 6


def network(scale=1.0, seed=0):
    return gf.initialize.gaussian(seed, (WIDTH,) * (DEPTH + 1), scale)


def test_backpropagated_norms_are_norms_of_gradients():
    h = 8
    net = gf.LinearNetwork(network().weights[:h])
    x = np.random.default_rng(0).standard_normal(WIDTH)

    def loss(shifts):
        y = jnp.asarray(x)
        for w, shift in zip(net.weights, shifts[1:], strict=True):
            y = w @ y + shift
        return c @ (y + 0 * shifts[0])

    c = np.arange(1.0, WIDTH + 1)
    gradients = jax.grad(loss)(jnp.zeros((h + 1, WIDTH)))[1:]
    found = ly.gradient_norms(net, output_gradient=c, steps=20)
    np.testing.assert_allclose(
        found.log_norms[1:], np.log(np.linalg.norm(gradients, axis=1)), atol=1e-12
    )
    assert found.log_norms[-1] == pytest.approx(np.log(np.linalg.norm(c)))
    pulled = np.linalg.norm(np.asarray(net.end_to_end()).T @ c)
    assert found.log_norms[0] == pytest.approx(np.log(pulled))


SHORTCUTS = {
    "plain": (None, lambda g: g),
    "residual": ("identity", ly.residual),
    "delta": (
        ly.delta_operator(0.9, np.arange(1.0, WIDTH + 1)),
        lambda g: ly.delta(g, 0.9, direction=np.arange(1.0, WIDTH + 1)),
    ),
}


@pytest.mark.parametrize("name", SHORTCUTS)
def test_norms_through_depth_grow_as_the_exponent_of_the_law_predicts(name):
    shortcut, law = SHORTCUTS[name]
    scale = 0.6
    ensemble = law(ly.Gaussian(WIDTH, scale / WIDTH**0.5))
    found = ly.gradient_norms(network(scale), shortcut=shortcut, ensemble=ensemble, steps=1000)
    passed = DEPTH - found.layers
    assert np.all(
        np.abs(found.log_norms - found.predicted)
        <= 4 * found.fluctuation * np.sqrt(passed) + 0.5 * (passed > 0)
    )
    # The three differ by far more than that.
    assert abs(found.rate - found.predicted_rate) < 0.12
    assert "predicted" in repr(found)


def test_prediction_from_the_layers_themselves_and_along_a_run():
    net = gf.initialize.gaussian(0, (3,) * 7, 0.9)
    flow = gf.GradientFlow(gf.Problem.from_singular_values([2.0, 1.0, 0.5]))
    traj = gf.descend(flow, net, 0.05, 40, save_every=20)
    first, last = ly.gradient_norms(traj, at=[0, -1], steps=300)
    start = ly.gradient_norms(net, steps=300)
    np.testing.assert_allclose(first.log_norms, start.log_norms)
    assert first.predicted_rate == pytest.approx(start.predicted_rate)
    final = ly.gradient_norms(traj.final, steps=300)
    np.testing.assert_allclose(last.log_norms, final.log_norms)
    assert not np.allclose(first.log_norms, last.log_norms)


def test_gradients_of_rectangular_and_of_dead_networks():
    net = gf.initialize.gaussian(0, (2, 5, 3), 1.0)
    found = ly.gradient_norms(net)
    assert np.isnan(found.predicted_rate)
    assert np.isfinite(found.log_norms).all()
    dead = ly.gradient_norms(gf.LinearNetwork([np.eye(2), np.zeros((2, 2))]), steps=50)
    assert dead.log_norms[0] == -np.inf
    assert dead.predicted_rate == -np.inf
    np.testing.assert_allclose(dead.predicted, [-np.inf, -np.inf, 0], atol=1e-12)


# Refused arguments -----------------------------------------------------------------------------

GAUSS = ly.Gaussian(2, 1.0)
PAIR = [[[2, 1], [1, 1]], [[3, 1], [2, 1]]]
NAN = np.array([[1.0, np.nan], [0.0, 1.0]])
NET = gf.initialize.gaussian(0, (2, 2, 2), 1.0)


def sometimes_nan(key):
    return jnp.where(jax.random.uniform(key) < 0.01, jnp.nan, 1.0) * jnp.eye(2)


def layer(W, x):
    return W @ x


def weights(key):
    return jnp.eye(2)


REFUSED = {
    "dimension_zero": (lambda: ly.Gaussian(0, 1.0), "d", ["0", ">= 1"]),
    "negative_sigma": (lambda: ly.Gaussian(2, -1.0), "sigma", ["-1", ">= 0"]),
    "covariance_shape": (
        lambda: ly.Gaussian(2, 1.0, covariance=np.eye(3)),
        "covariance",
        ["(3, 3)", "(2, 2)"],
    ),
    "covariance_indefinite": (
        lambda: ly.Gaussian(2, 1.0, covariance=np.diag([1.0, -1.0])),
        "covariance",
        ["-1", "positive definite"],
    ),
    "special_unitary": (lambda: ly.Haar(2, special=True, complex=True), "special", ["unitary"]),
    "non_square": (lambda: ly.Finite(np.ones((2, 2, 3))), "matrices", ["(2, 2, 3)", "square"]),
    "shapes_differ": (lambda: ly.Finite([np.eye(2), np.eye(3)]), "matrices", ["(2, 2), (3, 3)"]),
    "no_matrices": (lambda: ly.Finite([]), "matrices", ["no matrices"]),
    "nan_matrix": (lambda: ly.Finite([NAN]), "matrices", ["nan", "finite"]),
    "probabilities_sum": (
        lambda: ly.Finite(PAIR, [0.5, 0.4]),
        "probabilities",
        ["0.9", "sum must be 1"],
    ),
    "probability_negative": (lambda: ly.Finite(PAIR, [1.5, -0.5]), "probabilities", ["-0.5"]),
    "probabilities_number": (lambda: ly.Finite(PAIR, [1.0]), "probabilities", ["1 numbers", "2"]),
    "rank_one_p": (
        lambda: ly.RankOneMixture(0.0, np.ones(2), np.ones(2), np.eye(2)),
        "p",
        ["0", "> 0"],
    ),
    "zero_direction": (
        lambda: ly.DeltaProduct(2, 1.0, directions=[[0.0, 0.0]]),
        "directions",
        ["norm 0"],
    ),
    "zero_operator_direction": (lambda: ly.delta_operator(1.0, np.zeros(2)), "k", ["norm 0"]),
    "no_blocks": (lambda: ly.BlockTriangular([]), "blocks", ["no ensembles"]),
    "block_with_memory": (
        lambda: ly.BlockTriangular([ly.Cyclic([np.eye(2)])]),
        "blocks[0]",
        ["Cyclic", "independent"],
    ),
    "sampled_shape": (
        lambda: ly.Sampled(lambda key: jnp.ones((2, 3)), 2),
        "sample",
        ["(2, 3)", "(2, 2)"],
    ),
    "layer_shape": (
        lambda: ly.Layers(lambda W, x: W @ x, lambda key: jnp.ones((3, 2)), [1.0, 1.0]),
        "f",
        ["(3,)", "(2,)"],
    ),
    "layer_start": (lambda: ly.Layers(layer, weights, [1.0, np.nan]), "x0", ["nan", "finite"]),
    "layer_limit": (
        lambda: ly.Layers(layer, weights, [1.0, 1.0], limit=[0.0]),
        "limit",
        ["(1,)", "(2,)"],
    ),
    "layer_no_function": (lambda: ly.Layers(3, weights, [1.0, 1.0]), "f", ["3", "function"]),
    "residual_twice": (
        lambda: ly.residual(ly.residual(ly.Layers(layer, weights, [1.0, 1.0]))),
        "ensemble",
        ["shortcut"],
    ),
    "residual_of_array": (lambda: ly.residual(np.eye(2)), "ensemble", ["gradflow.lyapunov"]),
    "delta_direction": (lambda: ly.delta(GAUSS, 1.0, direction=[1.0]), "direction", ["2 entries"]),
    "no_steps": (lambda: ly.exponents(0, GAUSS, 0), "steps", ["0", ">= 1"]),
    "k_above_d": (lambda: ly.exponents(0, GAUSS, 5, 3), "k", ["3", "d = 2"]),
    "k_zero": (lambda: ly.exponents(0, GAUSS, 5, 0), "k", ["0", ">= 1"]),
    "zero_start": (lambda: ly.exponents(0, GAUSS, 5, start=[0.0, 0.0]), "start", ["norm 0"]),
    "short_start": (lambda: ly.exponents(0, GAUSS, 5, start=[1.0]), "start", ["(1,)", "(2,)"]),
    "dependent_start": (
        lambda: ly.exponents(0, GAUSS, 5, start=np.ones((2, 2))),
        "start",
        ["dependent", "independent"],
    ),
    "start_and_k": (
        lambda: ly.exponents(0, GAUSS, 5, 2, start=[1.0, 0.0]),
        "start",
        ["1 columns", "k = 2"],
    ),
    "negative_burn_in": (lambda: ly.exponents(0, GAUSS, 5, burn_in=-1), "burn_in", ["-1"]),
    "zero_error": (lambda: ly.exponents(0, GAUSS, 5, error=0.0), "error", ["0", "> 0"]),
    "unknown_interval": (
        lambda: ly.exponents(0, GAUSS, 5, qr_every="often"),
        "qr_every",
        ["often"],
    ),
    "nan_jacobian": (
        lambda: ly.exponents(0, ly.Sampled(sometimes_nan, 2), 300, chains=8),
        "ensemble",
        ["NaN", "Sampled", "finite"],
    ),
    "text_key": (lambda: ly.exponents("seed", GAUSS, 5), "key", ["jax.random.key"]),
    "few_bins": (lambda: ly.stationary_measure(GAUSS, 2), "bins", ["2", ">= 4"]),
    "measure_in_space": (
        lambda: ly.stationary_measure(ly.Gaussian(3, 1.0), 20),
        "ensemble",
        ["d = 3", "sample_stationary"],
    ),
    "measure_of_zero": (
        lambda: ly.stationary_measure(ly.Finite([np.zeros((2, 2))]), 20),
        "ensemble",
        ["zeros"],
    ),
    "measure_of_an_orbit": (
        lambda: ly.stationary_measure(ly.Layers(layer, weights, [1.0, 1.0]), 20),
        "ensemble",
        ["Layers", "independent"],
    ),
    "determinant_not_positive": (
        lambda: ly.determinant([[[2, 1], [1, 0]]], [1], 5),
        "matrices[0]",
        ["0.0", "> 0", "projective"],
    ),
    "determinant_not_two": (
        lambda: ly.determinant([np.ones((3, 3))], [1], 5),
        "matrices[0]",
        ["(3, 3)", "2 x 2"],
    ),
    "determinant_sum": (lambda: ly.determinant(PAIR, ["1/2", "1/3"], 5), "probabilities", ["0.83"]),
    "determinant_zero_probability": (
        lambda: ly.determinant(PAIR, [1, 0], 5),
        "probabilities",
        ["0", "never drawn"],
    ),
    "determinant_text": (
        lambda: ly.determinant(PAIR, ["half", "half"], 5),
        "probabilities[0]",
        ["half"],
    ),
    "determinant_words": (
        lambda: ly.determinant(PAIR, ["1/2", "1/2"], 40),
        "word_length",
        ["40", "shorter"],
    ),
    "no_closed_form": (
        lambda: ly.top_exponent(ly.Finite([basis(3), basis(3, 1)]), "closed form"),
        "method",
        ["none is known"],
    ),
    "unknown_method": (lambda: ly.top_exponent(GAUSS, "magic"), "method", ["'magic'", "sampled"]),
    "determinant_of_gaussian": (
        lambda: ly.top_exponent(GAUSS, "determinant"),
        "method",
        ["Finite", "Gaussian"],
    ),
    "filtration_of_an_orbit": (
        lambda: ly.filtration(ly.Cyclic([np.eye(2)]), 0),
        "ensemble",
        ["Cyclic", "independent"],
    ),
    "few_samples": (lambda: ly.assumptions(GAUSS, 0, samples=10), "samples", ["10", ">= 200"]),
    "threshold_of_one": (lambda: ly.threshold(1), "d", ["1", ">= 2"]),
    "no_scales": (lambda: ly.phase_diagram([2], []), "scales", ["empty"]),
    "which_above": (lambda: ly.phase_diagram([2], [1.0], which=3), "which", ["3", "2"]),
    "no_change_of_sign": (
        lambda: ly.sampled_threshold(0, 2, steps=50, bracket=(1.3, 1.5)),
        "bracket",
        ["negative at the lower end"],
    ),
    "gradients_of_an_array": (lambda: ly.gradient_norms(np.eye(2)), "net", ["LinearNetwork"]),
    "shortcut_shape": (
        lambda: ly.gradient_norms(NET, shortcut=np.eye(3)),
        "shortcut",
        ["(3, 3)", "(2, 2)"],
    ),
    "shortcut_number": (
        lambda: ly.gradient_norms(NET, shortcut=[np.eye(2)]),
        "shortcut",
        ["1 matrices", "2 layers"],
    ),
    "zero_output_gradient": (
        lambda: ly.gradient_norms(NET, output_gradient=[0.0, 0.0]),
        "output_gradient",
        ["norm 0"],
    ),
    "unequal_layers": (
        lambda: ly.network_layers(gf.initialize.gaussian(0, (2, 2, 3, 3), 1.0)),
        "net",
        ["(2, 2), (3, 2), (3, 3)", "one size"],
    ),
    "saved_time_of_network": (lambda: ly.network_layers(NET, at=1), "at", ["left out"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_argument_is_refused_by_name_value_and_remedy(name):
    call, argument, words = REFUSED[name]
    with pytest.raises(ValueError, match=r": got .*; ") as caught:
        call()
    assert isinstance(caught.value, gf.errors.GradflowError)
    assert caught.value.argument == argument
    for word in words:
        assert word in str(caught.value)
