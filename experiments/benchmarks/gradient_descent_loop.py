"""The flow by ``gf.simulate`` against the loop that takes small steps of gradient descent.

Full-batch gradient descent with step η is the explicit Euler method: at ``t = kη`` it is O(η) from
the flow, and it must take ``t1/η`` steps, of which stability bounds the size. It is written in
NumPy, in PyTorch with autograd (where that is installed) and as the compiled loop of
``gf.descend``, and run with the largest stable step, found by bisection, and with smaller ones.
Beside them ``gf.simulate`` runs at several tolerances. The error is the largest one of the
end-to-end map over equally spaced times, against a run at a tolerance of 1e-12. Compile times are
left out of the figure, and said.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import time
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

import gradflow as gf
from experiments._report import run_lines
from experiments.benchmarks._peers import numpy_field
from experiments.benchmarks._problems import gaussian


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this benchmark."""

    # Numbers of layers of width 5; the data are whitened with singular values 5, 4, 3, 2, 1.
    depths: tuple[int, ...] = (3,)
    # Horizon for each of them, long enough to learn all modes.
    horizons: tuple[float, ...] = (200.0,)
    # The starts: entries of layer i are N(0, scale²/d_{i−1}).
    scales: tuple[float, ...] = (0.1,)
    # Number of equally spaced times at which the error is taken, after t = 0.
    points: int = 100
    # How often the largest stable step is halved.
    halvings: int = 2
    # Tolerances of gf.simulate; the absolute one is 1e-3 of each.
    rtols: tuple[float, ...] = (1e-4, 1e-6)
    # Timed repeats of gf.simulate and gf.descend.
    repeats: int = 3
    # Seed of the starts, of one whose end-to-end map has a positive determinant, as the data have:
    # from another the weakest mode is never learnt.
    seed: int = 17

    @classmethod
    def full(cls) -> Config:
        """Smaller steps, down to 1/64 of the largest stable one, and a third problem."""
        return cls(
            depths=(3, 4, 6),
            horizons=(200.0, 200.0, 4000.0),
            scales=(0.1, 0.2, 0.4),
            halvings=6,
            rtols=(1e-3, 1e-4, 1e-5, 1e-6, 1e-8),
            repeats=5,
        )


WIDTH = 5
TARGETS = (1e-2, 1e-3)
SIMULATE, DESCEND, NUMPY, TORCH = "gf.simulate", "gf.descend", "NumPy loop", "PyTorch loop"
VARIANTS = (SIMULATE, DESCEND, NUMPY, TORCH)
# A loop of Python takes no more steps than this.
MAX_STEPS = 2_000_000


def compute(config: Config) -> xr.Dataset:
    """Errors and times of all variants on all problems, and the largest stable steps."""
    rows, runs, largest = [], {}, []
    problems = zip(config.depths, config.horizons, config.scales, strict=True)
    for depth, t1, scale in problems:
        case = _Case(config, depth, t1, scale)
        fewest = case.fewest_steps()
        largest.append(t1 / (config.points * fewest))
        rows += case.by_simulate()
        per_save = [fewest * 2**k for k in range(config.halvings + 1)]
        within = [n for n in per_save if n * config.points <= MAX_STEPS]
        rows += [case.by_numpy(n) for n in within]
        # One is enough, as every number of steps is another program.
        rows.append(case.by_descend(within[-1]))
        if importlib.util.find_spec("torch") is not None:
            rows.append(case.by_torch(within[0]))
        runs[f"{depth} layers, reference"] = case.reference
    found = {name: ("row", [row[name] for row in rows]) for name in rows[0] if name != "variant"}
    return xr.Dataset(
        {**found, "largest_step": ("depth", largest), "horizon": ("depth", list(config.horizons))},
        coords={"row": [row["variant"] for row in rows], "depth": list(config.depths)},
        attrs={
            "runs": run_lines(runs),
            "torch": int(TORCH in {row["variant"] for row in rows}),
        },
    )


