"""Stationary measures on the lines of the plane: where the directions of deep products end up.

A random 2×2 matrix moves every line through the origin. The law of the direction settles to a
stationary measure, and the largest exponent is the mean of ``log |Au|`` over it (Furstenberg &
Kifer 1983). Positive matrices gather the lines in a narrow cone, rotations spread them; and where
all matrices keep a line, that line carries a measure of its own: the measure is not unique, and a
start on the line grows at another rate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Number of lines of the operator, rounded up to a multiple of the bins of the histogram.
    bins: int = 720
    # Directions sampled from long products, and how long these are.
    samples: int = 20_000
    burn_in: int = 100
    # Bins of the histogram of the sampled directions.
    histogram: int = 90
    # Seed of the products.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More lines and samples."""
        return cls(bins=1440, samples=200_000, burn_in=300, histogram=180)


def _rotation(angle: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s], [s, c]])


def laws() -> dict[str, gf.lyapunov.Finite]:
    """The ensembles, by the title of their panel."""
    stretch = np.diag([2.0, 0.5])
    rotated = [stretch @ _rotation(x) for x in np.linspace(0, np.pi, 12, endpoint=False)]
    return {
        "two positive matrices": gf.lyapunov.Finite([[[2, 1], [1, 1]], [[1, 1], [1, 3]]]),
        "a rotation by any of 12 angles, then a stretch": gf.lyapunov.Finite(np.stack(rotated)),
        "a stretch or a small rotation": gf.lyapunov.Finite(
            np.stack([stretch, _rotation(0.3)]), [0.3, 0.7]
        ),
        "triangular: one line is kept by all": gf.lyapunov.Finite(
            [[[0.6, 0.5], [0, 1.4]], [[0.8, -0.5], [0, 1.1]]]
        ),
    }


def compute(config: Config) -> xr.Dataset:
    """The stationary measure and its exponents per law, and a histogram of sampled directions."""
    names, edges = list(laws()), np.linspace(0, np.pi, config.histogram + 1)
    bins = -(-config.bins // config.histogram) * config.histogram
    keys = jax.random.split(jax.random.key(config.seed), len(names))
    angles, density, counts = [], [], []
    exponents = np.full((len(names), 2), np.nan)
    lines = np.full((len(names), 2), np.nan)
    for i, (key, law) in enumerate(zip(keys, laws().values(), strict=True)):
        measure = gf.lyapunov.stationary_measure(law, bins)
        # Cells lie within the bins of the histogram, nodes on their edges.
        cells = gf.lyapunov.stationary_measure(law, bins, operator="ulam")
        angles.append(cells.angles)
        density.append(cells.density)
        exponents[i, : len(measure.exponents)] = measure.exponents[:2]
        lines[i, : len(measure.invariant_lines)] = measure.invariant_lines
        u = np.asarray(
            gf.lyapunov.sample_stationary(key, law, config.samples, burn_in=config.burn_in)
        )
        found = np.histogram(np.arctan2(u[:, 1], u[:, 0]) % np.pi, edges)[0]
        counts.append(found / found.sum() / np.diff(edges))
    return xr.Dataset(
        {
            "angle": (("law", "node"), np.array(angles)),
            "density": (("law", "node"), np.array(density)),
            "histogram": (("law", "bin"), np.array(counts)),
            "exponent": (("law", "measure"), exponents),
            "invariant_line": (("law", "line"), lines),
        },
        coords={"law": names, "edge": edges},
        attrs={
            "runs": (
                f"no integration: {len(names)} laws, {bins} lines each; {config.samples} "
                f"directions sampled from products of {config.burn_in} matrices"
            )
        },
    )


def coarse(data: xr.Dataset) -> np.ndarray:
    """The computed measure as mass per angle in the bins of the histogram, (law, bin)."""
    bins = data.sizes["edge"] - 1
    density = data["density"].values
    return density.reshape(len(density), bins, -1).mean(axis=-1)


def distances(data: xr.Dataset) -> np.ndarray:
    """Largest difference of the distribution functions, computed and sampled, per law."""
    widths = np.diff(data["edge"].values)
    gap = np.cumsum((coarse(data) - data["histogram"].values) * widths, axis=1)
    return np.abs(gap).max(axis=1)


def summary(data: xr.Dataset) -> str:
    """Exponents of all measures, invariant lines, and agreement with the samples."""
    lines = []
    for i, name in enumerate(data["law"].values):
        values = data["exponent"][i].values
        values = values[np.isfinite(values)]
        kept = data["invariant_line"][i].values
        kept = kept[np.isfinite(kept)]
        unique = "unique" if len(values) == 1 else "NOT unique, one measure for each exponent"
        where = ", ".join(f"{x / np.pi:.3f}π" for x in kept) or "none"
        lines.append(
            f"{name}: γ = {', '.join(f'{x:.5f}' for x in values)} ({unique}); lines kept by all: "
            f"{where}; distribution within {distances(data)[i]:.1e} of the sampled one"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """One panel for each law: the density, the sampled histogram and the lines kept by all."""
    fig, grid = plt.subplots(2, 2, figsize=(12, 7), sharex=True, layout="constrained")
    line, bars, kept_colour = gf.plot.palette(3)[0], "0.8", gf.plot.palette(2)[1]
    edges = data["edge"].values
    for i, (ax, name) in enumerate(zip(grid.ravel(), data["law"].values, strict=True)):
        ax.stairs(data["histogram"][i], edges / np.pi, fill=True, color=bars)
        ax.stairs(coarse(data)[i], edges / np.pi, color=line, lw=1.3)
        values = data["exponent"][i].values
        told = ", or ".join(f"{x:.4f}" for x in values[np.isfinite(values)])
        for angle in data["invariant_line"][i].values:
            if np.isfinite(angle):
                for x in {angle / np.pi, 1.0 if angle < 1e-9 else angle / np.pi}:
                    ax.axvline(x, color=kept_colour, ls="--", lw=2.5, clip_on=False)
        ax.set_title(f"{name}\nγ = {told} per layer", fontsize=11)
        ax.set_xlim(0, 1)
        ax.set_ylim(0, None)
        ax.set_ylabel("density (per radian)")
    for ax in grid[-1]:
        ax.set_xlabel("angle of the line (units of π)")
    handles: list[Any] = [
        Line2D([], [], color=line, lw=1.3, label="fixed vector of the operator on lines"),
        Patch(color=bars, label="sampled directions of deep products"),
        Line2D([], [], color=kept_colour, ls="--", lw=2.5, label="line kept by all matrices"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    fig.suptitle("Where directions end up after many layers, and the exponent they give")
    return fig
