"""Runs per second of ensembles: ``gf.ensemble`` against loops over gradflow and over SciPy.

All integrate the same problem from the same random starts, with the same tolerances and saved
times. The peers are SciPy's LSODA, on a right-hand side of layer products in NumPy, in a loop and
in a pool of processes that have been started and have imported everything before the clock runs.
Every run costs the peers about the same, so that they are timed on a few starts and scaled.
``gf.ensemble`` is timed on all of them after compilation, which is reported apart. All times are
the best of some repeats.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy.integrate import solve_ivp

import gradflow as gf
from experiments._report import run_lines
from experiments.benchmarks._peers import numpy_field


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this benchmark."""

    # Singular values of the data, and widths from input to output.
    singular_values: tuple[float, ...] = (5.0, 4.0, 3.0, 2.0, 1.0)
    widths: tuple[int, ...] = (5, 5, 5, 5)
    # The starts: entries of layer i are N(0, scale²/d_{i−1}).
    scale: float = 0.1
    # End of the runs.
    t1: float = 200.0
    # Tolerances of all solvers.
    rtol: float = 1e-8
    atol: float = 1e-10
    # Number of saved times.
    points: int = 11
    # Numbers of starts of an ensemble, rising.
    counts: tuple[int, ...] = (30, 100)
    # Starts on which the loops are timed, and the pool of processes.
    loop: int = 3
    pool: int = 6
    # Processes of the pool and threads of the ensemble.
    workers: int = 2
    # Starts in a batch of jax.vmap of gf.simulate, 0 to leave it out: it compiles long.
    mapped: int = 0
    # Timed repeats of everything.
    repeats: int = 1
    # Seed of the starts.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Up to 4,000 starts, longer samples of the loops, and ``jax.vmap`` of ``gf.simulate``."""
        return cls(counts=(10, 30, 100, 300, 1000, 4000), loop=20, pool=100, mapped=64, repeats=3)


class _Timed(NamedTuple):
    """The result, and the best wall time and processor time of some repeats, in seconds."""

    result: Any
    seconds: float
    processor: float


def _timed(call: Callable[[], Any], repeats: int) -> _Timed:
    seconds, processor = [], []
    for _ in range(repeats):
        marks = time.perf_counter(), time.process_time()
        result = call()
        seconds.append(time.perf_counter() - marks[0])
        processor.append(time.process_time() - marks[1])
    return _Timed(result, min(seconds), min(processor))


def compute(config: Config) -> xr.Dataset:
    """Seconds per run of all variants, compile times, and differences between their results."""
    shape = (config.widths[-1], config.widths[0])
    flow = gf.GradientFlow(gf.Problem.from_singular_values(config.singular_values, shape))
    starts = _starts(config)
    method = gf.Method(rtol=config.rtol, atol=config.atol)

    def ensemble(count, workers=config.workers):
        return gf.ensemble(
            flow,
            jax.tree.map(lambda w: w[:count], starts),
            config.t1,
            save=config.points,
            method=method,
            workers=workers,
        )

    def simulate(net):
        return gf.simulate(flow, net, config.t1, save=config.points, method=method)

    def compiled(call):
        began = time.perf_counter()
        call()
        first = time.perf_counter() - began
        timed = _timed(call, config.repeats)
        return timed, max(first - timed.seconds, 0.0)

    rows: dict[tuple[str, int], _Timed] = {}
    compile_seconds = {ENSEMBLE: 0.0}
    for count in config.counts:
        call = functools.partial(ensemble, count)
        rows[ENSEMBLE, count], spent = compiled(call)
        compile_seconds[ENSEMBLE] = max(compile_seconds[ENSEMBLE], spent)
    last = config.counts[-1]
    rows[ONE_WORKER, last], _ = compiled(lambda: ensemble(last, workers=1))
    batch = jax.tree.map(np.asarray, rows[ENSEMBLE, last].result)

    nets = [jax.tree.map(lambda w, i=i: w[i], starts) for i in range(max(config.loop, config.pool))]
    few = nets[: config.loop]
    rows[SIMULATE, config.loop], compile_seconds[SIMULATE] = compiled(
        lambda: [simulate(net) for net in few]
    )
    if config.mapped:
        some = jax.tree.map(lambda w: w[: config.mapped], starts)
        mapped = jax.jit(jax.vmap(simulate))
        rows[MAPPED, config.mapped], compile_seconds[MAPPED] = compiled(
            lambda: jax.block_until_ready(mapped(some))
        )
    jobs = [_Job.of(config, flow.problem, net) for net in nets]
    _scipy(jobs[0])
    rows[SCIPY, config.loop] = _timed(lambda: [_scipy(job) for job in jobs[: config.loop]], 1)
    rows[POOL, config.pool] = _in_processes(config, jobs[: config.pool])

    singles = rows[SIMULATE, config.loop].result
    theirs = rows[SCIPY, config.loop].result
    ours = [np.asarray(batch.lane(i).states.end_to_end()) for i in range(config.loop)]
    simulated = [np.asarray(one.states.end_to_end()) for one in singles]
    tight = dataclasses.replace(config, rtol=1e-12, atol=1e-14)
    exact = [_scipy(_Job.of(tight, flow.problem, net)) for net in few]
    gaps = {
        "ensemble_to_simulate": _gap(ours, simulated),
        "ensemble_to_scipy": _gap(ours, theirs),
        "ensemble_error": _gap(ours, exact),
        "simulate_error": _gap(simulated, exact),
        "scipy_error": _gap(theirs, exact),
    }
    names = [name for name, _ in rows]
    stats = batch.stats
    return xr.Dataset(
        {
            "starts": ("row", [count for _, count in rows]),
            "seconds": ("row", [timed.seconds for timed in rows.values()]),
            "processor_seconds": ("row", [timed.processor for timed in rows.values()]),
            "compile_seconds": ("compiled", list(compile_seconds.values())),
            **{name: ((), value) for name, value in gaps.items()},
        },
        coords={"row": names, "compiled": list(compile_seconds)},
        attrs={
            "runs": run_lines(
                {
                    f"ensemble of {last}": [batch.lane(i) for i in range(last)],
                    f"{config.loop} single runs": singles,
                }
            ),
            "reason": stats.reason,
            "evaluations": float(np.mean(stats.rhs_evaluations)),
            "workers": config.workers,
            "cores": os.cpu_count() or 1,
            "tolerances": f"rtol {config.rtol:g}, atol {config.atol:g}",
        },
    )


