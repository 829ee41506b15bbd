"""Pictures: drawn on the axes given, true to the run, and no burden on who needs none."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

import gradflow as gf
from gradflow import plotting

SINGULAR_VALUES = (3.0, 2.0, 1.0)
OF_RUNS = [plotting.modes, plotting.loss, plotting.drift, plotting.effective_rank]


@pytest.fixture(scope="module")
def run():
    flow = gf.GradientFlow(gf.Problem.from_singular_values(SINGULAR_VALUES, (3, 4)))
    start = gf.initialize.gaussian(0, (4, 5, 4, 3), 0.3)
    return gf.simulate(flow, start, 12.0, save=60)


@pytest.fixture(scope="module")
def loaded(run, tmp_path_factory):
    return gf.load(run.save(tmp_path_factory.mktemp("runs") / "run.nc"))


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


def dashed_heights(ax):
    return [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"]


def test_importing_gradflow_does_not_import_matplotlib():
    code = "import sys, gradflow; print('matplotlib' in sys.modules); gradflow.plot; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "ok"]


def test_plot_is_the_plotting_package():
    assert gf.plot is plotting


def test_importing_plotting_leaves_the_settings_of_matplotlib_alone():
    code = (
        "import matplotlib as mpl; before = dict(mpl.rcParams); import gradflow.plotting;"
        "print(dict(mpl.rcParams) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize("draw", OF_RUNS)
def test_pictures_of_runs_use_the_axes_given_and_label_them(draw, run, ax):
    assert draw(run, ax) is ax
    assert ax.lines
    assert "time" in ax.get_xlabel()
    assert ax.get_ylabel()
    assert plt.get_fignums() == [ax.figure.number]


@pytest.mark.parametrize("draw", OF_RUNS)
def test_pictures_make_a_figure_of_their_own_if_given_none(draw, run):
    ax = draw(run)
    assert plt.get_fignums() == [ax.figure.number]


@pytest.mark.parametrize("draw", OF_RUNS)
def test_loaded_runs_are_drawn_alike(draw, run, loaded):
    fresh, again = draw(run), draw(loaded)
    assert len(fresh.lines) == len(again.lines)
    for one, other in zip(fresh.lines, again.lines, strict=True):
        np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())


@pytest.mark.parametrize("draw", OF_RUNS)
def test_a_batch_of_runs_is_refused_and_the_remedy_named(draw, run):
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), run)
    with pytest.raises(ValueError, match=r"traj\.lane\(i\)"):
        draw(batch)
    draw(batch.lane(1))


@pytest.mark.parametrize("draw", OF_RUNS)
def test_what_is_no_run_or_no_axes_is_refused(draw, run):
    with pytest.raises(ValueError, match="traj: got 'run'"):
        draw("run")
    with pytest.raises(ValueError, match="ax: got 3"):
        draw(run, 3)


def test_modes_are_drawn_with_the_values_of_the_data_dashed_in_the_same_colours(run, ax):
    plotting.modes(run, ax)
    curves = [line for line in ax.lines if len(line.get_xdata()) == len(run.ts)]
    values = [line for line in ax.lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose([v.get_ydata()[0] for v in values], SINGULAR_VALUES)
    assert [v.get_color() for v in values] == [c.get_color() for c in curves]
    assert len({c.get_color() for c in curves}) == len(SINGULAR_VALUES)
    for mode, curve in enumerate(curves):
        np.testing.assert_array_equal(curve.get_xdata(), run.ts)
        np.testing.assert_array_equal(curve.get_ydata(), run["modes"][:, mode])


def test_modes_are_marked_where_they_reach_the_fraction_of_their_strength(run, ax):
    plotting.modes(run, ax, fraction=0.8)
    dots = np.concatenate([line.get_xydata() for line in ax.lines if line.get_marker() == "o"])
    np.testing.assert_allclose(dots[:, 0], gf.observables.learning_times(run, 0.8).times)
    np.testing.assert_allclose(dots[:, 1], 0.8 * np.array(SINGULAR_VALUES), rtol=1e-12)


def test_modes_that_are_not_learnt_have_no_mark(run, ax):
    early = eqx.tree_at(lambda t: t.recorded["modes"], run, 0 * run["modes"])
    plotting.modes(early, ax)
    assert not [line for line in ax.lines if line.get_marker() == "o"]


def test_modes_draws_singular_values_and_fewer_of_them_on_demand(run, ax):
    plotting.modes(run, ax, quantity="singular_values", count=2, fraction=None, legend=False)
    assert len(ax.lines) == 2
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), run.singular_values[:, 1])
    assert ax.get_legend() is None


def test_singular_values_have_dashed_lines_only_at_targets_given(run, ax):
    plotting.modes(run, ax, quantity="singular_values", targets=[5.0, 4.0, 3.0])
    assert dashed_heights(ax) == [5.0, 4.0, 3.0]


def test_modes_of_a_run_without_target_are_its_singular_values(ax):
    problem = gf.Problem.from_loss(lambda W: jnp.sum((W - 1.0) ** 2), (2, 2))
    run = gf.simulate(gf.GradientFlow(problem), gf.initialize.identity((2, 2)), 1.0, save=5)
    plotting.modes(run, ax)
    plotting.effective_rank(run, ax)
    assert not dashed_heights(ax)
    with pytest.raises(ValueError, match="must have recorded 'modes'"):
        plotting.modes(run, quantity="modes")
    with pytest.raises(ValueError, match="without conserved quantities"):
        plotting.drift(run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantity": "mode"}, "did you mean 'modes'"),
        ({"count": 0}, "count"),
        ({"fraction": 1.5}, "fraction"),
        ({"colours": ["red"]}, "there are 3 modes"),
        ({"targets": [1.0]}, "targets: got 1 values; there are 3 modes"),
    ],
)
def test_modes_refuses_options_out_of_range_by_name(options, message, run):
    with pytest.raises(ValueError, match=message):
        plotting.modes(run, **options)


def test_loss_is_on_a_log_axis_with_gaps_where_it_is_not_above_the_floor(run, ax):
    floor = float(run.loss[30])
    plotting.loss(run, ax, floor=floor, label="above", color="black")
    (curve,) = ax.lines
    assert ax.get_yscale() == "log"
    above = np.asarray(run.loss) - floor
    np.testing.assert_array_equal(np.isnan(curve.get_ydata()), above <= 0)
    np.testing.assert_allclose(curve.get_ydata()[:30], above[:30])
    assert curve.get_label() == "above"


def test_drift_of_nothing_but_zeros_is_drawn_at_round_off(run, ax):
    still = eqx.tree_at(lambda t: t.recorded["law_drift"], run, 0 * run["law_drift"])
    plotting.drift(still, ax)
    assert ax.get_yscale() == "log"
    assert set(ax.lines[-1].get_ydata()) == {np.finfo(float).eps}
    ax.figure.canvas.draw()


def test_drift_can_show_every_law(run, ax):
    plotting.drift(run, ax, each=True)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["$C_{1}$", "$C_{2}$"]
    both = np.stack([line.get_ydata() for line in ax.lines[-2:]], axis=1)
    np.testing.assert_array_equal(both, np.maximum(run["law_drift"], np.finfo(float).eps))


def test_effective_rank_is_the_observable_and_compares_with_the_data(run, ax):
    plotting.effective_rank(run, ax, targets=run.targets)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), run["effective_rank"], rtol=1e-10)
    data = gf.observables.effective_rank(gf.LinearNetwork([np.diag(SINGULAR_VALUES)]))
    np.testing.assert_allclose(dashed_heights(ax), [data], rtol=1e-12)


def test_adjacency_shows_the_matrix_in_colours_symmetric_about_zero(run, ax):
    net = run.network(-1)
    assert plotting.adjacency(net, ax) is ax
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), net.adjacency())
    low, high = image.get_clim()
    assert -low == high == float(jnp.abs(net.adjacency()).max())
    assert [t.get_text() for t in ax.get_xticklabels()] == ["input", "1", "2", "output"]
    assert sorted({line.get_xdata()[0] for line in ax.lines if line.get_xdata()[0] > 0}) == [
        3.5,
        8.5,
        12.5,
    ]


def test_adjacency_takes_any_matrix_with_or_without_blocks(ax):
    plotting.adjacency(np.zeros((3, 3)), ax, colorbar=False)
    assert ax.images[0].get_clim() == (-1.0, 1.0)
    assert not ax.lines
    blocks = plotting.adjacency(np.eye(3), widths=(1, 2), labels=("x", "y"), limit=2.0)
    assert blocks.images[0].get_clim() == (-2.0, 2.0)
    assert [t.get_text() for t in blocks.get_yticklabels()] == ["x", "y"]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.ones((2, 3)),), {}, "square"),
        ((np.full((2, 2), np.nan),), {}, "finite"),
        ((np.eye(3),), {"widths": (1, 1)}, "add up to 3"),
        ((np.eye(3),), {"labels": ("a",)}, "needs widths"),
        ((np.eye(3),), {"widths": (1, 2), "labels": ("a",)}, "2 node blocks"),
        ((np.eye(3),), {"limit": 0.0}, "limit"),
        ((gf.initialize.identity((2, 2)),), {"widths": (2, 2)}, "leave out"),
    ],
)
def test_adjacency_refuses_what_does_not_fit_by_name(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        plotting.adjacency(*arguments, **options)


def test_adjacency_refuses_a_batch_of_networks(run):
    with pytest.raises(ValueError, match="batch"):
        plotting.adjacency(run.states)


def test_style_ends_with_its_block():
    before = dict(mpl.rcParams)
    with plotting.style():
        assert dict(mpl.rcParams) != before
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("count", [0, 1, 7, 8, 30])
def test_palette_gives_as_many_different_colours_as_asked(count):
    colours = plotting.palette(count)
    assert len(set(colours)) == len(colours) == count
    assert all(mpl.colors.is_color_like(colour) for colour in colours)
