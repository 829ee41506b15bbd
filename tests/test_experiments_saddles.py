"""Saddles along runs, random starts and slices of the loss: the mathematics they show."""

import functools

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.interpolate import RegularGridInterpolator

import gradflow as gf
from experiments import loss_surface, random_starts, saddle_to_saddle


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


def drawn(module, data):
    with gf.plot.style():
        figure = module.figure(data)
    assert isinstance(figure, Figure)
    figure.canvas.draw()
    return figure


@functools.cache
def passing():
    return saddle_to_saddle.compute(saddle_to_saddle.Config(points=150))


def test_a_small_start_passes_every_saddle_in_turn_at_its_critical_value():
    data = passing()
    time, start, end, distance = np.moveaxis(data["passage"].values[..., :4], -1, 0)
    np.testing.assert_allclose(data["value"], [10.5, 2.5, 0.5])
    assert np.all(distance < 0.1)
    assert np.all(distance[1] < 1e-4)
    assert np.all((start <= time) & (time <= end))
    assert np.all(np.diff(start, axis=1) > 0)
    assert np.all(end[:, :-1] < start[:, 1:])
    for depth, times in zip(data["depth"], time, strict=True):
        one = data.sel(depth=depth)
        at = np.interp(times, one["t"], one["loss"])
        np.testing.assert_allclose(at, data["value"], rtol=0.05)


def test_plateaus_of_two_layers_show_the_next_singular_value_and_the_morse_index():
    one = passing().sel(depth=2)
    np.testing.assert_allclose(one["saddle_smallest"], [-4, -2, -1], atol=1e-12)
    np.testing.assert_array_equal(one["saddle_negative"], [4 * 3, 3 * 2, 2 * 1])
    smallest = one["passage"].sel(measure="smallest_eigenvalue")
    np.testing.assert_allclose(smallest, one["saddle_smallest"], rtol=0.05)
    counts = np.interp(one["passage"].sel(measure="time"), one["t"], one["negative"])
    np.testing.assert_allclose(counts, one["saddle_negative"], atol=1)


def test_plateaus_of_three_layers_are_flat_and_the_ways_between_them_are_not():
    one = passing().sel(depth=3)
    np.testing.assert_allclose(one["saddle_smallest"], 0, atol=1e-12)
    np.testing.assert_array_equal(one["saddle_negative"], 0)
    times = one["passage"].sel(measure="time").values
    nearest = np.searchsorted(one["t"], times)
    np.testing.assert_array_equal(one["negative"].values[nearest], 0)
    assert np.all(one["smallest"].values[nearest] > -0.2)
    for s, after in zip((4, 2, 1), times, strict=True):
        way = (one["t"] > after) & (
            one["t"] < np.append(times, np.inf)[times.searchsorted(after) + 1]
        )
        assert float(one["smallest"].where(way).min()) < -0.4 * s


def test_passages_are_told_and_drawn():
    text = saddle_to_saddle.summary(passing())
    assert "saddle {1, 2}, loss 0.5: nearest at t = " in text
    assert "not passed" not in text
    drawn(saddle_to_saddle, passing())


@functools.cache
def starts():
    config = random_starts.Config(starts=60, points=200, critical_points=40, directions=50)
    return random_starts.compute(config)


def test_every_random_start_ends_in_a_global_minimum():
    data = starts()
    found = random_starts.tally(data)
    assert found["runs"] == found["runs at a global minimum"] == 120
    assert float(data["final_loss"].max()) < 1e-12
    assert float(data["final_gradient"].max()) <= 1e-7
    assert np.all(np.isfinite(data["time"]))


def test_a_search_finds_no_spurious_minima_and_no_maxima():
    data = starts()
    found = random_starts.tally(data)
    assert found["critical points"] == 80
    assert found["above the global minimum"] > 60
    nothing = ("spurious minima", "maxima", "global minima with a way down", "undecided kinds")
    assert [found[name] for name in nothing] == [0, 0, 0, 0]
    # Not all ways down are found by chance, so that the search is one.
    assert found["of these, a random direction descends"] < found["above the global minimum"]


def test_the_tally_counts_what_it_is_there_to_find():
    data = starts().copy(deep=True)
    high = np.argwhere(data["excess"].values > 0.1)[:3]
    (a, b, c), low = map(tuple, high), tuple(np.argwhere(data["excess"].values < 1e-12)[0])
    data["down"].values[a] = 0.0
    data["down"].values[b] = data["random_down"].values[b] = 1e-3
    data["up"].values[c] = -1e-3
    data["down"].values[low] = -1e-3
    data["point_kind"].values[low] = "undecided"
    data["kind"].values[0, 0] = "nonstrict_saddle"
    found = random_starts.tally(data)
    assert found["spurious minima"] == 2
    assert (
        found["maxima"] == found["undecided kinds"] == found["global minima with a way down"] == 1
    )
    assert found["runs at a global minimum"] == found["runs"] - 1