ENSEMBLE = "gf.ensemble"
ONE_WORKER = "gf.ensemble, one thread"
SIMULATE = "gf.simulate, loop"
MAPPED = "gf.simulate, jax.vmap"
SCIPY = "SciPy LSODA, loop"
POOL = "SciPy LSODA, processes"


def _starts(config: Config) -> gf.LinearNetwork:
    """All starts in one network, stacked along the first axis of its weights."""
    rng = np.random.default_rng(config.seed)
    count = max(config.counts[-1], config.loop, config.pool, config.mapped)
    shapes = [(b, a) for a, b in itertools.pairwise(config.widths)]
    stacks = [config.scale * rng.standard_normal((count, *s)) / np.sqrt(s[1]) for s in shapes]
    first = gf.LinearNetwork([w[0] for w in stacks])
    return jax.tree.unflatten(jax.tree.structure(first), stacks)


class _Job(NamedTuple):
    """One run for SciPy, in plain arrays."""

    target: tuple[tuple[float, ...], ...]
    widths: tuple[int, ...]
    start: np.ndarray
    t1: float
    points: int
    rtol: float
    atol: float

    @classmethod
    def of(cls, config: Config, problem: gf.Problem, net: gf.LinearNetwork) -> _Job:
        start = np.concatenate([np.asarray(w).ravel() for w in net.weights])
        return cls(
            tuple(map(tuple, np.asarray(problem.target).tolist())),
            config.widths,
            start,
            config.t1,
            config.points,
            config.rtol,
            config.atol,
        )


@functools.cache
def _field(target: tuple[tuple[float, ...], ...], widths: tuple[int, ...]) -> Callable:
    return numpy_field(gf.Problem(target), widths)


def _scipy(job: _Job) -> np.ndarray:
    """The end-to-end map at the saved times."""
    solution = solve_ivp(
        _field(job.target, job.widths),
        (0.0, job.t1),
        job.start,
        method="LSODA",
        t_eval=np.linspace(0.0, job.t1, job.points),
        rtol=job.rtol,
        atol=job.atol,
    )
    if solution.status != 0:
        raise RuntimeError(solution.message)
    product, at = None, 0
    for a, b in itertools.pairwise(job.widths):
        layer = solution.y[at : at + a * b].T.reshape(-1, b, a)
        product = layer if product is None else layer @ product
        at += a * b
    return np.asarray(product)


