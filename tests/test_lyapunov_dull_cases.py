"""Ensembles whose exponents are plain: diagonal, orthogonal, singular, one-dimensional, fixed."""

import numpy as np
import pytest

from lyapunov_cases import block_triangular, ly, optimised, rank_one, within

pytestmark = pytest.mark.usefixtures("optimised")
assert optimised


def exact(ensemble, expected, steps=50, **options):
    run = ly.exponents(0, ensemble, steps, **options)
    np.testing.assert_allclose(run.exponents, expected, atol=1e-12)
    np.testing.assert_allclose(run.standard_error, 0, atol=1e-13)
    return run


@pytest.mark.parametrize("d", [3, pytest.param(11, marks=pytest.mark.slow)])
def test_zero_matrices_have_exponents_minus_infinity(d):
    run = ly.exponents(0, ly.Gaussian(d, 0.0), 10, chains=8)
    assert np.all(run.exponents == -np.inf)
    assert np.all(run.standard_error == 0)


@pytest.mark.parametrize("d", [2, 12])
def test_the_identity_has_exponents_zero(d):
    exact(ly.Finite(np.eye(d)[None]), np.zeros(d), chains=8)


def test_one_diagonal_matrix_has_the_logarithms_of_its_moduli_as_exponents():
    exact(ly.Finite([np.diag([0.5, -3.0, 2.0])]), np.log([3.0, 2.0, 0.5]), 200, burn_in=200)


def test_exponents_of_one_matrix_are_the_log_moduli_of_its_eigenvalues():
    A = np.random.default_rng(2).standard_normal((4, 4))
    expected = np.sort(np.log(np.abs(np.linalg.eigvals(A))))[::-1]
    run = ly.exponents(0, ly.Finite([A]), 40_000, chains=8)
    # A complex pair turns: its increments vary, and their mean only converges like 1/n.
    np.testing.assert_allclose(run.exponents, expected, atol=2e-3)


