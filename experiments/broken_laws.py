"""Which conservation laws a delta modulation keeps and which it breaks, for gates from 0 to 2.

With gates ``β_i`` along ``k_i`` the flow keeps, of
``C̃_i = W_{i+1}ᵀP_{i+1}⁻¹W_{i+1} − P_i^{−1/2}W_iW_iᵀP_i^{−1/2}``, ``P_i = I − β_i k_i k_iᵀ``, the
block orthogonal to ``k_i`` and the entry along ``k_i``. The ``d_i − 1`` entries that cross between
them move, so that each modulated hidden layer loses as many of its ``d_i(d_i + 1)/2`` laws. Where a
gate is 1 the layer's row ``k_iᵀW_i`` is frozen instead, and other laws are left.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Widths from input to output.
    widths: tuple[int, ...] = (3, 4, 5, 3)
    # Gates of all layers, one run for each.
    gates: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    # A gate other than 0 and 1 at which the laws are counted, beside 1.
    counted: float = 0.5
    # Scale of the random start: entries of W_i are N(0, scale²/d_{i−1}).
    scale: float = 0.7
    # End of the runs; for gates above 1 the loss may rise without bound later.
    t1: float = 1.0
    # Relative tolerance; the absolute one is a hundredth of it.
    rtol: float = 1e-12
    # Number of saved times.
    points: int = 81
    # Seed of target, start and directions.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Wider and deeper, more gates."""
        return cls(
            widths=(6, 8, 7, 8, 6),
            gates=(0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
            points=201,
        )


class _Constant(eqx.Module):
    """Gates as a function of time that does not change, so that one program serves all of them."""

    gates: jax.Array

    def __call__(self, t: Any, state: gf.LinearNetwork) -> jax.Array:
        return self.gates


_KEPT = ("block", "entry", "row")
_PARTS = (*_KEPT, "broken")


def compute(config: Config) -> xr.Dataset:
    """Change of every kind of law against time, by gate, and the number of laws by rank."""
    widths, h = config.widths, len(config.widths) - 1
    rng = np.random.default_rng(config.seed)
    problem = gf.Problem(rng.standard_normal((widths[-1], widths[0])))
    start = gf.LinearNetwork(
        [
            config.scale / np.sqrt(a) * rng.standard_normal((b, a))
            for a, b in itertools.pairwise(widths)
        ]
    )
    directions = [rng.standard_normal(d) for d in widths[1:]]
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=config.rtol * 1e-2)
    runs, changes = [], []
    for beta in config.gates:
        varying = gf.DeltaModulatedFlow(problem, _Constant(jnp.full(h, float(beta))), directions)
        traj = gf.simulate(varying, start, config.t1, save=config.points, method=method)
        fixed = gf.DeltaModulatedFlow(problem, float(beta), directions)
        runs.append(traj)
        changes.append(_changes(fixed, traj.states))
    modulated = np.arange(h)
    laws = [
        [_laws(problem, start, directions, beta, hidden) for hidden in range(h)]
        for beta in (config.counted, 1.0)
    ]
    sizes = np.array(widths[1:-1])
    full = int(np.sum(sizes * (sizes + 1) // 2))
    return xr.Dataset(
        {
            "change": (("gate", "part", "time"), np.array(changes)),
            "loss": (("gate", "time"), np.array([run.loss for run in runs])),
            "laws": (("counted", "modulated"), np.array(laws)),
            "formula": ("modulated", full - np.cumsum([0, *(sizes - 1)])),
        },
        coords={
            "gate": list(config.gates),
            "part": list(_PARTS),
            "t": ("time", np.asarray(runs[0].ts)),
            "counted": [config.counted, 1.0],
            "modulated": modulated,
        },
        attrs={"runs": _told(config, runs)},
    )


def _told(config: Config, runs: list[gf.Trajectory]) -> str:
    return "\n".join(
        f"β = {beta:g}: {run.status.name}, {run.solver}, {int(run.stats.accepted)} steps + "
        f"{int(run.stats.rejected)} rejected, loss {float(run.loss[0]):.4g} -> "
        f"{float(run.final_loss):.4g}"
        for beta, run in zip(config.gates, runs, strict=True)
    )


@eqx.filter_jit
def _laws_along(flow: gf.DeltaModulatedFlow, states: Any) -> tuple[list[Any], list[Any]]:
    return jax.vmap(lambda net: (flow.conserved(net), flow.broken(net)))(states)


def _changes(flow: gf.DeltaModulatedFlow, states: Any) -> np.ndarray:
    """Largest entry of the change since the start, per part and time; NaN where there is none."""
    # By their number of axes: blocks are matrices, entries numbers, frozen rows vectors.
    kinds = {2: "block", 0: "entry", 1: "row"}
    kept, broken = _laws_along(flow, states)
    found: dict[str, list[np.ndarray]] = {part: [] for part in _PARTS}
    for array in kept:
        found[kinds[array.ndim - 1]].append(np.asarray(array))
    found["broken"] = [np.asarray(array) for array in broken]
    times = len(found["broken"][0])
    rows = []
    for part in _PARTS:
        moved = [np.abs(a - a[:1]).reshape(times, -1).max(axis=1) for a in found[part]]
        rows.append(np.max(moved, axis=0) if moved else np.full(times, np.nan))
    return np.array(rows)


def _laws(problem, start, directions, beta: float, hidden: int) -> int:
    """Independent laws with a gate β in so many hidden layers, the first ones, and no others."""
    gates = [beta if i < hidden else 0.0 for i in range(len(directions))]
    flow = gf.DeltaModulatedFlow(problem, gates, directions)
    return gf.observables.independent_laws(start, flow)


def largest(data: xr.Dataset) -> xr.DataArray:
    """The largest change over time, per gate and part; NaN where there is no such part."""
    return data["change"].max("time")


def summary(data: xr.Dataset) -> str:
    """Largest changes by gate and part, and the numbers of laws."""
    found = largest(data)
    lines = []
    for gate in data["gate"].values:
        told = [
            f"{part} {float(found.sel(gate=gate, part=part)):.1e}"
            for part in _PARTS
            if np.isfinite(found.sel(gate=gate, part=part))
        ]
        lines.append(f"β = {gate:g}: largest change of {', '.join(told)}")
    for beta, row in zip(data["counted"].values, data["laws"].values, strict=True):
        lines.append(
            f"independent laws with gates {beta:g} in 0, 1, … hidden layers: "
            f"{', '.join(map(str, row))}"
        )
    lines.append(f"d_i − 1 fewer for each: {', '.join(map(str, data['formula'].values))}")
    return "\n".join(lines)


_NAMES = {
    "block": r"block orthogonal to $k_i$",
    "entry": r"entry along $k_i$",
    "row": r"frozen row $k_i^\top W_i$ (β = 1)",
    "broken": "rest: cross entries, at β = 1 the entry too",
}
_STYLES = {"block": "-", "entry": "--", "row": ":", "broken": "-"}


def figure(data: xr.Dataset) -> Figure:
    """Change of kept and broken parts against time, one panel per gate, and the count of laws."""
    count = data.sizes["gate"] + 1
    columns = 3 if count <= 6 else 5
    rows = -(-count // columns)
    fig, grid = plt.subplots(
        rows,
        columns,
        figsize=(1 + 3.4 * columns, 1 + 2.9 * rows),
        squeeze=False,
        layout="constrained",
    )
    for ax in grid.ravel()[count:]:
        ax.set_axis_off()
    blue, orange, green, pink, *_ = gf.plot.palette(7)
    colours = dict(zip(_PARTS, (blue, green, pink, orange), strict=True))
    floor = np.finfo(float).eps
    for i, (ax, gate) in enumerate(zip(grid.ravel(), data["gate"].values, strict=False)):
        for part in _PARTS:
            change = data["change"].sel(gate=gate, part=part).values
            if np.isfinite(change).all():
                ax.plot(data["t"], np.maximum(change, floor), color=colours[part], ls=_STYLES[part])
        ax.set_yscale("log")
        ax.set_ylim(0.3 * floor, 30 * max(1.0, float(data["change"].max())))
        ax.set_title(f"β = {gate:g}, {gf.delta.regime(gate)}")
        ax.set_xlabel(gf.plot.TIME_LABEL if columns == 3 else "time t")
        if i % columns == 0:
            ax.set_ylabel("change since the start, largest entry")
    _count(data, grid.ravel()[count - 1])
    handles = [
        Line2D([], [], color=colours[part], ls=_STYLES[part], label=_NAMES[part]) for part in _PARTS
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    fig.suptitle("A gate keeps block and entry and breaks what crosses between them")
    return fig


def _count(data: xr.Dataset, ax: Axes) -> None:
    x, formula = data["modulated"].values, data["formula"].values
    ax.plot(x, formula, color="black", lw=1.2, label=r"$\sum_i d_i(d_i+1)/2 - (d_i - 1)$")
    for row, marker, colour, beta in zip(
        data["laws"].values, "ox", gf.plot.palette(2), data["counted"].values, strict=True
    ):
        fill: dict[str, Any] = {"mfc": "white"} if marker == "o" else {}
        ax.plot(x, row, marker, ms=8, color=colour, label=f"by rank, β = {beta:g}", **fill)
    ax.set_xticks(x)
    ax.set_ylim(0, 1.45 * max(formula.max(), data["laws"].values.max()))
    ax.set_xlabel("number of modulated hidden layers")
    ax.set_ylabel("independent laws")
    ax.set_title("count of laws")
    ax.legend(loc="upper right")
