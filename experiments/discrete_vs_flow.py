"""Gradient descent against its flow: distance and drift of the laws by step size, and stability.

Gradient descent with step η stays within O(η) of the flow over a fixed time. The conserved
``C_i = W_{i+1}ᵀW_{i+1} − W_iW_iᵀ`` change in one step by exactly ``η²(G_{i+1}ᵀG_{i+1} − G_iG_iᵀ)``,
with the gradients G, and so over a run by ``η ∫ (G_{i+1}ᵀG_{i+1} − G_iG_iᵀ) dt`` along the flow, to
first order. Near a balanced minimum a perturbation along the sharpest direction changes by the
factor ``1 − η h s_1^{2−2/h}`` per step: it decays below ``η* = 2/(h s_1^{2−2/h})``, grows above.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from scipy.integrate import cumulative_simpson

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the target, strongest first.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Widths from input to output of the run that is compared with the flow.
    widths: tuple[int, ...] = (4, 6, 5, 3)
    # Scale of its random start.
    scale: float = 0.6
    # End of the run.
    t1: float = 6.4
    # Largest step size, a whole fraction of t1.
    largest_step: float = 0.02
    # How often it is halved.
    halvings: int = 4
    # Relative tolerance of the flow.
    rtol: float = 1e-11
    # Numbers of layers whose stability is measured.
    depths: tuple[int, ...] = (2, 3, 4)
    # Width of their hidden layers.
    hidden_width: int = 5
    # Step sizes as fractions of the predicted threshold: smallest, largest, how many.
    fractions: tuple[float, float, int] = (0.9, 1.1, 21)
    # Size of the perturbation of the minimum.
    perturbation: float = 1e-6
    # Steps of gradient descent from it; growth is measured over the second half.
    steps: int = 40
    # Seed of starts and perturbations.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Smaller steps, more depths, wider layers and finer fractions of the threshold."""
        return cls(
            widths=(16, 24, 20, 12),
            largest_step=0.02,
            halvings=8,
            depths=(2, 3, 4, 6, 8),
            hidden_width=16,
            fractions=(0.9, 1.1, 41),
        )


def compute(config: Config) -> xr.Dataset:
    """Distance and drift for all step sizes, and growth factors around the threshold."""
    accuracy, accuracy_runs = _accuracy(config)
    stability, stability_runs = _stability(config)
    data = xr.merge([accuracy, stability])
    data.attrs["runs"] = run_lines({**accuracy_runs, **stability_runs})
    return data


