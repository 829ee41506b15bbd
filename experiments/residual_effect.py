"""Exponents with and without a residual connection against the scale, and where it does harm.

A residual connection turns the Jacobian A into I + A. That it makes the spectrum a smaller
perturbation of the identity's can be read as "every |γ_k| shrinks". For Gaussian ``A = σG/√d`` this
holds for small scales and fails for large ones, at a scale that differs from exponent to exponent:
the shaded regions. The plain exponents are negative up to σ of order 1, the largest residual one
never is.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from tqdm.auto import tqdm

import gradflow as gf
from experiments._report import spectrum_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Width of the layers; each of the exponents has a panel of its own.
    dimension: int = 4
    # Smallest and largest scale σ: an entry has standard deviation σ/√d.
    smallest: float = 0.2
    largest: float = 8.0
    # Number of sampled scales, evenly spaced in the logarithm.
    scales: int = 13
    # Scales at which the closed forms are drawn.
    points: int = 161
    # Depth of each product, after the burn-in.
    steps: int = 600
    # Confidence of a verdict.
    level: float = 0.99
    # Seed of the matrices.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More scales and deeper products."""
        return cls(scales=33, points=400, steps=5000)


def compute(config: Config) -> xr.Dataset:
    """Both spectra and the verdicts per scale, and closed forms on a finer grid."""
    d = config.dimension
    scales = np.geomspace(config.smallest, config.largest, config.scales)
    fine = np.geomspace(config.smallest, config.largest, config.points)
    keys = jax.random.split(jax.random.key(config.seed), config.scales)
    effects = [
        gf.lyapunov.residual_effect(
            gf.lyapunov.Gaussian(d, scale / math.sqrt(d)),
            key,
            steps=config.steps,
            level=config.level,
        )
        for key, scale in zip(keys, tqdm(scales, leave=False, disable=None), strict=True)
    ]
    theory = [
        [
            gf.lyapunov.closed_form(wrap(gf.lyapunov.Gaussian(d, scale / math.sqrt(d))))
            for scale in fine
        ]
        for wrap in (lambda ensemble: ensemble, gf.lyapunov.residual)
    ]
    both = [(e.plain, e.residual) for e in effects]
    return xr.Dataset(
        {
            "exponent": (
                ("shortcut", "sigma", "k"),
                np.array(
                    [[np.asarray(s.exponents) for s in side] for side in zip(*both, strict=True)]
                ),
            ),
            "standard_error": (
                ("shortcut", "sigma", "k"),
                np.array(
                    [
                        [np.asarray(s.standard_error) for s in side]
                        for side in zip(*both, strict=True)
                    ]
                ),
            ),
            "verdict": (("sigma", "k"), np.array([e.verdict for e in effects])),
            "closed_form": (("shortcut", "fine_sigma", "k"), np.array(theory)),
        },
        coords={
            "shortcut": ["plain", "residual"],
            "sigma": scales,
            "fine_sigma": fine,
            "k": np.arange(1, d + 1),
        },
        attrs={
            "runs": spectrum_lines(
                {"plain": [e.plain for e in effects], "residual": [e.residual for e in effects]}
            ),
            "level": config.level,
        },
    )


def intervals(data: xr.Dataset, k: int) -> list[tuple[float, float]]:
    """The ranges of scales in which ``|γ_k|`` grows, by the closed forms."""
    sigma = data["fine_sigma"].values
    plain, residual = np.abs(data["closed_form"].sel(k=k).values)
    gap = residual - plain
    # Straight lines between neighbours find the ends well below the spacing.
    change = np.flatnonzero(np.diff(gap > 0))
    share = gap[change] / (gap[change] - gap[change + 1])
    ends = np.exp(np.log(sigma[change]) + share * np.log(sigma[change + 1] / sigma[change]))
    edges = [*([sigma[0]] if gap[0] > 0 else []), *ends, *([sigma[-1]] if gap[-1] > 0 else [])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def agreement(data: xr.Dataset) -> tuple[int, int]:
    """How many verdicts are decided, and how many of these agree with the closed forms."""
    plain, residual = np.abs(data["closed_form"].interp(fine_sigma=data["sigma"].values).values)
    verdict = data["verdict"].values
    decided = verdict != "undecided"
    right = np.where(residual > plain, "grew", "shrank") == verdict
    return int(decided.sum()), int((decided & right).sum())


def summary(data: xr.Dataset) -> str:
    """Where each exponent grows, and the verdicts of the samples."""
    lines = []
    for k in data["k"].values:
        words = data["verdict"].sel(k=k).values.tolist()
        where = " and ".join(f"{a:.4f} to {b:.4f}" for a, b in intervals(data, k)) or "nowhere"
        counts = ", ".join(f"{words.count(w)} {w}" for w in ("shrank", "grew", "undecided"))
        lines.append(f"|γ_{k}| grows for σ from {where} by closed form; sampled: {counts}")
    decided, right = agreement(data)
    lines.append(f"{right} of {decided} decided verdicts agree with the closed forms")
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """One panel for each exponent: without and with the connection, the worse region shaded."""
    number = data.sizes["k"]
    columns = min(number, 4 if number > 4 else 2)
    rows = -(-number // columns)
    fig, grid = plt.subplots(
        rows,
        columns,
        figsize=(1 + 5.3 * columns, 1.4 + 2.9 * rows),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    colours = dict(zip(data["shortcut"].values, gf.plot.palette(2), strict=True))
    markers = dict(zip(colours, "os", strict=True))
    for ax in grid.ravel()[number:]:
        ax.set_axis_off()
    for ax, k in zip(grid.ravel(), data["k"].values, strict=False):
        for low, high in intervals(data, k):
            ax.axvspan(low, high, color="0.88", lw=0, zorder=0)
        ax.axhline(0, color="0.5", lw=0.8)
        for name, colour in colours.items():
            one = data.sel(shortcut=name, k=k)
            ax.plot(data["fine_sigma"], one["closed_form"], color=colour, lw=1.4)
            ax.errorbar(
                data["sigma"],
                one["exponent"],
                2 * one["standard_error"],
                fmt=markers[name],
                color=colour,
                ms=4.5,
                mfc="white",
            )
        ax.set_title(f"exponent {k} of {number}")
        ax.set_ylabel(f"γ_{k} per layer")
    for ax in grid[-1]:
        ax.set_xscale("log")
        low, high = data["sigma"].values[[0, -1]]
        ax.set_xlim(low / 1.05, high * 1.05)
        ax.set_xticks([x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10) if low <= x <= high])
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xticks([], minor=True)
        ax.set_xlabel("scale σ of the weights (entries N(0, σ²/d))")
    names = {"plain": "plain, A", "residual": "residual, I + A"}
    handles: list[Any] = [
        Line2D([], [], color=c, marker=markers[n], ms=4.5, mfc="white", label=names[n])
        for n, c in colours.items()
    ]
    handles.append(Patch(color="0.88", label="|γ| larger with the residual connection"))
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    fig.suptitle(
        f"A residual connection tames exponents of small weights, not of large ones (d = {number})"
        "\nlines: closed form, markers: sampled"
    )
    return fig
