"""Lazy or rich: what decides is the scale of the start times its width, or its imbalance.

Two-layer networks are trained on whitened inputs from many starts. How much they learnt beyond
a fixed linearisation is measured by the tangent kernel, ``1 − cos`` of the angle between its
values at the start and at the end. A mode of strength s that starts at 0 from a kernel ``κ I`` ends
with ``‖W_1 v‖² + ‖W_2ᵀ u‖² = √(κ² + 4s²)``, so that the kernel ends with the eigenvalues
``½(√(κ² + 4s_i²) + √(κ² + 4s_k²))`` over all pairs of modes, and κ against the strengths in the
data decides. A wide random start of entries ``N(0, σ²)`` has ``κ = 2σ²d_1`` for a hidden layer of
width ``d_1``: the boundary is at ``σ ∝ d_1^{−1/2}``. A λ-balanced start obeys the same formula with
``κ = |λ|``, whatever its scale.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.optimize import brentq

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the target that are not zero.
    singular_values: tuple[float, ...] = (2.0, 1.0)
    # Width of input and output, and of the hidden layer of the λ-balanced starts.
    width: int = 6
    # Widths of the hidden layer of the random starts.
    hidden_widths: tuple[int, ...] = (6, 16, 48, 128, 384, 1024, 3072, 8192)
    # Smallest and largest product σ √d_1 of the random starts.
    smallest: float = 0.04
    largest: float = 4.0
    # Number of scales between them, evenly spaced in the logarithm.
    scales: int = 12
    # Random starts for every scale and width.
    seeds: int = 3
    # Smallest and largest scale of the λ-balanced starts (root of the map's singular values).
    balanced_smallest: float = 0.03
    balanced_largest: float = 2.0
    # Number of scales of the λ-balanced starts.
    balanced_scales: int = 6
    # Smallest and largest imbalance λ.
    imbalance_smallest: float = 0.02
    imbalance_largest: float = 30.0
    # Number of imbalances.
    imbalances: int = 11
    # End of all runs that have not met stop_gradient_norm before.
    t1: float = 40.0
    # Norm of the gradient at which a run ends.
    stop_gradient_norm: float = 1e-5
    # Relative tolerance of the solver.
    rtol: float = 1e-7
    # Seed of the starts.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Finer grids, more seeds, hidden layers up to ten thousand units."""
        return cls(
            hidden_widths=(6, 12, 24, 48, 96, 192, 384, 768, 1536, 3072, 6144, 12288, 24576),
            smallest=0.005,
            largest=10.0,
            scales=41,
            seeds=16,
            balanced_smallest=0.01,
            balanced_scales=25,
            imbalance_smallest=0.005,
            imbalance_largest=200.0,
            imbalances=41,
            t1=60.0,
            rtol=1e-8,
        )


def compute(config: Config) -> xr.Dataset:
    """Kernel distances and weight changes over scale and width, and over scale and imbalance."""
    d, s = config.width, np.zeros(config.width)
    s[: len(config.singular_values)] = config.singular_values
    flow = gf.GradientFlow(gf.Problem.from_singular_values(s))
    products = np.geomspace(config.smallest, config.largest, config.scales)
    keys = jax.random.split(jax.random.key(config.seed), config.seeds)
    starts: list[Sequence[np.ndarray]] = []
    widest = max(config.hidden_widths)
    # Entries N(0, 1) in both layers; a narrower network is the first units of the widest one.
    nets = [gf.initialize.gaussian(key, (d, widest, d), np.sqrt(d)).weights for key in keys]
    layers = [(np.asarray(W1), np.asarray(W2) * np.sqrt(widest / d)) for W1, W2 in nets]
    for width, (W1, W2) in itertools.product(config.hidden_widths, layers):
        small = _narrowed(W1[:width], W2[:, :width])
        starts += [[w * product / np.sqrt(width) for w in small] for product in products]
    shape = (len(config.hidden_widths), config.seeds, config.scales)
    count = len(starts)

    scales = np.geomspace(config.balanced_smallest, config.balanced_largest, config.balanced_scales)
    lams = np.geomspace(config.imbalance_smallest, config.imbalance_largest, config.imbalances)
    for a, lam in itertools.product(scales, lams):
        net = gf.initialize.lambda_balanced(jax.random.key(config.seed), (d, d, d), a, lam)
        starts.append(_narrowed(*map(np.asarray, net.weights)))
    balanced_shape = (len(scales), len(lams))
    runs, distance, change = _train(flow, starts, config)
    kappas = np.geomspace(0.3 * lams[0], max(3 * lams[-1], 3 * products[-1] ** 2), 200)
    return xr.Dataset(
        {
            "distance": (("width", "seed", "product"), distance[:count].reshape(shape)),
            "change": (("width", "seed", "product"), change[:count].reshape(shape)),
            "balanced_distance": (("scale", "imbalance"), distance[count:].reshape(balanced_shape)),
            "balanced_change": (("scale", "imbalance"), change[count:].reshape(balanced_shape)),
            "predicted": ("kappa", [predicted_distance(k, s) for k in kappas]),
            "predicted_boundary": _predicted_boundary(s),
        },
        coords={
            "width": list(config.hidden_widths),
            "product": products,
            "scale": scales,
            "imbalance": lams,
            "kappa": kappas,
        },
        attrs={
            "runs": run_lines(
                {
                    f"{count} random starts": runs[:count],
                    f"{len(runs) - count} λ-balanced starts": runs[count:],
                }
            ),
            "output_width": d,
        },
    )


