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
