"""Experiments against closed forms: what each figure claims, on small configurations."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import balanced_modes, imbalance, lambda_balanced, two_layer_exact


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def lambdas():
    return lambda_balanced.compute(lambda_balanced.Config(strengths=3, points=60))


@pytest.fixture(scope="module")
def shapes():
    cases = ("first layer larger", "balanced, target of rank 2", "bottleneck")
    config = two_layer_exact.Config(cases=cases, rtols=(1e-5, 1e-7, 1e-9), points=40)
    return two_layer_exact.compute(config)


@pytest.fixture(scope="module")
def starts():
    config = imbalance.Config(
        depths=(3,), seeds=8, smallest=0.01, largest=30.0, deltas=2, points=200
    )
    return imbalance.compute(config)


def test_balanced_modes_meet_the_closed_form_and_approach_the_infinite_limit():
    config = balanced_modes.Config(depths=(1, 2, 3, 16), scaled_end=200.0, points=50)
    data = balanced_modes.compute(config)
    assert float(balanced_modes.deviation(data).max()) < 1e-8
    assert np.all(np.diff(balanced_modes.distance_to_limit(data)) < 0)
    tau = data["scaled_time"].values
    logistic = 1 / (1 + (1 / config.start - 1) * np.exp(-tau))
    np.testing.assert_allclose(data["modes"].sel(depth=2, mode="learnt"), logistic, rtol=1e-9)
    for depth in (2, 3, 16):
        power = 2 - 2 / depth
        decay = (power * tau + config.start_of_decay**-power) ** (-1 / power)
        np.testing.assert_allclose(data["modes"].sel(depth=depth, mode="fading"), decay, rtol=1e-9)
    assert "REACHED_END" in data.attrs["runs"]
    assert "depth 16: half learnt" in balanced_modes.summary(data)
    assert isinstance(balanced_modes.figure(data), Figure)


def test_the_distance_to_the_riccati_solution_falls_with_the_tolerance(shapes):
    errors = two_layer_exact.largest_error(shapes)
    assert np.all(errors < 20 * shapes["rtol"])
    # Two orders of magnitude in the tolerance are worth at least one and a half.
    assert np.all(errors.values[:, :-1] > 30 * errors.values[:, 1:])
    assert np.all(np.diff(shapes["steps"], axis=1) > 0)
    np.testing.assert_allclose(shapes["singular_values"], shapes["exact"], atol=1e-8)


def test_two_layers_learn_as_many_modes_as_target_and_hidden_layer_hold(shapes):
    end = shapes["singular_values"].isel(time=-1).values
    np.testing.assert_allclose(end[0], [3.0, 2.0, 1.0, 0.0], atol=0.01)
    np.testing.assert_allclose(end[1], [3.0, 2.0, 0.0, 0.0], atol=0.05)
    np.testing.assert_allclose(end[2], [3.0, 2.0, 0.0, 0.0], atol=0.05)
    assert "∝ rtol^" in two_layer_exact.summary(shapes)
    assert isinstance(two_layer_exact.figure(shapes), Figure)


def test_modes_follow_the_riccati_solution_at_every_lambda(lambdas):
    assert float(lambda_balanced.deviation(lambdas).max()) < 1e-7
    np.testing.assert_allclose(
        lambdas["modes"].isel(time=-1) / lambdas["singular_value"], 1.0, atol=1e-3
    )
    assert "7 REACHED_END" in lambdas.attrs["runs"]


def test_large_lambda_is_lazy_and_small_lambda_is_rich(lambdas):
    lazy = lambda_balanced.lazy_deviation(lambdas)
    assert float(lazy.sel(lam=100.0, method="nearest")) < 1e-3
    assert float(lazy.sel(lam=0.0)) > 0.5
    for name in ("kernel_distance", "weight_change"):
        moved = lambdas[name].values  # λ from −100 through 0 to 100
        assert np.all(np.diff(moved[3:]) < 0)
        assert np.all(np.diff(moved[:4]) > 0)
    np.testing.assert_allclose(lambdas["kernel_distance"], lambdas["predicted_distance"], rtol=2e-3)
    ends = lambdas.isel(lam=[0, -1])
    np.testing.assert_allclose(ends["weight_change"], ends["lazy_change"], rtol=0.02)
    # At λ = 0 the kernel ends with eigenvalues s_i + s_j and starts as a multiple of the identity.
    s = lambdas["singular_value"].values
    sums = np.add.outer(s, s)
    cosine = sums.mean() / np.sqrt(np.mean(sums**2))
    assert float(lambdas["predicted_distance"].sel(lam=0.0)) == pytest.approx(1 - cosine)
    assert "kernel distances within" in lambda_balanced.summary(lambdas)
    assert isinstance(lambda_balanced.figure(lambdas), Figure)


def test_without_imbalance_modes_are_learnt_as_the_balanced_theory_says(starts):
    times, theory = starts["learning_time"], starts["balanced_time"]
    s, u0 = starts["singular_value"].values, 1e-3
    # The plateau of three layers, without what is left of it near the end.
    np.testing.assert_allclose(theory[0], u0 ** (-1 / 3) / s, rtol=0.1)
    np.testing.assert_allclose(times.isel(delta=0), np.broadcast_to(theory, (1, 8, 3)), rtol=2e-3)
    np.testing.assert_allclose(times.isel(delta=1), np.broadcast_to(theory, (1, 8, 3)), rtol=0.05)
    assert np.all(imbalance.in_order(starts).isel(delta=0) == 1)


def test_imbalance_makes_learning_sooner_and_its_time_uncertain(starts):
    times = starts["learning_time"][0]
    assert np.all(times.isel(delta=-1).median("seed") < 0.8 * starts["balanced_time"][0])
    spread = (times.quantile(0.9, "seed") - times.quantile(0.1, "seed")).values
    assert np.all(spread[2] > 10 * spread[1])
    assert "fraction of runs in the order" in imbalance.summary(starts)
    assert isinstance(imbalance.figure(starts), Figure)
