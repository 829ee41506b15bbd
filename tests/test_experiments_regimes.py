"""Lazy and rich, greedy low rank, discrete steps and other losses: the mathematics they show."""

import functools

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

import gradflow as gf
from experiments import discrete_vs_flow, greedy_low_rank, losses_beyond_quadratic, regimes


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


def drawn(module, data):
    """All figures of an experiment by their suffix."""
    with gf.plot.style():
        figures = module.figure(data)
    figures = figures if isinstance(figures, dict) else {"": figures}
    assert all(isinstance(one, Figure) for one in figures.values())
    return figures


@functools.cache
def lazy_and_rich():
    return regimes.compute(
        regimes.Config(
            hidden_widths=(6, 512, 2048, 8192),
            scales=7,
            seeds=2,
            balanced_scales=2,
            balanced_smallest=0.1,
            balanced_largest=1.0,
            imbalances=5,
        )
    )


@pytest.mark.slow
def test_scale_of_the_lazy_boundary_falls_like_the_inverse_root_of_the_width():
    data = lazy_and_rich()
    scales, (slope, _) = regimes.boundary(data)
    assert -0.55 < slope < -0.45
    wide = np.sqrt(float(data["predicted_boundary"]) / (2 * 8192))
    assert scales[-1] == pytest.approx(wide, rel=0.15)
    assert np.all(data["change"].isel(product=-1, width=-1) < 0.1)
    assert np.all(data["change"].isel(product=0) > 1)


def test_kernel_distance_of_wide_networks_is_that_of_the_conserved_quantities():
    data = lazy_and_rich()
    s = np.array([2.0, 1.0, 0, 0, 0, 0])
    said = [regimes.predicted_distance(2 * x**2, s) for x in data["product"].values]
    np.testing.assert_allclose(data["distance"].mean("seed")[-1], said, atol=5e-3)


def test_imbalance_alone_decides_for_lambda_balanced_starts():
    data = lazy_and_rich()
    s = np.array([2.0, 1.0, 0, 0, 0, 0])
    said = [regimes.predicted_distance(lam, s) for lam in data["imbalance"].values]
    for distance in data["balanced_distance"].values:
        np.testing.assert_allclose(distance, said, atol=5e-3)
    assert abs(regimes.balanced_boundary(data)[1][0]) < 0.02


def test_both_phase_diagrams_are_drawn():
    assert set(drawn(regimes, lazy_and_rich())) == {"", "imbalance"}
    assert "predicted" in regimes.summary(lazy_and_rich())


@pytest.mark.parametrize("width", [3, 20])
def test_narrowing_the_hidden_layer_changes_neither_map_nor_kernel_nor_their_motion(width):
    net = gf.initialize.gaussian(jax.random.key(0), (4, width, 4), 0.8)
    small = gf.LinearNetwork(regimes._narrowed(*map(np.asarray, net.weights)))
    assert small.widths == (4, 8, 4)
    flow = gf.GradientFlow(gf.Problem.from_singular_values([2.0, 1.0, 0.5, 0.0]))
    for _ in range(3):
        np.testing.assert_allclose(net.end_to_end(), small.end_to_end(), atol=1e-13)
        kernels = [gf.observables.tangent_kernel(one, np.eye(4)) for one in (net, small)]
        np.testing.assert_allclose(*kernels, atol=1e-13)
        net, small = (
            jax.tree.map(lambda w, f: w + 0.1 * f, one, flow.vector_field(0.0, one))
            for one in (net, small)
        )


@functools.cache
def greedy():
    return greedy_low_rank.compute(
        greedy_low_rank.Config(
            singular_values=(4.0, 2.0, 1.0),
            widths=(6, 5, 5, 3),
            smallest=0.02,
            largest=1.0,
            scales=4,
            seeds=2,
            points=300,
        )
    )


@pytest.mark.slow
def test_best_approximations_have_the_tail_of_the_spectrum_as_loss():
    data = greedy()
    np.testing.assert_allclose(data["r_loss"], [10.5, 2.5, 0.5, 0.0])
    assert data["r_rank"].values[1] == pytest.approx(1.0)
    p = np.array([2 / 3, 1 / 3])
    assert data["r_rank"].values[2] == pytest.approx(np.exp(-np.sum(p * np.log(p))))


def test_small_starts_pass_close_to_every_best_approximation_and_large_ones_do_not():
    data = greedy()
    near = data["nearest"].isel(r=slice(1, -1))
    assert float(near.isel(scale=0).max()) < 1e-3
    assert float(near.isel(scale=-1).min()) > 0.1
    # On the plateau next to the point of rank r the loss is that of the best approximation.
    one = data.isel(scale=0, seed=0)
    for r in (1, 2):
        target = float(data["r_loss"][r])
        at = int(np.argmin(abs(one["loss"].values - target)))
        assert float(one["loss"][at]) == pytest.approx(target, rel=1e-2)
        assert float(one["rank"][at]) == pytest.approx(float(data["r_rank"][r]), abs=0.02)


