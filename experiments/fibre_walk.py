"""A walk through networks of one end-to-end map: the loss stays, the curvature does not.

The walks start at a balanced global minimum and take small random steps in its fibre, hidden
changes of basis and terms that vanish in the product. No minimum is less sharp than the balanced
one: for the leading singular vectors ``u, v`` the sharpness is at least
``Σ_l ‖A_lᵀu‖² ‖B_l v‖² ≥ h s_1^{2−2/h}``, with ``A_l``, ``B_l`` the products after and before layer
l, because ``‖A_lᵀu‖ ‖B_{l+1}v‖ ≥ s_1``.
"""

from __future__ import annotations

import dataclasses

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the data, strongest first; their number is the width of both ends.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Number of layers.
    depth: int = 3
    # Width of every hidden layer, at least the number of modes.
    hidden_width: int = 4
    # Number of walks from the balanced minimum.
    walks: int = 8
    # Steps of every walk.
    steps: int = 50
    # Logarithmic size of the change of basis in one step.
    strength: float = 0.1
    # Size of the vanishing terms of one step, as a fraction of the layer.
    vanishing: float = 0.01
    # Seed of the walks.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More modes, a fourth layer, and more and longer walks."""
        return cls(
            singular_values=(4.0, 3.3, 2.6, 2.0, 1.5, 1.0),
            depth=4,
            hidden_width=7,
            walks=12,
            steps=100,
            strength=0.05,
        )


def compute(config: Config) -> xr.Dataset:
    """Hessian spectrum, and change of the end-to-end map and of the loss, along every walk."""
    r = len(config.singular_values)
    problem = gf.Problem.from_singular_values(config.singular_values)
    widths = (r, *[config.hidden_width] * (config.depth - 1), r)
    start = gf.landscape.critical_point(problem, widths, range(1, r + 1))
    keys = jax.random.split(jax.random.key(config.seed), (config.walks, config.steps))
    walks = [_walk(start, walk, config) for walk in keys]
    spectra = [[np.asarray(gf.landscape.spectrum(problem, net)) for net in walk] for walk in walks]
    maps = np.stack([[np.asarray(net.end_to_end()) for net in walk] for walk in walks])
    losses = np.asarray(jax.vmap(jax.vmap(problem.loss))(maps))
    ends = [gf.landscape.classify(problem, walk[-1]) for walk in walks]
    minima = sum(verdict.kind == "global_minimum" for verdict in ends)
    first = np.asarray(start.end_to_end())
    return xr.Dataset(
        {
            "eigenvalues": (("walk", "step", "eigenvalue"), np.stack(spectra)),
            "map_change": (("walk", "step"), np.abs(maps - first).max(axis=(2, 3))),
            "loss": (("walk", "step"), losses),
            "zero": ("walk", [verdict.eigenvalue_tolerance for verdict in ends]),
        },
        coords={"step": np.arange(config.steps + 1)},
        attrs={
            "runs": (
                f"no integration: {config.walks} walks of {config.steps} steps, "
                f"{minima} end at a global minimum by theory and eigenvalues"
            ),
            "lowest_sharpness": float(gf.exact.sharpness(config.singular_values, config.depth)),
            "depth": config.depth,
            "modes": r,
        },
    )


def _walk(net: gf.LinearNetwork, keys: jax.Array, config: Config) -> list[gf.LinearNetwork]:
    places = [net]
    for key in keys:
        net = gf.landscape.move_in_fiber(
            key, net, strength=config.strength, vanishing=config.vanishing
        )
        places.append(net)
    return places


def sharpness(data: xr.Dataset) -> xr.DataArray:
    """The largest Hessian eigenvalue of every walk and step."""
    return data["eigenvalues"].isel(eigenvalue=-1)


def positive(data: xr.Dataset) -> xr.DataArray:
    """The number of positive eigenvalues of every walk and step."""
    return (data["eigenvalues"] > data["zero"]).sum("eigenvalue")


def summary(data: xr.Dataset) -> str:
    """Largest changes of map and loss, and the range of the sharpness and of the inertia."""
    sharp, lowest = sharpness(data), data.attrs["lowest_sharpness"]
    counts = np.unique(positive(data)).tolist()
    ends = sharp.isel(step=-1).values
    return (
        f"largest change of an entry of the end-to-end map {float(data['map_change'].max()):.1e}, "
        f"of the loss {float(np.abs(data['loss'] - data['loss'][0, 0]).max()):.1e}\n"
        f"sharpness at the start {float(sharp[0, 0]):.10g}, formula {lowest:.10g}; smallest of all "
        f"steps {float(sharp.min()):.10g}, at the end {ends.min():.4g} to {ends.max():.4g}\n"
        f"positive eigenvalues at all steps: {', '.join(map(str, counts))} of "
        f"{data.sizes['eigenvalue']}, the others zero (smallest "
        f"{float(data['eigenvalues'].min()):.1e})"
    )


def figure(data: xr.Dataset) -> Figure:
    """The positive eigenvalues along one walk, and the sharpness along all."""
    fig, (spectrum, sharp) = plt.subplots(1, 2, figsize=(9.4, 4.2), layout="constrained")
    orange, step = gf.plot.palette(2)[1], data["step"].values
    shown = int(np.argmax(sharpness(data).values[:, -1]))
    values = data["eigenvalues"][shown].values
    kept = values[:, values[0] > float(data["zero"][shown])]
    spectrum.plot(step, kept[:, :-1], color="0.55", lw=1.2)
    spectrum.plot(step, kept[:, -1], color=orange)
    spectrum.set_ylabel("Hessian eigenvalue")
    spectrum.set_title(
        f"one walk: the {kept.shape[1]} positive eigenvalues ({values.shape[1] - kept.shape[1]} "
        "are zero)"
    )
    lowest = data.attrs["lowest_sharpness"]
    sharp.plot(step, np.delete(sharpness(data).values, shown, axis=0).T, color="0.55", lw=1.0)
    sharp.plot(step, sharpness(data)[shown], color=orange, label="the walk on the left")
    sharp.axhline(lowest, color="black", ls="--", lw=1.4, zorder=4)
    sharp.annotate(
        rf"balanced, the least: $h\,s_1^{{2-2/h}} = {lowest:.4g}$",
        (step[-1], lowest),
        xytext=(0, -5),
        textcoords="offset points",
        ha="right",
        va="top",
    )
    sharp.set_ylabel("sharpness, the largest eigenvalue")
    sharp.set_title(f"all {data.sizes['walk']} walks")
    sharp.legend(loc="upper left")
    for ax in (spectrum, sharp):
        ax.set_xlabel("step of the walk in the fibre")
        ax.set_xlim(0, step[-1])
        ax.set_ylim(bottom=0)
    change = float(np.abs(data["loss"] - data["loss"][0, 0]).max())
    fig.suptitle(
        "Minima of one end-to-end map differ in curvature; the balanced one is the least sharp\n"
        f"(the map changes by at most {float(data['map_change'].max()):.0e} along the walks, the "
        f"loss by {change:.0e})"
    )
    return fig
