"""Gaussian layers: the whole spectrum of exponents for several widths, with its closed form.

The entries of the d×d matrices are independent ``N(0, σ²/d)``. The exponents are known,
``γ_k = log σ + ½[log(2/d) + ψ((d − k + 1)/2)]`` (Newman 1986), and for wide layers fill the curve
``log σ + ½ log(1 − k/d)``: the directions of a deep random network grow and vanish at rates that
lie as densely as the layers are wide.
"""

from __future__ import annotations

import dataclasses
import math

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow as gf
from experiments._report import spectrum_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Widths of the layers.
    dimensions: tuple[int, ...] = (4, 20, 48)
    # Scale σ: an entry has standard deviation σ/√d.
    sigma: float = 1.0
    # Complex entries instead of real ones.
    complex: bool = False
    # Depth of each product, after the burn-in.
    steps: int = 500
    # Independent products for each width.
    chains: int = 16
    # Seed of the matrices.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Wider layers, four times as deep."""
        return cls(dimensions=(4, 20, 64, 128), steps=2000)


def compute(config: Config) -> xr.Dataset:
    """Sampled exponents, their standard errors and the closed form, per width."""
    widest = max(config.dimensions)
    shape = (len(config.dimensions), widest)
    sampled, errors, theory = (np.full(shape, np.nan) for _ in range(3))
    spectra = {}
    for i, d in enumerate(config.dimensions):
        ensemble = gf.lyapunov.Gaussian(d, config.sigma / math.sqrt(d), complex=config.complex)
        run = gf.lyapunov.exponents(config.seed, ensemble, config.steps, chains=config.chains)
        spectra[f"d = {d}"] = run
        sampled[i, :d], errors[i, :d] = run.exponents, run.standard_error
        theory[i, :d] = gf.lyapunov.closed_form(ensemble)
    return xr.Dataset(
        {
            "exponent": (("d", "k"), sampled),
            "standard_error": (("d", "k"), errors),
            "closed_form": (("d", "k"), theory),
        },
        coords={"d": list(config.dimensions), "k": np.arange(1, widest + 1)},
        attrs={
            "runs": spectrum_lines(spectra),
            "sigma": config.sigma,
            "entries": "complex" if config.complex else "real",
        },
    )


def deviations(data: xr.Dataset) -> xr.DataArray:
    """Sampled minus closed form, in standard errors."""
    return (data["exponent"] - data["closed_form"]) / data["standard_error"]


def summary(data: xr.Dataset) -> str:
    """Extremes of each spectrum and the largest deviations from the closed form."""
    lines = []
    off = deviations(data)
    for d in data["d"].values:
        one = data.sel(d=d).isel(k=slice(0, int(d)))
        away = float(abs(one["exponent"] - one["closed_form"]).max())
        lines.append(
            f"d = {d}: γ from {float(one['exponent'][0]):.5f} to {float(one['exponent'][-1]):.5f}, "
            f"within {away:.1e} of the closed form, {float(abs(off.sel(d=d)).max()):.1f} standard "
            "errors at most"
        )
    inside = float((abs(off) < 1.96).sum() / off.notnull().sum())
    lines.append(f"{inside:.0%} of all exponents lie within 1.96 standard errors")
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Exponents against k/d on their closed forms, and the deviations in standard errors."""
    widths = data["d"].values
    colours = gf.plot.palette(len(widths))
    markers = "osD^vPX"
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.6), layout="constrained", width_ratios=(1.4, 1)
    )
    off = deviations(data)
    x = np.linspace(0, 1, 400, endpoint=False)
    limit = math.log(data.attrs["sigma"]) + 0.5 * np.log1p(-x)
    left.plot(x, limit, color="black", ls="--", lw=1.2)
    handles = []
    for i, (d, colour) in enumerate(zip(widths, colours, strict=True)):
        one = data.sel(d=d).isel(k=slice(0, int(d)))
        place = (one["k"].values - 0.5) / d
        mark = markers[i % len(markers)]
        left.plot(place, one["closed_form"], color=colour, lw=1)
        left.plot(place, one["exponent"], mark, color=colour, ms=5, mfc="none")
        right.plot(place, off.sel(d=d)[: int(d)], mark, color=colour, ms=5, mfc="none")
        handles.append(
            Line2D([], [], color=colour, marker=mark, mfc="none", ms=5, label=f"d = {d}")
        )
    handles.append(Line2D([], [], color="black", ls="--", lw=1.2, label="limit of wide layers"))
    lowest = float(data["closed_form"].min())
    left.set_ylim(lowest - 0.15, max(limit[0], float(data["closed_form"].max())) + 0.15)
    left.set_ylabel("exponent γ_k per layer (log of growth)")
    left.set_title("markers: sampled by QR, lines: closed form")
    left.legend(handles=handles, loc="lower left")
    right.axhspan(-1.96, 1.96, color="0.92", zorder=0)
    right.axhline(0, color="0.6", lw=0.8)
    highest = max(4.0, 1.1 * float(abs(off).max()))
    right.set_ylim(-highest, highest)
    right.annotate("95 %", (0.99, 1.96), ha="right", va="top", color="0.4")
    right.set_ylabel("sampled − closed form (standard errors)")
    right.set_title("sampled less closed form")
    for ax in (left, right):
        ax.set_xlim(0, 1)
        ax.set_xlabel("position in the spectrum, (k − ½)/d")
    fig.suptitle(
        f"Every Lyapunov exponent of Gaussian layers ({data.attrs['entries']} entries, "
        f"σ = {data.attrs['sigma']:g}) is known in closed form"
    )
    return fig
