"""Modes against time when gates slow, freeze or reverse the learning along one direction.

The delta-modulated flow ``Ẇ_i = (I − β_i k_i k_iᵀ) f_i(A)`` learns along ``k_i`` at speed
``1 − β_i``. From a start aligned with the data, and with all ``k_i`` along one mode, that mode has
a clock of its own: it follows its closed form at time ``(1 − β)t``, which slows it (β < 1), stops
it (β = 1) or unlearns it (β > 1) while the other modes see nothing of it. When the gates shut it
is learnt as ever. With the last layer alone modulated the mode slows little: the other layers learn
on and make up for it, even where that layer is frozen. Where it is reversed it may be driven across
zero, and the plain flow afterwards comes to rest at a saddle without that mode.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the target, strongest first.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Which mode is modulated, from 1 for the strongest.
    modulated: int = 2
    # Number of layers.
    depth: int = 3
    # Width of every hidden layer.
    hidden_width: int = 5
    # Strength of every mode at the start.
    start: float = 0.3
    # Gates along the modulated mode.
    gates: tuple[float, ...] = (0.0, 0.7, 1.0, 1.5)
    # Time at which the gates shut; from there on the flow is plain.
    release: float = 1.5
    # End of the runs.
    t1: float = 4.0
    # Relative tolerance; the absolute one is a hundredth of it.
    rtol: float = 1e-10
    # Number of saved times.
    points: int = 241

    @classmethod
    def full(cls) -> Config:
        """More modes, layers and times."""
        return cls(
            singular_values=(4.0, 3.0, 2.0, 1.0),
            depth=4,
            hidden_width=32,
            start=0.2,
            release=2.0,
            t1=8.0,
            points=801,
        )


class _UntilRelease(eqx.Module):
    """Gates that are as given until a time and shut from then on."""

    gates: jax.Array
    release: jax.Array

    def __call__(self, t: Any, state: gf.LinearNetwork) -> jax.Array:
        return jnp.where(t < self.release, self.gates, 0.0)


_WHERE = ("all layers", "last layer only")


def compute(config: Config) -> xr.Dataset:
    """Modes and loss for all gates, in all layers and in the last one, and the closed form."""
    s = np.array(config.singular_values)
    h, mode = config.depth, config.modulated - 1
    problem = gf.Problem.from_singular_values(s)
    widths = (len(s), *[config.hidden_width] * (h - 1), len(s))
    start = gf.initialize.decoupled(problem, widths, config.start ** (1 / h))
    directions = [np.eye(width)[mode] for width in widths[1:]]
    last = np.eye(h)[-1]
    gates = np.stack([np.outer(config.gates, layers) for layers in (np.ones(h), last)])
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=config.rtol * 1e-2)

    def run(betas):
        flow = gf.DeltaModulatedFlow(
            problem, _UntilRelease(betas, jnp.asarray(config.release)), directions
        )
        return gf.simulate(flow, start, config.t1, save=config.points, method=method)

    # Functions of time that differ in numbers only: one program serves gates of all kinds.
    lanes = [run(jnp.asarray(betas)) for betas in gates.reshape(-1, h)]
    names = [f"{where}, β = {beta:g}" for where in _WHERE for beta in config.gates]
    shape = (len(_WHERE), len(config.gates), config.points, -1)
    return xr.Dataset(
        {
            "modes": (
                ("where", "gate", "time", "mode"),
                np.reshape([run["modes"] for run in lanes], shape),
            ),
            "loss": (
                ("where", "gate", "time"),
                np.reshape([run.loss for run in lanes], shape[:-1]),
            ),
            "exact": (("gate", "time"), _exact(config, np.asarray(lanes[0].ts))),
        },
        coords={
            "where": list(_WHERE),
            "gate": list(config.gates),
            "t": ("time", np.asarray(lanes[0].ts)),
            "singular_value": ("mode", s),
        },
        attrs={
            "runs": run_lines(dict(zip(names, lanes, strict=True))),
            "modulated": config.modulated,
            "release": config.release,
        },
    )


def _exact(config: Config, t: np.ndarray) -> np.ndarray:
    """The modulated mode with a gate β in all layers: its clock runs at 1 − β until the release."""
    s, u0, h = config.singular_values[config.modulated - 1], config.start, config.depth
    speeds = 1 - np.array(config.gates)[:, None]
    clock = np.where(t < config.release, speeds * t, speeds * config.release + t - config.release)
    # The closed form knows no negative times: it is taken from an earlier, smaller strength on.
    before, ahead = u0, 0.0
    while ahead < -clock.min():
        before /= 2
        ahead = float(gf.exact.mode_time(s, before, u0, h))
    return np.asarray(gf.exact.mode(s, before, clock + ahead, h))


def deviation(data: xr.Dataset) -> np.ndarray:
    """Largest distance of the modulated mode from its closed form, per gate, in all layers."""
    mode = data["modes"].isel(where=0, mode=data.attrs["modulated"] - 1)
    return abs(mode - data["exact"]).max("time").values


def rises(data: xr.Dataset) -> xr.DataArray:
    """How far the loss rises above its smallest value so far, per place and gate."""
    loss = data["loss"]
    lowest = np.minimum.accumulate(loss.values, axis=-1)
    return (loss - xr.DataArray(lowest, dims=loss.dims)).max("time")


def at_release(data: xr.Dataset) -> xr.DataArray:
    """The modulated mode's strength when the gates shut, per place and gate."""
    mode = data["modes"].isel(mode=data.attrs["modulated"] - 1)
    return mode.isel(time=int(np.argmin(abs(data["t"].values - data.attrs["release"]))))


