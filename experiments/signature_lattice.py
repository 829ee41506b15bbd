"""The critical values form a lattice: every arc that adds a mode leads down, by half its square.

Nodes are signatures, the sets of learnt modes, at the value of their critical points. On the arc
from S to ``S ∪ {i}`` mode i grows in all layers together, ``u_i = τ^h s_i`` for τ from 0 to 1, and
the loss falls as ``½ s_i² (1 − τ^h)²``. The ends are tightened points: non-strict saddles where S
holds the strongest modes and h ≥ 3.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the data, strongest first; their number is the width of both ends.
    singular_values: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0)
    # Number of layers.
    depth: int = 3
    # Width of every hidden layer.
    hidden_width: int = 4
    # Points along every arc.
    points: int = 101

    @classmethod
    def full(cls) -> Config:
        """Five modes in five layers, and finer arcs."""
        return cls(singular_values=(5.7, 4.0, 3.0, 2.0, 1.0), depth=5, hidden_width=7, points=401)


def compute(config: Config) -> xr.Dataset:
    """The kind of every critical point and the loss along every arc of the lattice."""
    r = len(config.singular_values)
    problem = gf.Problem.from_singular_values(config.singular_values)
    widths = (r, *[config.hidden_width] * (config.depth - 1), r)
    graph = gf.landscape.lattice(problem, widths)
    signatures = list(graph.nodes)
    place = {S: i for i, S in enumerate(signatures)}
    nets = [gf.landscape.critical_point(problem, widths, S) for S in signatures]
    verdicts = [gf.landscape.classify(problem, net) for net in nets]
    tau = np.linspace(0, 1, config.points)
    losses = jax.jit(jax.vmap(lambda net: problem.loss(net.end_to_end())))

    def along(upper: tuple[int, ...], lower: tuple[int, ...]) -> np.ndarray:
        arc = gf.landscape.arc(problem, widths, upper, lower)
        return np.asarray(losses(jax.vmap(arc)(tau)))

    arcs = list(graph.edges)
    loss = np.stack([along(upper, lower) for upper, lower in arcs])
    # Arcs that add several modes at once are no edges of the graph, but must fall as well.
    longer = [
        (upper, lower)
        for upper, lower in itertools.product(signatures, repeat=2)
        if set(upper) < set(lower) and len(lower) > len(upper) + 1
    ]
    steepest = max((np.diff(along(*pair)).max() for pair in longer), default=-np.inf)
    return xr.Dataset(
        {
            "kind": ("signature", [verdict.kind for verdict in verdicts]),
            "index": ("signature", [gf.landscape.inertia(problem, net).negative for net in nets]),
            "upper": ("arc", [place[upper] for upper, _ in arcs]),
            "lower": ("arc", [place[lower] for _, lower in arcs]),
            "mode": ("arc", [graph.edges[pair]["mode"] for pair in arcs]),
            "drop": ("arc", [graph.edges[pair]["drop"] for pair in arcs]),
            "loss": (("arc", "tau"), loss),
        },
        coords={
            "signature": [_name(S) for S in signatures],
            "value": ("signature", [graph.nodes[S]["value"] for S in signatures]),
            "rank": ("signature", [graph.nodes[S]["rank"] for S in signatures]),
            "tau": tau,
        },
        attrs={
            "runs": (
                f"no integration: {len(signatures)} critical points, theory and eigenvalues agree "
                f"at {sum(verdict.agree for verdict in verdicts)}; the loss falls along "
                f"{int(np.sum(np.diff(loss, axis=1).max(axis=1) < 0))} of {len(arcs)} arcs"
            ),
            "depth": config.depth,
            "longer_arcs": len(longer),
            "longer_step": float(steepest),
        },
    )


def _name(signature: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, signature)) + "}" if signature else "∅"


def deviation(data: xr.Dataset) -> float:
    """Largest distance of the loss along an arc from the closed form, as a fraction of its drop."""
    left = (1 - data["tau"] ** data.attrs["depth"]) ** 2
    end = data["value"].values[data["lower"].values]
    share = (data["loss"] - end[:, None]) / data["drop"]
    return float(np.abs(share - left).max())


def summary(data: xr.Dataset) -> str:
    """Kinds of the nodes, drops of the arcs, and the largest step up along any of them."""
    counts = data["kind"].to_series().value_counts()
    kinds = ", ".join(
        f"{kind.replace('_', ' ').replace('nonstrict', 'non-strict')} {count}"
        for kind, count in counts.items()
    )
    drops = dict(zip(data["mode"].values.tolist(), data["drop"].values, strict=True))
    per_mode = ", ".join(f"{i}: {drops[i]:.4g}" for i in sorted(drops))
    steps = np.diff(data["loss"].values, axis=1)
    longer = ""
    if data.attrs["longer_arcs"]:
        longer = (
            f"; largest along the {data.attrs['longer_arcs']} arcs that add several modes "
            f"{data.attrs['longer_step']:.2e}"
        )
    return (
        f"{data.sizes['signature']} signatures: {kinds}\n"
        f"{data.sizes['arc']} arcs that add one mode; drop by mode {per_mode}\n"
        f"largest step of the loss along them {steps.max():.2e} (negative: it falls){longer}\n"
        f"loss against the closed form: off by {deviation(data):.1e} of the drop"
    )


def figure(data: xr.Dataset) -> Figure:
    """The lattice, nodes by rank and loss, arcs coloured by drop; the loss along arcs."""
    count = data.sizes["signature"]
    fig, (graph, falls) = plt.subplots(
        1, 2, figsize=(9.1, 4.95), width_ratios=(2.1, 1), layout="constrained"
    )
    drops = np.unique(data["drop"].values.round(12))
    # Dark for large drops; the lightest part of viridis is hard to see on white.
    colours = plt.colormaps["viridis"](np.linspace(0.85, 0.0, len(drops)))
    which = np.searchsorted(drops, data["drop"].values.round(12))
    rank, value = data["rank"].values, data["value"].values
    ends = np.stack([data["upper"].values, data["lower"].values], axis=1)
    lines = LineCollection(
        list(np.stack([rank[ends], value[ends]], axis=2).astype(float)),
        colors=colours[which],
        lw=1.4,
        zorder=1,
    )
    graph.add_collection(lines)
    marks: dict[str, dict[str, Any]] = {
        "strict_saddle": {"marker": "o", "mfc": "white", "ms": 8, "label": "strict saddle"},
        "nonstrict_saddle": {
            "marker": "s",
            "mfc": "#D55E00",
            "ms": 8,
            "label": "non-strict saddle",
        },
        "global_minimum": {"marker": "*", "mfc": "black", "ms": 15, "label": "global minimum"},
    }
    kinds = data["kind"].values
    for kind, style in marks.items():
        here = kinds == kind
        if here.any():
            graph.plot(rank[here], value[here], ls="", color="black", mew=1.3, zorder=3, **style)
    if count <= 16:
        for S, x, y in zip(data["signature"].values, rank, value, strict=True):
            graph.annotate(
                S, (x, y), xytext=(0, 7), textcoords="offset points", ha="center", va="bottom",
                fontsize=8, bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"},
                zorder=2,
            )  # fmt: skip
    graph.set_xlabel("number of learnt modes, the rank of the end-to-end map")
    graph.set_ylabel(r"loss at the critical point $\frac{1}{2}\sum_{i\notin S} s_i^2$")
    graph.xaxis.set_major_locator(MaxNLocator(integer=True))
    graph.legend(loc="upper right")
    depth = data.attrs["depth"]
    graph.set_title(f"signatures S of {depth} layers and the arcs that add one mode")
    one_each = [int(np.flatnonzero(which == k)[0]) for k in range(len(drops))]
    for arc, colour in zip(one_each, colours, strict=True):
        fallen = data["loss"][arc] - data["loss"][arc, 0]
        falls.plot(data["tau"], fallen, color=colour, lw=2.2)
    for drop in drops:
        falls.plot(
            data["tau"],
            drop * ((1 - data["tau"] ** depth) ** 2 - 1),
            color="black",
            ls=(0, (1, 3)),
            lw=1.4,
        )
    falls.set_xlabel(r"position on the arc τ")
    falls.set_ylabel("loss less the loss at the upper end")
    falls.set_title("loss along an arc of each drop")
    falls.set_xlim(0, 1)
    falls.legend(
        handles=[
            Line2D([], [], color="0.4", lw=2.2, label="along the arc"),
            Line2D(
                [], [], color="black", ls=(0, (1, 3)), lw=1.4,
                label=rf"$\frac{{1}}{{2}}s_i^2\,[(1-\tau^{depth})^2-1]$",
            ),
        ],
        loc="lower left",
    )  # fmt: skip
    edges = np.arange(len(drops) + 1) - 0.5
    scale = plt.cm.ScalarMappable(BoundaryNorm(edges, len(drops)), ListedColormap(colours))
    bar = fig.colorbar(scale, ax=falls, ticks=range(len(drops)), pad=0.02)
    bar.ax.set_yticklabels([f"{d:.3g}" for d in drops])
    bar.ax.tick_params(length=0)
    bar.set_label(r"drop of the loss along an arc, $\frac{1}{2}s_i^2$")
    fig.suptitle("Every arc leads down, by half the square of the singular value that it adds")
    return fig
