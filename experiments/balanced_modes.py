"""A balanced mode waits the longer the deeper the network; one without data fades ever slower.

A single mode of an aligned, balanced network of depth h obeys ``u̇ = h u^{2−2/h}(s − u)``. Against
the scaled time ``h·t`` the curves of all depths go from the exponential of one layer to the limit
``u̇ = u²(s − u)`` of infinitely many. Where the data hold nothing, s = 0, the mode decays:
exponentially with one layer, with more like the power ``−h/(2h−2)`` of time. All layers of the
chain are integrated; the closed form knows only their product.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
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

    # Singular value of the target in the mode that is learnt.
    strength: float = 1.0
    # Strength of that mode at the start.
    start: float = 0.05
    # Strength at the start of the mode with singular value 0.
    start_of_decay: float = 1.0
    # Numbers of layers; the last stands beside the infinite limit.
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 64)
    # End of the runs, in scaled time h·t.
    scaled_end: float = 1e3
    # Relative tolerance of the solver; the absolute one is a hundredth of it.
    rtol: float = 1e-12
    # Number of saved times on the rise, and again over the whole run.
    points: int = 150

    @classmethod
    def full(cls) -> Config:
        """From closer to the origin, over more depths and longer."""
        return cls(
            start=0.005,
            depths=(1, 2, 3, 4, 5, 6, 7, 8, 16, 64, 256),
            scaled_end=1e5,
            rtol=1e-13,
            points=600,
        )


_CIRCLES: dict[str, Any] = {"marker": "o", "ls": "", "mfc": "white", "ms": 4.5}
# Where the closed form of the rise is drawn, as fractions of the final strength.
_LEVELS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
# In how many places that of the decay is drawn.
_MARKS = 12
# Below this part of its start a decaying mode is lost in the absolute tolerance.
_FLOOR = 1e-3


class _SideBySide(gf.AbstractFlow):
    """Modes of several depths in one state, each in its own scaled time: one program for all.

    The state holds one array of diagonal entries for each flow, which knows nothing of the others.
    """

    flows: tuple[gf.ModeFlow, ...]

    def vector_field(self, t: Any, state: Any, args: Any = None) -> Any:
        pairs = zip(self.flows, state, strict=True)
        return tuple(flow.vector_field(t, a) / flow.depth for flow, a in pairs)

    def loss(self, state: Any) -> Any:
        return sum(flow.loss(a) for flow, a in zip(self.flows, state, strict=True))

    def conserved(self, state: Any) -> list[Any]:
        return [jnp.concatenate([a[1:] ** 2 - a[:-1] ** 2 for a in state])]

    def check_state(self, state: Any) -> Any:
        return tuple(flow.check_state(a) for flow, a in zip(self.flows, state, strict=True))

    def observables(self) -> dict[str, Any]:
        return {"modes": lambda state: jnp.stack([jnp.prod(a, axis=0) for a in state])}


def compute(config: Config) -> xr.Dataset:
    """Both modes at every depth against scaled time, simulated and by the closed form."""
    s, u0, v0 = config.strength, config.start, config.start_of_decay
    # All depths have risen when the infinitely deep one has.
    rise = (np.log((s - u0) / u0 * 99) + s / u0) / s**2
    scaled = np.union1d(
        np.linspace(0.0, rise, config.points),
        np.geomspace(1e-2, max(config.scaled_end, rise), config.points),
    )
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=config.rtol * 1e-2)
    # Both modes side by side: (time, mode) from (time, 1) and (mode,).
    strengths, starts = np.array([[s, 0.0]]), np.array([[u0, v0]])
    flow = _SideBySide(tuple(gf.ModeFlow(strengths[0], depth) for depth in config.depths))
    chains = tuple(np.repeat(starts ** (1 / depth), depth, axis=0) for depth in config.depths)
    traj = gf.simulate(flow, chains, scaled[-1], save=scaled, method=method, save_states=False)
    exact = [
        np.asarray(gf.exact.mode(strengths, starts, scaled[:, None] / depth, depth))
        for depth in config.depths
    ]
    limit = np.asarray(gf.exact.infinite_depth_mode(strengths, starts, scaled[:, None]))
    return xr.Dataset(
        {
            "modes": (("scaled_time", "depth", "mode"), np.asarray(traj["modes"])),
            "exact": (("depth", "scaled_time", "mode"), np.stack(exact)),
            "limit": (("scaled_time", "mode"), limit),
        },
        coords={
            "depth": list(config.depths),
            "scaled_time": scaled,
            "mode": ["learnt", "fading"],
            "singular_value": ("mode", strengths[0]),
            "start": ("mode", starts[0]),
        },
        attrs={"runs": run_lines({"all depths at once": traj}), "rise": rise, "rtol": config.rtol},
    )


def deviation(data: xr.Dataset) -> xr.DataArray:
    """Largest relative difference between simulation and closed form, per depth and mode."""
    exact = data["exact"]
    seen = exact >= _FLOOR * data["start"]
    return abs(data["modes"] / exact - 1).where(seen).max("scaled_time")


def distance_to_limit(data: xr.Dataset) -> xr.DataArray:
    """Largest difference between a depth's learnt mode and the infinite limit."""
    return abs(data["modes"] - data["limit"]).sel(mode="learnt").max("scaled_time")


