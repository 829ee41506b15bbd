"""Exponents of products of delta operators against β, and the rule for their sum.

A delta operator ``I − β k kᵀ`` rewrites what the state holds along the unit vector k: β = 0 keeps
it, β = 1 forgets it, β = 2 reflects it. With k drawn anew at every layer, uniform on the sphere,
the exponents have a closed form, symmetric about β = 1. Whatever the law of k, the determinant is
``1 − β``, so that the exponents sum to ``log |1 − β|``: between 0 and 2 volumes shrink, outside
they grow.
"""

from __future__ import annotations

import dataclasses

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tqdm.auto import tqdm

import gradflow as gf
from experiments._report import spectrum_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Width d of the layers.
    dimension: int = 4
    # Smallest and largest β.
    smallest: float = -0.5
    largest: float = 2.5
    # Number of sampled values of β, evenly spaced.
    betas: int = 25
    # Values of β at which the closed form is drawn.
    points: int = 301
    # Depth of each product, after the burn-in.
    steps: int = 500
    # Independent products for each β.
    chains: int = 128
    # Seed of the directions.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Wider layers, more values of β and deeper products."""
        return cls(dimension=6, betas=61, points=601, steps=5000)


def compute(config: Config) -> xr.Dataset:
    """Sampled exponents and their errors per β, and the closed form on a finer grid."""
    d = config.dimension
    betas = np.linspace(config.smallest, config.largest, config.betas)
    fine = np.linspace(config.smallest, config.largest, config.points)
    keys = jax.random.split(jax.random.key(config.seed), config.betas)
    runs = [
        gf.lyapunov.exponents(
            key, gf.lyapunov.DeltaProduct(d, float(beta)), config.steps, chains=config.chains
        )
        for key, beta in zip(keys, tqdm(betas, leave=False, disable=None), strict=True)
    ]
    theory = [
        [gf.lyapunov.closed_form(gf.lyapunov.DeltaProduct(d, float(beta))) for beta in grid]
        for grid in (betas, fine)
    ]
    return xr.Dataset(
        {
            "exponent": (("beta", "k"), np.array([np.asarray(r.exponents) for r in runs])),
            "standard_error": (
                ("beta", "k"),
                np.array([np.asarray(r.standard_error) for r in runs]),
            ),
            "closed_form": (("beta", "k"), np.array(theory[0])),
            "fine_closed_form": (("fine_beta", "k"), np.array(theory[1])),
        },
        coords={"beta": betas, "fine_beta": fine, "k": np.arange(1, d + 1)},
        attrs={"runs": spectrum_lines({"delta products": runs})},
    )


def sum_rule(beta: np.ndarray) -> np.ndarray:
    """``log |1 − β|``."""
    with np.errstate(divide="ignore"):
        return np.log(np.abs(1 - beta))


def summary(data: xr.Dataset) -> str:
    """Distances from the closed form and from the sum rule, and what is forgotten at β = 1."""
    finite = np.isfinite(data["exponent"].values)
    gap = np.where(finite, data["exponent"] - np.where(finite, data["closed_form"], 0), 0)
    error = data["standard_error"].values
    # At β = 0 and 2 the matrices are orthogonal: nothing is random and the errors are 0.
    random = finite & (error > 1e-12)
    worst = float(np.max(np.abs(gap[random]) / error[random]))
    sums, rule = data["exponent"].sum("k").values, sum_rule(data["beta"].values)
    known = np.isfinite(rule)
    rest = np.abs(sums[known] - rule[known]).max()
    forgotten = (~finite).any(axis=1)
    where = ", ".join(f"{b:g}" for b in data["beta"].values[forgotten]) or "none"
    return (
        f"{int(random.sum())} exponents within {np.abs(gap).max():.1e} of the closed form, "
        f"{worst:.1f} standard errors at most\n"
        f"sums within {rest:.1e} of log |1 − β|; a direction is lost "
        f"(γ_{data.sizes['k']} = −∞) at β = {where}"
    )


def figure(data: xr.Dataset) -> Figure:
    """All exponents with their closed form, and their sum on the line of the rule."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 4.7), layout="constrained")
    colours = gf.plot.palette(data.sizes["k"])
    markers = "os^Dv<>"
    beta, fine = data["beta"].values, data["fine_beta"].values
    handles = []
    for i, (k, colour) in enumerate(zip(data["k"].values, colours, strict=True)):
        mark = markers[i % len(markers)]
        left.plot(fine, data["fine_closed_form"].sel(k=k), color=colour, lw=1.3)
        values = data["exponent"].sel(k=k).values
        left.plot(beta, np.where(np.isfinite(values), values, np.nan), mark, color=colour, ms=4.5)
        handles.append(Line2D([], [], color=colour, marker=mark, ms=4.5, label=f"γ_{k}"))
    finite = data["fine_closed_form"].values[np.isfinite(data["fine_closed_form"].values)]
    low = max(-2.0, float(finite.min()))
    left.set_ylim(low, float(finite.max()) + 0.1)
    left.set_ylabel("exponents γ_k per layer")
    left.set_title("markers: sampled, lines: closed form")
    left.legend(handles=handles, loc="lower left", ncols=2)
    sums = data["exponent"].sum("k").values
    right.plot(fine, sum_rule(fine), color="black", lw=1.3, label="log |1 − β|")
    right.plot(
        beta,
        np.where(np.isfinite(sums), sums, np.nan),
        "o",
        color=colours[0],
        mfc="white",
        label="sum of the sampled exponents",
    )
    right.set_ylim(-3.2, 0.8)
    right.set_ylabel("growth of volumes, sum of all γ_k per layer")
    right.set_title("the sum does not depend on the directions")
    right.legend(loc="lower left")
    for ax in (left, right):
        ax.axhline(0, color="0.6", lw=0.8, zorder=0)
        for x in (0, 1, 2):
            if fine[0] <= x <= fine[-1]:
                ax.axvline(x, color="0.85", lw=1, zorder=0)
        top = ax.get_ylim()[1]
        for x, word in ((0, "keeps"), (1, "forgets"), (2, "reflects")):
            if fine[0] <= x <= fine[-1]:
                ax.annotate(
                    word,
                    (x, top),
                    ha="center",
                    va="top",
                    color="0.4",
                    fontsize=9,
                    bbox={"fc": "white", "ec": "none", "pad": 1},
                )
        if fine[0] < 1 < fine[-1]:
            what = f"γ_{data.sizes['k']}" if ax is left else "sum"
            ax.annotate(
                f"{what} = −∞ at β = 1",
                (1, ax.get_ylim()[0]),
                xytext=(20, 8),
                textcoords="offset points",
                color="0.4",
                fontsize=9,
            )
        ax.set_xlim(fine[0], fine[-1])
        ax.set_xlabel("β of the delta operator I − β k kᵀ")
    fig.suptitle(
        f"Delta operators with random directions (d = {data.sizes['k']}): vanishing between "
        "β = 0 and 2, exploding outside"
    )
    return fig
