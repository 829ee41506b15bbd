"""Benchmarks: peers solve the same problems, and the numbers in the tables are what they say."""

import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import gradflow as gf
from cases import COVARIANCE, TARGET, WIDTHS, arrays, random_network
from experiments.benchmarks import (
    _peers,
    _problems,
    hessian_product,
    peak_memory,
    plateau_scaling,
    work_precision,
)


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


@pytest.mark.parametrize("covariance", [None, COVARIANCE], ids=["whitened", "coloured"])
def test_right_hand_sides_of_the_peers_are_the_vector_field_of_gradient_flow(covariance):
    problem = gf.Problem(TARGET, covariance)
    net = random_network(np.random.default_rng(3), WIDTHS)
    expected = arrays(gf.GradientFlow(problem).vector_field(0.0, net))
    flat = np.concatenate([w.ravel() for w in arrays(net)])
    of_numpy = _peers.numpy_field(problem, net.widths)(0.0, flat)
    np.testing.assert_allclose(of_numpy, np.concatenate([w.ravel() for w in expected]), atol=1e-14)
    for one, other in zip(_peers.jax_field(0.0, net.weights, problem), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-14)


def test_problems_start_from_one_draw_at_the_scale_that_they_name():
    assert list(_problems.CASES) == [f"B{k}" for k in range(1, 9)]
    for case in _problems.CASES.values():
        problem, net, times = case.problem(), case.start(), case.times()
        assert net.widths == case.widths
        assert problem.shape == (case.widths[-1], case.widths[0])
        unit = _problems.gaussian(case.widths, 1.0)
        for one, other in zip(arrays(net), unit, strict=True):
            np.testing.assert_allclose(one, case.scale * other, atol=1e-16)
        assert times.shape == (51,)
        assert (times[0], times[-1]) == (0.0, case.t1)
        assert np.all(np.diff(times) > 0)
        assert case.unknowns == sum(w.size for w in net.weights)
        assert str(len(case.widths) - 1) in case.label or case.digits
    np.testing.assert_allclose(
        _problems.CASES["B4"].problem().singular_values, np.arange(10, 0, -1)
    )


def test_drift_is_the_largest_change_of_the_laws_relative_to_weights_and_laws():
    a, b = np.array([[[1.0]], [[2.0]]]), np.array([[[3.0]], [[3.5]]])
    # C goes from 8 to 8.25; ‖C‖ + ‖W‖² at the end is 8.25 + 4 + 12.25.
    assert _problems.drift([a, b]) == pytest.approx(0.25 / 24.5)
    run = [np.repeat(w[None], 3, axis=0) for w in _problems.gaussian((3, 4, 2), 0.5)]
    assert _problems.drift(run) == 0
    np.testing.assert_allclose(_problems.end_to_end(run)[1], run[1][0] @ run[0][0])


def test_time_at_an_error_is_exact_for_a_power_law():
    error = np.array([1e-3, 1e-5, 1e-7, 1e-9])
    seconds = 0.01 * error ** (-1 / 5)
    assert work_precision.seconds_at(error, seconds, 3e-6) == pytest.approx(0.01 * 3e-6**-0.2)
    assert np.isnan(work_precision.seconds_at(error, seconds, 1e-10))
    # No extrapolation to loose tolerances, and a faster run with a smaller error counts.
    assert work_precision.seconds_at(error, seconds, 1e-2) == pytest.approx(seconds[0])
    assert work_precision.seconds_at(error, [1.0, 1.0, 1.0, 0.5], 1e-6) == 0.5
    assert np.isnan(work_precision.seconds_at([np.nan, 1e-5], [np.nan, 1.0], 1e-6))


@functools.cache
def precision() -> xr.Dataset:
    solvers = ("gradflow explicit", "SciPy DOP853", "SciPy Radau", "SciPy None", "diffrax Tsit5")
    return work_precision.compute(
        work_precision.Config(
            problems=("B1",),
            solvers=solvers,
            rtols=(1e-4, 1e-7),
            repeats=1,
            budget=60.0,
            enough=1e-30,
            check="SciPy DOP853",
        )
    )


