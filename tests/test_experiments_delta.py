"""Delta layers: the mathematics that the figures show."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

import gradflow as gf
from experiments import (
    broken_laws,
    delta_memory,
    delta_modulation,
    delta_spectrum,
    depth_flow,
    negative_eigenvalues,
    readout_contraction,
    shortcut_gallery,
)


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


def shown(module, data):
    """The summary; the figure must draw."""
    with gf.plot.style():
        figure = module.figure(data)
    assert isinstance(figure, Figure)
    figure.canvas.draw()
    text = module.summary(data)
    assert text.strip()
    return text


def test_one_eigenvalue_of_the_delta_operator_moves_with_the_gate():
    config = delta_spectrum.Config(dimension=3, columns=(1, 2), gates=5, points=13)
    data = delta_spectrum.compute(config)
    beta = data["beta"].values
    np.testing.assert_allclose(data["spectrum"][:, -1], 1 - beta, atol=1e-15)
    np.testing.assert_allclose(data["dense_eigenvalues"].min("eigenvalue"), 1 - beta, atol=1e-14)
    np.testing.assert_allclose(data["dense_determinant"].sel(m=2), (1 - beta) ** 2, atol=1e-14)
    # The projection lays the circle on a line, the reflection keeps it.
    sizes = np.linalg.norm(data["image"], axis=1)
    np.testing.assert_allclose(sizes[-1], 1, atol=1e-14)
    along = np.einsum("as,a->s", data["image"].sel(gate=1.0), data["direction"])
    np.testing.assert_allclose(along, 0, atol=1e-14)
    shown(delta_spectrum, data)


def test_blocks_multiply_the_readout_error_by_one_minus_beta():
    config = readout_contraction.Config(
        dimension=3, columns=2, depth=6, gates=(0.4, 1.0, 1.7), measured=3
    )
    data = readout_contraction.compute(config)
    np.testing.assert_allclose(data["error"], data["predicted"], rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(abs(data["factor"]), abs(1 - data["beta"]), atol=1e-12)
    shown(readout_contraction, data)


def test_the_delta_rule_is_the_block_and_replaces_where_the_additive_rule_mixes():
    config = delta_memory.Config(
        key_dimension=8, value_dimension=3, steps=8, pairs=6, seeds=8, rewrites=(2, 5, 7)
    )
    data = delta_memory.compute(config)
    np.testing.assert_allclose(data["over_time"], data["over_depth"], atol=1e-13)
    last = data["recall"].isel(stored=-1)
    assert float(last.sel(rule="delta")) < float(last.sel(rule="additive"))
    shown(delta_memory, data)


def test_blocks_converge_to_the_depth_flow_and_cross_a_target_that_it_does_not():
    config = depth_flow.Config(
        dimension=3, fewest=16, doublings=3, gates=(0.5, 1.5), depth=6, finer=(1, 2), points=31
    )
    data = depth_flow.compute(config)
    counts = data["count"].values
    for error in data["euler_error"].values:
        slope = np.polyfit(np.log(counts), np.log(error), 1)[0]
        assert slope == pytest.approx(-1, abs=0.1)
    flow, blocks = depth_flow.crossings(data)
    np.testing.assert_array_equal(flow, [0, 0])
    np.testing.assert_array_equal(blocks, [0, config.depth])
    shown(depth_flow, data)


def test_a_mode_with_gates_on_all_layers_has_a_clock_of_its_own():
    config = delta_modulation.Config(points=31, gates=(0.0, 1.0, 0.7), hidden_width=3)
    data = delta_modulation.compute(config)
    of_all = data["modes"].isel(where=0, mode=config.modulated - 1)
    np.testing.assert_allclose(of_all, data["exact"], atol=1e-7)
    before = data["t"].values <= config.release
    np.testing.assert_allclose(of_all.sel(gate=1.0)[before], of_all[0, 0], atol=1e-12)
    shown(delta_modulation, data)


def test_modulation_keeps_block_and_entry_and_breaks_what_crosses():
    config = broken_laws.Config(widths=(2, 3, 2), gates=(0.0, 0.5), points=9)
    data = broken_laws.compute(config)
    change = data["change"].sel(gate=0.5).max("time")
    assert float(change.sel(part="block")) < 1e-9
    assert float(change.sel(part="entry")) < 1e-9
    assert float(change.sel(part="broken")) > 1e-3
    np.testing.assert_array_equal(data["laws"][0], data["formula"])
    shown(broken_laws, data)


def test_rotations_keep_the_signal_and_delta_blocks_its_size():
    config = shortcut_gallery.Config(dimension=6, depth=12, seeds=3)
    data = shortcut_gallery.compute(config)
    kinds = [str(kind) for kind in data["kind"].values]
    start = data["signal"].isel(layer=0)
    orthogonal = next(kind for kind in kinds if "orthogonal" in kind or "rotation" in kind)
    np.testing.assert_allclose(
        data["signal"].sel(kind=orthogonal, layer=12) / start.sel(kind=orthogonal), 1, rtol=1e-9
    )
    assert bool(np.isfinite(data["gradient"]).all())
    shown(shortcut_gallery, data)


SMALL = negative_eigenvalues.Config(
    eigenvalues=(1.5, -1.0),
    depth=4,
    perturbations=(0.0, 0.3),
    seeds=2,
    depths=(1, 4),
    spreads=(0.0, 1.0),
    t1=60.0,
    aligned_t1=60.0,
    points=21,
)


def test_residual_networks_stay_at_the_saddle_that_delta_networks_leave():
    data = negative_eigenvalues.compute(SMALL)
    last = data["loss"].isel(time=-1)
    saddle = data.attrs["saddle"]
    assert saddle == pytest.approx(0.5)
    # The exact start shrinks the layers together: ½(1 + u⁴)² with u̇ = −u³(1 + u⁴), to 1/t.
    exact = last.sel(kind="residual, 0").values
    np.testing.assert_allclose(exact, saddle, atol=1e-3)
    assert (exact > saddle).all()
    assert (last.sel(kind="delta").values < 1e-3).all()
    # The rotation nearest to diag(3/2, −1) keeps one of the two signs wrong.
    np.testing.assert_allclose(last.sel(kind="orthogonal"), 0.5 * (0.5**2 + 2.0**2), atol=1e-6)
    # A negative determinant needs an odd number of layers that turn.
    assert (negative_eigenvalues.negative_layers(data).values % 2 == 1).all()
    np.testing.assert_allclose(data["reached"].sel(depth=1), data["reach"].sel(depth=1), atol=1e-4)
    assert (data["reached"].sel(depth=4).values < 1e-3).all()
    aligned = data["aligned"].isel(start=0)
    # All layers shrink along the eigenvector, and what is across it stays 1.
    np.testing.assert_allclose(aligned.sel(spread=0.0), saddle + 0.5 * 0.5**2, atol=0.02)
    assert (aligned.sel(spread=1.0).values < 1e-3).all()
    shown(negative_eigenvalues, data)


def test_targets_have_the_eigenvalues_that_their_names_say():
    d = len(negative_eigenvalues.Config().eigenvalues)
    for name, expected in (("signs", [2, 1.5, 1, -1]), ("rotation", [1, 1, -1, -1])):
        T = negative_eigenvalues.target(negative_eigenvalues.Config(target=name))
        np.testing.assert_allclose(np.linalg.eigvalsh(T)[::-1], expected, atol=1e-15)
    T = negative_eigenvalues.target(negative_eigenvalues.Config(target="symmetric"))
    np.testing.assert_array_equal(T, T.T)
    assert T.shape == (d, d)
    assert np.linalg.norm(T, 2) == pytest.approx(2)
    assert negative_eigenvalues.saddle(T) > 0
    # No map of determinant ≥ 0 does better: the nearest one gives up the weakest mode.
    T = np.diag([2.3, 1.2, 0.8, -0.9])
    assert negative_eigenvalues.saddle(T) == pytest.approx(0.405)
    assert negative_eigenvalues.barrier(T) == pytest.approx(0.32)
    assert negative_eigenvalues.barrier(-T) == pytest.approx(0.32)
    assert negative_eigenvalues.barrier(np.diag([-1.0, -2.0])) == 0
    with pytest.raises(ValueError, match="target: 'other', must be one of signs"):
        negative_eigenvalues.target(negative_eigenvalues.Config(target="other"))
    with pytest.raises(ValueError, match="needs 2 eigenvalues"):
        negative_eigenvalues.target(
            negative_eigenvalues.Config(target="rotation", eigenvalues=(1.0,))
        )
