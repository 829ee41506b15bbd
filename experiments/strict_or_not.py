"""One critical value, strict and non-strict representatives: negative curvature, or only slow ways.

All networks here have the same end-to-end map, the same loss and no gradient. They differ in the
blocks beside the learnt modes: k of the h layers have none and must move together before the next
mode can grow, so that the loss falls like ``τ^k``. For k = 2 that is negative curvature, a strict
saddle; for k ≥ 3 the Hessian is positive semi-definite and blind to the way down.
"""

from __future__ import annotations

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the data, strongest first; their number is the width of both ends.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Number of the strongest modes that are learnt, fewer than all.
    learnt: int = 1
    # Number of layers, 3 or more.
    depth: int = 4
    # Width of every hidden layer, more than the learnt modes.
    hidden_width: int = 3
    # Shortest and longest step along the escape directions, of unit length.
    shortest: float = 1e-3
    longest: float = 1.0
    # Number of steps, evenly spaced in the logarithm.
    points: int = 61

    @classmethod
    def full(cls) -> Config:
        """Six layers: orders up to six."""
        return cls(
            singular_values=(5.0, 4.0, 3.0, 2.0, 1.0),
            learnt=2,
            depth=6,
            hidden_width=6,
            points=201,
        )


def compute(config: Config) -> xr.Dataset:
    """Spectrum and fall of the loss of the representatives, by the order of their escape."""
    r, h = len(config.singular_values), config.depth
    problem = gf.Problem.from_singular_values(config.singular_values)
    widths = (r, *[config.hidden_width] * (h - 1), r)
    signature = tuple(range(1, config.learnt + 1))
    strict, nonstrict = (
        gf.landscape.critical_point(problem, widths, signature, tightened=tightened)
        for tightened in (False, True)
    )
    between = [_opened(nonstrict, strict, h - order) for order in range(3, h)]
    nets = [strict, *between, nonstrict]
    verdicts = [gf.landscape.classify(problem, net) for net in nets]
    taus = np.geomspace(config.shortest, config.longest, config.points)
    ways = [gf.landscape.escape_direction(problem, net) for net in nets]
    falls = [
        gf.landscape.loss_change(problem, net, V, taus)
        for net, (V, _) in zip(nets, ways, strict=True)
    ]
    same = sum(gf.landscape.same_fiber(strict, net) for net in nets)
    slope = max(verdict.gradient_norm for verdict in verdicts)
    return xr.Dataset(
        {
            "eigenvalues": (
                ("order", "eigenvalue"),
                np.stack([np.asarray(gf.landscape.spectrum(problem, net)) for net in nets]),
            ),
            "fall": (("order", "tau"), -np.stack([np.asarray(fall) for fall in falls])),
            "kind": ("order", [verdict.kind for verdict in verdicts]),
            "loss": ("order", [verdict.value for verdict in verdicts]),
            "zero": ("order", [verdict.eigenvalue_tolerance for verdict in verdicts]),
            "predicted_order": ("order", [verdict.escape_order for verdict in verdicts]),
        },
        coords={"order": [order for _, order in ways], "tau": taus},
        attrs={
            "runs": (
                f"no integration: {len(nets)} networks in one fibre ({same} of them equal in "
                f"end-to-end map), theory and eigenvalues agree at "
                f"{sum(verdict.agree for verdict in verdicts)}, largest gradient norm {slope:.1e}"
            ),
            "depth": h,
            "signature": "{" + ",".join(map(str, signature)) + "}" if signature else "∅",
        },
    )


def _opened(closed: gf.LinearNetwork, opened: gf.LinearNetwork, layers: int) -> gf.LinearNetwork:
    """The tightened point with the blocks of the open one in its first layers."""
    return gf.LinearNetwork([*opened.weights[:layers], *closed.weights[layers:]])


def slopes(data: xr.Dataset) -> np.ndarray:
    """d ln(fall) / d ln(τ) over the first decade of steps, for every representative."""
    tau = data["tau"].values
    first = tau <= 10.001 * tau[0]
    logs = np.log(data["fall"].values[:, first])
    return np.polyfit(np.log(tau[first]), logs.T, 1)[0]