@pytest.mark.slow
def test_errors_fall_with_the_tolerance_and_a_broken_solver_only_leaves_a_note():
    data = precision()
    # SciPy's order 8 at a tenth of the accuracy of the reference, 1e-8 per step, enlarged by the
    # way out of the plateau.
    assert data["reference_gap"].item() < 1e-5
    error = data["error"].sel(problem="B1")
    for name in data["solver"].values:
        broken = name == "SciPy None"
        note = data["note"].sel(problem="B1", solver=name).item()
        assert note.startswith("failed at rtol") if broken else note == ""
        if not broken:
            loose, tight = error.sel(solver=name).values
            assert 1e-11 < tight < 0.1 * loose < 0.1
    made = data.drop_sel(solver="SciPy None")
    assert np.all(made["seconds"] > 0)
    assert np.all(made["steps"] > 10)
    assert np.all(made["drift"] < 1e-2)


def test_table_and_figure_of_work_and_precision():
    data = precision()
    auto = data.assign_coords(
        solver=[s.replace("gradflow explicit", work_precision.AUTO) for s in data["solver"].values]
    )
    text = work_precision.summary(auto)
    assert "B1: 3 layers of 5, start 0.1, t1 = 200" in text
    assert "fastest peer / auto" in text
    with gf.plot.style():
        drawn = work_precision.figure(auto)
    assert isinstance(drawn, Figure)
    found = work_precision.ratios(auto, 1e-4).sel(problem="B1")
    times = work_precision.times_at(auto, 1e-4).sel(problem="B1")
    peers = times.sel(solver=[s for s in times["solver"].values if s in _peers.PEERS])
    assert float(found["speedup"]) == pytest.approx(
        float(peers.min()) / float(times.sel(solver=work_precision.AUTO))
    )


def test_a_run_over_its_budget_is_too_slow():
    solver = _peers.Solver("SciPy DOP853", _problems.CASES["B2"])
    with pytest.raises(_peers.TooSlow, match="more than"):
        solver(1e-4, 5000.0, budget=0.01)
    with pytest.raises(_peers.TooSlow, match="30000 rows"):
        _peers.Solver("SciPy BDF", _problems.CASES["B6"])


@pytest.mark.parametrize(("cost", "fits"), [("logarithm", True), ("linear", False)])
def test_cost_of_a_long_run_is_foreseen_from_shorter_ones(cost, fits):
    horizons = []

    class Fake:
        make, kind, case = "gradflow", "explicit", _problems.CASES["B3"]

        def __call__(self, rtol, t1):
            horizons.append(t1)
            seconds = 0.1 * np.log(1 + t1) if cost == "logarithm" else 1e-3 * t1
            return _peers.Run([], 1, seconds, "fake")

    if fits:
        _peers.approach(Fake(), 1e-4, budget=3.0)
        assert max(horizons) == pytest.approx(4e4)
    else:
        with pytest.raises(_peers.TooSlow, match="expected"):
            _peers.approach(Fake(), 1e-4, budget=3.0)
        assert max(horizons) < 4e3


def test_landing_on_saved_times_beats_dense_output():
    case = _problems.CASES["B1"]
    exact = _problems.end_to_end(_peers.Solver("SciPy LSODA", case)(1e-12, case.t1).states)
    solver = _peers.Solver("SciPy DOP853", case)
    dense = _problems.end_to_end(solver(1e-8, case.t1).states)
    landed = _problems.end_to_end(solver.landing(1e-8))
    assert np.abs(landed - exact).max() < 0.1 * np.abs(dense - exact).max()