def summary(data: xr.Dataset) -> str:
    """Relative deviations from the closed form, and how the infinite limit is approached."""
    off, gap = deviation(data), distance_to_limit(data)
    rising = data["exact"].sel(mode="learnt")
    half = [float(np.interp(0.5 * data["singular_value"][0], u, u["scaled_time"])) for u in rising]
    lines = [
        f"depth {int(h)}: half learnt at h·t = {x:.4g}, largest relative "
        f"deviation from the closed form {float(off.sel(depth=h, mode='learnt')):.1e}, of the "
        f"decay {float(off.sel(depth=h, mode='fading')):.1e}"
        for h, x in zip(data["depth"].values, half, strict=True)
    ]
    lines.append(
        f"largest relative deviation {float(off.max()):.1e} at rtol {data.attrs['rtol']:.0e}"
    )
    lines.append(
        "largest distance to the infinite limit: "
        + ", ".join(f"{float(g):.2g} (depth {int(h)})" for h, g in zip(gap.depth, gap, strict=True))
    )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """The learnt mode and the fading mode against scaled time, all depths in one panel each."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10.2, 4.6), layout="constrained")
    depths = data["depth"].values
    colours = plt.colormaps["viridis"](np.linspace(0, 0.9, len(depths)))
    tau = data["scaled_time"].values
    s, (u0, v0) = float(data["singular_value"][0]), data["start"].values
    shown = np.geomspace(0.02, tau[-1], _MARKS)
    left.axhline(s, color="0.5", linestyle=":", linewidth=1.0)
    for depth, colour in zip(depths, colours, strict=True):
        one = data.sel(depth=depth)
        left.plot(tau, one["modes"].sel(mode="learnt"), color=colour)
        exact = one["exact"].sel(mode="learnt")
        levels = _LEVELS[_LEVELS * s > u0] * s
        left.plot(np.interp(levels, exact, tau), levels, **_CIRCLES, color=colour)
        fading = one["modes"].sel(mode="fading")
        right.plot(tau[1:], fading.where(fading > 1e-9)[1:], color=colour)
        exact = one["exact"].sel(mode="fading").sel(scaled_time=shown, method="nearest")
        right.plot(exact["scaled_time"], exact, **_CIRCLES, color=colour)
    left.plot(tau, data["limit"].sel(mode="learnt"), color="black", ls="--", lw=1.3)
    right.plot(tau[1:], data["limit"].sel(mode="fading")[1:], color="black", ls="--", lw=1.3)
    left.set_xlim(0, data.attrs["rise"])
    left.set_ylim(0, 1.06 * s)
    left.set_title(f"in the data (s = {s:g}): a plateau, then the rise")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlim(1e-2, tau[-1])
    right.set_ylim(_FLOOR * v0, 1.6 * v0)
    right.set_title("not in the data (s = 0): algebraic decay from 2 layers on")
    for ax in (left, right):
        ax.set_xlabel("h × " + gf.plot.TIME_LABEL)
        ax.set_ylabel("mode strength u")
    handles = [
        Line2D([], [], color=c, label=f"{h} layer{'s' if h > 1 else ''}")
        for h, c in zip(depths, colours, strict=True)
    ]
    handles += [
        Line2D([], [], color="black", ls="--", lw=1.3, label="∞ layers (closed form)"),
        Line2D([], [], color="0.3", label="simulation of all layers"),
        Line2D([], [], **_CIRCLES, color="0.3", label="closed form of the product"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
    fig.suptitle("Depth makes a mode wait longer before it rises and linger longer when it fades")
    return fig
