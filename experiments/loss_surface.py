"""Two-dimensional slices of the loss through two saddles and a minimum, with a run drawn in.

A small random start is run to a global minimum. The corners are that minimum with all but its
strongest modes cut out of its layers, ``W_i Π_{i-1}`` with ``Π_i = W_{1:i} W^+ P_S W_{i+1:h}``:
exact critical points, and close to where the run passes. Three of them span a plane in the space of
all weights. The run is projected onto it, and its colour is its distance from the plane: where that
is not small, the loss of the run is not the loss drawn beneath it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the data, strongest first; two at least.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Widths from input to output.
    widths: tuple[int, ...] = (4, 5, 4, 3)
    # Scale of the Gaussian start.
    scale: float = 0.03
    # Numbers of modes learnt at the three points of every slice, ascending.
    slices: tuple[tuple[int, int, int], ...] = ((0, 1, 3), (1, 2, 3))
    # Number of saved times.
    points: int = 1000
    # Points of the slice along each axis.
    resolution: int = 161
    # Relative tolerance of the solver; the absolute one is 1e-9 of the scale.
    rtol: float = 1e-10
    # Seed of the start.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """A wider and deeper network, more modes and slices, a finer grid."""
        return cls(
            singular_values=(4.0, 3.0, 2.0, 1.0),
            widths=(8, 10, 12, 10, 4),
            scale=0.06,
            slices=((0, 1, 4), (2, 3, 4)),
            points=4000,
            resolution=321,
        )


def compute(config: Config) -> xr.Dataset:
    """The loss on every slice, the run's projection onto it, and its distance from it."""
    s = np.array(config.singular_values)
    problem = gf.Problem.from_singular_values(s, (config.widths[-1], config.widths[0]))
    traj = _run(config, problem)
    ranks = sorted({r for slice_ in config.slices for r in slice_})
    corners = {r: _cut(problem, traj.final, r) for r in ranks}
    verdicts = {r: gf.landscape.classify(problem, net) for r, net in corners.items()}
    states = _flat(traj.states)

    @jax.jit
    def losses(points):
        return jax.lax.map(lambda x: problem.loss(_network(x, config.widths).end_to_end()), points)

    slices = [
        _slice(config, states, [_flat(corners[r]) for r in one], losses) for one in config.slices
    ]
    gaps = {r: np.linalg.norm(states - _flat(net), axis=1) for r, net in corners.items()}
    return xr.Dataset(
        {
            "rank": (("slice", "point"), np.array(config.slices)),
            "t": ("time", np.asarray(traj.ts)),
            "loss": ("time", np.asarray(traj.loss)),
            "kind": ("learnt", [verdict.kind for verdict in verdicts.values()]),
            "value": ("learnt", [verdict.value for verdict in verdicts.values()]),
            "gradient": ("learnt", [verdict.gradient_norm for verdict in verdicts.values()]),
            "closest": ("learnt", [gap.min() for gap in gaps.values()]),
            "passed": ("learnt", [gap.argmin() for gap in gaps.values()]),
        },
        coords={"learnt": ranks},
        attrs={"runs": run_lines({"the run": traj})},
    ).merge(xr.concat(slices, dim="slice"))


def _slice(
    config: Config, states: np.ndarray, corners: list[np.ndarray], losses: Callable
) -> xr.Dataset:
    """The plane through three corners: its loss, the run's projection and distance."""
    origin, one, two = corners
    # Orthonormal, so that lengths in the picture are lengths in the space of weights.
    first = (one - origin) / np.linalg.norm(one - origin)
    rest = two - origin - first * (first @ (two - origin))
    basis = np.stack([first, rest / np.linalg.norm(rest)])
    places = (np.stack(corners) - origin) @ basis.T
    path = (states - origin) @ basis.T
    shadow = origin + path @ basis
    window = np.concatenate([places, path])
    low, high = window.min(axis=0), window.max(axis=0)
    # A square, with a margin.
    half = 0.76 * (high - low).max()
    axes = 0.5 * (low + high) + half * np.linspace(-1, 1, config.resolution)[:, None]
    grid = np.stack(np.meshgrid(*axes.T, indexing="xy"), axis=-1)
    surface = losses(jnp.asarray(origin + grid.reshape(-1, 2) @ basis))
    return xr.Dataset(
        {
            "x": ("i", axes[:, 0]),
            "y": ("j", axes[:, 1]),
            "surface": (("j", "i"), np.asarray(surface).reshape(grid.shape[:2])),
            "corner": (("point", "axis"), places),
            "path": (("time", "axis"), path),
            "distance": ("time", np.linalg.norm(states - shadow, axis=1)),
            "shadow_loss": ("time", np.asarray(losses(jnp.asarray(shadow)))),
        }
    )