def counts(data: xr.Dataset) -> np.ndarray:
    """(negative, zero, positive) eigenvalues of every representative."""
    values, zero = data["eigenvalues"].values, data["zero"].values[:, None]
    negative, positive = (values < -zero).sum(axis=1), (values > zero).sum(axis=1)
    return np.stack([negative, values.shape[1] - negative - positive, positive], axis=1)


def _words(kind: xr.DataArray) -> str:
    return str(kind.values).replace("_", " ").replace("nonstrict", "non-strict")


def summary(data: xr.Dataset) -> str:
    """Loss, inertia, smallest eigenvalue and fitted slope of every representative."""
    lines = []
    rows = zip(data["order"].values, counts(data), slopes(data), strict=True)
    for order, inertia, slope in rows:
        one = data.sel(order=order)
        lines.append(
            f"{_words(one['kind'])}, {order} layers must move: loss "
            f"{float(one['loss']):.12g}, inertia {tuple(map(int, inertia))}, smallest eigenvalue "
            f"{float(one['eigenvalues'][0]):.3g}, loss falls like τ^{slope:.4f}"
        )
    spread = float(data["loss"].max() - data["loss"].min())
    lines.append(f"signature {data.attrs['signature']}; losses differ by {spread:.1e}")
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Spectra one under the other, and the fall of the loss along the escape directions."""
    orders = [int(order) for order in data["order"].values]
    colours = gf.plot.palette(len(orders))
    fig = plt.figure(figsize=(12.5, 1.6 * len(orders) + 1.4), layout="constrained")
    grid = fig.add_gridspec(len(orders), 2, width_ratios=(1.25, 1))
    spectra = [fig.add_subplot(grid[0, 0])]
    for row in range(1, len(orders)):
        spectra.append(fig.add_subplot(grid[row, 0], sharex=spectra[0], sharey=spectra[0]))
    fall = fig.add_subplot(grid[:, 1])
    inertia, highest = counts(data), 1
    for ax, order, colour, (negative, zero, _) in zip(
        spectra, orders, colours, inertia, strict=True
    ):
        one = data.sel(order=order)
        eigenvalues = one["eigenvalues"].values
        scale = float(np.abs(eigenvalues).max())
        values, number = np.unique((eigenvalues / scale).round(9), return_counts=True)
        below = values * scale < -float(one["zero"])
        ax.vlines(values[~below] * scale, 0, number[~below], color="0.45", lw=3)
        ax.vlines(values[below] * scale, 0, number[below], color=colour, lw=5)
        ax.axvline(0, color="0.8", lw=0.8, zorder=0)
        what = f"{negative} negative eigenvalues" if negative else "no negative eigenvalue"
        ax.set_title(
            f"{_words(one['kind'])}, {order} layers must move: {what}",
            loc="left",
            color=colour,
            fontsize=10,
        )
        ax.annotate(
            f"{zero} at 0 ", (0, 1), xycoords=("data", "axes fraction"), ha="right", va="top"
        )
        ax.tick_params(labelbottom=ax is spectra[-1])
        ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        highest = max(highest, number[np.abs(values * scale) > float(one["zero"])].max())
    # The zeros are many more: their bar leaves the axes, with its number beside it.
    spectra[0].set_ylim(0, 1.3 * highest)
    spectra[-1].set_xlabel("Hessian eigenvalue")
    spectra[len(spectra) // 2].set_ylabel("number of eigenvalues")
    tau = data["tau"].values
    for order, colour, slope in zip(orders, colours, slopes(data), strict=True):
        change = data["fall"].sel(order=order).values
        label = f"{order} layers must move: fitted slope {slope:.3f}"
        fall.plot(tau, np.where(change > 0, change, np.nan), color=colour, label=label)
        guide = tau[tau <= 10.001 * tau[0]]
        fall.plot(guide, change[0] * (guide / tau[0]) ** order, color="black", ls=(0, (1, 2)))
    fall.plot([], [], color="black", ls=(0, (1, 2)), label="integer slope, over the fitted steps")
    fall.set_xscale("log")
    fall.set_yscale("log")
    fall.set_xlabel("step τ along the escape direction (unit length in weights)")
    fall.set_ylabel("fall of the loss")
    fall.legend(loc="lower right")
    value = float(data["loss"][0])
    fig.suptitle(
        f"One end-to-end map (signature {data.attrs['signature']}, loss {value:.4g}): "
        "negative curvature at some networks, only slower ways down at others"
    )
    return fig
