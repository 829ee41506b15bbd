"""What survives of the quadratic theory for cross-entropy, Huber loss and matrix completion.

Three-layer networks start small and balanced under four losses ``ℓ(W)`` of the end-to-end map: the
quadratic one, Huber's, and that of a partly observed matrix, all for the same low-rank target, and
cross-entropy for scanned digits. What needs only ``R = −∇ℓ`` survives: the laws ``C_i`` are kept
and singular values move at ``σ̇_r = h σ_r^{2−2/h} ⟨R, u_r v_rᵀ⟩``, so that they are learnt one after
another (less apart under cross-entropy). What needs a finite minimum does not: on separable data
the cross-entropy falls like ``ln(1/ℓ) = ln t + 2 ln m − (2/h) ln‖W‖ + const`` with the smallest
margin m, and W grows like ``ln t`` for ever. (Once the weights θ of all layers
point along the gradient, ``‖∇L‖ ≈ h m ℓ/‖θ‖``, and by balance ``‖θ‖² ∝ ‖W‖^{2/h}``.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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

    # Singular values of the target that are not zero.
    singular_values: tuple[float, ...] = (4.0, 2.0, 1.0)
    # Width of all layers for the target.
    width: int = 12
    # Number of layers.
    depth: int = 3
    # Scale of the starts for the target (singular value of every layer).
    scale: float = 0.04
    # End of the runs for the target.
    t1: float = 120.0
    # Where Huber's loss turns linear.
    threshold: float = 0.2
    # Fraction of the target's entries that is observed.
    observed: float = 0.7
    # Every how many of the digits' images is used.
    every: int = 12
    # Width of the hidden layers for the digits.
    digits_width: int = 12
    # Scale of the start for the digits.
    digits_scale: float = 0.1
    # End of the run for the digits.
    digits_t1: float = 10000.0
    # Smallest and largest scale of the starts of the completion, and how many.
    completion_scales: tuple[float, float, int] = (0.02, 1.5, 9)
    # Random starts of every scale.
    seeds: int = 3
    # Relative tolerance of the solver; the absolute one is a millionth of the start's scale.
    rtol: float = 1e-8
    # Number of saved times.
    points: int = 300
    # Seed of target, mask and starts.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """All digits, a wider target, longer runs and more scales."""
        return cls(
            width=32,
            scale=0.02,
            t1=250.0,
            every=1,
            digits_width=32,
            digits_t1=100000.0,
            completion_scales=(0.005, 2.0, 17),
            seeds=8,
            points=1000,
        )


_ON_TARGET = ("quadratic", "Huber", "completion")
_ON_DIGITS = "cross-entropy, digits"


def compute(config: Config) -> xr.Dataset:
    """Singular values and their rates under all losses, and completion against scale."""
    problems, target, mask = _problems(config)
    runs, parts = {}, []
    for name, problem in problems.items():
        d_out, d_in = problem.shape
        digits = name == _ON_DIGITS
        hidden = config.digits_width if digits else config.width
        scale = config.digits_scale if digits else config.scale
        t1 = config.digits_t1 if digits else config.t1
        widths = (d_in, *[hidden] * (config.depth - 1), d_out)
        start = gf.initialize.balanced(jax.random.key(config.seed), widths, scale)
        if digits:
            save = np.concatenate([[0.0], np.geomspace(1.0, t1, config.points - 1)])
        else:
            save = np.linspace(0.0, t1, config.points)
        flow = gf.GradientFlow(problem)
        method = gf.Method(solver="explicit", rtol=config.rtol, atol=1e-6 * scale)
        runs[name] = gf.simulate(flow, start, t1, save=save, method=method)
        parts.append(_measured(runs[name], flow, len(config.singular_values)))
    X, Y = _digits(config)
    margins = _smallest_margins(runs[_ON_DIGITS], X, Y)
    optimum = gf.Problem.from_data(X, Y).optimum
    data = xr.concat(parts, dim=xr.DataArray(list(problems), dims="loss_name", name="loss_name"))
    data["margin"] = ("time", margins)
    data = data.merge(_completion(config, problems["completion"], target, mask))
    data.attrs = {
        "runs": run_lines(runs),
        "depth": config.depth,
        "target_norm": float(np.linalg.norm(target)),
        "optimum_norm": float(np.linalg.norm(np.asarray(optimum))),
        "images": len(X),
    }
    return data


def _smallest_margins(run: gf.Trajectory, X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """The label's score over the best other one, smallest over images, at every saved time."""
    smallest = []
    for W in _product([np.asarray(w) for w in run.states.weights]):
        scores = X @ W.T
        others = np.where(Y > 0, -np.inf, scores).max(axis=1)
        smallest.append((scores[Y > 0] - others).min())
    return np.array(smallest)