def _run(config: Config, problem: gf.Problem) -> gf.Trajectory:
    """The run to where its gradient vanishes, saved evenly until all is learnt and at its end."""
    depth, last = len(config.widths) - 1, min(config.singular_values)
    start = gf.initialize.gaussian(jax.random.key(config.seed), config.widths, config.scale)
    # Long enough for a start a thousand times weaker in the last mode, and for its tail.
    escape = float(gf.exact.escape_time(last, 1e-3 * config.scale**depth, depth))
    t1 = escape + 40 / (depth * last ** (2 - 2 / depth))
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=1e-9 * config.scale)

    def saved(times):
        return gf.simulate(gf.GradientFlow(problem), start, t1, save=times, method=method)

    even = np.linspace(0, t1, config.points)
    loss = np.asarray(saved(even).loss)
    done = loss < 1e-8 * loss[0]
    learnt = even[np.argmax(done)] if done.any() else t1
    return saved(np.unique(np.append(np.linspace(0, learnt, config.points - 1), t1)))


def _cut(problem: gf.Problem, minimum: gf.LinearNetwork, rank: int) -> gf.LinearNetwork:
    """A minimum with all but its ``rank`` strongest modes cut out of every layer.

    Also with all modes kept, something goes: what the layers hold outside of them.
    """
    left, _ = map(np.asarray, problem.singular_bases())
    layers = [np.asarray(w) for w in minimum.weights]
    inputs = layers[0].shape[1]
    before = [np.eye(inputs)]
    for w in layers:
        before.append(w @ before[-1])
    after = [np.eye(len(left))]
    for w in reversed(layers):
        after.append(after[-1] @ w)
    after.reverse()
    kept = left[:, :rank] @ left[:, :rank].T
    through = np.linalg.pinv(before[-1]) @ kept
    return gf.LinearNetwork([w @ before[i] @ through @ after[i] for i, w in enumerate(layers)])


def _flat(net: gf.LinearNetwork) -> np.ndarray:
    """All weights on the last axis; of a stack of networks one row each."""
    layers = [np.asarray(w) for w in net.weights]
    return np.concatenate([w.reshape(*w.shape[:-2], -1) for w in layers], axis=-1)


def _network(x: jax.Array, widths: tuple[int, ...]) -> gf.LinearNetwork:
    shapes = list(zip(widths[1:], widths[:-1], strict=True))
    parts = jnp.split(x, np.cumsum([a * b for a, b in shapes])[:-1])
    return gf.LinearNetwork([p.reshape(shape) for p, shape in zip(parts, shapes, strict=True)])


def _label(rank: int) -> str:
    return "the origin" if rank == 0 else "{" + ", ".join(str(i + 1) for i in range(rank)) + "}"