def test_periodic_products_have_the_exponents_of_one_period():
    rng = np.random.default_rng(0)
    matrices = [np.triu(rng.standard_normal((3, 3))) + np.diag([3.0, 1.0, 0.2]) for _ in range(4)]
    ensemble = ly.Cyclic(matrices)
    expected = ly.closed_form(ensemble)
    np.testing.assert_allclose(
        expected, np.sort(np.log(np.abs([np.diag(A) for A in matrices])).mean(0))[::-1]
    )
    run = ly.exponents(0, ensemble, 400, chains=8, burn_in=400)
    np.testing.assert_allclose(run.exponents, expected, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("d", [3, 10])
def test_orthogonal_matrices_have_the_logarithm_of_their_scale_as_exponents(d):
    exact(ly.Haar(d, 0.7), np.full(d, np.log(0.7)), chains=16)
    exact(ly.Haar(d, 0.7, complex=True), np.full(d, np.log(0.7)), chains=16)


def test_rotations_are_special_and_of_haar_measure():
    for d in (3, 9):
        drawn = np.asarray(ly.Haar(d, special=True).sample(0, 2000))
        np.testing.assert_allclose(np.linalg.det(drawn), 1, atol=1e-12)
        # Entries have mean 0 and variance 1/d; the trace has variance 1, and 2 in the plane.
        assert abs(drawn[:, 0, 0].mean()) < 4 / np.sqrt(2000 * d)
        assert abs(np.trace(drawn, axis1=1, axis2=2).var() - (2 if d == 2 else 1)) < 0.25


def test_triangular_matrices_have_the_means_of_their_diagonals_as_exponents():
    rng = np.random.default_rng(1)
    matrices = np.triu(rng.standard_normal((3, 3, 3)), 1) + np.array(
        [np.diag(np.exp(rng.normal([1.0, 0.0, -1.0], 0.2))) for _ in range(3)]
    )
    p = np.array([0.2, 0.3, 0.5])
    logs = np.log(np.diagonal(matrices, axis1=1, axis2=2))
    ensemble = ly.Finite(matrices, p)
    run = ly.exponents(0, ensemble, 500)
    assert within(run, np.sort(p @ logs)[::-1])
    np.testing.assert_allclose(ly.closed_form(ensemble), np.sort(p @ logs)[::-1])


def test_one_dimension_is_the_mean_logarithm():
    run = ly.exponents(0, ly.Gaussian(1, 2.0), 400)
    assert within(run, [0.0579657578292062])
    exact(ly.Finite([[[-3.0]]]), [np.log(3.0)])


@pytest.mark.parametrize("d", [2, 12])
def test_projections_lose_one_dimension_and_no_number_is_nan(d):
    run = ly.exponents(0, ly.DeltaProduct(d, 1.0), 300, chains=16)
    assert run.exponents[-1] == -np.inf
    assert run.standard_error[-1] == 0
    assert np.all(run.running[1:, -1] == -np.inf)
    assert not np.isnan(np.asarray(run.running)).any()
    assert within(run, ly.closed_form(ly.DeltaProduct(d, 1.0))[:-1])


@pytest.mark.slow
def test_matrices_of_rank_one_leave_the_top_exponent():
    run = ly.exponents(0, rank_one(), 500)
    assert run.exponents[1] == -np.inf
    assert np.isfinite(run.exponents[0])


def test_a_wide_range_of_scales_is_resolved():
    A = np.diag([1e150, 1.0, 1e-150])
    Q = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    exact(ly.Finite([A]), np.log([1e150, 1.0, 1e-150]), start=np.eye(3))
    near = np.log([1e7, 1.0, 1e-7])
    exact(ly.Finite([np.diag(np.exp(near))]), near, burn_in=50)
    exact(ly.Finite([1e200 * Q]), np.full(3, np.log(1e200)))
    exact(ly.Finite([1e-200 * Q]), np.full(3, np.log(1e-200)))


@pytest.mark.slow
def test_complex_gaussian_matrices():
    ensemble = ly.Gaussian(3, 0.8, complex=True)
    run = ly.exponents(0, ensemble, 500)
    assert within(run, ly.closed_form(ensemble))
    assert run.exponents.dtype == float


@pytest.mark.slow
def test_correlated_rows():
    covariance = np.array([[2.0, 0.9], [0.9, 0.7]])
    ensemble = ly.Gaussian(2, 0.6, covariance=covariance)
    drawn = np.asarray(ensemble.sample(0, 40_000))
    np.testing.assert_allclose(
        np.einsum("nij,nkj->ik", drawn, drawn) / 80_000, 0.36 * covariance, atol=0.02
    )
    assert within(ly.exponents(0, ensemble, 500), ly.closed_form(ensemble))


@pytest.mark.slow
def test_correlated_rows_and_delta_shortcuts_of_larger_matrices():
    large = ly.Gaussian(10, 0.6, covariance=np.eye(10) + 0.5)
    run = ly.exponents(0, large, 300, 1, chains=32)
    assert within(run, ly.closed_form(large)[:1])
    large = ly.delta(ly.Gaussian(10, 0.2), 0.8)
    run = ly.exponents(0, large, 300, 1, chains=32)
    assert within(run, ly.closed_form(large)[:1])


def test_delta_shortcut():
    ensemble = ly.delta(ly.Gaussian(3, 0.4), 0.8)
    assert within(ly.exponents(0, ensemble, 500), ly.closed_form(ensemble)[:1])


@pytest.mark.slow
def test_fixed_directions():
    fixed = ly.delta(ly.Finite([0.1 * np.eye(2)]), 0.5, direction=[3.0, 0.0])
    exact(fixed, np.log([1.1, 0.6]), 200, burn_in=200)
    one = ly.DeltaProduct(2, 0.5, directions=[[0.0, 2.0]])
    exact(one, [0.0, np.log(0.5)], 200, burn_in=200)


@pytest.mark.slow
def test_no_delta_is_residual():
    base = ly.Gaussian(3, 0.4)
    one = ly.delta(base, 0.0)
    np.testing.assert_allclose(ly.closed_form(one), ly.closed_form(ly.residual(base)))
    matrices = one.sample(0, 5000).mean(0)
    np.testing.assert_allclose(matrices, np.eye(3), atol=0.03)


# Starts ----------------------------------------------------------------------------------------


def test_a_start_in_the_invariant_subspace_sees_its_exponent_only():
    ensemble = block_triangular()
    inside = ly.exponents(0, ensemble, 2000, start=[1.0, 0.0])
    assert inside.exponents.shape == (1,)
    assert within(inside, [0.1])
    generic = ly.exponents(0, ensemble, 2000, start=[1.0, 1.0])
    assert within(generic, [0.5])


@pytest.mark.slow
def test_a_frame_to_start_from():
    A = np.diag([2.0, 3.0, 5.0])
    run = ly.exponents(0, ly.Finite([A]), 20, start=np.eye(3)[:, :2])
    np.testing.assert_allclose(run.exponents, np.log([2.0, 3.0]), atol=1e-12)
    # Any basis of the same flag is the same start.
    other = ly.exponents(0, ly.Finite([A]), 20, start=np.array([[4.0, 1], [0, 2], [0, 0]]))
    np.testing.assert_allclose(other.exponents, run.exponents, atol=1e-12)
