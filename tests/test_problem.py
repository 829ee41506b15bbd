"""The loss, its gradient, its canonical frame and the report on the theory's assumptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import COVARIANCE, EPS, PROBLEMS, TARGET, WIDTHS, arrays, problem, start


def data(samples=30, d_in=4, d_out=3, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((samples, d_in)) @ rng.standard_normal((d_in, d_in))
    Y = X @ TARGET[:d_out, :d_in].T + noise * rng.standard_normal((samples, d_out))
    return X, Y


def whitened_inputs(X):
    """``(C_x^+)^{1/2} x`` by an eigendecomposition."""
    values, vectors = np.linalg.eigh(X.T @ X / len(X))
    kept = values > values[-1] * 1e-12
    return X @ (vectors[:, kept] / np.sqrt(values[kept])) @ vectors[:, kept].T


def mean_squared_error(X, Y, W):
    return 0.5 * np.mean(np.sum((Y - X @ W.T) ** 2, axis=1))


def some_maps(shape=(3, 4), count=5):
    rng = np.random.default_rng(11)
    return [jnp.asarray(rng.standard_normal(shape)) for _ in range(count)]


def singular_data():
    X, Y = data()
    X[:, 2] = 0.0
    return X, Y


@pytest.mark.parametrize("make", [data, singular_data], ids=["full_rank", "singular"])
@pytest.mark.parametrize("whiten", [False, True], ids=["raw", "whitened"])
def test_loss_of_data_is_half_the_mean_squared_error(make, whiten):
    X, Y = make()
    built = gf.Problem.from_data(X, Y, whiten=whiten)
    seen = whitened_inputs(X) if whiten else X
    for W in some_maps():
        expected = mean_squared_error(seen, Y, np.asarray(W))
        assert float(built.loss(W)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("whiten", [False, True], ids=["raw", "whitened"])
def test_data_covariances_are_means_over_samples(whiten):
    X, Y = data()
    built = gf.Problem.from_data(X, Y, whiten=whiten)
    seen = whitened_inputs(X) if whiten else X
    np.testing.assert_allclose(built.target, Y.T @ seen / len(X), rtol=0, atol=1e-13)
    if whiten:
        assert built.input_covariance is None
    else:
        np.testing.assert_allclose(built.input_covariance, X.T @ X / len(X), rtol=0, atol=1e-13)


@pytest.mark.parametrize("whiten", [False, True], ids=["raw", "whitened"])
def test_infimum_is_zero_for_realisable_data(whiten):
    X, Y = data(noise=0.0)
    built = gf.Problem.from_data(X, Y, whiten=whiten)
    # The misfit of a fit in floating point: a few roundings of numbers the size of Y.
    assert 0 <= float(built.irreducible_loss) < (100 * EPS * np.abs(Y).max()) ** 2
    assert 0 <= float(built.loss(built.optimum)) < (100 * EPS * np.abs(Y).max()) ** 2


@pytest.mark.parametrize("whiten", [False, True], ids=["raw", "whitened"])
def test_infimum_is_the_least_squares_misfit(whiten):
    X, Y = data()
    fit, *_ = np.linalg.lstsq(X, Y, rcond=None)
    built = gf.Problem.from_data(X, Y, whiten=whiten)
    misfit = mean_squared_error(X, Y, fit.T)
    assert float(built.irreducible_loss) == pytest.approx(misfit, rel=1e-12)
    assert float(built.loss(built.optimum)) == pytest.approx(misfit, rel=1e-12)


@pytest.mark.parametrize("kind", ["whitened", "coloured"])
def test_loss_near_the_optimum_does_not_cancel(kind):
    built = problem(kind)
    step = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)))
    C = COVARIANCE if kind == "coloured" else np.eye(4)
    quadratic = 0.5 * float(np.trace(np.asarray(step) @ C @ np.asarray(step).T))
    for size in (1e-3, 1e-6, 1e-10):
        value = float(built.loss(built.optimum + size * step))
        # W itself is rounded: a relative error of eps·|W|/size per entry.
        assert value == pytest.approx(quadratic * size**2, rel=20 * EPS / size + 1e-12, abs=0)
    assert float(built.loss(built.optimum)) >= 0


@pytest.mark.parametrize("kind", PROBLEMS)
def test_residual_is_minus_the_gradient_of_the_loss(kind):
    built = problem(kind)
    for W in some_maps():
        np.testing.assert_allclose(
            built.residual(W), -jax.grad(built.loss)(W), rtol=0, atol=100 * EPS
        )


@pytest.mark.parametrize("whiten", [False, True], ids=["raw", "whitened"])
def test_residual_of_data_is_minus_the_gradient_of_the_loss(whiten):
    built = gf.Problem.from_data(*singular_data(), whiten=whiten)
    for W in some_maps():
        np.testing.assert_allclose(
            built.residual(W), -jax.grad(built.loss)(W), rtol=1e-12, atol=1e-12
        )


def test_quadratic_loss_equals_its_trace_formula_up_to_a_constant():
    built = problem("coloured")

    def trace_formula(W):
        return 0.5 * np.trace(W @ COVARIANCE @ W.T) - np.trace(W @ TARGET.T)

    first, *others = some_maps()
    constant = float(built.loss(first)) - trace_formula(np.asarray(first))
    for W in others:
        assert float(built.loss(W)) == pytest.approx(trace_formula(np.asarray(W)) + constant)


def test_optimum_solves_the_normal_equations():
    built = problem("coloured")
    np.testing.assert_allclose(built.optimum @ COVARIANCE, TARGET, rtol=0, atol=1e-14)
    np.testing.assert_allclose(built.residual(built.optimum), 0, atol=1e-14)


def test_singular_covariance_is_pseudo_inverted():
    projector = np.diag([2.0, 1.0, 0.0, 1.0])
    target = TARGET * np.array([1.0, 1.0, 0.0, 1.0])
    built = gf.Problem(target, projector)
    assert built.input_rank == 3
    np.testing.assert_allclose(built.optimum, target @ np.diag([0.5, 1, 0, 1]), atol=1e-15)
    assert float(built.loss(built.optimum)) == 0


def test_singular_values_are_those_of_the_target_in_the_whitened_frame():
    np.testing.assert_allclose(
        problem("whitened").singular_values, np.linalg.svd(TARGET, compute_uv=False), rtol=1e-13
    )
    values, vectors = np.linalg.eigh(COVARIANCE)
    inverse_root = vectors @ np.diag(values**-0.5) @ vectors.T
    np.testing.assert_allclose(
        problem("coloured").singular_values,
        np.linalg.svd(TARGET @ inverse_root, compute_uv=False),
        rtol=1e-12,
    )


def test_whitening_data_keeps_the_singular_values_and_the_infimum():
    raw, white = (gf.Problem.from_data(*singular_data(), whiten=w) for w in (False, True))
    np.testing.assert_allclose(raw.singular_values, white.singular_values, rtol=1e-10, atol=1e-13)
    assert float(raw.irreducible_loss) == pytest.approx(float(white.irreducible_loss), rel=1e-12)


@pytest.mark.parametrize("shape", [None, (3, 5), (4, 3)])
def test_from_singular_values_puts_them_on_the_diagonal(shape):
    built = gf.Problem.from_singular_values([3.0, 2.0, 1.0], shape)
    assert built.shape == (shape or (3, 3))
    expected = np.zeros(built.shape)
    expected[range(3), range(3)] = 3, 2, 1
    np.testing.assert_array_equal(built.target, expected)
    np.testing.assert_allclose(built.singular_values[:3], [3, 2, 1], rtol=1e-14)


CANONICAL = {
    "whitened": lambda: problem("whitened"),
    "coloured": lambda: problem("coloured"),
    "tall": lambda: gf.Problem(TARGET.T.copy(), COVARIANCE[:3, :3].copy()),
    "singular_data": lambda: gf.Problem.from_data(*singular_data()),
}


@pytest.mark.parametrize("make", CANONICAL.values(), ids=CANONICAL)
def test_canonical_frame_has_orthogonal_bases_and_a_diagonal_descending_target(make):
    built = make()
    canonical, U, V = built.canonical()
    for Q in (U, V):
        np.testing.assert_allclose(Q.T @ Q, np.eye(len(Q)), rtol=0, atol=1e-13)
    diagonal = np.diag(np.asarray(canonical.target))
    assert np.all(np.diff(diagonal) <= 0)
    assert np.all(diagonal >= 0)
    off = np.array(canonical.target)
    np.fill_diagonal(off, 0)
    assert not off.any()
    np.testing.assert_allclose(U.T @ built.target @ V, canonical.target, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        canonical.singular_values, built.singular_values, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["whitened", "coloured"])
def test_flow_commutes_with_the_change_to_the_canonical_frame(kind):
    built = problem(kind)
    canonical, U, V = built.canonical()
    W1, W2, W3 = start().weights
    turned = gf.LinearNetwork([W1 @ V, W2, U.T @ W3])
    rate = gf.GradientFlow(built).vector_field(0.0, start())
    F1, F2, F3 = rate.weights
    expected = [F1 @ V, F2, U.T @ F3]
    found = gf.GradientFlow(canonical).vector_field(0.0, turned)
    for a, b in zip(arrays(found), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    losses = [float(p.loss(n.end_to_end())) for p, n in ((built, start()), (canonical, turned))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)


def test_problem_is_a_pytree_that_vmap_builds_and_maps_over():
    targets = jnp.stack([jnp.asarray(TARGET), 2 * jnp.asarray(TARGET)])
    built = jax.vmap(lambda t: gf.Problem(t, COVARIANCE))(targets)
    W = some_maps()[0]
    losses = jax.vmap(lambda p: p.loss(W))(built)
    for value, target in zip(losses, targets, strict=True):
        expected = float(gf.Problem(np.asarray(target), COVARIANCE).loss(W))
        assert float(value) == pytest.approx(expected, rel=1e-12)


def test_assumptions_hold_for_a_textbook_problem():
    X, Y = data()
    report = gf.Problem.from_data(X, Y, whiten=True).assumptions((4, 3, 3))
    assert bool(report)
    assert all(report.values())
    assert report["overdetermined"].number == 30 / 4
    assert report["full_rank_inputs"].number == 4
    assert report["full_rank_target"].number == 3
    assert report["hidden_widths"].number == 3


BROKEN = {
    "overdetermined": lambda: gf.Problem.from_data(*data(samples=3)).assumptions((4, 3, 3)),
    "full_rank_inputs": lambda: gf.Problem.from_data(*singular_data()).assumptions((4, 3, 3)),
    "whitened_inputs": lambda: problem("coloured").assumptions(WIDTHS),
    "full_rank_target": lambda: gf.Problem.from_singular_values([2.0, 1.0, 0.0]).assumptions(
        (3, 3)
    ),
    "distinct_singular_values": lambda: gf.Problem.from_singular_values([2.0, 2.0]).assumptions(
        (2, 2)
    ),
    "hidden_widths": lambda: problem("whitened").assumptions((4, 2, 3)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_assumption_that_fails_is_reported_with_its_number(name):
    report = BROKEN[name]()
    assert not report
    assert not report[name].holds
    assert np.isfinite(report[name].number)
    line = next(row for row in repr(report).splitlines() if row.split()[0] == name)
    assert "NO" in line
    assert report[name].text in line


def test_singular_covariance_report_says_what_was_done_about_it():
    report = gf.Problem.from_data(*singular_data()).assumptions((4, 3, 3))
    assert report["full_rank_inputs"].number == 3
    assert "rank of C_x is 3 of 4" in str(report)
    assert "pseudo-inverse" in str(report)


def test_problem_prints_its_shape_and_kind():
    assert repr(problem("whitened")) == "Problem(3x4, whitened inputs)"
    assert "log_cosh" in repr(problem("from_loss"))
    assert "30 samples" in repr(gf.Problem.from_data(*data()))
