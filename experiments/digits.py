"""On scanned digits the strongest modes are learnt first, and digits emerge from their average.

The end-to-end map is fitted to the 8 × 8 images and labels of ``gf.datasets.digits()`` from a
small balanced start, once with whitened inputs and once with the inputs as they are. With whitened
inputs every mode is predicted from the start alone: ``W_1 v`` and ``W_2ᵀ u`` along a mode grow
like ``e^{st}``, so that it has the effective start ``u_0 = ¼‖W_1 v + W_2ᵀ u‖²`` and is half learnt
at ``ln(s/u_0 − 1)/(2s)``.
"""

from __future__ import annotations

import dataclasses

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from scipy.stats import spearmanr

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Width of the hidden layer.
    hidden_width: int = 32
    # Singular value of both layers at the start.
    scale: float = 1e-8
    # End of the run with the inputs as they are.
    t1_raw: float = 1000.0
    # Relative tolerance of the solver.
    rtol: float = 1e-8
    # Number of saved times.
    points: int = 500
    # Seed of the start.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """A wider hidden layer, and the run with raw inputs until even weak modes are learnt."""
        return cls(hidden_width=256, scale=1e-10, t1_raw=20000.0, points=4000)


def compute(config: Config) -> xr.Dataset:
    """Modes against time, whitened and not, predicted learning times, and digits in pixels."""
    X, Y = gf.datasets.digits()
    widths = (X.shape[1], config.hidden_width, Y.shape[1])
    start = gf.initialize.balanced(jax.random.key(config.seed), widths, config.scale)
    method = gf.Method(rtol=config.rtol, atol=config.scale * 1e-7)
    problem = gf.Problem.from_data(X, Y, whiten=True)
    s = np.asarray(problem.singular_values)
    left, right = map(np.asarray, problem.singular_bases())
    grown = np.asarray(start.weights[0]) @ right + np.asarray(start.weights[1]).T @ left
    starts = 0.25 * np.sum(grown**2, axis=0)
    predicted = np.asarray(gf.exact.escape_time(s, starts, depth=2))
    whitened = gf.simulate(
        gf.GradientFlow(problem), start, 1.35 * predicted.max(), save=config.points, method=method
    )
    raw_flow = gf.GradientFlow(gf.Problem.from_data(X, Y, whiten=False))
    ratios = np.geomspace(1e-3, 1.0, config.points - 1)
    raw = gf.simulate(
        raw_flow,
        start,
        config.t1_raw,
        save=np.concatenate([[0.0], config.t1_raw * ratios]),
        method=method,
        save_states=False,
    )
    learnt = gf.observables.learning_times(whitened)
    stages = _stages(learnt, np.asarray(whitened.ts))
    return xr.Dataset(
        {
            "modes": (("time", "mode"), np.asarray(whitened["modes"])),
            "raw_modes": (("raw_time", "mode"), np.asarray(raw["modes"])),
            "effective_rank": ("time", np.asarray(whitened["effective_rank"])),
            "data_rank": gf.observables.effective_rank(gf.LinearNetwork([np.diag(s)])),
            "learning_time": ("mode", learnt.times),
            "predicted_time": ("mode", predicted),
            "raw_learning_time": ("mode", gf.observables.learning_times(raw).times),
            "stage_time": ("stage", np.asarray(whitened.ts)[np.array(stages)]),
            "learnt_modes": (
                "stage",
                [int((learnt.times <= float(whitened.ts[i])).sum()) for i in stages],
            ),
            "believed": (
                ("stage", "digit", "row", "column"),
                np.stack(
                    [_in_pixels(np.asarray(whitened.network(i).end_to_end()), X, Y) for i in stages]
                ),
            ),
            "class_mean": (
                ("digit", "row", "column"),
                np.stack([X[Y[:, d] == 1].mean(axis=0).reshape(8, 8) for d in range(10)]),
            ),
        },
        coords={
            "time": np.asarray(whitened.ts),
            "raw_time": np.asarray(raw.ts),
            "singular_value": ("mode", s),
        },
        attrs={"runs": run_lines({"whitened": whitened, "not whitened": raw})},
    )


def _stages(learnt: gf.observables.LearningTimes, ts: np.ndarray) -> list[int]:
    """Saved indices between the first and second mode learnt, half-way through, and at the end."""
    times = learnt.times[learnt.order]
    half = len(times) // 2
    middles = [0.5 * (times[k - 1] + times[k]) for k in (1, half)]
    return [*(int(np.searchsorted(ts, t)) for t in middles), len(ts) - 1]


