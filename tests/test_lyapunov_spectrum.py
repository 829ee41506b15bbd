"""Sampled spectra: exponents, standard errors, starts, dull cases, and when a run stops."""

import jax
import numpy as np
import pytest
import scipy.stats

from lyapunov_cases import (
    DRIFT,
    ly,
    optimised,
    positive_pair,
    rotation,
    sampled_cases,
    slow_layers,
    within,
)

pytestmark = pytest.mark.usefixtures("optimised")
assert optimised
CASES = sampled_cases()


QUICK = ("residual_gaussian_2_1", "delta_3_0.7", "rank_one", "positive_pair")


@pytest.mark.parametrize("name", QUICK)
def test_sampled_exponents_are_the_known_ones_within_four_standard_errors(name):
    ensemble, expected = CASES[name]
    run = ly.exponents(1, ensemble, 1000)
    assert within(run, expected)
    assert np.all(run.standard_error[: len(expected)] < 3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_long_samples_reach_every_reference_value_to_a_thousandth(name):
    ensemble, expected = CASES[name]
    steps = 60_000 if ensemble.dimension == 8 else 30_000
    run = ly.exponents(2, ensemble, steps, len(expected))
    assert within(run, expected)
    assert np.abs(np.asarray(run.exponents) - expected).max() < 1e-3


def test_sums_of_exponents_are_means_of_log_determinants():
    run = ly.exponents(0, ly.DeltaProduct(3, 0.7), 1000)
    # Every single step has the determinant 1 − β.
    np.testing.assert_allclose(run.chain_means.sum(1), np.log(0.3), atol=1e-12)
    np.testing.assert_allclose(run.sum, np.log(0.3), atol=1e-12)


def test_fewer_exponents_are_the_leading_ones():
    ensemble = CASES["gaussian_4"][0]
    run = ly.exponents(1, ensemble, 500, 2)
    assert run.exponents.shape == run.standard_error.shape == (2,)
    assert within(run, CASES["gaussian_4"][1][:2])


@pytest.mark.parametrize("d", [12, pytest.param(20, marks=pytest.mark.slow)])
def test_the_layout_for_larger_matrices_gives_the_same_law(d):
    run = ly.exponents(0, ly.Gaussian(d, 0.4), 400, chains=32)
    assert within(run, ly.closed_form(ly.Gaussian(d, 0.4)))


@pytest.mark.slow
def test_fewer_orthonormalisations_give_the_same_numbers():
    ensemble = ly.Gaussian(12, 0.4)
    every = [ly.exponents(0, ensemble, 64, chains=8, qr_every=n, burn_in=16) for n in (1, 4)]
    # A product of four has a condition of 1e6 or so.
    np.testing.assert_allclose(every[0].exponents, every[1].exponents, atol=1e-8)
    small = [ly.exponents(0, ly.Gaussian(3, 0.4), 64, qr_every=n, burn_in=16) for n in (1, 4)]
    np.testing.assert_allclose(small[0].exponents, small[1].exponents, atol=1e-8)


def test_orthonormalisations_are_left_out_only_where_that_is_accurate():
    from gradflow.lyapunov import spectrum

    logs = np.tile(np.array([0.1, -0.1])[None, :, None], (64, 1, 3))
    assert spectrum._longest_interval(logs, 2e-16) == 8
    assert spectrum._longest_interval(30 * logs, 2e-16) == 1
    assert spectrum._longest_interval(-np.inf * np.abs(logs), 2e-16) == 1
    # Products that overflow, however well conditioned.
    assert spectrum._longest_interval(300 + 0 * logs, 2e-16) == 1


@pytest.mark.slow
def test_a_rare_loss_of_rank_is_found_though_orthonormalisations_are_left_out():
    d = 20
    singular = np.eye(d)
    singular[-1, -1] = 0
    ensemble = ly.Finite([np.eye(d), singular], [0.9995, 0.0005])
    run = ly.exponents(3, ensemble, 2000, chains=16)
    assert run.interval == 1
    assert run.exponents[-1] == -np.inf
    # The projection shortens what was not yet orthogonal to it, once.
    np.testing.assert_allclose(run.exponents[:-1], 0, atol=1e-3)


def test_running_estimates_end_at_the_estimate_and_come_from_rising_steps():
    run = ly.exponents(0, positive_pair(), 130, checkpoints=7)
    assert run.running.shape == (7, 2)
    assert list(run.running_steps) == [19, 38, 57, 76, 94, 112, 130]
    np.testing.assert_allclose(run.running[-1], run.exponents, atol=1e-14)
    np.testing.assert_allclose(run.chain_means.mean(0), run.exponents, atol=1e-14)
    assert run.steps == 130
    assert run.chains == 256
    assert "positive" not in repr(run)
    assert "130 after 50" in repr(run).replace("steps ", "")


# Standard errors -------------------------------------------------------------------------------


def turning_pair():
    """Slow turns: a direction is remembered for many steps."""
    stretch = np.diag([1.25, 0.8])
    return ly.Finite([rotation(0.15) @ stretch, rotation(-0.1) @ stretch])


COVERED = {
    "slow_layers": (slow_layers, DRIFT, {"steps": 400, "chains": 16, "k": 1}),
    "slow_layers_one_chain": (slow_layers, DRIFT, {"steps": 6000, "chains": 1, "k": 1}),
    "turning_pair": (turning_pair, None, {"steps": 300, "chains": 12, "k": 1}),
    "gaussian": (lambda: ly.Gaussian(2, 1.0), 0.0579657578292062, {"steps": 60, "chains": 8}),
}


QUICKLY_COVERED = ("slow_layers", "turning_pair")


@pytest.mark.parametrize(
    "name",
    [*QUICKLY_COVERED]
    + [pytest.param(n, marks=pytest.mark.slow) for n in COVERED if n not in QUICKLY_COVERED],
)
def test_the_95_percent_interval_covers_the_truth_in_91_to_99_percent_of_runs(name):
    make, truth, options = COVERED[name]
    ensemble, steps = make(), options["steps"]
    if truth is None:
        truth = ly.stationary_measure(ensemble, 4000).exponent
    options = {key: value for key, value in options.items() if key != "steps"}
    keys = jax.random.split(jax.random.key(11), 200)
    runs = jax.jit(
        jax.vmap(lambda key: ly.exponents(key, ensemble, steps, burn_in=200, **options))
    )(keys)
    low, high = runs.confidence_interval()
    covered = np.mean((np.asarray(low[:, 0]) <= truth) & (truth <= np.asarray(high[:, 0])))
    assert 0.91 <= covered <= 0.99


@pytest.mark.parametrize("make", [pytest.param(slow_layers, marks=pytest.mark.slow), turning_pair])
def test_increments_of_those_ensembles_are_strongly_correlated(make):
    # Standard errors that took increments for independent would be several times too small.
    steps = 2000
    run = ly.exponents(0, make(), steps, 1, chains=64, checkpoints=steps)
    sums = np.diff(np.asarray(run.running)[:, 0] * np.asarray(run.running_steps), prepend=0.0)
    independent = np.std(sums) * 8  # of the mean over 64 chains; back to one chain
    honest = float(run.standard_error[0]) * 8 * np.sqrt(steps)
    assert honest > 1.8 * independent


def test_interval_is_student_s():
    run = ly.exponents(0, ly.Gaussian(1, 2.0), 100, chains=9)
    low, high = run.confidence_interval(0.9)
    half = scipy.stats.t.ppf(0.95, 8) * run.standard_error
    np.testing.assert_allclose(high - low, 2 * half)
    np.testing.assert_allclose(
        run.standard_error, np.std(run.chain_means, axis=0, ddof=1) / 3, rtol=1e-12
    )


@pytest.mark.parametrize("chains", [pytest.param(2, marks=pytest.mark.slow), 32])
def test_a_run_stops_at_the_wanted_error(chains):
    steps = 40_000 // chains
    options = {"chains": chains, "checkpoints": 256}
    run = ly.exponents(0, ly.Gaussian(2, 1.0), steps, error=0.02, **options)
    assert bool(run.reached)
    assert run.steps < steps
    assert np.all(run.standard_error <= 0.021)
    assert len(run.running) == len(run.running_steps) < 256
    never = ly.exponents(0, ly.Gaussian(2, 1.0), steps, error=1e-6, **options)
    assert not bool(never.reached)
    assert never.steps == steps
    assert "NOT reached" in repr(never)


def test_progress_changes_nothing(capsys):
    options = {"chains": 8, "checkpoints": 16}
    plain = ly.exponents(0, ly.Gaussian(2, 1.0), 200, **options)
    shown = ly.exponents(0, ly.Gaussian(2, 1.0), 200, progress=True, **options)
    np.testing.assert_array_equal(plain.exponents, shown.exponents)
    assert "exponents" in capsys.readouterr().err