def summary(data: xr.Dataset) -> str:
    """Deviations from the closed form, strengths at the release, and rises of the loss."""
    mode, release = data.attrs["modulated"], data.attrs["release"]
    others = data["modes"].isel(where=0).drop_isel(mode=mode - 1)
    seen = float(abs(others - others.isel(gate=0)).max())
    lines = [
        f"all layers: mode {mode} within {deviation(data).max():.1e} of its closed form, the other "
        f"modes within {seen:.1e} of each other for all gates"
    ]
    for where in data["where"].values:
        strengths, rise = at_release(data).sel(where=where), rises(data).sel(where=where)
        told = ", ".join(
            f"β = {beta:g}: {float(u):.4f}"
            for beta, u in zip(data["gate"].values, strengths, strict=True)
        )
        lines.append(
            f"{where}: mode {mode} at t = {release:g} has {told}; largest rise of the loss "
            f"{float(rise.max()):.2e}"
        )
    return "\n".join(lines)


_WORDS = {0: "plain", 1: "frozen"}


def figure(data: xr.Dataset) -> Figure:
    """Modes against time, by gate (columns), modulated in all layers or the last one (rows)."""
    count, modulated, release = data.sizes["gate"], data.attrs["modulated"], data.attrs["release"]
    fig, axes = plt.subplots(
        2,
        count,
        figsize=(0.8 + 2.9 * count, 6.4),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    t, s = data["t"].values, data["singular_value"].values
    colours = gf.plot.palette(data.sizes["mode"])
    some = slice(None, None, max(1, len(t) // 24))
    for row, where in zip(axes, data["where"].values, strict=True):
        for ax, gate in zip(row, data["gate"].values, strict=True):
            one = data.sel(where=where, gate=gate)
            if gate:
                ax.axvspan(0, release, color="0.92", lw=0, zorder=0)
            for mode, colour in enumerate(colours):
                ax.axhline(s[mode], color=colour, ls="--", lw=1.0, alpha=0.8)
                ax.plot(t, one["modes"][:, mode], color=colour)
            if where == _WHERE[0]:
                colour = colours[modulated - 1]
                ax.plot(t[some], one["exact"][some], "o", ms=4.5, mfc="white", color=colour)
        row[0].set_ylabel(f"{where}\nmode strength $u_j^\\top W\\, v_j$")
    for ax, gate in zip(axes[0], data["gate"].values, strict=True):
        word = _WORDS.get(gate, "slowed" if gate < 1 else "reversed")
        ax.set_title(f"β = {gate:g}, {word}")
    for ax in axes[1]:
        ax.set_xlabel("time t (rate × steps)")
    axes[0, 0].set_xlim(0, t[-1])
    handles: list[Any] = [
        Line2D([], [], color=c, label=f"mode {j + 1}" + ", modulated" * (j + 1 == modulated))
        for j, c in enumerate(colours)
    ]
    handles += [
        Line2D([], [], color="black", ls="", marker="o", mfc="white", ms=4.5, label="closed form"),
        Line2D([], [], color="black", ls="--", lw=1.0, label="value in the data"),
        Patch(color="0.92", label="gate open"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    fig.suptitle(
        "Gates in all layers set the clock of one mode; a single layer's gate does not, "
        "but can leave it at a saddle"
    )
    return fig
