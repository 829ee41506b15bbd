"""Error against time: gradflow's solvers beside SciPy's and diffrax's, on eight problems.

Every solver climbs a ladder of relative tolerances. Its error is the largest entry of the error of
the end-to-end map at 50 times spaced geometrically over the last four decades of the run, against
a reference solution at a hundredth of the tightest tolerance; its time is the shortest of some
repeats of the whole call, with all that it records, compiled beforehand. From these follow the
times at which an error of 1e-6 and 1e-8 is had, and the ratio of the fastest peer's to that of
``Method(solver="auto")``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from tqdm import tqdm

import gradflow as gf
from experiments.benchmarks._peers import OURS, PEERS, Solver, TooSlow, approach, measure
from experiments.benchmarks._problems import CASES, Case, drift, end_to_end

AUTO = OURS[0]
OWN, NONE = "own", "none"


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this benchmark."""

    # Problems, by name.
    problems: tuple[str, ...] = ("B1",)
    # Solvers, by package and name.
    solvers: tuple[str, ...] = (AUTO, "SciPy LSODA", "diffrax Tsit5")
    # Relative tolerances, loosest first; the absolute one is rtol · min(1, start scale) / 100.
    rtols: tuple[float, ...] = (1e-6, 1e-8, 1e-10)
    # Repeats of every run, of which the shortest counts.
    repeats: int = 3
    # Seconds that a run may take; some times more for large networks.
    budget: float = 2.0
    # Peers stop at the first error below this.
    enough: float = 3e-10
    # Solver of the reference, or "own" for that of each problem.
    reference: str = "SciPy LSODA"
    # A second one to check the reference with, "own" or "none".
    check: str = NONE

    @classmethod
    def full(cls) -> Config:
        """All problems, all solvers, all tolerances."""
        return cls(
            problems=tuple(CASES),
            solvers=OURS + PEERS,
            rtols=tuple(float(f"1e-{k}") for k in range(6, 12)),
            budget=5.0,
            reference=OWN,
            check=OWN,
        )


def compute(config: Config) -> xr.Dataset:
    """Seconds, errors, steps and drifts of every solver at every tolerance on every problem."""
    shape = len(config.problems), len(config.solvers), len(config.rtols)
    table = {
        name: np.full(shape, np.nan)
        for name in ("seconds", "error", "drift", "final_drift", "steps")
    }
    ran = np.full(shape, "", dtype=object)
    notes = np.full(shape[:2], "", dtype=object)
    gaps, sources, lines = [], [], []
    for i, name in enumerate(config.problems):
        case = CASES[name]
        bar = tqdm(config.solvers, desc=f"{name}: reference", leave=False)
        built = _Built(case)
        reference, gap, source = _reference(config, case, built)
        gaps.append(gap)
        sources.append(source)
        for j, solver in enumerate(bar):
            bar.set_description(f"{name}: {solver}")
            rows, notes[i, j] = _climb(config, built, solver, reference)
            for k, (row, which) in rows.items():
                ran[i, j, k] = which
                for quantity, value in row.items():
                    table[quantity][i, j, k] = value
            lines.append(_line(config, name, solver, rows, notes[i, j]))
        bar.close()
    dims = ("problem", "solver", "rtol")
    return xr.Dataset(
        {name: (dims, values) for name, values in table.items()}
        | {
            "ran": (dims, ran.astype(str)),
            "note": (dims[:2], notes.astype(str)),
            "reference": ("problem", np.array(sources, dtype=str)),
            "reference_gap": ("problem", gaps),
            "label": ("problem", np.array([CASES[p].label for p in config.problems], dtype=str)),
        },
        coords={
            "problem": list(config.problems),
            "solver": list(config.solvers),
            "rtol": list(config.rtols),
        },
        attrs={"runs": "\n".join(lines)},
    )


class _Built(dict):
    """Solvers of a case, built when first asked for, so that none is compiled twice."""

    def __init__(self, case: Case):
        super().__init__()
        self.case = case

    def __missing__(self, name: str) -> Solver:
        self[name] = Solver(name, self.case)
        return self[name]


