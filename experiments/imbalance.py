"""Imbalance shortens the plateaus of small starts and scrambles the order, in deep networks first.

Starts of one small strength in every mode: balanced and aligned with the target for δ = 0, which
the closed form describes, and perturbed at random to ``max_i ‖C_i‖ = δ`` beyond. While δ is well
below the squared singular value ``a²`` of a layer, modes are learnt when and in the order the
balanced theory says. Past that the perturbation is no smaller than the start itself, and learning
comes sooner. Two layers grow exponentially, at rates set by the data, and mostly keep the order;
deeper plateaus depend on the start like a power, and chance decides which mode comes first.
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
from matplotlib.ticker import LogLocator, NullFormatter
from tqdm import tqdm

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the target, strongest first; input and output are as wide.
    singular_values: tuple[float, ...] = (4.0, 3.0, 2.0)
    # Width of every hidden layer.
    hidden_width: int = 5
    # Numbers of layers.
    depths: tuple[int, ...] = (2, 3)
    # Strength of every mode of the balanced start; a layer has singular values a = start^(1/h).
    start: float = 1e-3
    # Smallest and largest δ besides 0, relative to a².
    smallest: float = 0.03
    largest: float = 30.0
    # Number of δ between them, evenly spaced in the logarithm.
    deltas: int = 7
    # Number of random starts for each δ.
    seeds: int = 16
    # End of the runs, in units of the time at which the balanced theory has all modes learnt.
    horizon: float = 3.0
    # Relative tolerance of the solver; the absolute one is a ten-thousandth of it.
    rtol: float = 1e-6
    # Number of saved times.
    points: int = 250
    # Seed of all starts.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More modes, depths and starts, from closer to the origin."""
        return cls(
            singular_values=(5.0, 4.0, 3.0, 2.0, 1.0),
            hidden_width=10,
            depths=(2, 3, 4, 5),
            start=1e-4,
            smallest=0.01,
            largest=100.0,
            deltas=11,
            seeds=40,
            rtol=1e-7,
            points=400,
        )


def compute(config: Config) -> xr.Dataset:
    """Half-learning times of all runs, per depth, relative δ, seed and mode."""
    s = np.array(config.singular_values)
    relative = np.geomspace(config.smallest, config.largest, config.deltas)
    relative = np.concatenate([[0.0], relative])
    runs, learnt, theory = {}, [], []
    for depth in tqdm(config.depths, desc="depths", leave=False, disable=None):
        theory.append(np.asarray(gf.exact.escape_time(s, config.start, depth)))
        lanes = _simulate(config, depth, relative, config.horizon * theory[-1].max())
        runs[f"depth {depth}, {len(lanes)} starts"] = lanes
        times = [gf.observables.learning_times(lane).times for lane in lanes]
        learnt.append(np.reshape(times, (len(relative), config.seeds, len(s))))
    return xr.Dataset(
        {
            "learning_time": (("depth", "delta", "seed", "mode"), np.stack(learnt)),
            "balanced_time": (("depth", "mode"), np.stack(theory)),
            "end": ("depth", [config.horizon * x.max() for x in theory]),
        },
        coords={
            "depth": list(config.depths),
            "delta": relative,
            "layer_scale": ("depth", [config.start ** (1 / h) for h in config.depths]),
            "singular_value": ("mode", s),
        },
        attrs={"runs": run_lines(runs)},
    )


def _simulate(config: Config, depth: int, relative: np.ndarray, t1: float) -> list[gf.Trajectory]:
    """One run per relative δ and seed, seeds fastest, all in one program."""
    s = config.singular_values
    widths = [len(s), *[config.hidden_width] * (depth - 1), len(s)]
    scale = config.start ** (1 / depth)

    keys = jax.random.split(jax.random.key(config.seed), config.seeds)
    lanes = np.tile(np.arange(config.seeds), len(relative))
    deltas = np.repeat(relative * scale**2, config.seeds)

    def start(key: Any, delta: Any) -> tuple[gf.LinearNetwork, Any]:
        net = gf.initialize.delta_balanced(key, widths, scale, delta)
        return net, net.end_to_end()

    nets, maps = jax.vmap(start)(keys[lanes], deltas)
    # The balanced start's map (the first of each seed) is config.start times an orthogonal matrix.
    # Turned back by it, the inputs see a map aligned with the diagonal target; no C_i changes.
    back = np.asarray(maps).mT[lanes] / config.start
    starts = nets.with_weights((nets.weights[0] @ back, *nets.weights[1:]))
    flow = gf.GradientFlow(gf.Problem.from_singular_values(s))
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=config.rtol * 1e-4)
    # Evenly spaced in the logarithm, because large δ are learnt much sooner.
    save = np.concatenate([[0.0], np.geomspace(5e-3 * t1, t1, config.points - 1)])
    batch = jax.vmap(lambda net: gf.simulate(flow, net, t1, save=save, method=method))(starts)
    return [batch.lane(i) for i in range(len(lanes))]


