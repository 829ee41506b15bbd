"""Unequal layers turn rich learning into lazy: λ alone decides, at one and the same start map.

Two layers start from ``W_2ᵀW_2 − W_1W_1ᵀ = λI`` with the same small product for every λ. Around
λ = 0 the modes are sigmoids, learnt one after another, and the tangent kernel turns towards the
data. For large |λ| every mode follows ``s(1 − e^{−|λ|t})``, whatever its strength, while the
weights, and with them the kernel, hardly move. (Dominé et al. 2025, arXiv 2409.14623.)
"""

from __future__ import annotations

import dataclasses
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

    # Singular values of the target, strongest first; all widths are as many.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # The singular values of the map at the start are the square of this.
    scale: float = 0.03
    # Smallest and largest |λ| besides 0.
    smallest: float = 0.1
    largest: float = 100.0
    # Number of |λ| between them, evenly spaced in the logarithm, each with both signs.
    strengths: int = 7
    # The λ whose modes are drawn; the nearest of those that are run.
    shown: tuple[float, ...] = (0.0, 3.0, 100.0)
    # Relative tolerance of the solver; the absolute one is a hundredth of it.
    rtol: float = 1e-9
    # Number of saved times.
    points: int = 200
    # Seed of the singular vectors of start and target.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More modes, a smaller start and a finer grid of λ."""
        return cls(
            singular_values=(8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0),
            scale=1e-3,
            smallest=0.01,
            largest=1000.0,
            strengths=21,
            shown=(0.0, 10.0, 1000.0),
            points=600,
        )


_CIRCLES: dict[str, Any] = {"marker": "o", "ls": "", "mfc": "white", "ms": 4.5}


def compute(config: Config) -> xr.Dataset:
    """Modes against time for every λ, and how far kernel and weights move in all."""
    s = np.array(config.singular_values)
    size = len(s)
    positive = np.geomspace(config.smallest, config.largest, config.strengths)
    lams = np.concatenate([-positive[::-1], [0.0], positive])
    for_left, for_right, for_start = jax.random.split(jax.random.key(config.seed), 3)
    U = np.array(jax.random.orthogonal(for_left, size))
    V = np.asarray(jax.random.orthogonal(for_right, size))
    widths = [size] * 3
    balanced = gf.initialize.lambda_balanced(for_start, widths, config.scale, 0.0)
    # A balanced flow never changes the sign of det W: with the other sign it would stay at a
    # saddle, one mode unlearnt.
    if np.linalg.det(balanced.end_to_end()) * np.linalg.det(U @ V.T) < 0:
        U[:, -1] *= -1
    problem = gf.Problem((U * s) @ V.T)
    # The library's singular vectors of the target may differ from these in sign.
    left, right = (np.asarray(basis) for basis in problem.singular_bases())
    flow, identity = gf.GradientFlow(problem), np.eye(size)
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=config.rtol * 1e-2)
    runs, times, modes, exact, distance, change = [], [], [], [], [], []
    for lam in lams:
        start = gf.initialize.lambda_balanced(for_start, widths, config.scale, float(lam))
        t1 = _horizon(s.min(), config.scale**2, lam)
        traj = gf.simulate(flow, start, t1, save=config.points, method=method, save_states=False)
        ts = np.asarray(traj.ts)
        solution = np.asarray(gf.exact.two_layer(problem, start, ts).W)
        runs.append(traj)
        times.append(ts)
        modes.append(np.asarray(traj["modes"]))
        exact.append(np.einsum("ij,tik,kj->tj", left, solution, right))
        kernels = [gf.observables.tangent_kernel(net, identity) for net in (start, traj.final)]
        distance.append(float(gf.observables.kernel_distance(*kernels)))
        change.append(_relative_change(start, traj.final))
    curve = np.geomspace(config.smallest, config.largest, 100)
    return xr.Dataset(
        {
            "t": (("lam", "time"), np.stack(times)),
            "modes": (("lam", "time", "mode"), np.stack(modes)),
            "exact": (("lam", "time", "mode"), np.stack(exact)),
            "kernel_distance": ("lam", distance),
            "predicted_distance": ("lam", _predicted_distance(s, lams)),
            "weight_change": ("lam", change),
            "lazy_change": ("lam", np.sqrt(np.mean(s**2)) / np.where(lams, abs(lams), np.nan)),
            "predicted_curve": ("curve_lam", _predicted_distance(s, curve)),
        },
        coords={"lam": lams, "curve_lam": curve, "singular_value": ("mode", s)},
        attrs={
            "runs": run_lines({f"{len(runs)} runs": runs}),
            "start": config.scale**2,
            "shown": list(config.shown),
        },
    )