def test_learning_time_follows_the_closest_saddle_by_the_law_of_the_depth():
    for depth, (slope, said) in random_starts.slopes(starts()).items():
        assert said == pytest.approx({2: 0.5, 3: 1 / 3}[depth])
        assert slope == pytest.approx(said, rel=0.2)


def test_deep_runs_come_as_close_to_later_saddles_as_to_the_origin():
    distance, which = random_starts.nearest(starts())
    deep = which.sel(depth=3).values
    assert np.mean(deep == "{1, 2}") > 0.2
    assert np.mean(deep == "{}") > 0.2
    assert float(distance.sel(depth=3)[deep == "{1, 2}"].min()) < 1e-4


def test_the_closed_form_of_two_layers_is_logarithmic_in_the_distance():
    times = random_starts.closed_form(np.array([1e-5, 1e-3]), 2, 1.0, 0.9)
    u = np.array([1e-5, 1e-3])
    np.testing.assert_allclose(times, 0.5 * np.log(0.9 * (1 - u) / (u * 0.1)), rtol=1e-9)


def test_random_starts_are_told_and_drawn():
    assert "runs at a global minimum: 120" in random_starts.summary(starts())
    figure = drawn(random_starts, starts())
    assert "60 of 60 starts" in figure.axes[0].get_title()


@functools.cache
def slices():
    return loss_surface.compute(loss_surface.Config(points=400, resolution=81))


def test_cutting_modes_out_of_a_minimum_leaves_exact_critical_points():
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0], (3, 5))
    minimum = gf.landscape.critical_point(problem, (5, 4, 6, 3), (1, 2, 3), key=jax.random.key(3))
    for rank in range(4):
        verdict = gf.landscape.classify(problem, loss_surface._cut(problem, minimum, rank))
        assert verdict.gradient_norm < 1e-12
        assert verdict.signature == tuple(range(1, rank + 1))


def test_corners_of_the_slices_are_critical_and_the_run_passes_close_to_them():
    data = slices()
    np.testing.assert_allclose(data["value"], [7, 2.5, 0.5, 0], atol=1e-12)
    assert data["kind"].values.tolist() == ["nonstrict_saddle"] * 3 + ["global_minimum"]
    assert float(data["gradient"].max()) < 1e-8
    assert float(data["closest"].max()) < 0.15
    assert np.all(np.diff(data["passed"]) > 0)


def test_the_surface_is_the_loss_at_its_points_and_the_projection_is_orthonormal():
    data = slices()
    for k in range(data.sizes["slice"]):
        one = data.isel(slice=k)
        read = RegularGridInterpolator(
            (one["y"].values, one["x"].values), one["surface"].values, method="cubic"
        )
        beneath = read(one["path"].values[:, ::-1])
        np.testing.assert_allclose(beneath, one["shadow_loss"], atol=1e-3)
        np.testing.assert_allclose(
            read(one["corner"].values[:, ::-1]), data["value"].sel(learnt=one["rank"]), atol=1e-3
        )
        # A mode of strength s has norm √h s^{1/h} in balanced layers, and is at right angles.
        roots = np.array([3.0, 2.0, 1.0]) ** (2 / 3)
        low, middle, high = one["rank"].values
        a, b = np.sqrt(3 * roots[low:middle].sum()), np.sqrt(3 * roots[middle:high].sum())
        np.testing.assert_allclose(one["corner"], [[0, 0], [a, 0], [a, b]], atol=0.01)


def test_where_the_run_is_in_the_plane_its_loss_is_the_one_drawn():
    data = slices()
    gap = abs(data["shadow_loss"] - data["loss"]).transpose("slice", "time").values
    distance = data["distance"].transpose("slice", "time").values
    # All but what the start left beside the modes ends in the plane; the detour through {1, 2}
    # leaves the first one.
    assert distance[:, -1].max() < 0.05
    np.testing.assert_allclose(gap[:, -1], 0, atol=1e-12)
    assert distance[0].max() > 1
    assert gap[distance < 0.1].max() < 0.1
    assert gap.max() > 0.5


def test_slices_are_told_and_drawn():
    assert "slice through {1}, {1, 2}, {1, 2, 3}" in loss_surface.summary(slices())
    drawn(loss_surface, slices())