def _in_pixels(W: np.ndarray, X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """What each row of a map on whitened inputs holds to be the mean image of its class.

    ``W C_x^{1/2}`` is the cross-covariance of labels and pixels that the map stands for: the
    data's own ``C_yx``, class means times class frequencies, once all is learnt.
    """
    values, vectors = np.linalg.eigh(X.T @ X / len(X))
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    return (W @ root / Y.mean(axis=0)[:, None]).reshape(-1, 8, 8)


def rank_correlation(data: xr.Dataset, times: str) -> float:
    """Spearman's correlation of learning order and order of singular values: 1 if equal."""
    return float(spearmanr(data[times].values, -data["singular_value"].values).statistic)


def summary(data: xr.Dataset) -> str:
    """The order in which modes were learnt, the prediction's error, and the final pixels'."""
    lines = []
    for name, key in (("whitened", "learning_time"), ("not whitened", "raw_learning_time")):
        times = data[key].values
        learnt = np.isfinite(times)
        order = np.argsort(times, kind="stable")[: learnt.sum()]
        same = "equal to" if np.array_equal(order, np.arange(len(times))) else "not quite"
        lines.append(
            f"{name}: learnt order {' '.join(str(k + 1) for k in order)}, {same} the order of "
            f"singular values (rank correlation {rank_correlation(data, key):.3f}), half learnt "
            f"between t = {times[learnt].min():.3g} and {times[learnt].max():.3g}"
        )
    off = np.abs(data["learning_time"] / data["predicted_time"] - 1).max()
    far = np.abs(data["believed"][-1] - data["class_mean"]).max()
    lines.append(f"whitened: learning times within {float(off):.2%} of the prediction")
    lines.append(f"last images within {float(far):.1e} of the class means (grey levels 0 to 1)")
    return "\n".join(lines)


def figure(data: xr.Dataset) -> dict[str, Figure]:
    """Three figures: modes and rank against time, digits in pixels, and the part of whitening."""
    return {
        "": _modes_figure(data),
        "patterns": _patterns_figure(data),
        "whitening": _whitening_figure(data),
    }


def _modes_figure(data: xr.Dataset) -> Figure:
    fig, (top, bottom) = plt.subplots(
        2, 1, figsize=(8.5, 6.4), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    s = data["singular_value"].values
    for mode, colour in enumerate(gf.plot.palette(len(s))):
        top.axhline(s[mode], color=colour, ls="--", lw=0.9, alpha=0.8)
        top.plot(
            data["time"], data["modes"][:, mode], color=colour, label=f"{mode + 1}: {s[mode]:.3f}"
        )
    top.set_ylabel(r"mode strength $u_j^\top W\, v_j$")
    top.legend(title="mode: data", loc="center left", bbox_to_anchor=(1.0, 0.5))
    bottom.plot(data["time"], data["effective_rank"], color="black")
    bottom.axhline(float(data["data_rank"]), color="black", ls="--", lw=0.9, alpha=0.8)
    bottom.set_ylabel("effective rank of $W$")
    bottom.set_ylim(0, len(s) + 0.5)
    bottom.set_xlabel(gf.plot.TIME_LABEL)
    bottom.set_xlim(0, float(data["time"][-1]))
    fig.suptitle("Scanned digits, whitened: the strongest modes are learnt first")
    return fig


def _patterns_figure(data: xr.Dataset) -> Figure:
    stages = data.sizes["stage"]
    fig, axes = plt.subplots(stages + 1, 10, figsize=(10.5, 4.4), layout="constrained")
    rows = [*data["believed"].values, data["class_mean"].values]
    names = [
        f"t = {float(t):.0f}\n{int(k)} mode{'s' if k > 1 else ''} learnt"
        for t, k in zip(data["stage_time"], data["learnt_modes"], strict=True)
    ] + ["class means\nin the data"]
    for line, images, name in zip(axes, rows, names, strict=True):
        for digit, ax in enumerate(line):
            picture = ax.imshow(images[digit], cmap="gray_r", vmin=0, vmax=1)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(True)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8)
    for digit, ax in enumerate(axes[0]):
        ax.set_title(str(digit))
    fig.colorbar(picture, ax=axes, label="grey level", shrink=0.7)
    fig.suptitle("Each digit emerges from the average image, mode by mode")
    return fig


def _whitening_figure(data: xr.Dataset) -> Figure:
    fig, ax = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    s = data["singular_value"].values
    blue, orange, *_ = gf.plot.palette(2)
    ax.plot(s, data["predicted_time"], "_", color="black", ms=14, mew=1.5)
    ax.plot(s, data["learning_time"], "o", color=blue, ms=7)
    ax.plot(s, data["raw_learning_time"], "s", color=orange, ms=7)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("singular value of the mode in the data")
    ax.set_ylabel("half-learning time (learning rate × steps)")
    handles = [
        Line2D([], [], color=orange, marker="s", ls="", ms=7, label="inputs as they are"),
        Line2D([], [], color=blue, marker="o", ls="", ms=7, label="whitened inputs"),
        Line2D(
            [],
            [],
            color="black",
            marker="_",
            ls="",
            ms=14,
            mew=1.5,
            label="whitened, predicted from the start",
        ),
    ]
    ax.legend(handles=handles)
    ax.set_title("Without whitening the modes are learnt much further apart", fontweight="bold")
    return fig