class _Case:
    """One problem and its reference solution."""

    def __init__(self, config: Config, depth: int, t1: float, scale: float):
        self.config, self.depth, self.t1 = config, depth, t1
        self.widths = (WIDTH,) * (depth + 1)
        self.problem = gf.Problem.from_singular_values(np.arange(WIDTH, 0, -1.0))
        self.flow = gf.GradientFlow(self.problem)
        self.start = [np.asarray(w) for w in gaussian(self.widths, scale, config.seed)]
        self.net = gf.LinearNetwork(self.start)
        self.times = np.linspace(0.0, t1, config.points + 1)
        self.reference = self._simulate(1e-12, 1e-14)
        self.exact = np.asarray(self.reference.states.end_to_end())

    def _simulate(self, rtol: float, atol: float) -> gf.Trajectory:
        method = gf.Method(rtol=rtol, atol=atol)
        return gf.simulate(self.flow, self.net, self.t1, save=self.times, method=method)

    def by_simulate(self) -> list[dict[str, Any]]:
        rows = []
        for rtol in self.config.rtols:
            call = functools.partial(self._simulate, rtol, 1e-3 * rtol)
            maps, seconds, compiled = self._timed(call)
            rows.append(self._row(SIMULATE, rtol, maps, seconds, compiled))
        return rows

    def by_descend(self, per_save: int) -> dict[str, Any]:
        steps = per_save * self.config.points
        eta = self.t1 / steps

        def call():
            return gf.descend(self.flow, self.net, eta, steps, save_every=per_save)

        maps, seconds, compiled = self._timed(call)
        return self._row(DESCEND, eta, maps[: len(self.exact)], seconds, compiled)

    def by_numpy(self, per_save: int) -> dict[str, Any]:
        eta = self.t1 / (per_save * self.config.points)
        begun = time.perf_counter()
        maps = self.descent(per_save)
        return self._row(NUMPY, eta, maps, time.perf_counter() - begun, 0.0)

    def by_torch(self, per_save: int) -> dict[str, Any]:
        import torch

        torch.set_default_dtype(torch.float64)
        weights = [torch.tensor(w, requires_grad=True) for w in self.start]
        target = torch.tensor(np.asarray(self.problem.target))
        eta = self.t1 / (per_save * self.config.points)
        optimiser = torch.optim.SGD(weights, lr=eta)
        maps = []
        begun = time.perf_counter()
        for step in range(per_save * self.config.points + 1):
            product = functools.reduce(lambda W, w: w @ W, weights)
            if step % per_save == 0:
                maps.append(product.detach().numpy().copy())
            optimiser.zero_grad()
            (0.5 * torch.sum((target - product) ** 2)).backward()
            optimiser.step()
        return self._row(TORCH, eta, np.array(maps), time.perf_counter() - begun, 0.0)

    def descent(self, per_save: int) -> np.ndarray:
        """The end-to-end map at all times by the loop in NumPy; cut short where it overflows."""
        field = numpy_field(self.problem, self.widths)
        eta = self.t1 / (per_save * self.config.points)
        y = np.concatenate([w.ravel() for w in self.start])
        maps = [self._map(y)]
        with np.errstate(all="ignore"):
            for _ in range(self.config.points):
                for _ in range(per_save):
                    y = y + eta * field(0.0, y)
                if not np.isfinite(y).all():
                    break
                maps.append(self._map(y))
        return np.array(maps)

    def _map(self, y: np.ndarray) -> np.ndarray:
        weights = y.reshape(self.depth, WIDTH, WIDTH)
        return functools.reduce(lambda W, w: w @ W, weights)

    def fewest_steps(self) -> int:
        """Steps between two saved times with the largest stable step, to a few per cent.

        Stable is a loop that converges: it ends with a loss within 1e-3 of the flow's whole fall.
        """
        s = np.asarray(self.problem.singular_values)
        threshold = gf.exact.max_learning_rate(s, self.depth)
        between = self.t1 / self.config.points
        # Half of the linear threshold is stable, twice is not.
        good, bad = int(np.ceil(2 * between / threshold)), int(between / (2 * threshold))
        while good - bad > max(1, 0.03 * good):
            middle = (good + bad) // 2
            if self._stable(middle):
                good = middle
            else:
                bad = middle
        return good

    def _stable(self, per_save: int) -> bool:
        maps = self.descent(per_save)
        if len(maps) < len(self.exact):
            return False
        target = np.asarray(self.problem.target)
        start, end, ours = (
            0.5 * np.sum((W - target) ** 2) for W in (self.exact[0], self.exact[-1], maps[-1])
        )
        return bool(ours - end < 1e-3 * (start - end))

    def _timed(self, call: Callable[[], gf.Trajectory]) -> tuple[np.ndarray, float, float]:
        """Maps, seconds of the best of the repeats, and what the first call took beyond that."""
        seconds = []
        for _ in range(self.config.repeats + 1):
            begun = time.perf_counter()
            run = call()
            seconds.append(time.perf_counter() - begun)
        best = min(seconds[1:])
        return np.asarray(run.states.end_to_end()), best, max(seconds[0] - best, 0.0)

    def _row(self, variant, knob, maps, seconds, compiled) -> dict[str, Any]:
        complete = len(maps) == len(self.exact)
        error = float(np.abs(maps - self.exact).max()) if complete else np.nan
        return {
            "variant": variant,
            "layers": self.depth,
            "knob": knob,
            "error": error,
            "seconds": seconds,
            "compile_seconds": compiled,
        }


def seconds_at(error: np.ndarray, seconds: np.ndarray, target: float) -> tuple[float, bool]:
    """Seconds for an error of ``target``, and whether that is extrapolated.

    The least time of the runs that are as accurate, or between two runs a power law. Beyond the
    most accurate run time grows like 1/error, as for a method of first order.
    """
    known = np.isfinite(error)
    error, seconds = error[known], seconds[known]
    if len(error) == 0:
        return np.nan, False
    met = error <= target
    if not met.any():
        best = int(np.argmin(error))
        return float(seconds[best] * error[best] / target), True
    found = float(seconds[met].min())
    missed = np.flatnonzero(~met)
    if len(missed):
        near = missed[np.argmin(error[missed])]
        first = np.flatnonzero(met)[np.argmax(error[met])]
        part = np.log(target / error[near]) / np.log(error[first] / error[near])
        between = seconds[near] ** (1 - part) * seconds[first] ** part
        found = min(found, float(between))
    return found, False


