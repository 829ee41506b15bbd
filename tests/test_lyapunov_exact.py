"""Closed forms, the determinant method and stationary measures, against reference values."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

import gradflow as gf
from cases import log_slope
from gradflow.lyapunov import _normal, closed_forms
from lyapunov_cases import (
    block_triangular,
    ly,
    oracles,
    positive_pair,
    rank_one,
    rotation,
    two_point,
)

ORACLE = oracles()


# Random numbers --------------------------------------------------------------------------------


def test_normal_numbers_are_normal_and_independent():
    z = np.asarray(_normal.normal(jax.random.key(3), (3, 66_667), np.float64))
    assert z.shape == (3, 66_667)
    assert scipy.stats.kstest(z.ravel(), "norm").pvalue > 0.01
    # Both of a pair, and their squares, are uncorrelated.
    a, b = z.ravel()[:100_000], z.ravel()[100_000:200_000]
    for x, y in ((a, b), (a**2, b**2), (a, b**2), (a[1:], a[:-1])):
        assert abs(np.corrcoef(x, y)[0, 1]) < 4 / np.sqrt(100_000)
    g = np.asarray(_normal.normal(jax.random.key(4), (50_000,), np.complex128))
    assert np.mean(np.abs(g) ** 2) == pytest.approx(1, abs=0.02)
    assert abs(np.mean(g**2)) < 0.02


def test_logarithm_of_normal_numbers_is_accurate_to_round_off():
    x = np.concatenate(
        [2.0 ** -np.arange(53), 1 - 2.0 ** -np.arange(1, 53), np.linspace(0.01, 1, 999)]
    )
    expected = np.log(x)
    found = np.asarray(_normal._log(jnp.asarray(x)))
    np.testing.assert_allclose(found, expected, rtol=1e-15)


# Closed forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ORACLE["gaussian"], ids=lambda c: f"d={c['d']}")
def test_gaussian_exponents(case):
    expected = np.array(case["exponents"], float)
    np.testing.assert_allclose(
        ly.closed_form(ly.Gaussian(case["d"], case["sigma"])), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("case", ORACLE["residual_gaussian_top"], ids=lambda c: str(c["epsilon"]))
def test_residual_gaussian_top_exponent(case):
    found = ly.closed_form(ly.residual(ly.Gaussian(case["d"], case["epsilon"])))
    assert found[0] == pytest.approx(float(case["exponent"]), abs=1e-12)
    if case["d"] == 2:
        x = 1 / (2 * case["epsilon"] ** 2)
        assert found[0] == pytest.approx(0.5 * scipy.special.exp1(x), abs=1e-12)


@pytest.mark.parametrize("case", ORACLE["delta_uniform_top"], ids=lambda c: str(c["d"]))
def test_delta_exponents_and_their_sum(case):
    found = ly.closed_form(ly.DeltaProduct(case["d"], float(case["beta"])))
    assert found[0] == pytest.approx(float(case["exponent"]), abs=1e-11)
    assert found.sum() == pytest.approx(float(case["sum"]), abs=1e-11)
    assert np.all(np.diff(found) < 0)


def test_rank_one_rotation_and_triangular_values():
    expected = float(ORACLE["rank_one_mixture"][0]["exponent"])
    found = ly.closed_form(rank_one())
    assert found[0] == pytest.approx(expected, abs=1e-11)
    assert found[1] == -np.inf
    # The same mixture as any finite set.
    plain = ly.Finite(rank_one().matrices, rank_one().probabilities)
    assert ly.closed_form(plain)[0] == pytest.approx(expected, abs=1e-11)
    haar = ly.Haar(3, special=True)
    np.testing.assert_allclose(ly.closed_form(haar), 0, atol=1e-15)
    residual = float(ORACLE["haar_so3"]["residual"])
    assert ly.closed_form(ly.residual(haar))[0] == pytest.approx(residual, abs=1e-12)
    case = ORACLE["block_triangular"]
    np.testing.assert_allclose(
        ly.closed_form(block_triangular()), [float(case["generic"]), float(case["start_e1"])]
    )


@pytest.mark.parametrize(("d", "epsilon"), [(2, 0.3), (4, 0.5), (5, 2.0), (12, 0.2)])
def test_partial_sums_of_residual_gaussian_are_mean_log_volumes(d, epsilon):
    # |det(I + εG)| of 20,000 draws; R of QR has the volumes of leading columns.
    rng = np.random.default_rng(d)
    A = np.eye(d) + epsilon * rng.standard_normal((20_000, d, d))
    logs = np.log(np.abs(np.diagonal(np.linalg.qr(A)[1], axis1=1, axis2=2)))
    volumes = np.cumsum(logs, axis=1)
    errors = volumes.std(0) / np.sqrt(len(A))
    found = np.cumsum(closed_forms.residual_gaussian(d, epsilon))
    assert np.all(np.abs(volumes.mean(0) - found) < 4 * errors)


def test_second_exponent_of_residual_gaussian_by_direct_integration():
    # d = 2: the second column past the first is non-central χ² with one degree of freedom, its
    # non-centrality ν/ε² with ν = 1 − (share of the first column along e_2).
    epsilon = 0.6
    x = 1 / (2 * epsilon**2)

    def mean_log(nu):  # E log |√ν + εg|
        return scipy.integrate.quad(
            lambda g: np.log(abs(np.sqrt(nu) + epsilon * g)) * np.exp(-(g**2) / 2),
            -9,
            9,
            points=[-np.sqrt(nu) / epsilon],
            limit=200,
        )[0] / np.sqrt(2 * np.pi)

    total, i = 0.0, np.arange(40)
    weights = np.exp(i * np.log(x) - x - scipy.special.gammaln(i + 1.0))
    for weight, n in zip(weights, i, strict=True):
        a = 0.5 + n  # ν ~ Beta(1/2 + i, 1/2) given the Poisson index
        if weight < 1e-13:
            continue
        norm = 1 / scipy.special.beta(a, 0.5)
        total += (
            weight
            * norm
            * scipy.integrate.quad(
                lambda t, a=a: 2 * np.sin(t) ** (2 * a - 1) * mean_log(np.sin(t) ** 2), 0, np.pi / 2
            )[0]
        )
    assert closed_forms.residual_gaussian(2, epsilon)[1] == pytest.approx(total, abs=1e-8)


@pytest.mark.parametrize("complex_entries", [False, True])
def test_residual_gaussian_at_the_ends_of_its_scale(complex_entries):
    found = closed_forms.residual_gaussian(3, 1e-2, complex=complex_entries)
    # To second order neighbours are ε² apart, as the drift of Dyson's Brownian motion has it.
    np.testing.assert_allclose(np.diff(found), -1e-4, rtol=1e-2)
    np.testing.assert_allclose(closed_forms.residual_gaussian(3, 0.0), 0)
    large = closed_forms.residual_gaussian(3, 1e4, complex=complex_entries)
    np.testing.assert_allclose(
        large, closed_forms.gaussian(3, 1e4, complex=complex_entries), atol=1e-6
    )


def test_complex_gaussian_matrices_have_doubled_degrees_of_freedom():
    rng = np.random.default_rng(0)
    G = (rng.standard_normal((20_000, 3, 3)) + 1j * rng.standard_normal((20_000, 3, 3))) / 2**0.5
    for A, found in (
        (0.7 * G, closed_forms.gaussian(3, 0.7, complex=True)),
        (np.eye(3) + 0.7 * G, closed_forms.residual_gaussian(3, 0.7, complex=True)),
    ):
        logs = np.log(np.abs(np.diagonal(np.linalg.qr(A)[1], axis1=1, axis2=2)))
        errors = logs.std(0) / np.sqrt(len(A))
        assert np.all(np.abs(logs.mean(0) - found) < 4 * errors)


def test_means_over_one_vector_by_sampling():
    rng = np.random.default_rng(1)
    g = rng.standard_normal((400_000, 3))
    k = rng.standard_normal((400_000, 3))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    covariance = np.array([[2.0, 0.5, 0.3], [0.5, 1.0, 0.1], [0.3, 0.1, 0.5]])
    delta = np.eye(3)[0] - 0.8 * k * k[:, :1] + 0.5 * g
    turned = np.eye(3)[0] + 0.6 * k
    for values, found in (
        (
            0.5 * np.log(np.einsum("ni,ij,nj->n", g, covariance, g)),
            closed_forms.correlated_gaussian_top(covariance),
        ),
        (np.log(np.linalg.norm(delta, axis=1)), closed_forms.delta_gaussian_top(3, 0.8, 0.5)),
        (np.log(np.linalg.norm(turned, axis=1)), closed_forms.residual_haar_top(3, 0.6)),
    ):
        assert abs(values.mean() - found) < 4 * values.std() / np.sqrt(len(values))


def test_correlated_rows_without_correlation_are_independent_entries():
    for d in (1, 2, 30):
        found = closed_forms.correlated_gaussian_top(4 * np.eye(d), 0.5)
        assert found == pytest.approx(closed_forms.gaussian(d, 1.0)[0], abs=1e-11)


def test_delta_products_in_dull_cases():
    np.testing.assert_allclose(closed_forms.delta_product(4, 0.0), 0, atol=1e-14)
    np.testing.assert_allclose(closed_forms.delta_product(4, 2.0), 0, atol=1e-14)
    np.testing.assert_allclose(closed_forms.delta_product(1, 0.5), np.log(0.5))
    # β = 1: ½[ψ((d−m)/2) − ψ(d/2)] for the sums.
    psi = scipy.special.digamma
    found = np.cumsum(closed_forms.delta_product(4, 1.0)[:-1])
    np.testing.assert_allclose(
        found, [0.5 * (psi(r / 2) - psi(2.0)) for r in (3, 2, 1)], atol=1e-10
    )
    assert closed_forms.delta_product(4, 1.0)[-1] == -np.inf
    near = closed_forms.delta_product(3, 1 - 1e-7)
    np.testing.assert_allclose(near[:2], closed_forms.delta_product(3, 1.0)[:2], atol=1e-6)


def test_rank_one_mixtures_in_dull_cases():
    B = np.diag([2.0, 0.5])
    # Always the same matrix of rank one: its eigenvalue.
    assert closed_forms.rank_one_mixture(1.0, [1.0, 2.0], [3.0, 1.0], B) == pytest.approx(np.log(5))
    assert closed_forms.rank_one_mixture(0.5, [1.0, 0.0], [0.0, 1.0], B) == -np.inf
    assert closed_forms.rank_one_mixture(0.5, [1.0, 0.0], [1.0, 0.0], B) == pytest.approx(
        0.5 * np.log(2)
    )
    # Hardly ever the one of rank one: the exponent of B.
    rare = closed_forms.rank_one_mixture(1e-3, [1.0, 1.0], [1.0, 1.0], B)
    assert rare == pytest.approx(np.log(2), abs=3e-3)


def test_what_is_not_known_is_said_so():
    rng = np.random.default_rng(0)
    assert ly.closed_form(ly.Finite(rng.standard_normal((2, 2, 2)))) is None
    assert np.isnan(ly.closed_form(ly.residual(ly.Haar(3)))[1:]).all()


# The threshold ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "expected"), [(2, 1.134866), (4, 0.927964), (10, 0.836039), (100, 0.790790)]
)
def test_threshold_of_the_residual_effect(d, expected):
    assert ly.threshold(d) == pytest.approx(expected, abs=1e-6)


def test_threshold_tends_to_its_limit():
    limit = ly.threshold_limit()
    assert 1 + limit**2 == pytest.approx(limit**-2)
    assert ly.threshold(1000) == pytest.approx(limit, abs=1e-3)
    gaps = np.array([ly.threshold(d) - limit for d in (100, 1000)])
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.05)  # like 1/d


# The determinant method ------------------------------------------------------------------------


def test_determinant_method_to_thirty_digits():
    case = ORACLE["determinant"][0]
    found = ly.determinant(case["matrices"], case["probabilities"], 8)
    with mpmath.workdps(60):
        gap = abs(found.exponent - mpmath.mpf(case["exponent"]))
        assert gap < mpmath.mpf(10) ** -30
        # The last change bounds the error, which falls faster than any power.
        assert gap < found.error
        assert found.error < mpmath.mpf(10) ** -24
    assert found.digits >= 24
    assert "1.1433110351029492458" in repr(found)
    assert float(found) == pytest.approx(float(case["exponent"]), abs=1e-15)


def test_determinant_method_to_forty_digits_by_longer_words():
    case = ORACLE["determinant"][0]
    found = ly.determinant(case["matrices"], case["probabilities"], 11, digits=44)
    with mpmath.workdps(70):
        assert abs(found.exponent - mpmath.mpf(case["exponent"])) < mpmath.mpf(10) ** -43
        exact = mpmath.mpf(case["exponent"])
        gaps = [abs(e - exact) for e in found.estimates[1:8]]
        logs = [float(mpmath.log10(g)) for g in gaps]
    # Faster than exponentially: every word length brings more digits than the one before.
    assert np.all(np.diff(logs, 2) < 0)


def test_determinant_method_with_one_matrix_is_its_eigenvalue():
    found = ly.determinant([[[2, 1], [1, 1]]], [1], 6)
    with mpmath.workdps(40):
        assert abs(found.exponent - mpmath.log((3 + mpmath.sqrt(5)) / 2)) < mpmath.mpf(10) ** -12
    same = ly.determinant([[[2, 1], [1, 1]], [[2, 1], [1, 1]]], ["1/3", "2/3"], 6)
    assert float(same) == pytest.approx(float(found), abs=1e-12)


def test_scaling_the_matrices_adds_the_mean_logarithm():
    matrices, p = [[[2, 1], [1, 1]], [[3, 1], [2, 1]]], [0.25, 0.75]
    scaled = [[[6, 3], [3, 3]], [[15, 5], [10, 5]]]
    found = ly.determinant(scaled, p, 9).exponent - ly.determinant(matrices, p, 9).exponent
    assert float(found) == pytest.approx(0.25 * np.log(3) + 0.75 * np.log(5), abs=1e-15)


def test_derivative_with_respect_to_the_probabilities():
    matrices = [[[2, 1], [1, 1]], [[3, 1], [2, 1]], [[1, 2], [1, 4]]]
    p = np.array([0.2, 0.3, 0.5])
    found = ly.determinant(matrices, p, 7, digits=25)
    derivative = np.array([float(x) for x in found.derivative])
    assert p @ derivative == pytest.approx(0, abs=1e-14)
    step = 1e-5
    for i in range(3):
        ends = []
        for sign in (1, -1):
            moved = (1 - sign * step) * p
            moved[i] += sign * step
            ends.append(ly.determinant(matrices, moved, 7, digits=25).exponent)
        assert derivative[i] == pytest.approx(float(ends[0] - ends[1]) / (2 * step), abs=1e-9)


# Stationary measures ---------------------------------------------------------------------------

BINS = np.array([80, 160, 320, 640, 1280, 2560])


def test_linear_transfer_operator_meets_the_determinant_method_at_order_two():
    exact = float(ORACLE["determinant"][0]["exponent"][:18])
    errors = [abs(ly.stationary_measure(positive_pair(), n).exponent - exact) for n in BINS]
    assert errors[-1] < 1e-6
    assert -2.4 < log_slope(BINS, errors) < -1.6


def test_ulam_operator_meets_the_determinant_method_at_order_one():
    exact = float(ORACLE["determinant"][0]["exponent"][:18])
    errors = np.array(
        [
            abs(ly.stationary_measure(positive_pair(), n, operator="ulam").exponent - exact)
            for n in BINS
        ]
    )
    # Which cells the edges of images fall in is as good as random: a bound, not a line.
    assert np.all(errors < 0.2 / BINS)
    assert log_slope(BINS, errors) < -0.8


@pytest.mark.parametrize("operator", ["linear", "ulam"])
def test_operators_are_stochastic_and_their_measure_is_stationary(operator):
    found = ly.stationary_measure(positive_pair(), 200, operator=operator)
    np.testing.assert_allclose(found.operator.sum(axis=1), 1, atol=1e-13)
    np.testing.assert_allclose(found.operator.T @ found.mass, found.mass, atol=1e-13)
    assert found.mass.sum() == pytest.approx(1)
    assert found.unique
    widths = found.mass[found.mass > 0] / found.density[found.mass > 0]
    np.testing.assert_allclose(widths, np.pi / 200, rtol=1e-6)
    # Positive matrices keep the first quadrant.
    assert found.mass[found.angles > np.pi / 2 + 0.02].sum() < 1e-12


def test_linear_operator_has_a_jagged_density_and_integrals_of_a_smooth_one():
    # Rotations by equal steps spread any line evenly: the density is 1/π up to terms that fall
    # faster than any power of their number, and γ_1 is log((s_1 + s_2)/2).
    turns = [rotation(np.pi * j / 40) @ np.diag([2.0, 0.5]) for j in range(40)]
    for n in (200, 800):
        jagged = ly.stationary_measure(ly.Finite(turns), n)
        smooth = ly.stationary_measure(ly.Finite(turns), n, operator="ulam")
        assert 0.02 < np.abs(np.pi * jagged.density - 1).max() < 0.2
        np.testing.assert_allclose(np.pi * smooth.density, 1, atol=1e-6)
        assert jagged.exponent == pytest.approx(np.log(1.25), abs=1e-6)
        # Sums over some nodes are far better than single ones.
        sums = jagged.mass.reshape(20, -1).sum(axis=1) * 20
        assert np.abs(sums - 1).max() < 0.01


def test_large_operators_are_solved_sparsely_with_the_same_result():
    coarse = ly.stationary_measure(positive_pair(), 1400)
    fine = ly.stationary_measure(positive_pair(), 2800)
    assert abs(coarse.exponent - fine.exponent) < 1e-6
    np.testing.assert_allclose(fine.operator.T @ fine.mass, fine.mass, atol=1e-12)


def test_ulam_of_a_rotation_shifts_cells():
    n = 8
    found = ly.stationary_measure(ly.Finite([rotation(np.pi / n)]), n, operator="ulam")
    np.testing.assert_allclose(found.operator.toarray(), np.roll(np.eye(n), 1, axis=1), atol=1e-12)
    assert found.unique
    np.testing.assert_allclose(found.mass, 1 / n)
    assert found.exponent == pytest.approx(0, abs=1e-14)


def test_measures_on_invariant_lines_are_told_apart():
    found = ly.stationary_measure(
        ly.Finite([[[np.exp(0.4), 1], [0, np.exp(0.5)]], [[np.exp(-0.2), -1], [0, np.exp(0.5)]]]),
        800,
    )
    assert not found.unique
    np.testing.assert_allclose(found.exponents, [0.5, 0.1], atol=1e-4)
    np.testing.assert_allclose(found.invariant_lines, [0], atol=1e-12)
    assert found.measures[1].max() == 1
    diagonal = ly.stationary_measure(ly.Finite([np.diag([2.0, 0.5])]), 50)
    np.testing.assert_allclose(diagonal.exponents, [np.log(2), -np.log(2)], atol=1e-12)
    turned = rotation(0.7) @ np.diag([2.0, 0.5]) @ rotation(-0.7)
    lines = ly.stationary_measure(ly.Finite([turned]), 50)
    np.testing.assert_allclose(lines.exponents, [np.log(2), -np.log(2)], atol=1e-9)
    np.testing.assert_allclose(lines.invariant_lines, [0.7, 0.7 + np.pi / 2])
    assert "NOT unique" in repr(lines)


def test_lines_that_are_only_exchanged_carry_one_measure():
    found = ly.stationary_measure(ly.Finite([np.diag([2.0, 0.5]), [[0.0, 1.0], [1.0, 0.0]]]), 64)
    assert found.unique
    assert found.exponent == pytest.approx(0, abs=1e-12)


def test_the_identity_has_a_measure_on_every_line():
    found = ly.stationary_measure(ly.Finite(np.eye(2)[None]), 10)
    assert len(found.measures) == 10
    assert not found.unique


def test_measures_of_laws_with_a_density_are_sampled():
    found = ly.stationary_measure(ly.Gaussian(2, 1.0), 100, samples=4000)
    # The direction of a Gaussian vector is uniform.
    np.testing.assert_allclose(found.density, 1 / np.pi, rtol=0.1)
    assert found.exponent == pytest.approx(0.0579657578, abs=0.03)


def test_singular_matrices_send_all_lines_to_one():
    found = ly.stationary_measure(rank_one(), 3000)
    assert found.exponent == pytest.approx(0.311098532507, abs=2e-3)


def test_sampled_directions_have_the_distribution_of_the_operator():
    ensemble = positive_pair()
    drawn = np.asarray(ly.sample_stationary(0, ensemble, 4000))
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=1), 1)
    angles = np.arctan2(drawn[:, 1], drawn[:, 0]) % np.pi
    found = ly.stationary_measure(ensemble, 2000)
    mean = found.angles @ found.mass
    spread = np.sqrt((found.angles - mean) ** 2 @ found.mass)
    assert abs(angles.mean() - mean) < 4 * spread / np.sqrt(4000)
    below = [
        np.mean(angles <= t) - found.mass[found.angles <= t].sum()
        for t in np.arange(0.4, 0.8, 0.02)
    ]
    assert np.abs(below).max() < 0.05


# The method that is chosen ---------------------------------------------------------------------


def test_the_most_exact_method_is_chosen():
    for ensemble, method in (
        (ly.Gaussian(3, 1.0), "closed form"),
        (ly.residual(ly.Gaussian(3, 1.0)), "closed form"),
        (ly.residual(ly.Haar(4)), "closed form"),
        (positive_pair(), "determinant"),
        (ly.Finite([[[2, 1], [1, 1]], [[3, -1], [2, 1]]]), "projective"),
    ):
        found = ly.top_exponent(ensemble)
        assert found.method == method
        assert found.error < 1e-3
        assert float(found) == found.exponent
        assert method in repr(found)
    assert float(ly.top_exponent(positive_pair())) == pytest.approx(1.143311035102949, abs=1e-13)


def test_methods_agree():
    exact = ly.top_exponent(positive_pair())
    projective = ly.top_exponent(positive_pair(), "projective")
    assert abs(float(projective) - float(exact)) < 1e-6
    sampled = ly.top_exponent(positive_pair(), "sampled", error=1e-3)
    assert sampled.method == "sampled"
    assert sampled.error <= 1e-3
    assert abs(float(sampled) - float(exact)) < 4 * sampled.error
    assert ly.top_exponent(two_point(0.3)).exponent == pytest.approx(0.3)
    assert gf.lyapunov.top_exponent(ly.Gaussian(2, 0.0)).exponent == -np.inf
