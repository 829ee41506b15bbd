"""Every family of starts keeps the guarantee that its docstring gives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import COVARIANCE, EPS, TARGET, arrays, problem

WIDTHS = {
    "one_layer": (4, 3),
    "narrow": (4, 1, 3),
    "mixed": (4, 3, 5, 3),
    "deep": (2, 3, 5, 4, 3, 2),
}
deep_widths = pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)


def imbalances(net):
    return [b.T @ b - a @ a.T for a, b in itertools.pairwise(arrays(net))]


def map_spectrum(net):
    return np.linalg.svd(np.asarray(net.end_to_end()), compute_uv=False)


@deep_widths
@pytest.mark.parametrize("scale", [1e-3, 3.0])
def test_balanced_start_has_vanishing_imbalance_and_product_singular_values_scale_to_the_h(
    widths, scale
):
    net = gf.initialize.balanced(jax.random.key(1), widths, scale)
    assert net.widths == widths
    for C in imbalances(net):
        assert np.linalg.norm(C) <= 50 * EPS * scale**2
    expected = np.zeros(min(widths[0], widths[-1]))
    expected[: min(widths)] = scale**net.depth
    np.testing.assert_allclose(
        map_spectrum(net), expected, rtol=1e-13, atol=1e-14 * scale**net.depth
    )


@deep_widths
@pytest.mark.parametrize("key", [None, 5], ids=["standard_bases", "random_bases"])
def test_from_product_factorises_the_map_into_balanced_layers(widths, key):
    rng = np.random.default_rng(0)
    rank = min(widths)
    W = rng.standard_normal((widths[-1], rank)) @ rng.standard_normal((rank, widths[0]))
    net = gf.initialize.from_product(W, widths, key=key)
    np.testing.assert_allclose(net.end_to_end(), W, rtol=0, atol=100 * EPS * np.linalg.norm(W))
    for C in imbalances(net):
        assert np.linalg.norm(C) <= 100 * EPS * np.linalg.norm(W)
    strengths = np.linalg.svd(W, compute_uv=False)[:rank] ** (1 / net.depth)
    for layer in gf.observables.layer_singular_values(net):
        np.testing.assert_allclose(layer[:rank], strengths, rtol=1e-12)
        np.testing.assert_allclose(layer[rank:], 0, atol=1e-13)


@pytest.mark.parametrize("widths", list(WIDTHS.values())[1:], ids=list(WIDTHS)[1:])
@pytest.mark.parametrize("delta", [1e-12, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("scale", [0.0, 0.5, 20.0])
def test_delta_balanced_start_is_exactly_delta_from_balance(widths, delta, scale):
    net = gf.initialize.delta_balanced(3, widths, scale, delta)
    largest = max(np.linalg.norm(C) for C in imbalances(net))
    # C is a difference of squares of the weights, so its round-off is eps times their size.
    roundoff = 50 * EPS * max(np.sum(w**2) for w in arrays(net))
    assert largest == pytest.approx(delta, rel=1e-10, abs=roundoff)
    assert float(gf.observables.balancedness(net)) == pytest.approx(
        largest, rel=1e-13, abs=roundoff
    )


def test_delta_of_zero_is_the_balanced_start():
    net = gf.initialize.delta_balanced(3, (4, 3, 5, 3), 0.5, 0.0)
    assert max(np.linalg.norm(C) for C in imbalances(net)) < 50 * EPS


LAMBDA = {
    "square_positive": ((3, 3, 3), 0.7),
    "square_negative": ((3, 3, 3), -0.7),
    "narrow_positive": ((4, 2, 3), 1.3),
    "narrow_negative": ((4, 2, 3), -1.3),
    "wide_output_positive": ((2, 4, 5), 0.4),
    "wide_input_negative": ((5, 4, 2), -0.4),
    "hidden_one": ((3, 1, 2), 2.0),
    "zero": ((3, 4, 3), 0.0),
    "deep_one_lambda": ((3, 3, 3, 3), 0.5),
    "deep_per_layer": ((4, 3, 3, 3, 4), (0.5, -0.2, 0.3)),
    "deep_narrow_middle": ((4, 4, 2, 3), (-0.5, 0.8)),
    "tiny_scale": ((3, 3, 3), 0.7),
    "large": ((3, 2, 3), 50.0),
}


@pytest.mark.parametrize("name", LAMBDA)
def test_lambda_balanced_start_has_imbalance_lambda_times_identity(name):
    widths, lam = LAMBDA[name]
    net = gf.initialize.lambda_balanced(2, widths, 1e-4 if name == "tiny_scale" else 0.8, lam)
    assert net.widths == widths
    lams = np.broadcast_to(lam, len(widths) - 2)
    for value, C in zip(lams, imbalances(net), strict=True):
        np.testing.assert_allclose(
            C, value * np.eye(len(C)), rtol=0, atol=100 * EPS * (1 + np.abs(lams).max())
        )


@pytest.mark.parametrize(
    "name", ["square_positive", "square_negative", "narrow_positive", "tiny_scale", "hidden_one"]
)
def test_two_layer_lambda_balanced_spectra_follow_their_formula(name):
    widths, lam = LAMBDA[name]
    scale = 1e-4 if name == "tiny_scale" else 0.8
    net = gf.initialize.lambda_balanced(2, widths, scale, lam)
    s, rank = scale**2, min(widths)
    # Their product is s: the small one is s over the large one, without cancellation.
    large = np.sqrt((np.sqrt(lam**2 + 4 * s**2) + abs(lam)) / 2)
    first, second = (s / large, large) if lam > 0 else (large, s / large)
    layers = gf.observables.layer_singular_values(net)
    np.testing.assert_allclose(layers[0][:rank], first, rtol=1e-9)
    np.testing.assert_allclose(layers[1][:rank], second, rtol=1e-9)


@pytest.mark.parametrize("name", ["deep_one_lambda", "deep_per_layer", "narrow_positive"])
def test_lambda_balanced_product_has_singular_values_scale_to_the_h(name):
    widths, lam = LAMBDA[name]
    net = gf.initialize.lambda_balanced(2, widths, 0.8, lam)
    np.testing.assert_allclose(map_spectrum(net)[: min(widths)], 0.8**net.depth, rtol=1e-11)


@pytest.mark.parametrize("scales", [0.3, [0.5, 0.2], [[0.5, 0.2], [0.1, 0.4], [1.0, 2.0]]])
def test_decoupled_start_is_diagonal_in_the_bases_of_the_data(scales):
    widths = (4, 3, 5, 3)
    built = problem("whitened")
    net = gf.initialize.decoupled(built, widths, np.asarray(scales))
    U, _, Vt = np.linalg.svd(TARGET)
    seen = U.T @ np.asarray(net.end_to_end()) @ Vt.T
    strengths = np.prod(np.broadcast_to(scales, (3, *np.shape(scales)[-1:])), axis=0)
    expected = np.zeros((3, 4))
    count = strengths.size if np.ndim(scales) else 3
    expected[range(count), range(count)] = strengths
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-14)
    W1, W2, W3 = arrays(net)
    for D in (W1 @ Vt.T, W2, U.T @ W3):
        np.testing.assert_allclose(np.where(np.eye(*D.shape, dtype=bool), 0, D), 0, atol=1e-14)


def test_decoupled_start_stays_decoupled_for_commuting_covariance():
    U, _, Vt = np.linalg.svd(TARGET)
    covariance = Vt.T @ np.diag([2.0, 1.0, 0.5, 0.7]) @ Vt
    built = gf.Problem(TARGET, covariance)
    net = gf.initialize.decoupled(built, (4, 3, 3), 0.4)
    F1, F2 = gf.GradientFlow(built).vector_field(0.0, net).weights
    for D in (np.asarray(F1 @ Vt.T), np.asarray(U.T @ F2)):
        np.testing.assert_allclose(np.where(np.eye(*D.shape, dtype=bool), 0, D), 0, atol=1e-13)


def test_identity_start_is_balanced_with_identity_map_for_equal_widths():
    net = gf.initialize.identity((3, 3, 3, 3))
    np.testing.assert_array_equal(net.end_to_end(), np.eye(3))
    assert all(not C.any() for C in imbalances(net))
    np.testing.assert_array_equal(gf.initialize.identity((4, 2)).weights[0], np.eye(2, 4))


@deep_widths
def test_orthogonal_layers_are_scaled_partial_isometries(widths):
    net = gf.initialize.orthogonal(7, widths, 0.6)
    for w, C_in in zip(arrays(net), widths[:-1], strict=True):
        gram = w.T @ w if w.shape[0] >= C_in else w @ w.T
        np.testing.assert_allclose(gram, 0.36 * np.eye(len(gram)), rtol=0, atol=1e-14)


def test_orthogonal_start_is_balanced_where_hidden_layers_are_narrow():
    net = gf.initialize.orthogonal(7, (4, 3, 3, 5), 0.6)
    assert all(np.linalg.norm(C) < 1e-14 for C in imbalances(net))
    wide = gf.initialize.orthogonal(7, (3, 5, 3), 0.6)  # the theory promises nothing here
    assert np.linalg.norm(imbalances(wide)[0]) > 0.1


def test_gaussian_entries_have_mean_zero_and_variance_scale_squared_over_fan_in():
    net = gf.initialize.gaussian(0, (100, 200, 50), 1.5)
    for w in arrays(net):
        variance = 1.5**2 / w.shape[1]
        # Standard errors of mean and variance of w.size normal numbers; five of them.
        assert abs(w.mean()) < 5 * np.sqrt(variance / w.size)
        assert abs(w.var() / variance - 1) < 5 * np.sqrt(2 / w.size)
    first, second = (w.ravel()[:5000] for w in arrays(net))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(5000)


RANDOM = {
    "gaussian": lambda key: gf.initialize.gaussian(key, (3, 4, 2), 0.5),
    "orthogonal": lambda key: gf.initialize.orthogonal(key, (3, 4, 2), 0.5),
    "balanced": lambda key: gf.initialize.balanced(key, (3, 4, 2), 0.5),
    "from_product": lambda key: gf.initialize.from_product(np.eye(2, 3), (3, 4, 2), key=key),
    "lambda_balanced": lambda key: gf.initialize.lambda_balanced(key, (3, 2, 2), 0.5, 0.1),
    "delta_balanced": lambda key: gf.initialize.delta_balanced(key, (3, 4, 2), 0.5, 0.1),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_starts_work_under_vmap_over_keys_and_differ_between_keys(name):
    keys = jax.random.split(jax.random.key(0), 3)
    batch = jax.vmap(RANDOM[name])(keys)
    for i, key in enumerate(keys):
        for together, alone in zip(batch.weights, RANDOM[name](key).weights, strict=True):
            np.testing.assert_allclose(together[i], alone, rtol=0, atol=1e-13)
    assert float(jnp.abs(batch.weights[0][0] - batch.weights[0][1]).max()) > 1e-3


@pytest.mark.parametrize("name", RANDOM)
def test_seed_key_and_raw_key_give_the_same_start(name):
    make = RANDOM[name]
    with_seed, with_key = make(4), make(jax.random.key(4))
    raw = make(jax.random.key_data(jax.random.key(4)))
    for a, b, c in zip(with_seed.weights, with_key.weights, raw.weights, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_scale_and_delta_may_be_traced():
    def size(scale):
        net = gf.initialize.delta_balanced(0, (3, 4, 2), scale, 0.1 * scale)
        return gf.observables.balancedness(net)

    np.testing.assert_allclose(jax.vmap(size)(jnp.array([0.5, 2.0])), [0.05, 0.2], rtol=1e-10)


def test_coloured_problem_is_what_it_says():
    # A guard on the table of cases: the covariance must be a covariance, and not commute.
    assert np.all(np.linalg.eigvalsh(COVARIANCE) > 0)
    commutator = COVARIANCE @ (TARGET.T @ TARGET) - (TARGET.T @ TARGET) @ COVARIANCE
    assert np.abs(commutator).max() > 0.01