@functools.cache
def plateaus() -> xr.Dataset:
    return plateau_scaling.compute(
        plateau_scaling.Config(
            depths=(3,),
            scales=(1e-1, 1e-2, 1e-3, 1e-4),
            solvers=("gradflow conserving", "diffrax Tsit5"),
            repeats=1,
            budget=10.0,
        )
    ).sel(depth=3)


def test_steps_of_conserving_grow_like_the_logarithm_of_the_scale():
    row = plateaus().sel(solver="gradflow conserving")
    assert np.all(row["learnt"] == 2)
    found = plateau_scaling.growth(row)
    assert found.better == "log(1/a)"
    assert found.misfit_log < 0.06
    assert found.power < 0.25
    # Half again as long as the last mode of this draw takes, at every scale.
    ratio = row["horizon"].values[1:] / row["horizon"].values[:-1]
    np.testing.assert_allclose(ratio, 10, rtol=0.05)


def test_steps_of_an_explicit_peer_grow_with_the_length_of_the_plateau():
    row = plateaus().sel(solver="diffrax Tsit5")
    found = plateau_scaling.growth(row)
    assert found.better == "power"
    assert found.power > 0.7


def test_escape_times_of_aligned_starts_are_those_of_the_closed_form():
    assert np.all(plateaus()["escape_error"] < 1e-6)


def test_both_laws_of_growth_are_recovered():
    scale = np.array([1e-1, 1e-2, 1e-3, 1e-4])
    for steps, better in ((20 + 30 * np.log10(1 / scale), "log(1/a)"), (scale**-0.5, "power")):
        row = xr.Dataset(
            {"steps": ("scale", steps), "ran": ("scale", ["one"] * 4)}, coords={"scale": scale}
        )
        found = plateau_scaling.growth(row)
        assert found.better == better
        if better == "power":
            assert found.power == pytest.approx(0.5)
        else:
            assert (found.offset, found.slope) == pytest.approx((20, 30))
    # Runs by another solver than the last do not count.
    mixed = row.assign(ran=("scale", ["other", "one", "one", "one"]))
    assert list(plateau_scaling.alike(mixed)) == [False, True, True, True]
    assert plateau_scaling.growth(mixed.isel(scale=slice(0, 3))) is None


def test_table_and_figure_of_plateaus():
    data = plateaus().expand_dims("depth")
    text = plateau_scaling.summary(data)
    assert "log(1/a) fits" in text
    assert "NOT ALL" not in text
    with gf.plot.style():
        assert isinstance(plateau_scaling.figure(data), Figure)


@pytest.mark.parametrize("module", [work_precision, plateau_scaling])
def test_full_configurations_name_known_solvers(module):
    config = module.Config.full()
    assert config != module.Config()
    assert set(config.solvers) <= {*_peers.OURS, *_peers.PEERS}
    assert jax.config.jax_enable_x64
    assert jnp.asarray(config.rtol if module is plateau_scaling else config.rtols).dtype == float


@pytest.mark.slow
def test_peak_memory_is_that_of_a_process_and_hessian_products_agree():
    memory = peak_memory.compute(peak_memory.Config(widths=(4,), horizon=1.0))
    one = memory.sel(solver="conserving", width=4)
    assert (float(one["unknowns"]), float(one["state"])) == (48, pytest.approx(8e-6 * 48))
    assert float(one["matrix"]) == pytest.approx(8e-6 * 48**2)
    # A process with JAX in it, in MB: neither kilobytes nor bytes.
    assert 50 < float(one["peak"]) < 20_000
    assert "REACHED_END" in memory.attrs["runs"]
    assert "48" in peak_memory.summary(memory)
    assert isinstance(peak_memory.figure(memory), Figure)

    products = hessian_product.compute(
        hessian_product.Config(widths=((3, 4, 2), (2, 2)), rounds=3, length=2)
    )
    assert float(products["difference"].max()) < 1e-12
    np.testing.assert_array_equal(products["parameters"], [20, 4])
    assert "3, 4, 2" in hessian_product.summary(products)
    assert isinstance(hessian_product.figure(products), Figure)
