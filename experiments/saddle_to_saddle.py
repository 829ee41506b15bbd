"""A run from a small start goes from saddle to saddle, and the Hessian tells where it is.

Two layers pass strict saddles: there the smallest eigenvalue is minus the next singular value to
be learnt, and the number of negative ones is (hidden width − r)(modes − r) after r modes. Three
and more layers, all small beside the learnt modes, pass saddles where the form is almost blind:
negative curvature is seen on the way from one to the next only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the data, strongest first.
    singular_values: tuple[float, ...] = (4.0, 2.0, 1.0)
    # Inputs; there are as many outputs as singular values.
    inputs: int = 5
    # Width of every hidden layer.
    hidden_width: int = 4
    # Numbers of layers, one run each.
    depths: tuple[int, ...] = (2, 3)
    # Singular value of the end-to-end map at the start, which is balanced.
    product: float = 1e-5
    # Relative tolerance of the solver; the absolute one is 1e-6 of the start's layers.
    rtol: float = 1e-9
    # Number of saved times of every run, at each of which the Hessian is diagonalised.
    points: int = 300
    # Eigenvalues up to this fraction of the sharpness of a balanced minimum count as zero.
    tol: float = 0.01
    # A saddle is passed within this fraction of the strongest mode that is left to learn.
    within: float = 0.2
    # Seed of the starts.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Wider and deeper, more modes, a smaller start."""
        return cls(
            singular_values=(8.0, 4.0, 2.0, 1.0),
            inputs=8,
            hidden_width=8,
            depths=(2, 3, 4),
            product=1e-6,
        )


def compute(config: Config) -> xr.Dataset:
    """Loss, smallest eigenvalue and inertia along one run of every depth, and its passages."""
    s = np.array(config.singular_values)
    problem = gf.Problem.from_singular_values(s, (len(s), config.inputs))
    saddles = [tuple(range(1, r + 1)) for r in range(len(s))]
    runs, curves, passed, limits = {}, [], [], []
    for depth in config.depths:
        widths = (config.inputs, *(config.hidden_width,) * (depth - 1), len(s))
        traj = _run(config, problem, widths)
        tol = config.tol * depth * s[0] ** (2 - 2 / depth)
        spectra = [_spectrum(problem, traj.network(i)) for i in range(len(traj.ts))]
        curves.append([(values[0], (values < -tol).sum()) for values in spectra])
        at_saddles = [_spectrum(problem, _balanced(problem, widths, S)) for S in saddles]
        limits.append([(values[0], (values < -tol).sum()) for values in at_saddles])
        passages = gf.landscape.saddle_passages(traj, problem, within=config.within, tol=config.tol)
        passed.append(_by_rank(passages, saddles))
        runs[f"{depth} layers"] = traj
    smallest, negative = np.moveaxis(np.array(curves), -1, 0)
    saddle_smallest, saddle_negative = np.moveaxis(np.array(limits), -1, 0)
    return xr.Dataset(
        {
            "t": (("depth", "time"), np.stack([traj.ts for traj in runs.values()])),
            "loss": (("depth", "time"), np.stack([traj.loss for traj in runs.values()])),
            "smallest": (("depth", "time"), smallest),
            "negative": (("depth", "time"), negative),
            "saddle_smallest": (("depth", "learnt"), saddle_smallest),
            "saddle_negative": (("depth", "learnt"), saddle_negative),
            "passage": (("depth", "learnt", "measure"), np.stack(passed)),
        },
        coords={
            "depth": list(config.depths),
            "learnt": [len(S) for S in saddles],
            "value": ("learnt", [0.5 * float(np.sum(s[len(S) :] ** 2)) for S in saddles]),
            "measure": list(_MEASURES),
        },
        attrs={"runs": run_lines(runs), "tol": config.tol, "within": config.within},
    )


# Of a passage, as named in gradflow.landscape.Passage.
_MEASURES = ("time", "start", "end", "distance", "smallest_gradient", "smallest_eigenvalue")


def _run(config: Config, problem: gf.Problem, widths: tuple[int, ...]) -> gf.Trajectory:
    """The run, ended a little after everything is learnt."""
    depth = len(widths) - 1
    scale = config.product ** (1 / depth)
    start = gf.initialize.balanced(jax.random.key(config.seed), widths, scale)
    # Long enough for a start whose weakest mode is a thousand times smaller.
    last = min(config.singular_values)
    t1 = float(gf.exact.escape_time(last, 1e-3 * config.product, depth))
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=1e-6 * scale)

    def until(end):
        return gf.simulate(gf.GradientFlow(problem), start, end, save=config.points, method=method)

    whole = until(t1)
    done = np.asarray(whole.loss) < 1e-6 * float(whole.loss[0])
    return until(float(whole.ts[np.argmax(done)])) if done.any() else whole


def _spectrum(problem: gf.Problem, net: gf.LinearNetwork) -> np.ndarray:
    return np.asarray(gf.landscape.spectrum(problem, net))


