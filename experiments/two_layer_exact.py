"""Two layers have a closed form for every shape, and the solver meets it to its tolerance.

With ``Q = [W_1ᵀ; W_2]`` gradient flow from a λ-balanced start, ``W_2ᵀW_2 − W_1W_1ᵀ = λI``, is a
matrix Riccati equation in ``QQᵀ``. Its solution gives the map and both Gram matrices at any time
for equal and unequal widths, narrow and wide hidden layers, targets without full rank and λ of
either sign. What is left between it and the simulation falls with the tolerance: it is the
integrator's error.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow as gf
from experiments._report import run_lines


class Case(NamedTuple):
    """A shape of the network, its λ, and how many singular values the target has."""

    widths: tuple[int, int, int]
    lam: float
    rank: int


CASES = {
    "second layer larger": Case((4, 4, 4), 1.5, 3),
    "first layer larger": Case((4, 4, 4), -1.5, 3),
    "balanced, target of rank 2": Case((4, 4, 4), 0.0, 2),
    "bottleneck": Case((5, 2, 4), 0.5, 3),
    "balanced, wide hidden layer": Case((5, 8, 4), 0.0, 3),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Which of the cases to run.
    cases: tuple[str, ...] = tuple(CASES)
    # All widths are multiplied by this.
    enlarge: int = 1
    # Singular values of the target, as many as the case wants.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # The singular values of the map at the start are the square of this.
    scale: float = 0.2
    # Relative tolerances, loosest first; the absolute ones are a hundredth of them.
    rtols: tuple[float, ...] = (1e-5, 1e-8, 1e-11)
    # End of the runs.
    t1: float = 5.0
    # Number of saved times.
    points: int = 150
    # Seed of the starts and of the targets' singular vectors.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Networks eight times as wide, and more tolerances."""
        return cls(enlarge=8, rtols=(1e-5, 1e-7, 1e-9, 1e-11, 1e-12), t1=10.0, points=600)


_CIRCLES: dict[str, Any] = {"marker": "o", "ls": "", "mfc": "white", "ms": 4.5}


def compute(config: Config) -> xr.Dataset:
    """Singular values, simulated and exact, and the error of all three matrices."""
    times = np.linspace(0.0, config.t1, config.points)
    runs: dict[str, list[gf.Trajectory]] = {f"rtol {rtol:.0e}": [] for rtol in config.rtols}
    # Cases of unequal shapes leave the entries past their own rank empty.
    most = config.enlarge * max(min(CASES[name].widths[::2]) for name in config.cases)
    empty = (len(config.cases), config.points, most)
    simulated, exact = np.full(empty, np.nan), np.full(empty, np.nan)
    targets = np.zeros((len(config.cases), len(config.singular_values)))
    errors, steps = [], []
    keys = jax.random.split(jax.random.key(config.seed), len(config.cases))
    for i, (name, key) in enumerate(zip(config.cases, keys, strict=True)):
        case = CASES[name]
        widths = [config.enlarge * d for d in case.widths]
        targets[i, : case.rank] = config.singular_values[: case.rank]
        for_left, for_right, for_start = jax.random.split(key, 3)
        U = np.asarray(jax.random.orthogonal(for_left, widths[2]))[:, : case.rank]
        V = np.asarray(jax.random.orthogonal(for_right, widths[0]))[:, : case.rank]
        problem = gf.Problem((U * targets[i, : case.rank]) @ V.T)
        start = gf.initialize.lambda_balanced(for_start, widths, config.scale, case.lam)
        solution = [np.asarray(part) for part in gf.exact.two_layer(problem, start, times)]
        flow = gf.GradientFlow(problem)
        for rtol in config.rtols:
            method = gf.Method(solver="explicit", rtol=rtol, atol=rtol * 1e-2)
            traj = gf.simulate(flow, start, config.t1, save=times, method=method)
            runs[f"rtol {rtol:.0e}"].append(traj)
            differences = [
                abs(ours - closed).max(axis=(1, 2))
                for ours, closed in zip(_products(traj.states), solution, strict=True)
            ]
            errors.append(np.max(differences, axis=0))
            steps.append(traj.stats.accepted)
        values = np.asarray(traj.singular_values)  # at the tightest tolerance
        simulated[i, :, : values.shape[1]] = values
        exact[i, :, : values.shape[1]] = np.linalg.svd(solution[0], compute_uv=False)
    shape = (len(config.cases), len(config.rtols))
    return xr.Dataset(
        {
            "singular_values": (("case", "time", "index"), simulated),
            "exact": (("case", "time", "index"), exact),
            "target": (("case", "target_index"), targets),
            "error": (("case", "rtol", "time"), np.reshape(errors, (*shape, -1))),
            "steps": (("case", "rtol"), np.reshape(steps, shape)),
        },
        coords={
            "case": list(config.cases),
            "lam": ("case", [CASES[name].lam for name in config.cases]),
            "widths": (
                ("case", "layer"),
                [[config.enlarge * d for d in CASES[name].widths] for name in config.cases],
            ),
            "rtol": list(config.rtols),
            "time": times,
        },
        attrs={"runs": run_lines(runs)},
    )


