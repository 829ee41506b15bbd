"""From a small start the modes are learnt one after another, as the closed forms say.

Networks of depth 2, 3 and 4 start balanced and aligned with a target of known singular values, at
the same small strength in every mode. Each mode then follows ``u̇ = h u^{2−2/h}(s − u)``: it
waits on a plateau, the longer the weaker the mode and the deeper the network, and is learnt
within a short time. The whole network is integrated; the closed form knows only one mode.
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

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the target, strongest first.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Numbers of layers.
    depths: tuple[int, ...] = (2, 3, 4)
    # Strength of every mode of the end-to-end map at the start.
    start: float = 1e-4
    # Width of the input.
    input_width: int = 6
    # Width of every hidden layer.
    hidden_width: int = 5
    # Width of the output.
    output_width: int = 4
    # Relative tolerance of the solver; the absolute one is a hundredth of it.
    rtol: float = 1e-10
    # Number of saved times.
    points: int = 400
    # Seed of the target's singular vectors and of the hidden bases.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Wider, deeper and from closer to the origin."""
        return cls(
            singular_values=(5.0, 4.0, 3.0, 2.0, 1.0),
            depths=(2, 3, 4, 6),
            start=1e-6,
            input_width=64,
            hidden_width=64,
            output_width=32,
            rtol=1e-11,
            points=2000,
        )


_CIRCLES: dict[str, Any] = {"marker": "o", "ls": "", "mfc": "white", "ms": 4.5}
# Where the closed form is drawn, as fractions of a mode's final strength.
_LEVELS = np.array([0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98])


def compute(config: Config) -> xr.Dataset:
    """Modes of every depth against time, simulated and by the closed form."""
    s = np.array(config.singular_values)
    keys = jax.random.split(jax.random.key(config.seed), 2 + len(config.depths))
    U = np.asarray(jax.random.orthogonal(keys[0], config.output_width))[:, : len(s)]
    V = np.asarray(jax.random.orthogonal(keys[1], config.input_width))[:, : len(s)]
    flow = gf.GradientFlow(gf.Problem((U * s) @ V.T))
    method = gf.Method(rtol=config.rtol, atol=config.rtol * 1e-2)
    runs, exact, levels, learnt = {}, [], [], []
    for depth, key in zip(config.depths, keys[2:], strict=True):
        hidden = [config.hidden_width] * (depth - 1)
        widths = (config.input_width, *hidden, config.output_width)
        start = gf.initialize.from_product(config.start * U @ V.T, widths, key=key)
        t1 = 1.05 * float(gf.exact.escape_time(s.min(), config.start, depth, fraction=0.99))
        traj = gf.simulate(flow, start, t1, save=config.points, method=method, save_states=False)
        runs[f"depth {depth}"] = traj
        ts = np.asarray(traj.ts)
        exact.append(gf.exact.mode(s[None, :], config.start, ts[:, None], depth))
        levels.append(gf.exact.mode_time(s[:, None], config.start, np.outer(s, _LEVELS), depth))
        learnt.append(gf.observables.learning_times(traj).times[: len(s)])
    modes = np.stack([np.asarray(traj["modes"])[:, : len(s)] for traj in runs.values()])
    half = _LEVELS.tolist().index(0.5)
    return xr.Dataset(
        {
            "t": (("depth", "time"), np.stack([np.asarray(r.ts) for r in runs.values()])),
            "modes": (("depth", "time", "mode"), modes),
            "exact": (("depth", "time", "mode"), np.stack(exact)),
            "exact_time": (("depth", "mode", "level"), np.array(levels)),
            "learning_time": (("depth", "mode"), np.array(learnt)),
            "exact_learning_time": (("depth", "mode"), np.array(levels)[:, :, half]),
        },
        coords={"depth": list(config.depths), "singular_value": ("mode", s), "level": _LEVELS},
        attrs={"runs": run_lines(runs), "start": config.start},
    )


def deviation(data: xr.Dataset) -> xr.DataArray:
    """Largest difference between simulated and exact modes, per depth."""
    return abs(data["modes"] - data["exact"]).max(("time", "mode"))


def summary(data: xr.Dataset) -> str:
    """Largest deviation from the closed form and the learning times."""
    lines = []
    for depth in data["depth"].values:
        one = data.sel(depth=depth)
        times = ", ".join(f"{t:.4g}" for t in one["learning_time"].values)
        exact = ", ".join(f"{t:.4g}" for t in one["exact_learning_time"].values)
        lines.append(
            f"depth {depth}: largest deviation from the closed form "
            f"{float(deviation(one.expand_dims('depth'))[0]):.1e}; "
            f"half learnt at t = {times} (closed form {exact})"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Modes against time, one panel per depth, the closed form as circles."""
    panels = data.sizes["depth"]
    fig, axes = plt.subplots(
        1, panels, figsize=(1 + 3.3 * panels, 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    colours = gf.plot.palette(data.sizes["mode"])
    for ax, depth in zip(axes[0], data["depth"].values, strict=True):
        one = data.sel(depth=depth)
        for mode, colour in enumerate(colours):
            s = float(data["singular_value"][mode])
            ax.axhline(s, color=colour, linestyle="--", linewidth=1.0, alpha=0.8)
            ax.plot(one["t"], one["modes"][:, mode], color=colour)
            ax.plot(one["exact_time"][mode], data["level"] * s, **_CIRCLES, color=colour)
        ax.set_title(f"{depth} layers")
        ax.set_xlim(0, float(one["t"][-1]))
        ax.set_xlabel(gf.plot.TIME_LABEL)
    axes[0, 0].set_ylabel(r"mode strength $u_j^\top W\, v_j$")
    handles = [
        Line2D([], [], color="black", label="simulation of the whole network"),
        Line2D([], [], **_CIRCLES, color="black", label="closed form of each mode"),
        Line2D([], [], color="black", ls="--", lw=1.0, label="value in the data"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    fig.suptitle("The strongest mode is learnt first; deeper networks wait longer")
    return fig