def test_closest_approach_falls_with_about_the_power_of_the_depth():
    data = greedy()
    assert np.all(abs(greedy_low_rank.slopes(data, count=2) - 3) < 0.7)
    assert np.all(abs(greedy_low_rank.slopes(data, "aligned_nearest", count=2) - 3) < 0.4)
    assert set(drawn(greedy_low_rank, data)) == {""}
    assert "in the limit 3" in greedy_low_rank.summary(data)


@functools.cache
def steps():
    return discrete_vs_flow.compute(
        discrete_vs_flow.Config(t1=3.2, halvings=3, depths=(2, 3, 4), fractions=(0.95, 1.05, 11))
    )


@pytest.mark.slow
def test_gradient_descent_leaves_the_flow_at_first_order():
    data = steps()
    assert discrete_vs_flow.order(data, "distance") == pytest.approx(1, abs=0.03)
    assert discrete_vs_flow.order(data, "drift") == pytest.approx(1, abs=0.03)
    np.testing.assert_allclose(data["drift"], data["predicted_drift"], rtol=0.02)


def test_one_step_changes_the_laws_by_the_squares_of_the_gradients():
    data = steps()
    assert discrete_vs_flow.order(data, "step_drift") == pytest.approx(2, abs=0.05)
    assert float(data["identity_error"].max()) < 1e-14


def test_stability_is_lost_within_a_percent_of_the_predicted_step():
    data = steps()
    np.testing.assert_allclose(discrete_vs_flow.measured_threshold(data), 1.0, atol=1e-3)
    factor = discrete_vs_flow.growth(data)
    assert np.all(factor.sel(fraction=0.99, method="nearest") < 1)
    assert np.all(factor.sel(fraction=1.01, method="nearest") > 1)
    predicted = abs(1 - 2 * data["fraction"])
    assert float(abs(factor - predicted).max()) < 1e-3
    s1 = 3.0
    for depth, threshold in zip(data["depth"].values, data["threshold"].values, strict=True):
        assert threshold == pytest.approx(2 / (depth * s1 ** (2 - 2 / depth)))


def test_orders_and_stability_are_drawn():
    assert set(drawn(discrete_vs_flow, steps())) == {"", "stability"}
    assert "predicted 2" in discrete_vs_flow.summary(steps())


@functools.cache
def losses():
    return losses_beyond_quadratic.compute(
        losses_beyond_quadratic.Config(
            width=8,
            singular_values=(4.0, 1.5),
            scale=0.06,
            t1=60.0,
            observed=0.8,
            every=30,
            digits_t1=3000.0,
            completion_scales=(0.06, 1.5, 2),
            seeds=1,
            points=150,
        )
    )


@pytest.mark.slow
def test_laws_and_the_rate_equation_survive_every_loss():
    data = losses()
    assert float(data["drift"].max()) < 1e-6
    assert float(data["rate_error"].max()) < 1e-6
    # The same by differences of saved singular values, away from fast changes.
    one = data.isel(time=slice(1, -1)).sel(loss_name="completion")
    sigma, t = data.sel(loss_name="completion")["singular_values"].values, one["t"].values
    slope = (sigma[2:] - sigma[:-2]) / (2 * (t[1] - t[0]))
    late = slice(len(t) // 2, None)
    np.testing.assert_allclose(slope[late], one["balanced_rate"].values[late], atol=2e-3)


@pytest.mark.slow
def test_modes_are_learnt_in_turn_under_losses_of_the_same_target():
    times = losses_beyond_quadratic.half_times(losses())[:3]
    assert np.all(times[:, 1] > 1.3 * times[:, 0])


@pytest.mark.slow
def test_cross_entropy_grows_like_the_logarithm_of_time_and_the_others_converge():
    data = losses()
    last = data.isel(time=-1)
    for name in ("quadratic", "Huber"):
        assert float(last["norm"].sel(loss_name=name)) == pytest.approx(
            data.attrs["target_norm"], rel=1e-3
        )
    norm, fall, predicted = losses_beyond_quadratic.growth(data)
    assert norm > 1
    assert float(data["margin"][-1]) > 0
    assert fall == pytest.approx(predicted, rel=0.1)


@pytest.mark.slow
def test_a_small_start_completes_at_the_rank_of_the_target():
    data = losses()
    small, large = data["completion_rank"].values[:, 0]
    assert small == pytest.approx(float(data["target_rank"]), abs=0.1)
    assert large > small + 1
    assert set(drawn(losses_beyond_quadratic, data)) == {"", "norm", "completion"}
    assert "rate equation within" in losses_beyond_quadratic.summary(data)
