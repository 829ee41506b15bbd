"""Each delta block multiplies its readout error by 1 − β: error against depth for β in (0, 2).

The readout error ``kᵀX − vᵀ`` of the rewrite ``X + βk(vᵀ − kᵀX)`` becomes ``(1 − β)(kᵀX − vᵀ)``: it
shrinks for all gates between 0 and 2, keeps its sign below 1, turns it at every layer above 1 and
is gone after one layer at β = 1 (Zhang et al., arXiv 2601.00417).
"""

from __future__ import annotations

import dataclasses

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Rows d and columns d_v of the state.
    dimension: int = 8
    columns: int = 4
    # Number of blocks.
    depth: int = 30
    # Gates whose error is drawn against depth.
    gates: tuple[float, ...] = (0.1, 0.4, 0.9, 1.0, 1.3, 1.7, 1.95)
    # Number of gates between 0 and 2 at which the factor per block is measured.
    measured: int = 39
    # Seed of state, direction and value.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Wider states, more blocks and gates."""
        return cls(dimension=256, columns=32, depth=200, measured=199)


def compute(config: Config) -> xr.Dataset:
    """Readout errors of every layer for every gate, and the factor of the first blocks."""
    rng = np.random.default_rng(config.seed)
    d, m = config.dimension, config.columns
    X0, k, v = rng.standard_normal((d, m)), rng.standard_normal(d), rng.standard_normal(m)
    fine = np.linspace(0, 2, config.measured + 2)[1:-1]

    def errors(beta):
        block = gf.delta.DeltaBlock(k, v, beta, squash=False)
        states = gf.delta.unroll(block, X0, config.depth)
        return jax.vmap(block.readout_error)(states)

    both = np.asarray(jax.vmap(errors)(np.concatenate([config.gates, fine])))
    coarse, scan = np.split(both, [len(config.gates)])
    # Signed, by projection on the error before: 1 − β if each block does what it should.
    factor = np.sum(scan[:, 1] * scan[:, 0], axis=-1) / np.sum(scan[:, 0] ** 2, axis=-1)
    layers = np.arange(config.depth + 1)
    size = np.linalg.norm(coarse[:, :1], axis=-1)
    predicted = size * np.abs(1 - np.array(config.gates))[:, None] ** layers
    side = np.sign(np.sum(coarse * coarse[:, :1], axis=-1))
    return xr.Dataset(
        {
            "error": (("gate", "layer"), np.linalg.norm(coarse, axis=-1)),
            "side": (("gate", "layer"), side),
            "predicted": (("gate", "layer"), predicted),
            "factor": ("beta", factor),
        },
        coords={"gate": list(config.gates), "layer": layers, "beta": fine},
        attrs={"runs": f"no integration: {len(both)} stacks of {config.depth} blocks"},
    )


def _floor(data: xr.Dataset) -> float:
    """Errors below this, a few units of round-off of the first, are not told apart from zero."""
    return 1e-15 * float(data["error"].isel(layer=0).max())


def deviation(data: xr.Dataset) -> float:
    """Largest difference from the prediction, relative to the error of the first layer."""
    first = data["error"].isel(layer=0)
    return float((abs(data["error"] - data["predicted"]) / first).max())


def summary(data: xr.Dataset) -> str:
    """Deviations from the predictions, and the layers that a tenfold smaller error takes."""
    off = float(abs(data["factor"] - (1 - data["beta"])).max())
    layers = []
    for gate in data["gate"].values:
        rate = abs(1 - gate)
        layers.append(f"{gate:g}: {np.log(10) / -np.log(rate):.1f}" if rate > 0 else f"{gate:g}: 0")
    return (
        f"errors within {deviation(data):.1e} of |1 − β|^l times the first one, factors of "
        f"{data.sizes['beta']} gates within {off:.1e} of 1 − β\n"
        f"layers for a tenfold smaller error, by gate: {', '.join(layers)}"
    )


def figure(data: xr.Dataset) -> Figure:
    """Error against depth with the prediction on top; the measured factor against the gate."""
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(11.5, 4.8), width_ratios=(1.5, 1), layout="constrained"
    )
    floor, layer = _floor(data), data["layer"].values
    some = slice(None, None, max(1, (len(layer) - 1) // 30))
    colours = gf.plot.palette(data.sizes["gate"])
    for gate, colour in zip(data["gate"].values, colours, strict=True):
        one = data.sel(gate=gate)
        # Kept off 0, so that the line of β = 1 leaves the axes and is not left out.
        left.plot(layer, np.maximum(one["predicted"], 1e-30 * floor), color=colour)
        error = np.where(one["error"] > floor, one["error"], np.nan)[some]
        same = one["side"].values[some] > 0
        left.plot(layer[some][same], error[same], "o", ms=5, color=colour)
        left.plot(layer[some][~same], error[~same], "o", ms=5, mfc="white", color=colour)
        right.plot(gate, 1 - gate, "o", ms=6, color=colour, zorder=3)
    left.set_yscale("log")
    left.set_ylim(bottom=floor)
    left.set_xlabel("layer (number of blocks applied)")
    left.set_ylabel(r"readout error $\|k^\top X_l - v^\top\|$")
    left.set_title("error against depth")
    handles = [
        Line2D(
            [],
            [],
            color=c,
            marker="o",
            ms=5,
            label=f"β = {g:g}, factor {1 - g:.2f}".replace("-", "−"),
        )
        for c, g in zip(colours, data["gate"].values, strict=True)
    ]
    handles += [
        Line2D([], [], color="black", ls="-", label=r"predicted, $|1-\beta|^l$ times the first"),
        Line2D([], [], color="black", ls="", marker="o", ms=5, label="measured"),
        Line2D(
            [],
            [],
            color="black",
            ls="",
            marker="o",
            mfc="white",
            ms=5,
            label="measured, sign turned",
        ),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    beta = data["beta"].values
    right.plot([0, 2], [1, -1], color="black", lw=1.2, label="1 − β")
    thin = slice(None, None, max(1, len(beta) // 40))
    right.plot(beta[thin], data["factor"][thin], "x", ms=5, color="0.45", label="measured")
    right.axhline(0, color="0.8", lw=0.8, zorder=0)
    right.set_xlabel("gate β")
    right.set_ylabel("factor of the readout error in one block")
    right.set_title("factor per block")
    right.legend(loc="upper right")
    fig.suptitle("Each delta block multiplies its readout error by 1 − β")
    return fig