def summary(data: xr.Dataset) -> str:
    """How critical the points are, how close the run comes, and how far it leaves the slices."""
    lines = [
        f"{_label(int(r))}: {data['kind'].values[k]}, loss {data['value'].values[k]:.6g}, gradient "
        f"norm {data['gradient'].values[k]:.1e}; in the space of weights the run comes within "
        f"{data['closest'].values[k]:.2g} of it"
        for k, r in enumerate(data["learnt"].values)
    ]
    for k in range(data.sizes["slice"]):
        one = data.isel(slice=k)
        gap = abs(one["shadow_loss"] - data["loss"])
        names = ", ".join(_label(int(r)) for r in one["rank"].values)
        lines.append(
            f"slice through {names}: the run is up to {float(one['distance'].max()):.2g} away from "
            f"it, and the loss beneath it up to {float(gap.max()):.2g} off"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Every slice with the run on it, coloured by its distance, and both losses against time."""
    count = data.sizes["slice"]
    fig, axes = plt.subplots(
        2,
        count,
        figsize=(1.6 + 4.2 * count, 6.8),
        height_ratios=(1, 0.36),
        squeeze=False,
        layout="constrained",
    )
    most = float(data["value"].max())
    levels = most * np.geomspace(1e-3, 10, 19)
    greys = ListedColormap(plt.colormaps["Greys"](np.linspace(0, 0.7, len(levels) - 1)))
    colours = ListedColormap(plt.colormaps["plasma"](np.linspace(0, 0.86, 256)))
    norm = Normalize(0, float(data["distance"].max()))
    for k, (ax, below) in enumerate(axes.T):
        one = data.isel(slice=k)
        height = (one["surface"].values - float(data["value"].min())).clip(levels[0], levels[-1])
        filled = ax.contourf(
            one["x"], one["y"], height, levels, cmap=greys, norm=BoundaryNorm(levels, greys.N)
        )
        ax.contour(one["x"], one["y"], height, levels, colors="0.45", linewidths=0.4)
        distances = 0.5 * (one["distance"].values[:-1] + one["distance"].values[1:])
        path = one["path"].values
        ax.plot(*path.T, color="white", lw=5.5, solid_capstyle="round")
        run = ax.add_collection(_coloured(path, distances, colours, norm))
        for at, rank in zip(one["corner"].values, one["rank"].values, strict=True):
            point = data.sel(learnt=rank)
            lowest = point["kind"] == "global_minimum"
            ax.plot(*at, "*" if lowest else "X", color="black", mfc="white", ms=12, mew=1.2)
            ax.annotate(
                f"{_label(int(rank))}, loss {round(float(point['value']), 9):.3g}",
                at,
                (0, 10 if lowest else -10),
                textcoords="offset points",
                ha="center",
                va="bottom" if lowest else "top",
                bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": "none", "alpha": 0.75},
            )
        names = [_label(int(rank)) for rank in one["rank"].values]
        ax.set_title(f"plane through {names[0]}, {names[1]} and {names[2]}")
        ax.set_xlabel(f"weights, from {names[0]} towards {names[1]}")
        ax.set_ylabel(f"weights, from {names[1]} towards {names[2]}")
        ax.set_box_aspect(1)
        below.plot(data["t"], one["shadow_loss"], color="black", lw=1.4, ls=(0, (2, 1.5)))
        curve = np.stack([data["t"].values, data["loss"].values], axis=1)
        below.add_collection(_coloured(curve, distances, colours, norm))
        below.set_xlim(0, float(data["t"][-2]))
        below.set_xlabel(gf.plot.TIME_LABEL)
        below.set_ylabel("loss")
    fig.colorbar(run, ax=axes, label="distance of the run from the plane", pad=0.01, aspect=40)
    bar = fig.colorbar(filled, ax=axes, label="loss in the plane", pad=0.01, aspect=40, format="%g")
    bar.set_ticks([t for t in 10.0 ** np.arange(-6, 6) if levels[0] <= t <= levels[-1]])
    bar.ax.minorticks_off()
    handles = [
        Line2D([], [], color=colours(0.3), lw=3.2),
        Line2D([], [], color="black", lw=1.4, ls=(0, (2, 1.5))),
        Line2D([], [], color="black", marker="X", mfc="white", ls="", ms=10),
        Line2D([], [], color="black", marker="*", mfc="white", ls="", ms=12),
    ]
    labels = ["run", "loss in the plane beneath the run", "saddle {learnt modes}", "global minimum"]
    fig.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    fig.suptitle("A run from a small start turns a corner at every saddle")
    return fig


def _coloured(
    path: np.ndarray, distances: np.ndarray, colours: ListedColormap, norm: Normalize
) -> LineCollection:
    pieces = np.stack([path[:-1], path[1:]], axis=1)
    line = LineCollection(list(pieces), cmap=colours, norm=norm, lw=3.2, capstyle="round")
    line.set_array(distances)
    return line
