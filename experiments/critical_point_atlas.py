"""All critical points by signature: value, number of ways down at second order, and strictness.

A critical point has learnt a set S of modes, its *signature*, and has the value ``½ Σ_{i∉S} s_i²``.
Its Morse index is the number of negative Hessian eigenvalues, at a saddle the dimension of the ways
down at second order. Where every pair of layers (*pivot*) is tightened, a learnt mode can only be
exchanged for a stronger one that was left out, and the index is the number of such pairs of modes.
It is zero, the saddle non-strict, if the strongest modes are learnt. Where a pivot is open, not
tightened, the modes that were left out can grow as well. With two layers it always is.
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
from matplotlib.ticker import MaxNLocator

import gradflow as gf

PIVOTS = ("tightened", "open")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the data, strongest first; their number is the width of both ends.
    singular_values: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0)
    # Numbers of layers.
    depths: tuple[int, ...] = (2, 3, 4)
    # Width of every hidden layer.
    hidden_width: int = 4
    # Random places in the fibre for every signature and kind of pivots, beside the standard one.
    draws: int = 5
    # Seed of the random places.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More modes, wider layers and more random places."""
        return cls(
            singular_values=(5.7, 4.0, 3.0, 2.0, 1.0),
            hidden_width=7,
            draws=5,
        )


def compute(config: Config) -> xr.Dataset:
    """Value, kind and index of every signature at every depth, tightened and open."""
    r = len(config.singular_values)
    problem = gf.Problem.from_singular_values(config.singular_values)
    widths = {h: (r, *[config.hidden_width] * (h - 1), r) for h in config.depths}
    values = gf.landscape.critical_values(problem, widths[config.depths[0]])
    shape = (len(config.depths), len(values), len(PIVOTS))
    kinds = np.full(shape, "", dtype=object)
    smallest = np.full(shape, np.nan)
    index = np.full((*shape, 1 + config.draws), np.nan)
    seeds = jax.random.split(jax.random.key(config.seed), config.draws)
    points = agreed = 0
    slope = error = 0.0
    for a, depth in enumerate(config.depths):
        for b, (signature, value) in enumerate(values):
            for c, pivots in enumerate(PIVOTS):
                for d, key in enumerate([None, *seeds]):
                    verdict = _verdict(problem, widths[depth], signature, key, pivots)
                    if verdict is None:  # no such points
                        break
                    points += 1
                    agreed += verdict.agree and kinds[a, b, c] in ("", verdict.kind)
                    slope = max(slope, verdict.gradient_norm)
                    error = max(error, abs(verdict.value - value))
                    kinds[a, b, c] = kinds[a, b, c] or verdict.kind
                    index[a, b, c, d] = verdict.inertia.negative
                    if d == 0:
                        smallest[a, b, c] = verdict.smallest_eigenvalue
    return xr.Dataset(
        {
            "kind": (("depth", "signature", "pivots"), kinds.astype(str)),
            "index": (("depth", "signature", "pivots", "draw"), index),
            "smallest_eigenvalue": (("depth", "signature", "pivots"), smallest),
            "exchanges": ("signature", [_exchanges(S, r) for S, _ in values]),
        },
        coords={
            "depth": list(config.depths),
            "signature": [name(S) for S, _ in values],
            "value": ("signature", [value for _, value in values]),
            "pivots": list(PIVOTS),
        },
        attrs={
            "runs": (
                f"no integration: {points} critical points, theory and eigenvalues agree at "
                f"{agreed}; largest gradient norm {slope:.1e}, value off ½ Σ s_i² by {error:.1e}"
            ),
            "points": points,
            "agreed": agreed,
            "modes": r,
            "hidden_width": config.hidden_width,
        },
    )


def _verdict(
    problem: gf.Problem, widths: tuple[int, ...], signature: tuple[int, ...], key: Any, pivots: str
) -> Any:
    tightened = pivots == "tightened"
    try:
        net = gf.landscape.critical_point(problem, widths, signature, key=key, tightened=tightened)
    except gf.errors.ArgumentError:
        return None
    verdict = gf.landscape.classify(problem, net)
    # Two layers below the minimum have open points only.
    return verdict if verdict.tightened == tightened else None


def _exchanges(signature: tuple[int, ...], modes: int) -> int:
    """Pairs of a learnt mode and a stronger one that was left out."""
    left = [i for i in range(1, modes + 1) if i not in signature]
    return sum(k < i for i in signature for k in left)


def name(signature: tuple[int, ...]) -> str:
    """``{1,3}`` for (1, 3), ``∅`` for none."""
    return "{" + ",".join(map(str, signature)) + "}" if signature else "∅"


