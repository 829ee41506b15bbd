"""The conserved quantities drift only as far as the solver's tolerance lets them.

``C_i = W_{i+1}ᵀW_{i+1} − W_iW_iᵀ`` is constant under the exact flow, so that its drift measures
the error of the integration: it grows while the network learns, stays where it is afterwards,
and is proportional to the tolerance.
"""

from __future__ import annotations

import dataclasses

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

    # Widths of the layers, input first.
    widths: tuple[int, ...] = (4, 6, 5, 6, 3)
    # Singular values of the target.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Scale of the Gaussian start.
    scale: float = 0.5
    # Relative tolerances; the absolute one is a hundredth of each.
    rtols: tuple[float, ...] = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
    # End of the run.
    t1: float = 10.0
    # Number of saved times.
    points: int = 400
    # Solver, "explicit" or "implicit".
    solver: str = "explicit"
    # Seed of the start.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """A larger network and twice as many tolerances."""
        return cls(
            widths=(32, 48, 40, 48, 24),
            singular_values=(5.0, 4.0, 3.0, 2.0, 1.0),
            rtols=tuple(10.0 ** (-k / 2) for k in range(8, 23)),
            t1=50.0,
        )


def compute(config: Config) -> xr.Dataset:
    """The drift of every law against time, for every tolerance."""
    shape = (config.widths[-1], config.widths[0])
    flow = gf.GradientFlow(gf.Problem.from_singular_values(config.singular_values, shape))
    start = gf.initialize.gaussian(jax.random.key(config.seed), config.widths, config.scale)
    runs = {}
    for rtol in config.rtols:
        method = gf.Method(solver=config.solver, rtol=rtol, atol=rtol * 1e-2)
        runs[f"rtol {rtol:.1e}"] = gf.simulate(
            flow, start, config.t1, save=config.points, method=method
        )
    laws = [f"C_{i}" for i in range(1, start.depth)]
    return xr.Dataset(
        {
            "drift": (
                ("rtol", "time", "law"),
                np.stack([np.asarray(traj["law_drift"]) for traj in runs.values()]),
            ),
            "steps": ("rtol", [traj.stats.accepted for traj in runs.values()]),
        },
        coords={
            "rtol": list(config.rtols),
            "time": np.asarray(next(iter(runs.values())).ts),
            "law": laws,
        },
        attrs={
            "runs": run_lines(runs),
            "independent_laws": gf.observables.independent_laws(start),
            "parameters": sum(w.size for w in start.weights),
        },
    )


def slope(data: xr.Dataset) -> float:
    """The slope of the drift at the end against the tolerance, both in logarithms."""
    return float(np.polyfit(np.log(data["rtol"].values), np.log(_at_end(data)), 1)[0])


def _at_end(data: xr.Dataset) -> np.ndarray:
    return data["drift"].isel(time=-1).max("law").values


def summary(data: xr.Dataset) -> str:
    """The number of laws, the drifts relative to the tolerance, and the slope."""
    largest = data["drift"].max(("time", "law")).values / data["rtol"].values
    last = _at_end(data) / data["rtol"].values
    return (
        f"{data.attrs['independent_laws']} independent laws in {data.sizes['law']} matrices, "
        f"{data.attrs['parameters']} parameters\n"
        f"drift / rtol: {last.min():.2g} to {last.max():.2g} at the end; up to "
        f"{largest.max():.2g} at saved times, which are interpolated between steps\n"
        f"drift at the end ∝ rtol^{slope(data):.3f}"
    )


def figure(data: xr.Dataset) -> Figure:
    """The drift of every law against time, and the drift at the end against the tolerance."""
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(11.0, 4.6), width_ratios=(1.45, 1), layout="constrained"
    )
    rtols, last = data["rtol"].values, _at_end(data)
    # The loosest, a middle and the tightest tolerance: more curves would hide each other.
    shown = np.unique([0, (len(rtols) - 1) // 2, len(rtols) - 1])
    colours = gf.plot.palette(len(shown))
    styles = ("-", "--", ":", "-.")
    for index, colour in zip(shown, colours, strict=True):
        drifts = data["drift"][index]
        for law in range(data.sizes["law"]):
            one = drifts[:, law].where(drifts[:, law] > 0)
            left.plot(data["time"], one, color=colour, ls=styles[law % len(styles)], lw=1.3)
        left.annotate(
            f"rtol {rtols[index]:.0e}",
            (float(data["time"][-1]), float(drifts.isel(time=-1).max())),
            xytext=(0, 7),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontweight="bold",
        )
    left.set_yscale("log")
    left.set_xlim(0, float(data["time"][-1]))
    left.set_xlabel(gf.plot.TIME_LABEL)
    left.set_ylabel(r"drift $\max\,|C_i(t) - C_i(0)|$")
    laws = [
        Line2D([], [], color="0.3", ls=styles[law % len(styles)], lw=1.3, label=f"$C_{law + 1}$")
        for law in range(data.sizes["law"])
    ]
    left.legend(
        handles=laws, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(laws), 5)
    )
    right.plot(rtols, last, "o", color="0.3", label="drift at the end of the run")
    for index, colour in zip(shown, colours, strict=True):
        right.plot(rtols[index], last[index], "o", color=colour, ms=8)
    middle = np.exp(np.mean(np.log(last / rtols)))
    right.plot(rtols, middle * rtols, color="0.5", lw=1.0, label="slope 1")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("relative tolerance of the solver, rtol")
    right.set_ylabel("drift at the end")
    right.legend(loc="upper left")
    fig.suptitle("The conservation laws are kept to the tolerance of the solver")
    return fig