def _balanced(
    problem: gf.Problem, widths: tuple[int, ...], signature: tuple[int, ...]
) -> gf.LinearNetwork:
    """The critical point of a signature with nothing beside its modes."""
    return gf.landscape.critical_point(problem, widths, signature)


def _by_rank(passages: list, saddles: list[tuple[int, ...]]) -> np.ndarray:
    """The measures of the passage at every saddle ``(1, …, r)``, nan where there was none."""
    found = {p.signature: [getattr(p, name) for name in _MEASURES] for p in passages}
    nothing = [np.nan] * len(_MEASURES)
    return np.array([found.get(S, nothing) for S in saddles])


def _signature(rank: int) -> str:
    return "{" + ", ".join(str(i + 1) for i in range(rank)) + "}"


def summary(data: xr.Dataset) -> str:
    """Every passage: when, how long, how close, and the smallest eigenvalue beside theory."""
    lines = []
    for depth in data["depth"].values:
        lines.append(f"{depth} layers")
        for r in data["learnt"].values:
            one = data["passage"].sel(depth=depth, learnt=r)
            if np.isnan(one[0]):
                lines.append(f"  saddle {_signature(r)}: not passed")
                continue
            time, start, end, distance, gradient, smallest = one.values
            at = data.sel(depth=depth, learnt=r)
            limit = round(float(at["saddle_smallest"]), 3) + 0
            nearest = int(np.argmin(abs(at["t"].values - time)))
            lines.append(
                f"  saddle {_signature(r)}, loss {float(at['value']):g}: nearest at t = "
                f"{time:.3g}, distance {distance:.1e}, plateau of {end - start:.3g}, gradient "
                f"{gradient:.1e}; smallest eigenvalue {smallest:.3f} (at the saddle "
                f"{limit:.3f}), {int(at['negative'][nearest])} negative "
                f"({int(at['saddle_negative'])})"
            )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Loss, smallest eigenvalue and number of negative ones against time, a column per depth."""
    depths = data["depth"].values
    fig, axes = plt.subplots(
        3,
        len(depths),
        figsize=(1.5 + 4.9 * len(depths), 8.2),
        height_ratios=(1.25, 1, 1),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    colours = gf.plot.palette(data.sizes["learnt"])
    line: dict[str, Any] = {"color": "black", "lw": 1.6}
    for column, depth in enumerate(depths):
        one = data.sel(depth=depth)
        loss, smallest, negative = axes[:, column]
        loss.plot(one["t"], one["loss"], **line)
        smallest.plot(one["t"], one["smallest"], **line)
        negative.plot(one["t"], one["negative"], drawstyle="steps-mid", **line)
        for r, colour in zip(data["learnt"].values, colours, strict=True):
            time, start, end, distance = one["passage"].sel(learnt=r).values[:4]
            saddle = one.sel(learnt=r)
            level = float(saddle["value"])
            loss.axhline(level, color=colour, ls=":", lw=1.2, zorder=0)
            if np.isnan(time):
                continue
            for ax in (loss, smallest, negative):
                ax.axvspan(start, end, color=colour, alpha=0.13, lw=0)
            at = time, float(np.interp(time, one["t"], one["loss"]))
            loss.plot(*at, "o", color=colour, ms=7)
            loss.annotate(f"{distance:.0e}", at, (6, 5), textcoords="offset points", fontsize=9)
            dashes = {"colors": colour, "lw": 3.0, "linestyles": (0, (2, 1))}
            smallest.hlines(float(saddle["saddle_smallest"]), start, end, **dashes)
            negative.hlines(float(saddle["saddle_negative"]), start, end, **dashes)
        loss.set_title(f"{depth} layers")
        loss.set_xlim(0, float(one["t"][-1]))
        loss.set_ylim(-0.04 * float(data["value"][0]), 1.1 * float(data["value"][0]))
        negative.set_xlabel(gf.plot.TIME_LABEL)
        negative.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("smallest\nHessian eigenvalue")
    axes[2, 0].set_ylabel(f"negative eigenvalues\n(beyond {data.attrs['tol']:.0%} of sharpness)")
    handles: list[Artist] = [
        Line2D([], [], **line),
        Line2D([], [], color="0.4", ls=":", lw=1.2),
        Line2D([], [], color="0.4", marker="o", ls="", ms=7),
        Line2D([], [], color="0.4", lw=3, ls=(0, (2, 1))),
    ]
    labels = [
        "run",
        "critical value",
        "nearest to the saddle, with the distance",
        "at the saddle itself",
    ]
    for r, colour in zip(data["learnt"].values, colours, strict=True):
        handles.append(Patch(color=colour, alpha=0.3, lw=0))
        near = "" if r else f"within {data.attrs['within']:g} $s_{{r+1}}$ of "
        labels.append(f"{near}{'saddle ' if r else 'the origin, '}{_signature(r)}")
    fig.legend(handles, labels, loc="outside lower center", ncols=4)
    fig.suptitle(
        "Between learning one mode and the next the run rests at a saddle: strict with two layers, "
        "flat with more"
    )
    return fig