def in_order(data: xr.Dataset) -> xr.DataArray:
    """The fraction of runs that learn all modes, strongest first, per depth and δ."""
    times = data["learning_time"]
    later = times.isel(mode=slice(1, None)).values > times.isel(mode=slice(None, -1)).values
    ordered = later.all(axis=-1) & np.isfinite(times.values).all(axis=-1)
    return xr.DataArray(ordered, dims=times.dims[:-1], coords={"delta": data["delta"]}).mean("seed")


def summary(data: xr.Dataset) -> str:
    """Learning times at δ = 0 against theory, the fraction in order, and what was not learnt."""
    times, theory = data["learning_time"], data["balanced_time"]
    lines = []
    fractions = in_order(data)
    for i, depth in enumerate(data["depth"].values):
        off = float(abs(times[i, 0] / theory[i] - 1).max())
        ordered = ", ".join(f"{float(x):.2f}" for x in fractions[i])
        sooner = times[i, -1].median("seed").values / theory[i].values
        missing = int(np.isinf(times[i].values).any(axis=-1).sum())
        lines += [
            f"depth {int(depth)}: δ = 0 learns within {off:.1e} of the closed form; at the largest "
            f"δ the median times are {', '.join(f'{x:.2f}' for x in sooner)} of it",
            f"  fraction of runs in the order of the singular values: {ordered}; "
            f"{missing} of {times[i, ..., 0].size} runs left a mode unlearnt",
        ]
    lines.append("δ/a² = " + ", ".join(f"{x:.2g}" for x in data["delta"].values))
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Learning times against δ, one panel per depth, and the fraction of runs in order."""
    depths = data["depth"].values
    rows = 1 if len(depths) < 3 else 2
    columns = -(-(len(depths) + 1) // rows)
    fig, grid = plt.subplots(
        rows,
        columns,
        figsize=(0.6 + 4.1 * columns, 1.0 + 3.6 * rows),
        squeeze=False,
        layout="constrained",
    )
    axes = grid.ravel()[: len(depths) + 1]
    for ax in grid.ravel()[len(depths) + 1 :]:
        ax.set_axis_off()
    delta = data["delta"].values
    # δ = 0 has no place on a logarithmic axis: it stands left of the others.
    zero = delta[1] ** 2 / delta[2] if len(delta) > 2 else 0.3 * delta[1]
    place = np.concatenate([[zero], delta[1:]])
    colours = gf.plot.palette(data.sizes["mode"])
    for i, (ax, depth) in enumerate(zip(axes, depths, strict=False)):
        for mode, colour in enumerate(colours):
            times = data["learning_time"][i, ..., mode].values
            low, middle, high = np.quantile(times, (0.1, 0.5, 0.9), axis=1, method="nearest")
            ax.axhline(float(data["balanced_time"][i, mode]), color=colour, ls="--", lw=1.2)
            ax.fill_between(
                place, low, np.minimum(high, float(data["end"][i])), color=colour, alpha=0.2, lw=0
            )
            ax.plot(place, middle, "o-", color=colour, ms=4)
        ax.set_title(f"{depth} layers, a = {float(data['layer_scale'][i]):.2g}")
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_ylabel("half-learning time (learning rate × steps)")
    order = axes[-1]
    markers = ("o-", "s--", "^:", "v-.", "D-")
    for i, depth in enumerate(depths):
        shade = plt.colormaps["viridis"](0.8 * i / max(len(depths) - 1, 1))
        line = markers[i % len(markers)]
        order.plot(place, in_order(data)[i], line, color=shade, ms=5, label=f"{depth} layers")
    order.set_ylim(-0.03, 1.05)
    order.set_title("runs that keep the order")
    order.set_ylabel("fraction of runs")
    order.legend(loc="lower left")
    for ax in axes:
        ax.set_xscale("log")
        ticks = [x for x in (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3) if delta[1] <= x <= delta[-1]]
        ax.set_xticks([zero, *ticks], ["0", *(f"{x:g}" for x in ticks)])
        ax.set_xticks([], minor=True)
        ax.set_xlabel("imbalance δ / a² of the start")
    handles: list[Any] = [
        Line2D([], [], color=c, marker="o", ms=4, label=f"mode s = {float(x):g}, median")
        for c, x in zip(colours, data["singular_value"], strict=True)
    ]
    handles += [
        Patch(color="0.3", alpha=0.2, label="10 to 90 % of the starts"),
        Line2D([], [], color="0.3", ls="--", lw=1.2, label="closed form, balanced and aligned"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3 if columns < 3 else 5)
    fig.suptitle("Imbalance hastens learning and scrambles its order, in deep networks first")
    return fig