def _in_processes(config: Config, jobs: list[_Job]) -> _Timed:
    """All jobs in a pool that is up before the clock runs."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(config.workers, mp_context=context) as pool:
        # More jobs than processes, or the first one up would take them all.
        list(pool.map(_scipy, jobs[: 4 * config.workers]))

        def call():
            return list(pool.map(_scipy, jobs, chunksize=max(1, len(jobs) // 20)))

        timed = _timed(call, config.repeats)
    return timed._replace(processor=np.nan)


def _gap(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def rates(data: xr.Dataset) -> dict[str, float]:
    """Runs per second of every variant, at its largest number of starts."""
    rows = zip(data["row"].values, data["starts"].values, data["seconds"].values, strict=True)
    return {str(name): float(count / seconds) for name, count, seconds in rows}


def summary(data: xr.Dataset) -> str:
    """The table of times and ratios, compile times, and differences."""
    found, cores, workers = rates(data), data.attrs["cores"], data.attrs["workers"]
    best = found[ENSEMBLE]
    lines = [
        f"{data.attrs['tolerances']}; best of the repeats; {workers} threads or processes, "
        f"{cores} cores",
        f"{'':<24} {'starts':>7} {'ms per run':>11} {'processor ms':>13} {'runs/s':>8} "
        f"{'gf.ensemble is':>15}",
    ]
    for i, name in enumerate(data["row"].values):
        count, seconds = int(data["starts"][i]), float(data["seconds"][i])
        processor = float(data["processor_seconds"][i]) / count
        shown = f"{1e3 * processor:.2f}" if np.isfinite(processor) else "-"
        rate = count / seconds
        lines.append(
            f"{name:<24} {count:>7} {1e3 / rate:>11.2f} {shown:>13} {rate:>8.1f} "
            f"{best / rate:>14.1f}x"
        )
    compiles = ", ".join(
        f"{name} {float(value):.1f} s"
        for name, value in zip(data["compiled"].values, data["compile_seconds"].values, strict=True)
    )
    gaps = {name: float(data[name]) for name in data.data_vars if data[name].ndim == 0}
    lines += [
        f"compile time, once: {compiles}",
        f"{data.attrs['reason']}; {data.attrs['evaluations']:.0f} evaluations per run",
        "largest difference of the map at saved times: "
        f"ensemble to single runs {gaps['ensemble_to_simulate']:.1e}, "
        f"ensemble to SciPy {gaps['ensemble_to_scipy']:.1e}",
        f"error, against rtol 1e-12: ensemble {gaps['ensemble_error']:.1e}, "
        f"single runs {gaps['simulate_error']:.1e}, SciPy {gaps['scipy_error']:.1e}",
        "loops and processes are timed on as many starts as their rows say",
    ]
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Runs per second against the number of starts."""
    fig, ax = plt.subplots(figsize=(7.4, 5.0), layout="constrained")
    names = [ENSEMBLE, ONE_WORKER, SIMULATE, MAPPED, POOL, SCIPY]
    colours = dict(zip(names, gf.plot.palette(len(names)), strict=True))
    markers = dict(zip(names, "os^Dv<", strict=True))
    row, starts = data["row"].values, data["starts"].values
    rate = starts / data["seconds"].values
    span = np.array([starts.min(), starts.max()])
    for name in names:
        here = row == name
        if not here.any():
            continue
        style = {"color": colours[name], "marker": markers[name], "ms": 6, "label": name}
        if name == ENSEMBLE:
            ax.plot(starts[here], rate[here], lw=2.6, zorder=5, **style)
            continue
        ax.plot(starts[here], rate[here], ls="--", **style)
        if name != ONE_WORKER:
            ax.plot(span, np.repeat(rate[here], 2), ls="--", lw=1.1, color=colours[name])
    found = rates(data)
    top = int(starts[row == ENSEMBLE][-1])
    beside = top * (top / starts.min()) ** 0.04
    ax.annotate(
        "",
        (beside, found[SCIPY]),
        (beside, found[ENSEMBLE]),
        arrowprops={"arrowstyle": "<->", "shrinkA": 0, "shrinkB": 0},
    )
    ax.annotate(
        f"× {found[ENSEMBLE] / found[SCIPY]:.0f} ",
        (beside, np.sqrt(found[SCIPY] * found[ENSEMBLE])),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=12,
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(10 ** np.floor(np.log10(rate.min())), 10 ** np.ceil(np.log10(rate.max())))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("number of starts (loops and processes are timed at the marker)")
    ax.set_ylabel("runs per second")
    ax.set_title(
        f"An ensemble of {top} starts runs {found[ENSEMBLE] / found[SCIPY]:.0f} times as fast as a "
        "loop over SciPy",
        fontweight="bold",
    )
    fig.legend(loc="outside lower center", ncols=3)
    return fig