def _products(states: gf.LinearNetwork) -> gf.exact.TwoLayer:
    """The matrices that the closed form knows, from the weights at all times."""
    W1, W2 = (np.asarray(w) for w in states.weights)
    return gf.exact.TwoLayer(W2 @ W1, W1.mT @ W1, W2 @ W2.mT)


def largest_error(data: xr.Dataset) -> xr.DataArray:
    """The largest error of any matrix entry at any time, per case and tolerance."""
    return data["error"].max("time")


def summary(data: xr.Dataset) -> str:
    """The largest errors per case, and how far they fall with the tolerance."""
    worst = largest_error(data)
    lines = []
    for name in data["case"].values:
        one = data.sel(case=name)
        widths = " -> ".join(str(int(d)) for d in one["widths"].values)
        errors = ", ".join(f"{float(e):.1e}" for e in worst.sel(case=name))
        lines.append(f"{name} ({widths}, λ = {_number(one['lam'])}): largest error {errors}")
    rtols = ", ".join(f"{float(r):.0e}" for r in data["rtol"])
    lines.append(f"the errors are those at rtol {rtols}")
    if data.sizes["rtol"] > 1:
        fall = np.polyfit(np.log(data["rtol"]), np.log(worst.max("case")), 1)[0]
        lines.append(f"largest error of all cases ∝ rtol^{fall:.2f}")
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Singular values of the map, a panel per case, and the error of all cases."""
    columns = 3
    rows = -(-(data.sizes["case"] + 1) // columns)
    fig, axes = plt.subplots(
        rows, columns, figsize=(9.3, 0.9 + 2.65 * rows), squeeze=False, layout="constrained"
    )
    panels = axes.ravel()
    time = data["time"].values
    # Denser early on, where the modes move.
    marks = np.unique((np.linspace(0, 1, 13) ** 1.7 * (len(time) - 1)).astype(int))
    shown = min(data.sizes["index"], data.sizes["target_index"] + 1)
    colours = gf.plot.palette(shown)
    for ax, name in zip(panels, data["case"].values, strict=False):
        one = data.sel(case=name)
        for target in one["target"].values[one["target"].values > 0]:
            ax.axhline(target, color="0.6", linestyle="--", linewidth=1.0)
        for k, colour in enumerate(colours):
            ax.plot(time, one["singular_values"][:, k], color=colour)
            ax.plot(time[marks], one["exact"][marks, k], **_CIRCLES, color=colour, clip_on=False)
        widths = " → ".join(str(int(d)) for d in one["widths"].values)
        ax.set_title(f"{name}\n{widths}, λ = {_number(one['lam'])}")
        ax.set_xlim(0, time[-1])
        ax.set_ylim(0, 1.05 * float(data["target"].max()))
        ax.set_xlabel(gf.plot.TIME_LABEL)
    for ax in axes[:, 0]:
        ax.set_ylabel("singular values of $W_2 W_1$")
    for ax in panels[data.sizes["case"] + 1 :]:
        ax.set_axis_off()
    _draw_errors(panels[data.sizes["case"]], data)
    handles = [
        Line2D([], [], color="0.3", label="simulation"),
        Line2D([], [], **_CIRCLES, color="0.3", label="closed form (Riccati)"),
        Line2D([], [], color="0.6", ls="--", lw=1.0, label="singular values of the target"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    fig.suptitle("Two layers: the closed form holds for every shape, to the solver's tolerance")
    return fig


def _draw_errors(ax: Any, data: xr.Dataset) -> None:
    """The error of every case against time, one colour per tolerance."""
    colours = plt.colormaps["viridis"](np.linspace(0.75, 0, data.sizes["rtol"]))
    for rtol, colour in zip(data["rtol"].values, colours, strict=True):
        errors = data["error"].sel(rtol=rtol)
        for one in np.maximum.accumulate(errors.values, axis=1):
            ax.plot(data["time"], np.where(one > 0, one, np.nan), color=colour, lw=1.2)
        ax.annotate(
            f"rtol {rtol:.0e}",
            (0.98, float(errors.max())),
            xycoords=("axes fraction", "data"),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontweight="bold",
        )
    ax.set_yscale("log")
    ax.set_xlim(0, float(data["time"][-1]))
    worst = largest_error(data)
    ax.set_ylim(float(worst.min()) / 300, 30 * float(worst.max()))
    ax.set_title("what differs is the\nintegrator's error")
    ax.set_xlabel(gf.plot.TIME_LABEL)
    ax.set_ylabel("largest difference so far")


def _number(value: Any) -> str:
    return f"{float(value):g}".replace("-", "−")