def _reference(config: Config, case: Case, built: _Built) -> tuple[np.ndarray, float, str]:
    """The end-to-end map at all saved times, how far the check is off, and who made them."""
    rtol = max(1e-2 * min(config.rtols), 1e-13)
    name = case.reference if config.reference == OWN else config.reference
    check = case.check if config.check == OWN else config.check
    maps = end_to_end(_accurate(built[name], rtol))
    source = f"reference {name} at rtol {rtol:.0e}"
    if check == NONE:
        return maps, np.nan, source
    try:
        patience = 20 * config.budget * case.patience
        other = end_to_end(_accurate(built[check], 10 * rtol, patience))
    except Exception as error:
        return maps, np.nan, f"{source}, check failed ({check}: {_first_line(error)})"
    return maps, float(np.abs(other - maps).max()), f"{source}, check {check} at {10 * rtol:.0e}"


def _accurate(solver: Solver, rtol: float, budget: float = np.inf) -> list[np.ndarray]:
    if solver.make == "gradflow":
        # Its saved times are as accurate as its steps.
        return solver(rtol, solver.case.t1).states
    return solver.landing(rtol, budget)


def _climb(
    config: Config, built: _Built, name: str, reference: np.ndarray
) -> tuple[dict[int, tuple[dict[str, float], str]], str]:
    """Rows by rung of the ladder, and why the ladder was left early, if it was."""
    rows: dict[int, tuple[dict[str, float], str]] = {}
    note = ""
    times: list[float] = []
    budget = config.budget * built.case.patience
    for k, rtol in enumerate(config.rtols):
        try:
            solver = built[name]
            if not times:
                approach(solver, rtol, budget)
            elif times[-1] * (times[-1] / times[-2] if len(times) > 1 else 2) > budget:
                raise TooSlow(f"over {budget:g} s expected at rtol {rtol:.0e}")
            found = measure(solver, rtol, budget, config.repeats)
        except TooSlow as slow:
            return rows, f"too slow: {slow}"
        except Exception as error:  # the others are still worth measuring
            note = f"failed at rtol {rtol:.0e}: {_first_line(error)}"
            continue
        states = found.run.states
        times.append(found.seconds)
        row = {
            "seconds": found.seconds,
            "error": float(np.abs(end_to_end(states) - reference).max()),
            "drift": drift(states),
            "final_drift": drift([w[[0, -1]] for w in states]),
            "steps": found.run.steps,
        }
        rows[k] = row, found.run.solver
        if name in PEERS and row["error"] < config.enough:
            break
    return rows, note


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0][:120]


def _line(config: Config, name: str, solver: str, rows: dict, note: str) -> str:
    parts = [f"{len(rows)} of {len(config.rtols)} tolerances"] + [note] * bool(note)
    if rows:
        last, which = rows[max(rows)]
        parts.insert(
            1,
            f"{which}, error {last['error']:.1e} in {last['seconds']:.2g} s "
            f"({last['steps']:.0f} {'evaluations' if solver.startswith('SciPy') else 'steps'})",
        )
    return f"{name} {solver}: {', '.join(parts)}"


def seconds_at(error: Any, seconds: Any, target: float) -> float:
    """The shortest time in which an error of at most ``target`` is had, NaN if in none.

    Between two neighbouring runs, one above and one below, both are interpolated as logarithms.

    Args:
        error, seconds: of the runs, in the order of their tolerances; NaN where there was none.
        target: > 0.
    """
    error, seconds = np.asarray(error), np.asarray(seconds)
    met = np.isfinite(error) & np.isfinite(seconds)
    error, seconds = np.maximum(error[met], 1e-300), seconds[met]
    times = list(seconds[error <= target])
    for k in range(len(error) - 1):
        if error[k] > target >= error[k + 1]:
            part = np.log(error[k] / target) / np.log(error[k] / error[k + 1])
            times.append(float(seconds[k] ** (1 - part) * seconds[k + 1] ** part))
    return float(min(times, default=np.nan))