def _laws(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``C_i`` of weights that may be stacked along leading axes."""
    pairs = itertools.pairwise(weights)
    return [b.swapaxes(-1, -2) @ b - a @ a.swapaxes(-1, -2) for a, b in pairs]


def _accuracy(config: Config) -> tuple[xr.Dataset, dict[str, gf.Trajectory | list[gf.Trajectory]]]:
    shape = (config.widths[-1], config.widths[0])
    flow = gf.GradientFlow(gf.Problem.from_singular_values(config.singular_values, shape))
    start = gf.initialize.gaussian(jax.random.key(config.seed), config.widths, config.scale)
    field = jax.jit(jax.vmap(lambda net: flow.vector_field(0.0, net)))
    count = round(config.t1 / config.largest_step)
    etas = config.t1 / count / 2.0 ** np.arange(config.halvings + 1)
    method = gf.Method(rtol=config.rtol, atol=1e-2 * config.rtol)
    exact = gf.simulate(flow, start, config.t1, save=count + 1, method=method)
    smooth = list(map(np.asarray, exact.states.weights))
    # First-order drift: the integral of G_{i+1}ᵀG_{i+1} − G_iG_iᵀ along the flow.
    rates = _laws(list(map(np.asarray, field(exact.states).weights)))
    ts = np.asarray(exact.ts)
    integrals = [cumulative_simpson(rate, x=ts, axis=0, initial=0) for rate in rates]
    coefficient = max(float(np.abs(one).max()) for one in integrals)

    runs, distances, drifts, identities, single = [], [], [], [], []
    for halving, eta in enumerate(etas):
        # As many steps for all of them, so that one program serves all; those past t1 are cut.
        run = gf.descend(flow, start, float(eta), count * 2**config.halvings)
        runs.append(run)
        kept = slice(0, count * 2**halving + 1)
        weights = [np.asarray(w)[kept] for w in run.states.weights]
        at_saves = [w[:: 2**halving] for w in weights]
        gaps = [np.sum((a - b) ** 2, axis=(1, 2)) for a, b in zip(at_saves, smooth, strict=True)]
        distances.append(float(np.sqrt(sum(gaps).max())))
        drifts.append(float(np.max(run["drift"][kept])))
        G = [np.asarray(g)[kept] for g in field(run.states).weights]
        changes = [np.diff(c, axis=0) for c in _laws(weights)]
        said = [eta**2 * one[:-1] for one in _laws(G)]
        identities.append(_largest(a - b for a, b in zip(changes, said, strict=True)))
        single.append(_largest(changes))
    data = xr.Dataset(
        {
            "distance": ("eta", distances),
            "drift": ("eta", drifts),
            "predicted_drift": ("eta", etas * coefficient),
            "step_drift": ("eta", single),
            "identity_error": ("eta", identities),
        },
        coords={"eta": etas},
    )
    return data, {"flow": exact, f"gradient descent, {len(etas)} step sizes": runs}


def _largest(arrays) -> float:
    return max(float(np.abs(a).max()) for a in arrays)


def _stability(
    config: Config,
) -> tuple[xr.Dataset, dict[str, gf.Trajectory | list[gf.Trajectory]]]:
    s = config.singular_values
    problem = gf.Problem.from_singular_values(s)
    flow = gf.GradientFlow(problem)
    low, high, count = config.fractions
    fractions = np.linspace(low, high, count)
    rng = np.random.default_rng(config.seed)
    thresholds, deviations = [], []
    runs: dict[str, gf.Trajectory | list[gf.Trajectory]] = {}
    for depth in config.depths:
        widths = (len(s), *[config.hidden_width] * (depth - 1), len(s))
        minimum = gf.initialize.from_product(np.asarray(problem.target), widths)
        shift = [rng.normal(size=w.shape) for w in minimum.weights]
        size = config.perturbation / np.sqrt(sum(np.sum(v**2) for v in shift))
        pairs = zip(minimum.weights, shift, strict=True)
        start = gf.LinearNetwork([np.asarray(w) + size * v for w, v in pairs])
        threshold = float(gf.exact.max_learning_rate(s, depth))
        several = [
            gf.descend(flow, start, float(fraction * threshold), config.steps, save_states=False)
            for fraction in fractions
        ]
        runs[f"{depth} layers, {count} step sizes around η* = {threshold:.4f}"] = several
        # Whitened: the loss is half the squared distance of the map to the target.
        deviations.append([np.sqrt(2 * np.asarray(run.loss)) for run in several])
        thresholds.append(threshold)
    data = xr.Dataset(
        {
            "deviation": (("depth", "fraction", "step"), np.array(deviations)),
            "threshold": ("depth", thresholds),
        },
        coords={"depth": list(config.depths), "fraction": fractions},
    )
    return data, runs


def order(data: xr.Dataset, name: str) -> float:
    """The fitted slope of a quantity against η on log-log axes."""
    return float(np.polyfit(np.log(data["eta"].values), np.log(data[name].values), 1)[0])


def growth(data: xr.Dataset) -> xr.DataArray:
    """The factor per step of the deviation from the minimum, over the second half of each run."""
    last = data.sizes["step"] - 1
    half = last // 2
    ratio = data["deviation"].isel(step=last) / data["deviation"].isel(step=half)
    return ratio ** (1 / (last - half))


def measured_threshold(data: xr.Dataset) -> xr.DataArray:
    """Where the growth factor passes 1, as a fraction of the predicted threshold, per depth."""
    fractions = data["fraction"].values
    logs = np.log(growth(data).values)
    return xr.DataArray(
        [np.interp(0.0, row, fractions) for row in logs], coords={"depth": data["depth"]}
    )


def summary(data: xr.Dataset) -> str:
    """Orders in the step size, the identity's error, and the thresholds."""
    ratio = (data["drift"] / data["predicted_drift"]).values
    factor, found = growth(data), measured_threshold(data)
    predicted = abs(1 - 2 * data["fraction"])
    lines = [
        f"largest distance to the flow ∝ η^{order(data, 'distance'):.3f} (predicted 1)",
        f"drift of C_i over the run ∝ η^{order(data, 'drift'):.3f} (predicted 1), "
        f"{ratio[0]:.3f} … {ratio[-1]:.4f} times the first-order prediction",
        f"drift of C_i in one step ∝ η^{order(data, 'step_drift'):.3f} (predicted 2); identity "
        f"C⁺ − C = η²(GᵀG − GGᵀ) within {float(data['identity_error'].max()):.1e}",
    ]
    for depth in data["depth"].values:
        at = data["threshold"].sel(depth=depth)
        off = abs(factor - predicted).sel(depth=depth).max()
        lines.append(
            f"{depth} layers: perturbation starts to grow at {float(found.sel(depth=depth)):.5f} "
            f"of the predicted η* = {float(at):.5f}; factors per step within {float(off):.1e} of "
            "|1 − η λ_max|"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> dict[str, Figure]:
    """Distance and drift against step size; growth of a perturbation around the threshold."""
    return {"": _order_figure(data), "stability": _stability_figure(data)}


_OPEN: dict[str, Any] = {"ls": "", "mfc": "white", "ms": 6}


def _order_figure(data: xr.Dataset) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
    blue, orange, green, purple = gf.plot.palette(4)
    eta = data["eta"].values
    # Through the smallest step, where higher orders matter least.
    first = float(data["distance"][-1]) * eta / eta[-1]
    left.plot(eta, first, color="black", ls="--", lw=1.2, label="slope 1")
    label = f"largest distance, fitted slope {order(data, 'distance'):.2f}"
    left.plot(eta, data["distance"], "o", **_OPEN, color=blue, label=label)
    left.set_ylabel(r"$\max_t \|W_{\mathrm{descent}}(t) - W_{\mathrm{flow}}(t)\|$")
    left.set_title("distance to the flow")
    second = float(data["step_drift"][-1]) * (eta / eta[-1]) ** 2
    label = f"over the run, fitted slope {order(data, 'drift'):.2f}"
    right.plot(eta, data["drift"], "o", **_OPEN, color=orange, label=label)
    right.plot(eta, data["predicted_drift"], color=orange, lw=1.2, label="predicted, slope 1")
    label = f"in one step, fitted slope {order(data, 'step_drift'):.2f}"
    right.plot(eta, data["step_drift"], "s", **_OPEN, color=green, label=label)
    right.plot(eta, second, color="black", ls="--", lw=1.2, label="slope 2")
    label = r"error of $C_i^+ - C_i = \eta^2(G_{i+1}^\top G_{i+1} - G_i G_i^\top)$"
    right.plot(eta, data["identity_error"], "x", ms=6, color=purple, label=label)
    right.set_ylabel("change of the conserved matrices, largest entry")
    right.set_title(r"drift of $C_i$")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set_yscale("log")
        _plain_ticks(ax.xaxis, (1, 2, 5))
        ax.set_xlabel(r"step size $\eta$ (learning rate)")
    _plain_ticks(left.yaxis, (1, 2, 5))
    left.legend(loc="upper left")
    right.legend(loc="center", bbox_to_anchor=(0.6, 0.3))
    fig.suptitle("Gradient descent leaves its flow, and the conserved quantities, at first order")
    return fig


def _plain_ticks(axis: Axis, subs: tuple[float, ...]) -> None:
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _stability_figure(data: xr.Dataset) -> Figure:
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(11.5, 4.8), width_ratios=(1.3, 1), layout="constrained"
    )
    factor = growth(data)
    for depth, colour in zip(
        data["depth"].values, gf.plot.palette(data.sizes["depth"]), strict=True
    ):
        at = float(data["threshold"].sel(depth=depth))
        etas = at * data["fraction"].values
        left.axvline(at, color=colour, lw=1.2, ls=":")
        left.plot(etas, abs(1 - 2 * data["fraction"]), color=colour, lw=1.4)
        left.plot(etas, factor.sel(depth=depth), "o", **{**_OPEN, "ms": 4.5}, color=colour)
        left.annotate(
            f"{depth} layers\n$\\eta^* = {at:.3f}$",
            (at, factor.values.max()),
            xytext=(-4, 10),
            textcoords="offset points",
            color=colour,
            ha="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    left.axhline(1, color="black", lw=0.8)
    left.set_ylim(factor.values.min() - 0.03, factor.values.max() + 0.12)
    left.set_xscale("log")
    _plain_ticks(left.xaxis, (1, 1.5, 2, 3, 4))
    left.set_xlabel(r"step size $\eta$ (learning rate)")
    left.set_ylabel("growth of the perturbation per step")
    left.set_title("growth factor and threshold")
    handles = [
        Line2D([], [], color="black", marker="o", **{**_OPEN, "ms": 4.5}, label="measured"),
        Line2D([], [], color="black", lw=1.4, label=r"$|1 - \eta\, h s_1^{2-2/h}|$"),
        Line2D([], [], color="black", lw=1.2, ls=":", label=r"$\eta^* = 2/(h s_1^{2-2/h})$"),
    ]
    left.legend(handles=handles, loc="center", bbox_to_anchor=(0.66, 0.2))
    middle = data["depth"].values[data.sizes["depth"] // 2]
    one = data["deviation"].sel(depth=middle)
    wanted = (0.9, 0.95, 0.99, 1.01, 1.05, 1.1)
    shown = np.unique([int(abs(data["fraction"].values - f).argmin()) for f in wanted])
    colours = plt.colormaps["PuOr_r"](np.r_[np.linspace(0, 0.25, 3), np.linspace(0.75, 1, 3)])
    for i, colour in zip(shown, colours, strict=False):
        fraction = float(data["fraction"][i])
        row = one.isel(fraction=i).values
        right.plot(row, color=colour)
        right.annotate(
            rf"${fraction:.2f}\,\eta^*$",
            (len(row) - 1, row[-1]),
            xytext=(4, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )
    right.set_yscale("log")
    right.set_xlim(0, 1.18 * (one.sizes["step"] - 1))
    right.set_xlabel("step of gradient descent")
    right.set_ylabel(r"deviation from the minimum, $\|\Sigma - W\|$")
    right.set_title(f"{middle} layers, started close to the minimum")
    fig.suptitle("A balanced minimum loses its stability at the predicted step size")
    return fig
