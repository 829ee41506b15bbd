"""The benchmark of throughput: its peers compute the same spectra, and its table says so."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

import gradflow as gf
from experiments.benchmarks import lyapunov_throughput as benchmark


@pytest.mark.parametrize("peer", ["loop", "stacked"])
def test_peers_compute_the_spectrum_of_gaussian_matrices(peer):
    exact = gf.lyapunov.closed_form(gf.lyapunov.Gaussian(3, 0.6))
    if peer == "loop":
        found = benchmark.numpy_loop(0, 3, 0.6, 4000)
    else:
        found = benchmark.numpy_stacked(0, 3, 0.6, 100, 40)
    np.testing.assert_allclose(found, exact, atol=0.08)


def test_table_and_figure_of_throughput():
    config = benchmark.Config(
        dimensions=(2, 10),
        chains=(8, 4),
        steps=(20, 10),
        loop=(50, 20),
        stacked=(80, 40),
        repeats=1,
    )
    data = benchmark.compute(config)
    found = benchmark.ratios(data)
    rate = data["rate"].values
    np.testing.assert_allclose(found[benchmark.LOOP], rate[0] / rate[1])
    np.testing.assert_allclose(found[benchmark.STACKED], rate[0] / rate[2])
    text = benchmark.summary(data)
    assert f"{found[benchmark.LOOP][0]:.1f}x" in text
    with gf.plot.style():
        plt.close(benchmark.figure(data))
    full = benchmark.Config.full()
    fields = (full.dimensions, full.chains, full.steps, full.loop, full.stacked)
    assert len({len(field) for field in fields}) == 1