def times_at(data: xr.Dataset, target: float) -> xr.DataArray:
    """Seconds of every solver on every problem at an error, ``(problem, solver)``."""
    problems, solvers = data["problem"].values, data["solver"].values
    table = [
        [seconds_at(one["error"].values, one["seconds"].values, target) for one in row]
        for row in ([data.sel(problem=p, solver=s) for s in solvers] for p in problems)
    ]
    return xr.DataArray(
        table, coords={"problem": problems, "solver": solvers}, dims=("problem", "solver")
    )


def ratios(data: xr.Dataset, target: float) -> xr.Dataset:
    """At an error: the fastest peer over auto, and auto over gradflow's fastest fixed choice."""
    seconds = times_at(data, target)
    names = seconds["solver"].values.tolist()
    auto = seconds.sel(solver=AUTO, drop=True)

    def best(chosen):
        chosen = [s for s in chosen if s in names]
        if not chosen:
            return np.full(auto.shape, np.nan), np.full(auto.shape, "none", dtype=object)
        some = seconds.sel(solver=chosen).fillna(np.inf)
        least = some.min("solver").values
        who = np.array(chosen, dtype=object)[some.argmin("solver").values]
        found = np.isfinite(least)
        return np.where(found, least, np.nan), np.where(found, who, "none")

    peer, peer_name = best(PEERS)
    ours, ours_name = best(OURS[1:])
    return xr.Dataset(
        {
            "auto": auto,
            "peer": ("problem", peer),
            "peer_name": ("problem", peer_name),
            "fixed": ("problem", ours),
            "fixed_name": ("problem", ours_name),
            "speedup": ("problem", peer / auto.values),
            "loss": ("problem", auto.values / ours),
        },
        coords={"problem": data["problem"].values},
    )


TARGETS = (1e-6, 1e-8)


def summary(data: xr.Dataset) -> str:
    """Problems and references, times and ratios at two errors, drifts."""
    lines = []
    for p in data["problem"].values:
        one = data.sel(problem=p)
        gap = float(one["reference_gap"])
        checked = f": {gap:.1e} apart" if np.isfinite(gap) else ""
        lines.append(f"{p}: {_plain(str(one['label'].values))}; {one['reference'].values}{checked}")
    names = data["solver"].values.tolist()
    for target in TARGETS:
        seconds, found = times_at(data, target), ratios(data, target)
        lines += ["", f"milliseconds at an error of {target:.0e}, and ratios"]
        head = "".join(f"{_short(s):>11}" for s in names)
        lines.append(f"   {head}  fastest peer / auto   auto / best fixed choice")
        for p in data["problem"].values:
            row, ratio = seconds.sel(problem=p), found.sel(problem=p)
            cells = "".join(f"{_milliseconds(float(row.sel(solver=s))):>11}" for s in names)
            lines.append(
                f"{p:<3}{cells}  {_ratio(ratio['speedup']):>7} {ratio['peer_name'].values:<17} "
                f"{_ratio(ratio['loss']):>6} {ratio['fixed_name'].values}"
            )
    middle = int(np.argmin(np.abs(np.log(data["rtol"].values / 1e-8))))
    rtol = float(data["rtol"][middle])
    ours = [s for s in names if s in OURS]
    peers = [s for s in names if s in PEERS]
    lines += [
        "",
        f"drift of the conserved C relative to ‖C‖ + ‖W‖², largest over time, rtol {rtol:.0e}",
    ]
    lines.append(f"   {''.join(f'{_short(s):>11}' for s in ours)}  peers, at the end")
    for p in data["problem"].values:
        one = data.sel(problem=p).isel(rtol=middle)
        cells = "".join(f"{_small(one['drift'].sel(solver=s)):>11}" for s in ours)
        ends = ", ".join(
            f"{_short(s)} {_small(one['final_drift'].sel(solver=s))}"
            for s in peers
            if np.isfinite(one["final_drift"].sel(solver=s))
        )
        lines.append(f"{p:<3}{cells}  {ends}")
    conserving = [s for s in ours if s.endswith("conserving")]
    if conserving:
        worst = float(data["drift"].sel(solver=conserving).max())
        lines.append(f"largest drift of conserving at any tolerance: {worst:.1e}")
    return "\n".join(lines)