def _horizon(s: float, u0: float, lam: float) -> float:
    """When the weakest mode is learnt to 1e-4, aligned or not: ``u̇ = √(λ² + 4u²)(s − u)``."""
    plateau = np.arcsinh(2 * s / abs(lam)) / (2 * s) if abs(lam) > u0 else np.log(s / u0) / (2 * s)
    return 2 * plateau + np.log(1e4) / np.hypot(lam, 2 * s)


def _relative_change(start: gf.LinearNetwork, end: gf.LinearNetwork) -> float:
    moved = sum(np.sum((b - a) ** 2) for a, b in zip(start.weights, end.weights, strict=True))
    return float(np.sqrt(moved / sum(np.sum(w**2) for w in start.weights)))


def _predicted_distance(s: np.ndarray, lams: np.ndarray) -> np.ndarray:
    """Kernel distance from start to minimum, for whitened inputs.

    The kernel starts proportional to the identity and ends with eigenvalues ``a_i² + b_j²``,
    where ``a, b = √((√(λ² + 4s²) ∓ λ)/2)`` are the singular values of the layers.
    """
    root = np.sqrt(lams[:, None] ** 2 + 4 * s**2)
    first, second = (root - lams[:, None]) / 2, (root + lams[:, None]) / 2
    eigenvalues = (first[:, :, None] + second[:, None, :]).reshape(len(lams), -1)
    # 1 − mean/rms, without cancellation where all are nearly equal.
    mean, variance = eigenvalues.mean(axis=1), eigenvalues.var(axis=1)
    rms = np.hypot(mean, np.sqrt(variance))
    return variance / (rms * (rms + mean))


def deviation(data: xr.Dataset) -> xr.DataArray:
    """Largest difference between simulated and exact modes, per λ."""
    return abs(data["modes"] - data["exact"]).max(("time", "mode"))


def lazy_deviation(data: xr.Dataset) -> xr.DataArray:
    """Largest difference from ``s(1 − e^{−|λ|t})`` relative to s, per λ."""
    lazy = -np.expm1(-abs(data["lam"]) * data["t"])
    return abs(data["modes"] / data["singular_value"] - lazy).max(("time", "mode"))


def summary(data: xr.Dataset) -> str:
    """Deviations from the closed form and from the lazy limit, and the movements."""
    lazy, distance, change = lazy_deviation(data), data["kernel_distance"], data["weight_change"]
    rows = [
        f"λ = {float(lam):.3g}: off the lazy limit by {float(lazy.sel(lam=lam)):.2g} of s, "
        f"kernel distance {float(distance.sel(lam=lam)):.2g} "
        f"(closed form {float(data['predicted_distance'].sel(lam=lam)):.2g}), "
        f"relative weight change {float(change.sel(lam=lam)):.2g}"
        + (f" (lazy limit {float(data['lazy_change'].sel(lam=lam)):.2g})" if lam else "")
        for lam in [data["lam"].values[0], *_shown(data)]
    ]
    ratio = abs(distance / data["predicted_distance"] - 1).max()
    return "\n".join(
        [
            f"largest deviation of a mode from the closed form {float(deviation(data).max()):.1e}",
            *rows,
            f"kernel distances within {float(ratio):.1e} of the closed form",
        ]
    )