def _digits(config: Config) -> tuple[np.ndarray, np.ndarray]:
    X, Y = gf.datasets.digits()
    return X[:: config.every], Y[:: config.every]


def _problems(config: Config) -> tuple[dict[str, gf.Problem], np.ndarray, np.ndarray]:
    """The four problems by name, the target and the mask of its observed entries."""
    d, s = config.width, np.array(config.singular_values)
    rng = np.random.default_rng(config.seed)
    U, V = (np.linalg.qr(rng.normal(size=(d, len(s))))[0] for _ in range(2))
    target = (U * s) @ V.T
    mask = rng.random((d, d)) < config.observed
    X, Y = _digits(config)
    losses: list[Any] = [
        # The quadratic loss, as one that never turns linear: one program serves the first two.
        gf.losses.Huber(target, 1e9),
        gf.losses.Huber(target, config.threshold),
        gf.losses.Masked(target, mask),
    ]
    problems = [gf.Problem.from_loss(loss, (d, d)) for loss in losses]
    entropy = gf.losses.CrossEntropy(X, Y)
    problems.append(gf.Problem.from_loss(entropy, (Y.shape[1], X.shape[1])))
    return dict(zip((*_ON_TARGET, _ON_DIGITS), problems, strict=True)), target, mask


def _product(weights: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(lambda product, W: W @ product, weights[1:], weights[0])


def _measured(run: gf.Trajectory, flow: gf.GradientFlow, shown: int) -> xr.Dataset:
    """Singular values, and their rates by the network's motion and by the balanced equation."""
    weights = [np.asarray(w) for w in run.states.weights]
    maps, h = _product(weights), len(weights)
    field = jax.jit(
        jax.vmap(lambda net, W: (flow.vector_field(0.0, net), flow.problem.residual(W)))
    )
    rates, R = field(run.states, maps)
    moving = [np.asarray(w) for w in rates.weights]
    velocity = sum(_product([*weights[:j], moving[j], *weights[j + 1 :]]) for j in range(h))
    U, sigma, Vt = np.linalg.svd(maps, full_matrices=False)
    actual = np.einsum("tir,tij,trj->tr", U, velocity, Vt, optimize=True)
    along = np.einsum("tir,tij,trj->tr", U, np.asarray(R), Vt, optimize=True)
    balanced = h * sigma ** (2 - 2 / h) * along
    # Relative to the largest rate that the equation allows a mode of this strength.
    bound = h * sigma ** (2 - 2 / h) * np.linalg.norm(np.asarray(R), axis=(1, 2))[:, None]
    error = np.abs(actual - balanced) / bound
    return xr.Dataset(
        {
            "t": ("time", np.asarray(run.ts)),
            "loss": ("time", np.asarray(run.loss)),
            "norm": ("time", np.linalg.norm(maps, axis=(1, 2))),
            "singular_values": (("time", "mode"), sigma[:, :shown]),
            "rate": (("time", "mode"), actual[:, :shown]),
            "balanced_rate": (("time", "mode"), balanced[:, :shown]),
            "rate_error": ("time", error[:, :shown].max(axis=1)),
            "drift": ("time", np.asarray(run["drift"])),
        }
    )


def _completion(
    config: Config, problem: gf.Problem, target: np.ndarray, mask: np.ndarray
) -> xr.Dataset:
    """Effective rank and error on the hidden entries against the scale of the start."""
    flow, d = gf.GradientFlow(problem), config.width
    low, high, count = config.completion_scales
    scales = np.geomspace(low, high, count)
    ranks, errors = np.zeros((2, count, config.seeds))
    for i, a in enumerate(scales):
        # The hidden entries follow slowly, long after the observed ones are fitted.
        t1 = 4 * config.t1 * max(1.0, config.scale / a)
        method = gf.Method(solver="explicit", rtol=1e-6, atol=1e-6 * a)
        for j in range(config.seeds):
            key = jax.random.key(config.seed + 10 + j)
            start = gf.initialize.balanced(key, (d,) * (config.depth + 1), a)
            # As many saved times as above, so that the same program serves.
            run = gf.simulate(flow, start, t1, save=config.points, method=method)
            W = np.asarray(run.final.end_to_end())
            ranks[i, j] = float(gf.observables.effective_rank(run.final))
            errors[i, j] = np.linalg.norm((W - target)[~mask]) / np.linalg.norm(target[~mask])

    def rank(matrix):
        return float(gf.observables.effective_rank(gf.LinearNetwork([matrix])))

    return xr.Dataset(
        {
            "completion_rank": (("scale", "seed"), ranks),
            "completion_error": (("scale", "seed"), errors),
            "target_rank": rank(target),
            "observed_rank": rank(np.where(mask, target, 0.0)),
        },
        coords={"scale": scales},
    )


def growth(data: xr.Dataset) -> tuple[float, float, float]:
    """Over the last decade: d‖W‖/d ln t, and −d ln ℓ/d ln t measured and by the margin."""
    one = data.sel(loss_name=_ON_DIGITS)
    last = _late(one["t"].values, 0.1)
    ln_t = np.log(one["t"].values[last])
    norm, loss, predicted = (
        np.polyfit(ln_t, y[last], 1)[0]
        for y in (one["norm"].values, -np.log(one["loss"].values), -np.log(_predicted_loss(data)))
    )
    return float(norm), float(loss), float(predicted)


def _late(t: np.ndarray, part: float) -> np.ndarray:
    return t >= part * t[-1]


def _predicted_loss(data: xr.Dataset) -> np.ndarray:
    """``ℓ ∝ ‖W‖^{2/h} / (t m²)``, through the last point; not a number where m ≤ 0."""
    one = data.sel(loss_name=_ON_DIGITS)
    t, norm, margin = (one[name].values for name in ("t", "norm", "margin"))
    good = (margin > 0) & (t > 0)
    shape = np.full(len(t), np.nan)
    shape[good] = norm[good] ** (2 / data.attrs["depth"]) / (t[good] * margin[good] ** 2)
    return float(one["loss"][-1]) * shape / shape[-1]


def half_times(data: xr.Dataset) -> np.ndarray:
    """When each singular value first reaches half of its last value, per loss and mode."""
    reached = data["singular_values"] >= 0.5 * data["singular_values"].isel(time=-1)
    first = reached.argmax("time")
    return data["t"].isel(time=first).values


def summary(data: xr.Dataset) -> str:
    """Drift, error of the rate equation, order of learning; growth of the norm; completion."""
    lines = []
    for name, times in zip(data["loss_name"].values, half_times(data), strict=True):
        one = data.sel(loss_name=name)
        half = ", ".join(f"{t:.3g}" for t in times)
        lines.append(
            f"{name}: largest drift {float(one['drift'].max()):.1e}, rate equation within "
            f"{float(one['rate_error'].max()):.1e}, half of the last singular values at t = {half}"
        )
    norm, fall, predicted = growth(data)
    at = data.isel(scale=[0, -1]).mean("seed")
    ranks, errors = at["completion_rank"].values, at["completion_error"].values
    return "\n".join(
        [
            *lines,
            f"cross-entropy on {data.attrs['images']} images: smallest margin "
            f"{float(data['margin'][-1]):.2f} at the end; over the last decade of time "
            f"d‖W‖/d ln t = {norm:.2f}, loss ∝ t^{-fall:.3f} (predicted from the margin "
            f"{-predicted:.3f})",
            f"completion from scale {float(at['scale'][0]):.2g}: effective rank {ranks[0]:.2f}, "
            f"error on hidden entries {errors[0]:.1e}; from scale {float(at['scale'][1]):.2g}: "
            f"{ranks[1]:.2f}, {errors[1]:.2f} (target's effective rank "
            f"{float(data['target_rank']):.2f})",
        ]
    )


def figure(data: xr.Dataset) -> dict[str, Figure]:
    """Three figures: what survives, what does not, and completion against scale."""
    return {
        "": _rates_figure(data),
        "norm": _norm_figure(data),
        "completion": _completion_figure(data),
    }


_CIRCLES: dict[str, Any] = {"marker": "o", "ls": "", "mfc": "white", "ms": 4}


def _rates_figure(data: xr.Dataset) -> Figure:
    names = data["loss_name"].values
    fig, axes = plt.subplots(2, len(names), figsize=(12.0, 5.2), sharex="col", layout="constrained")
    colours = gf.plot.palette(data.sizes["mode"])
    for column, name in enumerate(names):
        one, (top, bottom) = data.sel(loss_name=name), axes[:, column]
        t = one["t"].values
        logarithmic = name == _ON_DIGITS
        for mode, colour in enumerate(colours):
            top.plot(t, one["singular_values"][:, mode], color=colour)
            rate = abs(one["rate"][:, mode].values)
            bottom.plot(t, rate, color=colour, lw=1.3)
            at = _spread(t, rate)
            bottom.plot(t[at], abs(one["balanced_rate"][at, mode]), **_CIRCLES, color=colour)
        fastest = float(one["rate"].max())
        bottom.set_yscale("log")
        bottom.set_ylim(1e-4 * fastest, 3 * fastest)
        if logarithmic:
            top.set_xscale("log")
            top.set_xlim(10, t[-1])
        else:
            top.set_xlim(0, t[-1])
        lost, off = float(one["drift"].max()), float(one["rate_error"].max())
        top.set_title(f"{name}\nlaws kept to {lost:.0e}, rates to {off:.0e}")
        bottom.set_xlabel(gf.plot.TIME_LABEL)
    axes[0, 0].set_ylabel(r"singular values $\sigma_r$ of $W$")
    axes[1, 0].set_ylabel(r"rates $|\dot\sigma_r|$")
    handles = [
        Line2D([], [], color=colour, label=f"singular value {mode + 1}")
        for mode, colour in enumerate(colours)
    ]
    handles += [
        Line2D([], [], color="black", lw=1.3, label="rate of the network"),
        Line2D(
            [],
            [],
            **_CIRCLES,
            color="black",
            label=r"$h\,\sigma_r^{2-2/h}\langle R, u_r v_r^\top\rangle$",
        ),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    fig.suptitle("Every loss keeps the laws and the rate equation; stages blur under cross-entropy")
    return fig


def _spread(t: np.ndarray, rate: np.ndarray, count: int = 14) -> np.ndarray:
    """Indices spread evenly along a curve on a log axis of four decades, rather than in time."""
    x = np.linspace(0, 1, len(t))
    height = np.log10(np.maximum(rate, 1e-4 * rate.max())) / 4
    length = np.hypot(np.diff(x), np.diff(height))
    along = np.concatenate([[0.0], np.cumsum(length)])
    return np.unique(np.searchsorted(along, np.linspace(0, along[-1], count)).clip(0, len(t) - 1))


def _norm_figure(data: xr.Dataset) -> Figure:
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(13.5, 4.4), layout="constrained")
    colours = gf.plot.palette(4)
    dashed: dict[str, Any] = {"color": "black", "lw": 1.4, "ls": (0, (2, 2))}
    for name, colour in zip(_ON_TARGET, colours[:3], strict=True):
        one = data.sel(loss_name=name)
        left.plot(one["t"], one["norm"], color=colour, label=name)
    left.axhline(data.attrs["target_norm"], **dashed, label="norm of the target")
    left.set_xlim(0, float(one["t"][-1]))
    left.set_ylabel(r"norm $\|W\|_F$ of the end-to-end map")
    left.set_title("losses with a finite minimum")
    left.legend(loc="lower right")
    one = data.sel(loss_name=_ON_DIGITS)
    one = one.isel(time=slice(1, None))
    t, norm = one["t"].values, one["norm"].values
    slope, _, _ = growth(data)
    late = _late(t, 0.03)
    middle.plot(t, norm, color=colours[3], label="cross-entropy")
    line = norm[-1] + slope * np.log(t / t[-1])
    middle.plot(t[late], line[late], color="black", ls="--", lw=1.4, label="straight in ln t")
    middle.axhline(data.attrs["optimum_norm"], **dashed, label="minimum of the\nquadratic loss")
    middle.set_title("digits: the map keeps growing")
    right.plot(t, one["loss"], color=colours[3], label="cross-entropy")
    label = r"predicted, $\propto \|W\|^{2/h} / (t\, m^2)$" + "\nwith the smallest margin m"
    line = _predicted_loss(data)[1:]
    right.plot(t[late], line[late], color="black", ls="--", lw=1.4, label=label)
    right.set_yscale("log")
    right.set_ylabel("loss")
    right.set_title("digits: the loss falls nearly like 1/t")
    for ax in (left, middle, right):
        ax.set_xlabel(gf.plot.TIME_LABEL)
    for ax in (middle, right):
        ax.set_xscale("log")
        ax.set_xlim(10, t[-1])
    middle.legend(loc="upper left")
    right.legend(loc="lower left")
    fig.suptitle("Cross-entropy has no finite minimum: the map grows like the logarithm of time")
    return fig


def _completion_figure(data: xr.Dataset) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(11.0, 4.4), layout="constrained")
    blue, orange, *_ = gf.plot.palette(2)
    scales = data["scale"].values
    for ax, name, colour in ((left, "completion_rank", blue), (right, "completion_error", orange)):
        ax.plot(scales, data[name], "o", ms=4.5, mfc="none", color=colour)
        ax.plot(scales, data[name].mean("seed"), color=colour, label="completion, mean of starts")
        ax.set_xscale("log")
        ax.set_xlabel("scale a of the start (singular value of the layers)")
    dashed: dict[str, Any] = {"color": "black", "lw": 1.3}
    left.axhline(float(data["target_rank"]), ls="--", **dashed, label="target")
    left.axhline(float(data["observed_rank"]), ls=":", **dashed, label="observed, 0 elsewhere")
    right.axhline(1.0, ls=":", **dashed, label="observed, 0 elsewhere")
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    left.set_ylabel("effective rank of the end-to-end map")
    right.set_ylabel("relative error on the hidden entries")
    for ax in (left, right):
        ax.legend(loc="lower right")
    fig.suptitle(
        "Small starts complete a matrix at the rank of the target, large ones at full rank"
    )
    return fig
