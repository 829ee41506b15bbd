"""Peak memory of implicit runs against width: no matrix with a row per unknown is ever formed.

Every run is a process of its own, and its memory is the largest resident set that the operating
system has counted, with Python, JAX and compilation in it. Beside it stands what a single matrix of
as many rows and columns as there are unknowns would take. The runs are short, since what a step
holds does not depend on how many there are; how many were made, and how many of them implicit, is
printed.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import sys
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from tqdm import tqdm

import gradflow as gf
from experiments.benchmarks._problems import gaussian

COLUMNS = ("unknowns", "peak", "state", "matrix", "steps", "seconds")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this benchmark."""

    # Widths of all layers.
    widths: tuple[int, ...] = (10, 100)
    # Numbers of layers.
    depth: int = 3
    # Solvers by name.
    solvers: tuple[str, ...] = ("conserving",)
    # The start: entries are N(0, scale²/d).
    scale: float = 0.5
    # The horizon, in units of the decay time of the fastest mode.
    horizon: float = 20.0
    # Relative tolerance.
    rtol: float = 1e-6

    @classmethod
    def full(cls) -> Config:
        """Up to three layers of width 200, 120,000 unknowns."""
        return cls(widths=(10, 25, 50, 100, 150, 200), solvers=("conserving", "auto"))


def compute(config: Config) -> xr.Dataset:
    """Peak memory in MB (10⁶ bytes) of every solver at every width."""
    table = np.zeros((len(config.solvers), len(config.widths), len(COLUMNS)))
    lines = []
    jobs = [(i, j) for i in range(len(config.solvers)) for j in range(len(config.widths))]
    for i, j in tqdm(jobs, desc="processes", leave=False):
        solver, width = config.solvers[i], config.widths[j]
        # A fresh process: what was held once is counted for ever.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            table[i, j], line = pool.apply(_run, (config, solver, width))
        lines.append(f"{solver}, width {width}: {line}")
    coords = {"solver": list(config.solvers), "width": list(config.widths)}
    return xr.Dataset(
        {name: (("solver", "width"), table[:, :, k]) for k, name in enumerate(COLUMNS)},
        coords=coords,
        attrs={"runs": "\n".join(lines), "depth": config.depth},
    )


def _run(config: Config, solver: str, width: int) -> tuple[list[float], str]:
    jax.config.update("jax_enable_x64", True)
    widths = (width,) * (config.depth + 1)
    flow = gf.GradientFlow(gf.Problem.from_singular_values(np.arange(width, 0, -1.0)))
    net = gf.LinearNetwork(gaussian(widths, config.scale))
    t1 = config.horizon / (flow.fastest_rate(net) or 1.0)
    method = gf.Method(solver=solver, rtol=config.rtol, atol=1e-2 * config.rtol)
    run = gf.simulate(flow, net, t1, save=2, method=method)
    unknowns = sum(w.size for w in net.weights)
    row = [
        unknowns,
        _peak(),
        8e-6 * unknowns,
        8e-6 * unknowns**2,
        run.stats.steps,
        run.stats.seconds,
    ]
    stiff = "" if run.stats.stiff_steps is None else f", {run.stats.stiff_steps} implicit"
    return row, f"{run.status.name}, {run.stats.solver}, {run.stats.steps} steps{stiff}"


def _peak() -> float:
    """The largest resident set of this process so far, in MB."""
    # Linux counts kilobytes of 1024 bytes, macOS bytes.
    unit = 1e-6 if sys.platform == "darwin" else 1024e-6
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def summary(data: xr.Dataset) -> str:
    """A table: unknowns, state, peak, and what one matrix would take."""
    head = f"{'solver':<12}{'width':>6}{'unknowns':>10}{'state':>10}{'peak':>10}{'a matrix':>12}"
    lines = [f"memory in MB, {data.attrs['depth']} layers", f"{head}{'matrix / peak':>15}"]
    for solver in data["solver"].values:
        for width in data["width"].values:
            row: Any = data.sel(solver=solver, width=width)
            peak, matrix = float(row["peak"]), float(row["matrix"])
            lines.append(
                f"{solver:<12}{width:>6}{int(row['unknowns']):>10}{float(row['state']):>10.2f}"
                f"{peak:>10.0f}{matrix:>12.4g}{matrix / peak:>15.3g}"
            )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Peak memory against the number of unknowns, and what one matrix would take."""
    fig, ax = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    colours = gf.plot.palette(data.sizes["solver"])
    for solver, colour, marker in zip(data["solver"].values, colours, "os^D", strict=False):
        one = data.sel(solver=solver)
        ax.plot(one["unknowns"], one["peak"], marker=marker, color=colour, label=f"{solver}, peak")
    one = data.isel(solver=0)
    ax.plot(one["unknowns"], one["matrix"], "--", color="0.35", label="one matrix of that order")
    ax.plot(one["unknowns"], one["state"], ":", color="0.35", label="the state itself")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("unknowns")
    ax.set_ylabel("memory (MB)")
    ax.set_title("Implicit runs hold states, not matrices")
    ax.legend(loc="upper left")
    return fig