def _shown(data: xr.Dataset) -> list[float]:
    wanted = np.atleast_1d(data.attrs["shown"])
    return [float(data["lam"].sel(lam=lam, method="nearest")) for lam in wanted]


def figure(data: xr.Dataset) -> Figure:
    """Modes against time for three λ, and kernel and weight movement against λ."""
    shown = _shown(data)
    fig = plt.figure(figsize=(10.8, 7.2), layout="constrained")
    halves: Any = fig.subfigures(2, 1, height_ratios=(1.12, 1))
    top, bottom = halves
    panels = top.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    colours = gf.plot.palette(data.sizes["mode"])
    s = data["singular_value"].values
    for ax, lam in zip(panels, shown, strict=True):
        one = data.sel(lam=lam)
        t = one["t"].values
        marks = np.searchsorted(t, np.linspace(0, 1, 17) ** 1.4 * t[-1]).clip(max=len(t) - 1)
        for mode, colour in enumerate(colours):
            ax.axhline(s[mode], color="0.75", lw=0.8, zorder=0)
            if lam != 0:
                lazy = -s[mode] * np.expm1(-abs(lam) * t)
                ax.plot(t, lazy, color="black", linestyle="--", linewidth=1.3, zorder=3)
            ax.plot(t, one["modes"][:, mode], color=colour)
            ax.plot(t[marks], one["exact"][marks, mode], **_CIRCLES, color=colour)
        ax.set_xlim(0, t[-1])
        ax.set_xlabel(gf.plot.TIME_LABEL)
    names = ["rich: in turn"] + ["in between"] * (len(shown) - 2) + ["lazy: together"]
    for ax, lam, name in zip(panels, shown, names, strict=False):
        ax.set_title(f"λ = {lam:.3g}, {name}")
    panels[0].set_ylabel(r"mode strength $u_j^\top W_2 W_1\, v_j$")
    handles = [
        Line2D([], [], color="0.3", label="simulation"),
        Line2D([], [], **_CIRCLES, color="0.3", label="closed form (Riccati)"),
        Line2D([], [], color="black", ls="--", lw=1.3, label=r"lazy limit $s(1-e^{-|\lambda| t})$"),
    ]
    top.legend(handles=handles, loc="outside lower center", ncols=3)
    _draw_movement(bottom.subplots(1, 2), data)
    fig.suptitle("From rich to lazy at a fixed start map: the imbalance λ of two layers decides")
    return fig


def _draw_movement(axes: Any, data: xr.Dataset) -> None:
    """Kernel distance and weight change against |λ|, one marker for each sign."""
    kernel, weights = axes
    kernel.plot(data["curve_lam"], data["predicted_curve"], color="0.3", label="closed form")
    blue, orange = gf.plot.palette(2)
    signs = (("λ > 0", data["lam"] > 0, "o", blue, 6), ("λ < 0", data["lam"] < 0, "x", orange, 6))
    balanced = data.sel(lam=0.0)
    for ax, name in ((kernel, "kernel_distance"), (weights, "weight_change")):
        for label, chosen, marker, colour, size in signs:
            part = data[name].where(chosen, drop=True)
            ax.plot(abs(part["lam"]), part, marker, color=colour, mfc="none", ms=size, label=label)
        ax.axhline(float(balanced[name]), color="0.6", ls=":", lw=1.2, label="λ = 0")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("imbalance |λ|")
    kernel.set_ylabel("kernel distance, start to end")
    kernel.set_title("the tangent kernel stops turning")
    # The large layer is √|λ| times orthogonal and stays; the other one fits the target.
    s = data["singular_value"].values
    lazy = np.sqrt(np.mean(s**2)) / data["curve_lam"]
    seen = data["curve_lam"] >= s.max()
    weights.plot(data["curve_lam"][seen], lazy[seen], color="0.3", label="lazy limit")
    weights.set_ylabel(r"weight change $\|\Delta W\| \,/\, \|W(0)\|$")
    weights.set_title("the weights stop moving")
    for ax in (kernel, weights):
        ax.legend(loc="lower left")