def _narrowed(W1: np.ndarray, W2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same two-layer network with as many hidden units as it has inputs and outputs.

    ``W_1`` and ``W_2ᵀ`` span at most ``d_0 + d_2`` directions of the hidden layer and the flow
    never leaves them, so that an orthonormal basis of that space (filled up with idle units where
    the layer is narrower) carries the same map, kernel and distances, whatever the width.
    """
    inputs, units = W1.shape[1], W1.shape[1] + W2.shape[0]
    factor = np.linalg.qr(np.hstack([W1, W2.T]), mode="r")
    padded = np.zeros((units, units))
    padded[: len(factor)] = factor
    return padded[:, :inputs], padded[:, inputs:].T


def _train(
    flow: gf.GradientFlow, starts: Sequence[Sequence[np.ndarray]], config: Config
) -> tuple[list[gf.Trajectory], np.ndarray, np.ndarray]:
    """All runs, kernel distance between start and end, and relative change of the weights."""
    nets = [gf.LinearNetwork(weights) for weights in starts]
    stacked = jax.tree.map(lambda *w: np.stack(w), *nets)
    X = np.sqrt(config.width) * np.eye(config.width)  # whitened: XᵀX/N = I
    smallest = min(float(abs(w).max()) for weights in starts for w in weights)
    method = gf.Method(rtol=config.rtol, atol=smallest * 1e-5)

    def run(net):
        traj = gf.simulate(
            flow,
            net,
            config.t1,
            save=2,
            method=method,
            stop_gradient_norm=config.stop_gradient_norm,
            save_states=False,
        )
        kernels = [gf.observables.tangent_kernel(one, X) for one in (net, traj.final)]
        return traj, gf.observables.kernel_distance(*kernels)

    batch, distance = jax.tree.map(np.asarray, jax.vmap(run)(stacked))

    def squared(weights):
        return sum(np.sum(w**2, axis=(1, 2)) for w in weights)

    moved = jax.tree.map(np.subtract, batch.final, stacked)
    change = np.sqrt(squared(moved.weights) / squared(stacked.weights))
    runs = [jax.tree.map(jnp.asarray, batch.lane(i)) for i in range(len(starts))]
    return runs, np.asarray(distance), change


def predicted_distance(kappa: float, s: np.ndarray) -> float:
    """Kernel distance from ``κ I`` to the kernel at the end, by the conserved quantities."""
    ends = np.sqrt(kappa**2 + 4 * s**2)
    eigenvalues = 0.5 * (ends[:, None] + ends[None, :])
    return float(1 - eigenvalues.mean() / np.sqrt(np.mean(eigenvalues**2)))


def _predicted_boundary(s: np.ndarray) -> float:
    """The κ at which the predicted distance is half of its largest value, that at κ = 0."""
    half = 0.5 * predicted_distance(0.0, s)
    top = 2 * s.max()
    return float(brentq(lambda kappa: predicted_distance(kappa, s) - half, 1e-6 * top, 1e3 * top))


def _crossing(x: np.ndarray, falling: np.ndarray) -> float:
    """Where a falling curve meets half of its maximum, linear in ln x."""
    half = 0.5 * falling.max()
    last = int(np.flatnonzero(falling >= half)[-1])
    if last + 1 == len(x):
        return float("nan")
    part = (falling[last] - half) / (falling[last] - falling[last + 1])
    return float(np.exp(np.log(x[last]) + part * np.log(x[last + 1] / x[last])))


def boundary(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The σ of half the largest distance, per width, and its ``(slope, ln prefactor)``.

    The power law is fitted to hidden layers at least 16 times as wide as the output: the
    prediction is that of the limit of wide ones.
    """
    mean = data["distance"].mean("seed").values
    widths = data["width"].values
    scales = np.array([_crossing(data["product"].values, row) for row in mean]) / np.sqrt(widths)
    wide = (widths >= 16 * data.attrs["output_width"]) & np.isfinite(scales)
    return scales, np.polyfit(np.log(widths[wide]), np.log(scales[wide]), 1)


def balanced_boundary(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The λ of half the largest distance, per scale, and its ``(slope, ln prefactor)``."""
    lams = data["imbalance"].values
    found = np.array([_crossing(lams, row) for row in data["balanced_distance"].values])
    good = np.isfinite(found)
    return found, np.polyfit(np.log(data["scale"].values[good]), np.log(found[good]), 1)


def summary(data: xr.Dataset) -> str:
    """Both boundaries and their slopes against the predicted ones, and how far the runs are off."""
    found, (slope, offset) = boundary(data)
    kappa = float(data["predicted_boundary"])
    lams, (flat, _) = balanced_boundary(data)
    off = abs(_predicted_at(data, data["imbalance"].values)[None] - data["balanced_distance"])
    wide = data["distance"].mean("seed").isel(width=-1)
    wide_off = abs(_predicted_at(data, 2 * data["product"].values ** 2) - wide)
    return "\n".join(
        [
            f"random starts: boundary at scale = {np.exp(offset):.3f} × width^{slope:.3f} "
            f"(predicted {np.sqrt(kappa / 2):.3f} × width^-0.5), from {found[0]:.3f} at width "
            f"{int(data['width'][0])} to {found[-1]:.4f} at width {int(data['width'][-1])}",
            f"random starts of the largest width: distance within {float(wide_off.max()):.1e} of "
            f"the prediction (largest distance {float(wide.max()):.3f})",
            f"λ-balanced starts: boundary at λ = {lams.min():.4f} … {lams.max():.4f} "
            f"(predicted {kappa:.4f}), slope against scale {flat:.4f} (predicted 0)",
            f"λ-balanced starts: distance within {float(off.max()):.1e} of the prediction",
            f"relative change of the weights from {float(data['change'].min()):.2g} (lazy) to "
            f"{float(data['change'].max()):.2g} (rich)",
        ]
    )


def _predicted_at(data: xr.Dataset, kappa: np.ndarray) -> np.ndarray:
    return np.interp(np.log(kappa), np.log(data["kappa"].values), data["predicted"].values)


def figure(data: xr.Dataset) -> dict[str, Figure]:
    """Two phase diagrams: scale and width of a random start, scale and imbalance of a balanced."""
    return {"": _width_figure(data), "imbalance": _imbalance_figure(data)}


_DATA_LINE: dict[str, Any] = {"color": "white", "marker": "o", "ms": 5, "mec": "black", "lw": 1.6}
_FIT_LINE: dict[str, Any] = {"color": "#E69F00", "ls": "-", "lw": 2.0}
_THEORY_LINE: dict[str, Any] = {"color": "black", "ls": (0, (2, 2)), "lw": 2.2}


def _edges(middles: np.ndarray) -> np.ndarray:
    """Ends of cells around points that are evenly spaced in the logarithm, or nearly."""
    logs = np.log(middles)
    inner = 0.5 * (logs[1:] + logs[:-1])
    return np.exp(np.concatenate([[2 * logs[0] - inner[0]], inner, [2 * logs[-1] - inner[-1]]]))


def _maps(axes, x, ys, distance, change, labels) -> None:
    """Kernel distance and weight change as two maps, column by column, with a colour bar each."""
    fig = axes[0].figure
    edges = _edges(x)
    for ax, values, name, cmap in (
        (axes[0], distance, "kernel distance, start to end", "viridis"),
        (axes[1], change, "‖W(T) − W(0)‖ / ‖W(0)‖", "cividis"),
    ):
        norm = Normalize(0, values.max()) if cmap == "viridis" else LogNorm(*_range(values))
        for column, (y, cells) in enumerate(zip(ys, values, strict=True)):
            cell_edges = edges[column : column + 2], _edges(y)
            mesh = ax.pcolormesh(*cell_edges, cells[:, None], cmap=cmap, norm=norm, rasterized=True)
        fig.colorbar(mesh, ax=ax, label=name, pad=0.02)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(edges[0], edges[-1])
        ax.set_xlabel(labels[0])
        ax.set_ylabel(labels[1])


def _range(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _regime_names(ax: Axes, lazy: tuple[float, float], rich: tuple[float, float]) -> None:
    for name, at, colour in (("lazy", lazy, "white"), ("rich", rich, "black")):
        ax.text(*at, name, color=colour, ha="center", va="center", fontsize=13, style="italic")


def _width_figure(data: xr.Dataset) -> Figure:
    fig, axes = plt.subplots(1, 3, figsize=(13.5, 4.3), layout="constrained")
    widths, products = data["width"].values, data["product"].values
    sigma = products[None, :] / np.sqrt(widths)[:, None]
    mean = data["distance"].mean("seed").values
    change = np.exp(np.log(data["change"].values).mean(axis=1))
    labels = ("width $d_1$ of the hidden layer", r"scale $\sigma$ of the weights at the start")
    _maps(axes[:2], widths, sigma, mean, change, labels)
    found, (slope, offset) = boundary(data)
    kappa = float(data["predicted_boundary"])
    for ax in axes[:2]:
        ax.plot(widths, np.exp(offset) * widths**slope, **_FIT_LINE)
        ax.plot(widths, np.sqrt(kappa / (2 * widths)), **_THEORY_LINE)
        ax.plot(widths, found, **{**_DATA_LINE, "lw": 0})
    middle = len(widths) // 2
    at, border = float(widths[middle]), float(np.sqrt(kappa / (2 * widths[middle])))
    _regime_names(axes[0], (at, 4 * border), (at, border / 6))
    axes[0].set_title("kernel distance")
    axes[1].set_title("relative change of the weights")
    for row, width, colour in zip(mean, widths, gf.plot.palette(len(widths)), strict=True):
        axes[2].plot(2 * products**2, row, "o-", ms=3.5, lw=1.2, color=colour, label=f"{width}")
    axes[2].plot(data["kappa"], data["predicted"], **_THEORY_LINE)
    axes[2].set_xlim(2 * products[0] ** 2 / 1.5, 2 * products[-1] ** 2 * 1.5)
    axes[2].set_xscale("log")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel(r"$\kappa = 2\sigma^2 d_1$, the kernel at the start")
    axes[2].set_ylabel("kernel distance, start to end")
    axes[2].set_title("wide networks fall on one curve")
    axes[2].legend(title="width", loc="upper right")
    handles = [
        Line2D([], [], **{**_DATA_LINE, "lw": 0}, label="half of the largest kernel distance"),
        Line2D([], [], **_FIT_LINE, label=rf"fit $\sigma \propto d_1^{{\,{slope:.3f}}}$"),
        Line2D(
            [],
            [],
            **_THEORY_LINE,
            label=r"wide limit: $\sigma \propto d_1^{-1/2}$, predicted",
        ),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    fig.suptitle(
        r"Training is lazy beyond one value of $\sigma^2 d_1$: scale and width count together"
    )
    return fig


def _imbalance_figure(data: xr.Dataset) -> Figure:
    fig, axes = plt.subplots(1, 3, figsize=(13.5, 4.3), layout="constrained")
    lams, scales = data["imbalance"].values, data["scale"].values
    distance, change = data["balanced_distance"].values, data["balanced_change"].values
    labels = (r"imbalance $\lambda$ of the layers", "scale a of the start")
    rows = np.broadcast_to(scales, (len(lams), len(scales)))
    _maps(axes[:2], lams, rows, distance.T, change.T, labels)
    found, (slope, offset) = balanced_boundary(data)
    kappa = float(data["predicted_boundary"])
    for ax in axes[:2]:
        ax.plot(np.exp(offset) * scales**slope, scales, **_FIT_LINE)
        ax.axvline(kappa, **_THEORY_LINE)
        ax.plot(found, scales, **{**_DATA_LINE, "lw": 0})
    at = float(np.sqrt(scales[0] * scales[-1]))
    _regime_names(axes[0], (8 * kappa, at), (kappa / 6, at))
    axes[0].set_title("kernel distance")
    axes[1].set_title("relative change of the weights")
    colours = plt.colormaps["viridis"](np.linspace(0, 0.9, len(scales)))
    for row, a, colour in zip(distance, scales, colours, strict=True):
        axes[2].plot(lams, row, "o", ms=4, mfc="none", color=colour, label=f"{a:.2g}")
    axes[2].plot(data["kappa"], data["predicted"], **_THEORY_LINE)
    axes[2].set_xlim(lams[0] / 1.5, lams[-1] * 1.5)
    axes[2].set_xscale("log")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel(labels[0])
    axes[2].set_ylabel("kernel distance, start to end")
    axes[2].set_title("all scales fall on one curve")
    shown = axes[2].get_legend_handles_labels()
    step = max(1, len(scales) // 5)
    axes[2].legend(shown[0][::step], shown[1][::step], title="scale a", loc="upper right")
    handles = [
        Line2D([], [], **{**_DATA_LINE, "lw": 0}, label="half of the largest kernel distance"),
        Line2D([], [], **_FIT_LINE, label=rf"fit $\lambda \propto a^{{\,{slope:.3f}}}$"),
        Line2D([], [], **_THEORY_LINE, label=r"predicted, whatever the scale"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    fig.suptitle(r"From $\lambda$-balanced starts the imbalance alone decides, not the scale")
    return fig
