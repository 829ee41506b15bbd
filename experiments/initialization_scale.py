"""Near the origin modes are learnt one by one, far from it all at once.

Two-layer networks all start at the same map, ``W_2 W_1 = 0``, and differ in scale alone: every
singular value of both layers is ``a``, with the hidden units that read and those that write
orthogonal (in wide random networks they nearly are). A mode of strength s then follows
``u̇ = √(c² + 4u²)(s − u)`` with ``c = 2a²``: near the origin it is half learnt at about
``ln(s/a²)/(2s)``, far from it at ``ln 2/(2a²)``, whatever s.
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
    singular_values: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0)
    # Width of the hidden layer, at least twice the number of singular values.
    hidden_width: int = 16
    # Smallest singular value of the layers at the start.
    smallest: float = 1e-4
    # Largest singular value of the layers at the start.
    largest: float = 5.0
    # Number of scales between them, evenly spaced in the logarithm.
    scales: int = 15
    # Relative tolerance of the solver.
    rtol: float = 1e-9
    # Number of saved times.
    points: int = 600
    # Seed of the hidden basis.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More modes, a wider hidden layer and more scales."""
        return cls(
            singular_values=(6.0, 5.0, 4.0, 3.0, 2.0, 1.0),
            hidden_width=128,
            smallest=1e-8,
            largest=20.0,
            scales=31,
            points=2000,
        )


_CIRCLES: dict[str, Any] = {"marker": "o", "ls": "", "mfc": "white", "ms": 4.5}


def compute(config: Config) -> xr.Dataset:
    """Learning times of every mode against the scale of the start, and the runs at both ends."""
    s = np.array(config.singular_values)
    scales = np.geomspace(config.smallest, config.largest, config.scales)
    curve = np.geomspace(config.smallest, config.largest, 200)
    flow = gf.GradientFlow(gf.Problem.from_singular_values(s))
    basis = np.asarray(jax.random.orthogonal(jax.random.key(config.seed), config.hidden_width))
    reading, writing = basis[:, : len(s)], basis[:, len(s) : 2 * len(s)].T
    runs = []
    for a in scales:
        # atol far below the entries of the start.
        method = gf.Method(rtol=config.rtol, atol=a * 1e-8)
        start = gf.LinearNetwork([a * reading, a * writing])
        t1 = float(gf.exact.unbalanced_mode_time(s, np.sqrt(2) * a, 0.0, 0.99 * s).max())
        runs.append(gf.simulate(flow, start, t1, save=config.points, method=method))
    ends = [runs[0], runs[-1]]
    return xr.Dataset(
        {
            "learning_time": (
                ("scale", "mode"),
                np.stack([gf.observables.learning_times(run).times for run in runs]),
            ),
            "theory": (("scale", "mode"), _half_times(s, scales)),
            "theory_curve": (("curve_scale", "mode"), _half_times(s, curve)),
            "t": (("end", "time"), np.stack([np.asarray(run.ts) for run in ends])),
            "modes": (("end", "time", "mode"), np.stack([np.asarray(x["modes"]) for x in ends])),
        },
        coords={
            "scale": scales,
            "curve_scale": curve,
            "singular_value": ("mode", s),
            "end": ["near", "far"],
        },
        attrs={"runs": run_lines({f"{len(runs)} runs": runs})},
    )


def _half_times(s: np.ndarray, scales: np.ndarray) -> np.ndarray:
    # The zero map with c = a_1² − a_2² = 2a².
    first = np.sqrt(2) * scales[:, None]
    return np.asarray(gf.exact.unbalanced_mode_time(s[None, :], first, 0.0, s[None, :] / 2))


def spread(data: xr.Dataset) -> xr.DataArray:
    """How many times later the last mode is learnt than the first, per scale."""
    return data["learning_time"].max("mode") / data["learning_time"].min("mode")


def summary(data: xr.Dataset) -> str:
    """How far apart the modes are learnt at both ends, and how far off the theory is."""
    lines = [
        f"scale {float(one['scale']):.2g}: the last mode is learnt {float(spread(one)):.2f} times "
        "as late as the first"
        for one in (data.isel(scale=0), data.isel(scale=-1))
    ]
    off = float(abs(data["learning_time"] / data["theory"] - 1).max())
    return "\n".join([*lines, f"learning times within {off:.1e} of the closed form"])


def figure(data: xr.Dataset) -> Figure:
    """Modes against time near and far from the origin, and learning times against scale."""
    fig, (near, far, times) = plt.subplots(
        1, 3, figsize=(12.5, 4.3), width_ratios=(1, 1, 1.25), layout="constrained"
    )
    colours = gf.plot.palette(data.sizes["mode"])
    s = data["singular_value"].values
    for ax, end, scale in ((near, "near", data["scale"][0]), (far, "far", data["scale"][-1])):
        run = data.sel(end=end)
        for mode, colour in enumerate(colours):
            ax.axhline(s[mode], color=colour, linestyle="--", linewidth=1.0, alpha=0.8)
            ax.plot(run["t"], run["modes"][:, mode], color=colour)
        ax.set_title(f"{end} {'' if end == 'near' else 'from '}the origin, a = {float(scale):.2g}")
        ax.set_xlabel(gf.plot.TIME_LABEL)
        ax.set_xlim(0, float(run["t"][-1]))
    near.set_ylabel(r"mode strength $u_j^\top W\, v_j$")
    for mode, colour in enumerate(colours):
        times.plot(data["curve_scale"], data["theory_curve"][:, mode], color=colour)
        times.plot(data["scale"], data["learning_time"][:, mode], **_CIRCLES, color=colour)
    times.set_xscale("log")
    times.set_yscale("log")
    times.set_xlabel("scale a of the start (singular value of the layers)")
    times.set_ylabel("half-learning time (learning rate × steps)")
    times.set_title("learning times meet as the start moves out")
    handles = [
        Line2D([], [], color=c, label=f"mode of strength {x:g}")
        for c, x in zip(colours, s, strict=True)
    ]
    handles += [
        Line2D([], [], color="black", label="closed form (right)"),
        Line2D([], [], **_CIRCLES, color="black", label="simulation (right)"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
    fig.suptitle("The scale of the start decides whether modes are learnt in turn or together")
    return fig
