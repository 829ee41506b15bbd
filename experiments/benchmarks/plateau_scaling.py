"""Steps against the scale of the start: they grow like its logarithm, plateaus like a power of it.

The start is one Gaussian draw times a scale a, the horizon long enough for every mode to be learnt,
which takes ``∝ a^{-(h−2)}`` with h layers. A method whose steps grow with the plateau takes a
number of steps ``∝ log(1/a)``; one whose steps are held up by the modes already learnt takes
``∝ a^{-(h−2)}``. Both laws are fitted. That the plateaus have the right length is checked on
starts aligned with the data, whose escape times are known in closed form.
"""

from __future__ import annotations

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tqdm import tqdm

import gradflow as gf
from experiments._report import run_lines
from experiments.benchmarks._peers import Solver, TooSlow, approach, measure
from experiments.benchmarks._problems import POINTS, Case, end_to_end


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this benchmark."""

    # Numbers of layers.
    depths: tuple[int, ...] = (3,)
    # Width of every layer, which is also the number of modes of the data.
    width: int = 2
    # Scales of the start, largest first.
    scales: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    # Solvers, by package and name; the first one is gradflow's.
    solvers: tuple[str, ...] = ("gradflow conserving", "SciPy LSODA")
    # Of these the escape times are checked.
    checked: tuple[str, ...] = ("gradflow conserving",)
    # Relative tolerance; the absolute one is rtol · scale / 100.
    rtol: float = 1e-8
    # Repeats of every run, of which the shortest counts.
    repeats: int = 3
    # Seconds that a run may take.
    budget: float = 0.5
    # Scale of the run that finds how long the last mode of this draw takes.
    pilot: float = 1e-2

    @classmethod
    def full(cls) -> Config:
        """Width 5, two scales a decade, more solvers."""
        return cls(
            depths=(3, 4),
            width=5,
            scales=tuple(float(a) for a in np.geomspace(1e-1, 1e-5, 9)),
            solvers=(
                "gradflow auto",
                "gradflow conserving",
                "gradflow explicit",
                "SciPy LSODA",
                "SciPy Radau",
                "diffrax Tsit5",
                "diffrax Kvaerno5",
            ),
            checked=("gradflow auto", "gradflow conserving"),
            budget=20.0,
        )


def compute(config: Config) -> xr.Dataset:
    """Steps, seconds and learnt modes of every run; errors of the escape times."""
    shape = len(config.depths), len(config.solvers), len(config.scales)
    steps, seconds, learnt = (np.full(shape, np.nan) for _ in range(3))
    ran = np.full(shape, "", dtype=object)
    notes = np.full(shape[:2], "", dtype=object)
    horizons = np.full((shape[0], shape[2]), np.nan)
    escapes = np.full((shape[0], len(config.checked), shape[2]), np.nan)
    runs: dict[str, list[gf.Trajectory]] = {}
    for i, depth in enumerate(config.depths):
        cases = _cases(config, depth)
        horizons[i] = [case.t1 for case in cases]
        with tqdm(total=shape[1] * shape[2], desc=f"{depth} layers", leave=False) as bar:
            for j, name in enumerate(config.solvers):
                for k, case in enumerate(cases):
                    bar.set_description(f"{depth} layers, {name}, start {case.scale:.1e}")
                    try:
                        solver = Solver(name, case)
                        approach(solver, config.rtol, config.budget)
                        found = measure(solver, config.rtol, config.budget, config.repeats)
                    except Exception as error:  # the others are still worth measuring
                        what = "too slow" if isinstance(error, TooSlow) else "failed"
                        notes[i, j] = f"{what} at start {case.scale:.1e}: {error}".splitlines()[0]
                        bar.update(shape[2] - k)
                        break
                    steps[i, j, k], seconds[i, j, k] = found.run.steps, found.seconds
                    ran[i, j, k] = found.run.solver
                    learnt[i, j, k] = _learnt(config, end_to_end(found.run.states)[-1])
                    bar.update()
        for j, name in enumerate(config.checked):
            checks = [_escape(config, name, depth, a) for a in config.scales]
            escapes[i, j] = [error for _, error in checks]
            runs[f"{depth} layers, {name}, aligned starts"] = [traj for traj, _ in checks]
    dims = ("depth", "solver", "scale")
    return xr.Dataset(
        {
            "steps": (dims, steps),
            "seconds": (dims, seconds),
            "learnt": (dims, learnt),
            "ran": (dims, ran.astype(str)),
            "note": (dims[:2], notes.astype(str)),
            "horizon": (("depth", "scale"), horizons),
            "escape_error": (("depth", "checked", "scale"), escapes),
        },
        coords={
            "depth": list(config.depths),
            "solver": list(config.solvers),
            "scale": list(config.scales),
            "checked": list(config.checked),
        },
        attrs={"runs": run_lines(runs), "width": config.width, "rtol": config.rtol},
    )


def _cases(config: Config, depth: int) -> list[Case]:
    """A case for every scale, with one and a half times the time that its last mode takes."""
    widths = (config.width,) * (depth + 1)
    # Of a balanced start the weakest mode, of strength 1, would escape at this time.
    predicted = {
        a: float(gf.exact.escape_time(1.0, min(a, 0.5) ** depth, depth))
        for a in (config.pilot, *config.scales)
    }
    case = Case("pilot", widths, config.pilot, 100 * predicted[config.pilot])
    last = np.inf
    while not np.isfinite(last):
        method = _method(config, config.solvers[0], case)
        flow = gf.GradientFlow(case.problem())
        traj = gf.simulate(flow, case.start(), case.t1, save=case.times(), method=method)
        last = float(gf.observables.learning_times(traj).times.max())
        if case.t1 > 1e12 * predicted[config.pilot]:
            raise RuntimeError(f"{depth} layers: the last mode of the pilot run is never learnt")
        case = dataclasses.replace(case, t1=100 * case.t1)
    delay = last / predicted[config.pilot]
    # And some time for the last mode to settle to a millionth.
    settle = np.log(1e6) / depth
    return [Case(f"{a:g}", widths, a, 1.5 * delay * predicted[a] + settle) for a in config.scales]


def _method(config: Config, name: str, case: Case) -> gf.Method:
    solver = name.removeprefix("gradflow ")
    return gf.Method(solver=solver, rtol=config.rtol, atol=case.atol(config.rtol))


def _learnt(config: Config, product: np.ndarray) -> int:
    """How many modes have 99 % of their strength."""
    strengths = np.arange(config.width, 0, -1)
    return int(np.sum(np.diag(product) > 0.99 * strengths))


def _escape(config: Config, name: str, depth: int, scale: float) -> tuple[gf.Trajectory, float]:
    """A run from an aligned start, and the largest relative error of its escape times.

    Every mode starts at ``a^h`` and is saved just before and after its exact escape time.
    """
    case = Case("aligned", (config.width,) * (depth + 1), scale, 1.0)
    problem = case.problem()
    exact = np.asarray(gf.exact.escape_time(problem.singular_values, scale**depth, depth))
    # As many saved times as all other runs have, for the same program.
    each = np.full(config.width, POINTS // config.width)
    each[: POINTS % config.width] += 1
    saves = np.sort(
        np.concatenate([[0.0], *(t * _around(n) for t, n in zip(exact, each, strict=True))])
    )
    flow = gf.GradientFlow(problem)
    start = gf.initialize.decoupled(problem, case.widths, scale)
    method = _method(config, name, case)
    traj = gf.simulate(flow, start, saves[-1], save=saves, method=method)
    found = gf.observables.learning_times(traj).times
    return traj, float(np.max(np.abs(found / exact - 1)))


def _around(count: int) -> np.ndarray:
    """``count`` factors close to 1, on both sides, from 5 % away to a billionth."""
    below = count // 2
    return np.concatenate(
        [1 - np.geomspace(5e-2, 1e-9, below), 1 + np.geomspace(1e-9, 5e-2, count - below)]
    )


@dataclasses.dataclass(frozen=True)
class Growth:
    """Steps as a function of the scale a of the start, by least squares.

    ``offset + slope · log10(1/a)`` and ``∝ (1/a)^power``, each with its root mean square relative
    misfit.
    """

    offset: float
    slope: float
    power: float
    misfit_log: float
    misfit_power: float

    @property
    def better(self) -> str:
        return "log(1/a)" if self.misfit_log < self.misfit_power else "power"


def alike(row: xr.Dataset) -> np.ndarray:
    """Which runs were made, by the solver that the last of them took.

    ``auto`` picks another one for short plateaus, with other steps.
    """
    met = np.isfinite(row["steps"].values)
    which = row["ran"].values
    return met & (which == which[met][-1]) if met.any() else met


def growth(row: xr.Dataset) -> Growth | None:
    """Both fits to the runs of one solver and depth; None for fewer than three of a kind."""
    scale, steps, met = row["scale"].values, row["steps"].values, alike(row)
    if met.sum() < 3:
        return None
    x, y = np.log10(1 / scale[met]), steps[met]
    # Relative misfits in both.
    slope, offset = np.polyfit(x, y, 1, w=1 / y)
    power, front = np.polyfit(x, np.log10(y), 1)

    def misfit(fit):
        return float(np.sqrt(np.mean((fit / y - 1) ** 2)))

    return Growth(
        float(offset),
        float(slope),
        float(power),
        misfit(offset + slope * x),
        misfit(10 ** (front + power * x)),
    )


def summary(data: xr.Dataset) -> str:
    """Tables of steps and milliseconds, both fits, and how right the escape times are."""
    names, scales = data["solver"].values, data["scale"].values
    modes = data.attrs["width"]
    lines = [
        f"{modes} modes, layers of {modes}, rtol {data.attrs['rtol']:.0e}; steps (evaluations for "
        "SciPy) / milliseconds"
    ]
    for depth in data["depth"].values:
        one = data.sel(depth=depth)
        lines.append(f"{depth} layers")
        lines.append(f"  {'start a':<21}" + "".join(f"{a:>15.1e}" for a in scales))
        lines.append(f"  {'horizon':<21}" + "".join(f"{t:>15.2e}" for t in one["horizon"].values))
        for name in names:
            row = one.sel(solver=name)
            cells = (
                f"{s:.0f} / {1e3 * t:.{0 if t > 0.1 else 1}f}" if np.isfinite(s) else "-"
                for s, t in zip(row["steps"].values, row["seconds"].values, strict=True)
            )
            lines.append(f"  {name:<21}" + "".join(f"{cell:>15}" for cell in cells))
        for name in names:
            row = one.sel(solver=name)
            lines.append(f"  {name}: {_said(row)}{_why(row, modes)}")
        for name in data["checked"].values:
            worst = float(one["escape_error"].sel(checked=name).max())
            lines.append(f"  {name}: relative error of aligned escape times at most {worst:.1e}")
    return "\n".join(lines)


def _said(row: xr.Dataset) -> str:
    found, met = growth(row), alike(row)
    if found is None:
        return "too few runs for a fit"
    some = f" (from a = {row['scale'].values[met][0]:.0e} on, {row['ran'].values[met][0]})"
    kind = some if met.sum() < np.isfinite(row["steps"]).sum() else ""
    return (
        f"{found.better} fits{kind}: {found.offset:.0f} + {found.slope:.0f} log10(1/a), "
        f"misfit {found.misfit_log:.1%}; ∝ (1/a)^{found.power:.2f}, misfit {found.misfit_power:.1%}"
    )


def _why(row: xr.Dataset, modes: int) -> str:
    made = np.isfinite(row["steps"].values)
    missed = int(np.sum(row["learnt"].values[made] < modes))
    text = f"; NOT ALL MODES LEARNT in {missed} runs" if missed else ""
    note = str(row["note"].values)
    return text + (f"; {note}" if note else "")


def figure(data: xr.Dataset) -> Figure:
    """Steps against scale: where they are a straight line, and all on log axes."""
    names, scales = data["solver"].values.tolist(), data["scale"].values
    # SciPy counts evaluations, not steps.
    shown = [name for name in names if not name.startswith("SciPy")]
    ours = [name for name in shown if name in ("gradflow auto", "gradflow conserving")]
    colours = dict(zip(shown, gf.plot.palette(len(shown)), strict=True))
    depths = data["depth"].values.tolist()
    fig, axes = plt.subplots(
        1, len(depths) + 1, figsize=(4.2 * (len(depths) + 1), 4.7), layout="constrained"
    )
    marks = dict(zip(depths, "os^vD", strict=False))
    for ax in axes:
        ax.set_xscale("log")
        ax.set_xlabel("scale a of the start")
        ax.xaxis.set_inverted(True)
    first = axes[0]
    for name in ours:
        for depth in depths:
            row = data.sel(solver=name, depth=depth)
            first.plot(scales, row["steps"], marks[depth], color=colours[name], ms=6, mfc="white")
            fit = growth(row)
            if fit is not None:
                at = scales[alike(row)]
                line = fit.offset + fit.slope * np.log10(1 / at)
                first.plot(at, line, color=colours[name], lw=1.3, zorder=1)
            # Off the line because made by another solver.
            for k in np.flatnonzero(np.isfinite(row["steps"].values) & ~alike(row))[-1:]:
                first.annotate(
                    str(row["ran"].values[k]),
                    (scales[k], float(row["steps"][k])),
                    xytext=(8, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    color=colours[name],
                )
    first.set_ylim(0, 1.15 * first.get_ylim()[1])
    first.set_ylabel("steps until all modes are learnt")
    first.set_title("gradflow, fitted by a line: growth like log(1/a)")
    for ax, depth in zip(axes[1:], depths, strict=True):
        one = data.sel(depth=depth)
        for name in shown:
            ax.plot(scales, one["steps"].sel(solver=name), marks[depth] + "-", mfc="white")
            ax.lines[-1].set_color(colours[name])
            if "too slow" in str(one["note"].sel(solver=name).values):
                last = np.flatnonzero(np.isfinite(one["steps"].sel(solver=name)))[-1:]
                for k in last:
                    ax.annotate(
                        "too slow beyond",
                        (scales[k], float(one["steps"].sel(solver=name)[k])),
                        xytext=(8, -3),
                        textcoords="offset points",
                        fontsize=8,
                        color=colours[name],
                    )
        # A guide through the first run of the slowest growth.
        start = float(one["steps"].isel(scale=0).sel(solver=shown).max())
        guide = start * (scales / scales[0]) ** -(depth - 2.0)
        ax.plot(scales, guide, color="black", lw=1.0, ls=(0, (2, 3)), zorder=0)
        ax.set_yscale("log")
        ax.set_ylim(top=3e7)
        ax.set_title(f"{depth} layers; dotted: $a^{{-{depth - 2}}}$, like the horizon")
    handles = [Line2D([], [], color=colours[n], lw=3) for n in shown]
    handles += [
        Line2D([], [], color="black", marker=marks[d], mfc="white", ls="", ms=6) for d in depths
    ]
    labels = [*shown, *(f"{depth} layers" for depth in depths)]
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    fig.suptitle(_headline(data))
    return fig


def _headline(data: xr.Dataset) -> str:
    last = data.isel(depth=-1, solver=0)
    longer = float(last["horizon"][-1] / last["horizon"][0])
    steps = last["steps"].values
    return (
        f"{int(last['depth'])} layers: plateaus longer by a factor of {longer:.0e}, steps of "
        f"{last['solver'].values} from {steps[0]:.0f} to {steps[-1]:.0f}"
    )