def off_theory(data: xr.Dataset) -> int:
    """The number of tightened points whose index is not the number of possible exchanges."""
    tight = data["index"].sel(pivots="tightened")
    return int(((tight != data["exchanges"]) & tight.notnull()).sum())


def summary(data: xr.Dataset) -> str:
    """The table of all signatures: value, and index with kind at every depth."""
    short = {"strict_saddle": "strict", "nonstrict_saddle": "non-strict", "global_minimum": "min"}
    room = max(9, *(len(S) for S in data["signature"].values))
    heads = [f"{h} layers, {p}" for h in data["depth"].values for p in PIVOTS]
    lines = [
        "Morse index by depth and pivots (a–b: over random places in the fibre)",
        f"{'signature':{room}}  {'value':>7}  " + "  ".join(f"{head:19}" for head in heads),
    ]
    for S in data["signature"].values:
        row = data.sel(signature=S)
        cells = []
        for h in data["depth"].values:
            for p in PIVOTS:
                one = row.sel(depth=h, pivots=p)
                kind = short.get(str(one["kind"].values), "–")
                low, high = one["index"].min(), one["index"].max()
                span = (
                    "" if kind == "–" else f"{low:.0f}" if low == high else f"{low:.0f}–{high:.0f}"
                )
                cells.append(f"{span:>6} {kind:12}")
        lines.append(f"{S:{room}}  {float(row['value']):7.3f}  " + "  ".join(cells))
    tight = int(data["index"].sel(pivots="tightened").notnull().sum())
    lines.append(
        f"tightened points whose index is the number of stronger modes left out, summed over the "
        f"learnt ones: {tight - off_theory(data)} of {tight}"
    )
    return "\n".join(line.rstrip() for line in lines)


def figure(data: xr.Dataset) -> Figure:
    """Value against index, a panel per depth, every signature at its own height."""
    blue, red, green, *_ = gf.plot.palette(7)
    marks: dict[tuple[str, str], dict[str, Any]] = {
        ("global_minimum", "tightened"): {"marker": "*", "color": "black", "ms": 13},
        ("nonstrict_saddle", "tightened"): {"marker": "s", "color": red, "ms": 7},
        ("strict_saddle", "tightened"): {"marker": "o", "color": blue, "ms": 6.5},
        ("strict_saddle", "open"): {"marker": "D", "color": green, "ms": 5.5, "mfc": "white"},
    }
    names = [
        "global minimum",
        "non-strict saddle: index 0",
        "strict saddle, every pivot tightened",
        "strict saddle, an open pivot (line: range found in the fibre)",
    ]
    labelled = data.sizes["signature"] <= 32
    height = 6.6 if data.sizes["signature"] <= 16 else 9.5
    fig, axes = plt.subplots(
        1,
        data.sizes["depth"],
        figsize=(4.2 * data.sizes["depth"], height),
        sharey=True,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, depth in zip(axes[0], data["depth"].values, strict=True):
        panel = data.sel(depth=depth)
        for S in data["signature"].values:
            row = panel.sel(signature=S)
            value = float(row["value"])
            low, high = float(row["index"].min()), float(row["index"].max())
            ax.plot([low, high], [value, value], color="0.8", lw=1.0, zorder=1)
            for p in PIVOTS:
                kind = str(row["kind"].sel(pivots=p).values)
                if not kind:
                    continue
                found = np.unique(row["index"].sel(pivots=p).values)
                style = marks[kind, p]
                ax.plot(found, np.full(len(found), value), ls="-", lw=1.0, mew=1.4, **style)
            if labelled:
                ax.annotate(
                    S, (high, value), xytext=(9, 0), textcoords="offset points", va="center",
                    fontsize=8,
                )  # fmt: skip
        ax.set_title(f"{depth} layers")
        ax.set_xlabel("Morse index (negative Hessian eigenvalues)")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.margins(x=0.12)
        ax.grid(axis="x", color="0.9")
        ax.set_axisbelow(True)
    axes[0, 0].set_ylabel(r"loss at the critical point $\frac{1}{2}\sum_{i\notin S} s_i^2$")
    present = [pair for pair in marks if np.any(data["kind"].sel(pivots=pair[1]) == pair[0])]
    handles = [
        Line2D([], [], ls="", mew=1.4, label=label, **style)
        for (pair, style), label in zip(marks.items(), names, strict=True)
        if pair in present
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    fig.suptitle(
        "From three layers on, saddles that have learnt the strongest modes may have "
        "no negative eigenvalue"
    )
    return fig
