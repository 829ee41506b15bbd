"""Time against hidden width: a two-layer run in full, and by exact reduction with ``gf.compress``.

Up to 30,000 hidden units with ``--full``. Both runs use the same solver, tolerances and saved
times, and are timed after compilation, best of some repeats. "bare" is the full integration that
records no more than loss and gradient norm; "recorded" is what ``gf.simulate`` does by default,
with the conserved matrix of the hidden layer and all states. "reduced" is everything that replaces
it: compress, simulate with all default records, and lift the states at all saved times. Entries of
both layers are N(0, a²/d_1), so that the tangent kernel, and with it the run, is the same at every
width.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this benchmark."""

    # Hidden widths.
    widths: tuple[int, ...] = (30, 300, 3000)
    # Numbers of inputs and of outputs, which is also the number of modes of the data.
    ends: int = 10
    # Singular values of the data, evenly spaced between these.
    weakest: float = 1.0
    strongest: float = 3.0
    # The start: entries of both layers are N(0, scale²/d_1).
    scale: float = 1.0
    # End of the runs.
    t1: float = 200.0
    # Relative tolerance of the solver; the absolute one is a hundredth of it.
    rtol: float = 1e-11
    # Number of saved times.
    points: int = 5
    # Timed repeats of the reduced run.
    repeats: int = 10
    # Timed repeats of the full run.
    full_repeats: int = 1
    # Widths whose full run is also timed with all its records: they hold d_1 × d_1 matrices.
    recorded: tuple[int, ...] = (300,)
    # Seed of the starts.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More widths, up to 30,000."""
        return cls(
            widths=(10, 30, 100, 300, 1000, 3000, 10_000, 30_000),
            full_repeats=3,
            recorded=(100, 300, 1000, 3000),
        )


class BareFlow(gf.GradientFlow):
    """Gradient flow of which only loss and gradient norm are recorded."""

    def __init__(self, problem: gf.Problem):
        super().__init__(problem)

    def conserved(self, state: Any) -> list[jax.Array]:
        return []

    def observables(self) -> dict[str, Callable]:
        return {}


def compute(config: Config) -> xr.Dataset:
    """Seconds of the full and the reduced run at every width, and how far apart they end."""
    values = np.linspace(config.weakest, config.strongest, config.ends)[::-1]
    problem = gf.Problem.from_singular_values(values)
    flow, bare = gf.GradientFlow(problem), BareFlow(problem)
    rows: list[dict[str, float]] = []
    runs: dict[str, gf.Trajectory] = {}
    for width in config.widths:
        net = _start(config, width)
        row, ends = _row(config, flow, bare, net)
        rows.append(row)
        runs |= {f"width {width}, {name}": run for name, run in ends.items()}
    return xr.Dataset(
        {name: ("width", [row[name] for row in rows]) for name in rows[0]},
        coords={"width": list(config.widths)},
        attrs={"runs": run_lines(runs), "ends": config.ends},
    )


def _start(config: Config, width: int) -> gf.LinearNetwork:
    rng = np.random.default_rng(config.seed)
    size = config.scale / np.sqrt(width)
    return gf.LinearNetwork(
        [
            size * rng.standard_normal((width, config.ends)),
            size * rng.standard_normal((config.ends, width)),
        ]
    )