def _plain(label: str) -> str:
    for mark, text in (("$", ""), (r"\times 10^", "e"), ("10^", "1e"), ("_1", "1")):
        label = label.replace(mark, text)
    return label


def _short(solver: str) -> str:
    return solver.removeprefix("gradflow ").removeprefix("SciPy ").removeprefix("diffrax ")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if np.isfinite(seconds) else "-"


def _ratio(value: Any) -> str:
    return f"{float(value):.2f}" if np.isfinite(value) else "-"


def _small(value: Any) -> str:
    return f"{float(value):.1e}" if np.isfinite(value) else "-"


def figure(data: xr.Dataset) -> Figure:
    """Seconds against error, a panel for every problem."""
    problems, names = data["problem"].values, data["solver"].values
    columns = min(4, len(problems))
    rows = -(-len(problems) // columns)
    beside = columns < 4
    fig, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.1 * columns + (4.6 if beside else 0.4), 1.7 + 2.7 * rows),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    colours = dict(zip(OURS, gf.plot.palette(len(OURS)), strict=True))
    peers = dict(zip(PEERS, "osD^vXP", strict=True))
    handles: dict[str, Any] = {}
    for ax, p in zip(axes.flat, problems, strict=False):
        # Peers first, auto last: on top.
        for name in reversed(names):
            one = data.sel(problem=p, solver=name)
            line: dict[str, Any] = {"color": colours.get(name), "marker": ".", "lw": 1.4}
            if name == AUTO:
                line |= {"lw": 3.2, "zorder": 5}
            elif name in peers:
                grey = "0.6" if name.startswith("SciPy") else "0.15"
                line = {"color": grey, "marker": peers[name], "ms": 4.5, "mfc": "white", "lw": 0.9}
            (drawn,) = ax.plot(one["error"], one["seconds"], **line, label=name)
            if np.any(np.isfinite(one["seconds"])):
                handles[name] = drawn
        for target in TARGETS:
            ax.axvline(target, color="0.8", lw=0.8, zorder=0)
        ax.set_title(f"{p}: {data['label'].sel(problem=p).values}".replace(", start", "\nstart"))
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.grid(axis="y", color="0.9", lw=0.6)
        low, high = ax.get_ylim()
        ax.set_ylim(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high)))
        ax.yaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].invert_xaxis()
    for ax in axes[-1]:
        ax.set_xlabel("largest error of the map")
    for ax in axes[:, 0]:
        ax.set_ylabel("wall time of a run (s)")
    for ax in list(axes.flat)[len(problems) :]:
        ax.remove()
    ordered = [name for name in names if name in handles]
    fig.legend(
        [handles[name] for name in ordered],
        ordered,
        loc="outside right center" if beside else "outside lower center",
        ncols=1 if beside else 6,
    )
    fig.suptitle(_headline(data))
    return fig


def _headline(data: xr.Dataset) -> str:
    found = ratios(data, TARGETS[-1])
    speedups = found["speedup"].values
    if not np.any(np.isfinite(speedups)):
        return "Error against time"
    won, compared = int(np.sum(speedups > 1)), int(np.sum(np.isfinite(speedups)))
    low, high = np.nanmin(speedups), np.nanmax(speedups)
    by = f"{low:.2g}" if compared == 1 else f"{low:.2g} to {high:.2g}"
    return (
        f"At an error of 1e-8 auto is faster than the fastest peer on {won} of {compared} "
        f"problems:\npeer / auto = {by} (more accurate to the right)"
    )