def _of(data: xr.Dataset, depth: int, variant: str) -> xr.Dataset:
    return data.isel(row=(data["row"].values == variant) & (data["layers"].values == depth))


def summary(data: xr.Dataset) -> str:
    """Largest stable steps, every run, and the table of ratios."""
    lines = []
    for depth in data["depth"].values:
        one = data.sel(depth=depth)
        threshold = float(gf.exact.max_learning_rate(np.arange(WIDTH, 0, -1.0), int(depth)))
        step, t1 = float(one["largest_step"]), float(one["horizon"])
        lines.append(
            f"{depth} layers of {WIDTH}, t1 = {t1:g}: largest stable step {step:.4f} "
            f"({step / threshold:.2f} of 2/(h s_1^(2-2/h))), {t1 / step:.0f} steps"
        )
        for variant in VARIANTS:
            rows = _of(data, depth, variant)
            lines += [_line(variant, rows.isel(row=i)) for i in range(rows.sizes["row"])]
    lines.append("seconds at an error of the map, and ratio to gf.simulate; *: extrapolated as 1/η")
    for depth, target in itertools.product(data["depth"].values, TARGETS):
        times = {v: _time(data, depth, v, target) for v in VARIANTS if len(_of(data, depth, v).row)}
        ours = times[SIMULATE][0]
        cells = ", ".join(
            f"{v} {t:.3g}{'*' if far else ''} s ({t / ours:.3g}x)" for v, (t, far) in times.items()
        )
        lines.append(f"{depth} layers, error {target:g}: {cells}")
    if not data.attrs["torch"]:
        lines.append("PyTorch is not installed: its loop is skipped")
    return "\n".join(lines)


def _line(variant: str, row: xr.Dataset) -> str:
    knob = "rtol" if variant == SIMULATE else "η"
    compiled = float(row["compile_seconds"])
    also = f", compiled in {compiled:.1f} s" if compiled > 0.3 else ""
    return (
        f"  {variant:<13} {knob} = {float(row['knob']):<8.3g} error {float(row['error']):.1e}, "
        f"{float(row['seconds']):.4f} s{also}"
    )


def _time(data: xr.Dataset, depth: int, variant: str, target: float) -> tuple[float, bool]:
    rows = _of(data, depth, variant)
    return seconds_at(rows["error"].values, rows["seconds"].values, target)


def figure(data: xr.Dataset) -> Figure:
    """Time against error, a panel for every problem."""
    depths = data["depth"].values
    fig, axes = plt.subplots(
        1,
        len(depths),
        figsize=(1.4 + 4.0 * len(depths), 4.6),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    styles = dict(zip(VARIANTS, zip(gf.plot.palette(4), "os^D", strict=True), strict=True))
    handles: dict[str, Any] = {}
    for ax, depth in zip(axes[0], depths, strict=True):
        for variant in VARIANTS:
            rows = _of(data, depth, variant).sortby("error")
            if rows.sizes["row"] == 0:
                continue
            colour, marker = styles[variant]
            error, seconds = rows["error"].values, rows["seconds"].values
            width = 2.6 if variant == SIMULATE else 1.4
            (line,) = ax.plot(error, seconds, marker + "-", color=colour, lw=width, ms=5.5)
            handles[variant] = line
            far, extrapolated = seconds_at(error, seconds, TARGETS[-1])
            if extrapolated:
                ax.plot([error[0], TARGETS[-1]], [seconds[0], far], ":", color=colour, lw=1.6)
                ax.plot([TARGETS[-1]], [far], marker, mfc="white", color=colour, ms=5.5)
        ours, loop = (_time(data, depth, v, TARGETS[-1])[0] for v in (SIMULATE, NUMPY))
        ax.annotate(
            "",
            (TARGETS[-1], ours),
            (TARGETS[-1], loop),
            arrowprops={"arrowstyle": "<->", "shrinkA": 6, "shrinkB": 1, "color": "0.3"},
        )
        ax.annotate(
            f" × {float(f'{loop / ours:.2g}'):g}",
            (TARGETS[-1], np.sqrt(ours * loop)),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=12,
        )
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_title(
            f"{depth} layers of {WIDTH}, $t_1$ = {float(data['horizon'].sel(depth=depth)):g}"
        )
    axes[0, 0].invert_xaxis()
    for ax in axes[0]:
        ax.set_xlabel("largest error of the map (more accurate to the right)")
    axes[0, 0].set_ylabel("wall time of a run (s)")
    labels = [f"{v}, auto" if v == SIMULATE else f"{v}, gradient descent" for v in handles]
    fig.legend(list(handles.values()), labels, loc="outside lower center", ncols=len(handles))
    fig.suptitle(
        "Small steps of gradient descent are a slow way to the flow (dotted: extrapolated)",
        fontweight="bold",
    )
    return fig