def _row(
    config: Config, flow: gf.GradientFlow, bare: BareFlow, net: gf.LinearNetwork
) -> tuple[dict[str, float], dict[str, gf.Trajectory]]:
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=1e-2 * config.rtol)

    def simulate(which, state, t1=config.t1, save_states=True):
        return gf.simulate(
            which, state, t1, save=config.points, method=method, save_states=save_states
        )

    def reduced():
        marks = [time.perf_counter()]
        small, lift = gf.compress(net)
        jax.block_until_ready(small)
        marks.append(time.perf_counter())
        run = simulate(flow, small)
        marks.append(time.perf_counter())
        states = jax.block_until_ready(lift(run.states))
        marks.append(time.perf_counter())
        return run, states, np.diff(marks)

    reduced()  # compiles
    trials = [reduced() for _ in range(config.repeats)]
    run, states, parts = min(trials, key=lambda trial: trial[2].sum())

    def timed(which, save_states, repeats):
        # The horizon is a number to the program: a short run compiles it for the long one.
        simulate(which, net, 1e-6 * config.t1, save_states)
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            full = simulate(which, net, save_states=save_states)
            seconds.append(time.perf_counter() - begun)
        return full, min(seconds)

    full, bare_seconds = timed(bare, False, config.full_repeats)
    recorded = np.nan
    if net.widths[1] in config.recorded:
        _, recorded = timed(flow, True, 1)
    last = jax.tree.map(lambda x: x[-1], states)
    return {
        "bare": bare_seconds,
        "recorded": recorded,
        "compress": parts[0],
        "simulate": parts[1],
        "lift": parts[2],
        "reduced": parts.sum(),
        "small_width": run.final.widths[1],
        "bare_steps": full.stats.steps,
        "small_steps": run.stats.steps,
        "weight_gap": _gap(last.weights, full.final.weights),
        "map_gap": _gap([last.end_to_end()], [full.final.end_to_end()]),
        "loss_gap": _gap([run.loss], [full.loss]),
    }, {"bare": full, "reduced": run}


def _gap(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def summary(data: xr.Dataset) -> str:
    """The table of times, ratios and agreement."""
    lines = [
        f"{data.attrs['ends']} inputs and outputs; seconds, best of the repeats, compile apart; "
        "gap: largest difference of weights, map and loss",
        f"{'width':>7} {'reduced':>9} {'(compress + simulate + lift)':>29} {'bare':>8} {'ratio':>7}"
        f" {'recorded':>9} {'ratio':>7} {'gap':>8}",
    ]
    for width in data["width"].values:
        row = data.sel(width=width)
        parts = " + ".join(f"{float(row[name]):.4f}" for name in ("compress", "simulate", "lift"))
        reduced, bare, recorded = (float(row[name]) for name in ("reduced", "bare", "recorded"))
        gap = max(float(row[name]) for name in ("weight_gap", "map_gap", "loss_gap"))
        kept = (
            f"{recorded:>9.3f} {recorded / reduced:>7.1f}" if recorded > 0 else f"{'-':>9} {'-':>7}"
        )
        lines.append(
            f"{width:>7} {reduced:>9.4f} {f'({parts})':>29} {bare:>8.3f} {bare / reduced:>7.1f} "
            f"{kept} {gap:>8.1e}"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Seconds against hidden width, with the ratio written where it counts."""
    fig, ax = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    width = data["width"].values
    colours = gf.plot.palette(3)
    series = {
        "bare": ("full run, nothing but the loss recorded", "o-", colours[1]),
        "recorded": ("full run with default records", "s--", colours[2]),
        "reduced": ("gf.compress, simulate, lift", "D-", colours[0]),
    }
    for name, (label, marks, colour) in series.items():
        ax.plot(width, data[name], marks, color=colour, ms=5, label=label)
    last = data.isel(width=-1)
    low, high, at = float(last["reduced"]), float(last["bare"]), float(width[-1])
    ax.annotate(
        "", (at, low), (at, high), arrowprops={"arrowstyle": "<->", "shrinkA": 7, "shrinkB": 7}
    )
    ax.annotate(
        f"× {high / low:.0f} ",
        (at, np.sqrt(low * high)),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=12,
    )
    ax.axvline(2 * data.attrs["ends"], ymax=0.75, color="0.6", lw=1.0, ls=(0, (2, 2)), zorder=0)
    ax.annotate(
        f"$d_0 + d_2 = {2 * data.attrs['ends']}$",
        (2 * data.attrs["ends"], 0.62),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color="0.35",
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("hidden width $d_1$")
    ax.set_ylabel("wall time of one run (s)")
    ax.set_title(
        "After exact reduction the cost of a run hardly depends on its width", fontweight="bold"
    )
    ax.legend(loc="upper left")
    return fig
