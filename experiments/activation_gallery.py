"""γ₁ of tanh and smooth ReLU layers against the scale of the weights, for three kinds of shortcut.

Layers ``x ↦ φ(Wx)``, ``x + φ(Wx)`` and ``(I − β k kᵀ)x + φ(Wx)`` with entries of W independent
``N(0, σ²/d)``, drawn anew for each layer, no bias, and k uniform on the sphere. φ is tanh or the
smooth leaky ReLU ``a u + (1 − a) log(1 + e^u)``. A sharpness of it, ``log(1 + e^{su})/s``, would
only change the unit of x, and no exponent. γ₁ is that of the Jacobians along the orbit.

tanh without shortcut. Where weights are small orbits shrink to 0, the Jacobians become W, and γ₁ is
that of Gaussian matrices, ``log σ + ½[log(2/d) + ψ(d/2)]`` (Newman 1986). It passes 0 at a scale
above 1 that tends to 1 for wide layers. There mean field theory (Poole et al., arXiv 1606.05340,
Schoenholz et al., arXiv 1611.01232) has its edge of chaos, ``χ₁ = σ² E φ'(√q z)² = 1`` at the
variance q of the signal. For layers of finite width the two events at the edge come apart. Orbits
no longer vanish from the zero of the closed form on, yet γ₁ turns negative again, as fluctuations
of order 1/d outweigh mean field growth of second order in σ − 1. Chaos begins at a larger scale,
and in narrow layers, such as d = 8, nowhere up to σ = 4.

Smooth ReLU without shortcut. φ(0) > 0 keeps orbits away from 0. Those of large weights grow until
only the two slopes of φ matter. Then ``|Jv|/|v|`` has one law for all directions v, because the
sign of an entry of Wx says nothing of the size of one of Wv, and γ₁ is a mean of closed forms over
the number of positive entries. Near its zero states take thousands of layers to grow, and the zero
that is sampled through fewer is a little too large.

The lines of wide layers follow the mean field of x, of a tangent v and of their overlap through as
many layers as were sampled, with what a delta shortcut takes away, 1/d of the squares, kept in.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy.special
import scipy.stats
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tqdm.auto import tqdm

import gradflow as gf
from experiments._report import spectrum_lines

ACTIVATIONS = ("tanh", "smooth ReLU")
SHORTCUTS = ("none", "residual", "delta")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Width d of the layers.
    dimension: int = 16
    # Smallest and largest scale σ: a weight has standard deviation σ/√d.
    smallest: float = 0.25
    largest: float = 4.0
    # Number of sampled scales, evenly spaced in the logarithm.
    scales: int = 9
    # Scales between two of the sampled ones for every other change of the sign of γ₁.
    refined: int = 4
    # More scales around the edge of chaos of tanh layers without shortcut, and their range.
    edge_scales: int = 7
    edge: tuple[float, float] = (0.9, 1.8)
    # Scales at which closed forms and mean fields are drawn.
    points: int = 33
    # β of the delta shortcut: 1 forgets what is along k.
    beta: float = 1.0
    # Slope of the smooth ReLU far on the negative side, > 0.
    leak: float = 0.1
    # Depth of each product, and layers before it that do not count. States of smooth ReLU layers
    # grow exponentially: at σ = 4 they overflow after some 600 layers.
    steps: int = 200
    burn_in: int = 50
    # Independent products.
    chains: int = 32
    # Seed of the weights.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More scales and many more products."""
        return cls(scales=17, refined=12, edge_scales=19, points=97, steps=400, chains=512)


class Weights(eqx.Module):
    """The law of a layer's parameters: all numbers are data, so that one program serves all kinds.

    ``smooth`` is 0 for tanh and 1 for the smooth ReLU, ``keep`` 1 with a shortcut and 0 without.
    """

    law: gf.lyapunov.Gaussian
    smooth: Any
    keep: Any
    beta: Any
    leak: Any

    def __call__(self, key: Any) -> Any:
        # One draw for both: the last row gives k, whose length does not matter.
        G = self.law.draw(key, 1, False)[0, :, :-1]
        W, k = G[:-1], G[-1] / jnp.linalg.norm(G[-1])
        return W, k, self.smooth, self.keep, self.beta, self.leak


def layer(parameters: Any, x: Any) -> Any:
    """One layer of any kind."""
    W, k, smooth, keep, beta, leak = parameters
    u = W @ x
    branch = jnp.where(smooth == 1, leak * u + (1 - leak) * jax.nn.softplus(u), jnp.tanh(u))
    return keep * (x - beta * k * jnp.dot(k, x)) + branch


def ensemble(config: Config, activation: str, shortcut: str, sigma: float) -> gf.lyapunov.Layers:
    """The layers of one kind at one scale, from a random start with entries of order 1."""
    d = config.dimension
    weights = Weights(
        gf.lyapunov.Gaussian(d + 1, sigma / math.sqrt(d)),
        smooth=float(activation == "smooth ReLU"),
        keep=float(shortcut != "none"),
        beta=config.beta if shortcut == "delta" else 0.0,
        leak=config.leak,
    )
    start = np.random.default_rng(config.seed).standard_normal(d)
    return gf.lyapunov.Layers(layer, weights, start)


def compute(config: Config) -> xr.Dataset:
    """γ₁ for all kinds and scales, with closed forms and mean fields on a finer grid."""
    scales = np.geomspace(config.smallest, config.largest, config.scales)
    near = np.linspace(*config.edge, config.edge_scales)
    fine = np.geomspace(config.smallest, config.largest, config.points)
    fine_edge = np.linspace(*config.edge, 81)
    kinds = list(itertools.product(ACTIVATIONS, SHORTCUTS))
    jobs = [(*kind, sigma) for kind in kinds for sigma in scales]
    jobs += [("tanh", "none", sigma) for sigma in near]
    runs = [
        sample(config, seed, *job) for seed, job in enumerate(tqdm(jobs, leave=False, disable=None))
    ]
    grid = runs[: len(kinds) * config.scales]
    edges = [
        edge(config, *kind, scales, grid[i * config.scales : (i + 1) * config.scales])
        for i, kind in enumerate(kinds)
    ]
    # Where it is looked at more closely, unless that is at other scales.
    (values, errors), (near_values, near_errors) = _values(grid), _values(runs[len(grid) :])
    closer = crossing(near, near_values, near_errors)
    edges[0] = edges[0] if math.isnan(closer[0]) else closer
    shape = (len(ACTIVATIONS), len(SHORTCUTS), config.scales)
    theory = {
        name: np.reshape([line(config, *kind, fine) for kind in kinds], (*shape[:2], -1))
        for name, line in (("at_zero", at_zero), ("at_infinity", at_infinity))
    }
    wide = np.reshape([mean_field(config, *kind, fine) for kind in kinds], (*shape[:2], -1))
    axes, fine_axes = ("activation", "shortcut", "sigma"), ("activation", "shortcut", "fine_sigma")
    running = np.array([np.asarray(r.running)[:, 0] for r in grid])
    return xr.Dataset(
        {
            "exponent": (axes, np.reshape(values, shape)),
            "standard_error": (axes, np.reshape(errors, shape)),
            "running": ((*axes, "depth"), running.reshape(*shape, -1)),
            "zero": (axes[:2], np.reshape([e[0] for e in edges], shape[:2])),
            "zero_error": (axes[:2], np.reshape([e[1] for e in edges], shape[:2])),
            "edge_exponent": ("edge_sigma", near_values),
            "edge_error": ("edge_sigma", near_errors),
            "at_zero": (fine_axes, theory["at_zero"]),
            "at_infinity": (fine_axes, theory["at_infinity"]),
            "mean_field": (fine_axes, wide),
            "edge_mean_field": ("fine_edge", mean_field(config, "tanh", "none", fine_edge)),
            "edge_at_zero": ("fine_edge", at_zero(config, "tanh", "none", fine_edge)),
        },
        coords={
            "activation": list(ACTIVATIONS),
            "shortcut": list(SHORTCUTS),
            "sigma": scales,
            "fine_sigma": fine,
            "edge_sigma": near,
            "fine_edge": fine_edge,
            "depth": np.asarray(grid[0].running_steps),
        },
        attrs={
            "runs": spectrum_lines(
                {
                    f"{a}, shortcut {s}": grid[i * config.scales : (i + 1) * config.scales]
                    for i, (a, s) in enumerate(kinds)
                }
            ),
            "dimension": config.dimension,
            "beta": config.beta,
            "leak": config.leak,
        },
    )


def sample(
    config: Config, seed: int, activation: str, shortcut: str, sigma: float
) -> gf.lyapunov.Spectrum:
    """γ₁ of one kind at one scale; the first call compiles for all others."""
    return gf.lyapunov.exponents(
        jax.random.fold_in(jax.random.key(config.seed), seed),
        ensemble(config, activation, shortcut, sigma),
        config.steps,
        1,
        burn_in=config.burn_in,
        chains=config.chains,
        checkpoints=4,
    )


def _values(runs: list[gf.lyapunov.Spectrum]) -> tuple[np.ndarray, np.ndarray]:
    """γ₁ and its standard error of every run."""
    return (
        np.array([float(r.exponents[0]) for r in runs]),
        np.array([float(r.standard_error[0]) for r in runs]),
    )


def crossing(
    sigma: np.ndarray, exponent: np.ndarray, error: np.ndarray | None = None
) -> tuple[float, float]:
    """The scale where γ₁ rises through 0 for good, and its standard error.

    By straight lines between neighbouring scales; ``nan`` if there is none. The error is that of
    the samples at the two neighbours, not that of the line; 0 if none is given.
    """
    below = np.flatnonzero(exponent < 0)
    if len(below) == 0 or below[-1] == len(exponent) - 1:
        return math.nan, math.nan
    i = below[-1]
    gap = exponent[i + 1] - exponent[i]
    share = -exponent[i] / gap
    step = sigma[i + 1] - sigma[i]
    if error is None:
        return float(sigma[i] + share * step), 0.0
    spread = math.hypot((1 - share) * error[i], share * error[i + 1])
    return float(sigma[i] + share * step), float(step * spread / gap)


def edge(
    config: Config,
    activation: str,
    shortcut: str,
    sigma: np.ndarray,
    runs: list[gf.lyapunov.Spectrum],
) -> tuple[float, float]:
    """Where γ₁ rises through 0 for good and its error, with more samples between two scales."""
    values, errors = _values(runs)
    rough, _ = crossing(sigma, values, errors)
    if math.isnan(rough):
        return rough, math.nan
    i = int(np.searchsorted(sigma, rough)) - 1
    inner = np.geomspace(sigma[i], sigma[i + 1], config.refined + 2)
    # Seeds that no other sample has.
    seeds = range(10_000, 10_000 + config.refined)
    more = [
        sample(config, seed, activation, shortcut, s)
        for seed, s in zip(seeds, inner[1:-1], strict=True)
    ]
    return crossing(inner, *_values([runs[i], *more, runs[i + 1]]))


def at_zero(config: Config, activation: str, shortcut: str, sigma: np.ndarray) -> np.ndarray:
    """γ₁ of the Jacobians at x = 0, by closed form, shape like ``sigma``."""
    forms, d = gf.lyapunov.closed_forms, config.dimension
    # φ'(0): the branch's Jacobian is φ'(0) W.
    slope = 1.0 if activation == "tanh" else (1 + config.leak) / 2
    if shortcut == "none":
        return np.array([forms.gaussian(d, slope * s / math.sqrt(d))[0] for s in sigma])
    if shortcut == "residual":
        return np.array([forms.residual_gaussian(d, slope * s / math.sqrt(d), 1)[0] for s in sigma])
    return np.array(
        [forms.delta_gaussian_top(d, config.beta, slope * s / math.sqrt(d)) for s in sigma]
    )


def at_infinity(config: Config, activation: str, shortcut: str, sigma: np.ndarray) -> np.ndarray:
    """γ₁ of ``x ↦ φ(Wx)`` for large x, where φ has slopes 1 and a only; ``nan`` for other kinds.

    ``Σ_b 2^{−d} C(d, b) E ½ log(χ²_b + a² χ²_{d−b})`` plus ``log(σ/√d)``, b the number of positive
    entries.
    """
    if (activation, shortcut) != ("smooth ReLU", "none"):
        return np.full(len(sigma), np.nan)
    d = config.dimension
    count = np.arange(d + 1)
    tops = [
        gf.lyapunov.closed_forms.correlated_gaussian_top(
            np.diag(np.where(np.arange(d) < b, 1.0, config.leak**2))
        )
        for b in count
    ]
    return scipy.stats.binom.pmf(count, d, 0.5) @ np.array(tops) + np.log(sigma / math.sqrt(d))


def mean_field(config: Config, activation: str, shortcut: str, sigma: np.ndarray) -> np.ndarray:
    """γ₁ of wide layers, averaged over the layers that are sampled, shape like ``sigma``.

    With z of N(0, 1) an entry of Wx is ``σ√q z`` and one of Wv ``σ√p (ρ z + √(1−ρ²) z')``. Followed
    through the layers are ``q = |x|²/d`` and ``p = |v|²/d``, the means m and m_v of the entries of
    x and v, both over the roots of these, and ``ρ = xᵀv/(d√(qp))``. A shortcut multiplies means by
    ``1 − β/d`` and products by ``1 − β(2 − β)/d``.
    """
    keep = float(shortcut != "none")
    beta = config.beta if shortcut == "delta" else 0.0
    once = keep * (1 - beta / config.dimension)
    twice = keep * (1 - beta * (2 - beta) / config.dimension)
    # Trapezoids that are fine near 0, where φ of large states has its kink.
    t = np.linspace(-6.5, 6.5, 181)
    z = 0.02 * np.sinh(t)
    weight = np.gradient(t) * 0.02 * np.cosh(t) * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    def mean(values):
        return values @ weight

    # The size √q of x is kept apart, for it may be 1e±300; v is brought to size 1 at each layer.
    size = np.ones_like(sigma)
    m, mv = np.zeros_like(sigma), np.zeros_like(sigma)
    rho = np.full_like(sigma, 0.1)  # generic, not 0
    total = np.zeros_like(sigma)
    for step in range(config.burn_in + config.steps):
        u = (sigma * size)[:, None] * z
        if activation == "tanh":
            phi = np.tanh(u)
            slope = 1 - phi * phi
        else:
            phi = config.leak * u + (1 - config.leak) * np.logaddexp(0, u)
            slope = config.leak + (1 - config.leak) * scipy.special.expit(u)
        phi = phi / size[:, None]
        along = rho * sigma
        moved = along * mean(slope * z)
        growth = (
            twice
            + 2 * once * mv * moved
            + sigma**2 * ((1 - rho**2) * mean(slope**2) + rho**2 * mean((slope * z) ** 2))
        )
        overlap = (
            twice * rho + once * m * moved + once * mv * mean(phi) + along * mean(phi * slope * z)
        )
        gain = np.sqrt(twice + 2 * once * m * mean(phi) + mean(phi**2))
        stretch = np.sqrt(growth)
        m, mv = (once * m + mean(phi)) / gain, (once * mv + moved) / stretch
        rho = np.clip(overlap / (gain * stretch), -1, 1)
        size = np.maximum(size * gain, 1e-300)
        total += np.log(stretch) if step >= config.burn_in else 0.0
    return total / config.steps


def zero(data: xr.Dataset, activation: str, shortcut: str) -> tuple[float, float]:
    """Where the sampled γ₁ of one kind rises through 0 for good, and the standard error."""
    one = data.sel(activation=activation, shortcut=shortcut)
    return float(one["zero"]), float(one["zero_error"])


def vanishing(data: xr.Dataset) -> xr.Dataset:
    """Kinds and scales whose orbits shrink to 0, with the deviations in standard errors there.

    tanh shrinks all it gets: orbits vanish wherever the exponent at 0 is negative.
    """
    known = data["at_zero"].sel(activation="tanh").interp(fine_sigma=data["sigma"])
    one = data.sel(activation="tanh")
    off = ((one["exponent"] - known) / one["standard_error"]).where(known < -0.05)
    return off.to_dataset(name="deviation")


def summary(data: xr.Dataset) -> str:
    """Where γ₁ passes 0, against closed forms and mean fields, and the check at x = 0."""
    d = data.attrs["dimension"]
    off = vanishing(data)["deviation"].values
    off = off[np.isfinite(off)]
    fine, tanh = data["fine_edge"].values, data["edge_at_zero"].values
    first, _ = crossing(fine, tanh)
    chaos, error = zero(data, "tanh", "none")
    dip = data["edge_exponent"].where(data["edge_sigma"] > first)
    lines = [
        f"{len(off)} samples of orbits that vanish: at most {np.abs(off).max(initial=0):.1f} "
        "standard errors off the closed form at x = 0",
        f"tanh without shortcut, d = {d}: orbits vanish up to σ = {first:.4f} (1 for wide layers); "
        + (
            "γ₁ is positive nowhere that was sampled"
            if math.isnan(chaos)
            else f"γ₁ > 0 from σ = {chaos:.3f} ± {error:.1g} on; between them down to "
            f"{float(dip.min()):.4f}"
        ),
    ]
    for activation, shortcut in itertools.product(ACTIVATIONS, SHORTCUTS):
        one = data.sel(activation=activation, shortcut=shortcut)
        where, spread = zero(data, activation, shortcut)
        wide, _ = crossing(data["fine_sigma"].values, one["mean_field"].values)
        place = (
            "no change of sign"
            if math.isnan(where)
            else f"rises through 0 at σ = {where:.3f} ± {spread:.1g}"
        )
        exact, _ = crossing(np.log(data["fine_sigma"].values), one["at_infinity"].values)
        place += "" if math.isnan(exact) else f", by the two slopes alone at {math.exp(exact):.3f}"
        place += "" if math.isnan(wide) else f" (wide layers: {wide:.3f})"
        low, high = one["exponent"].values[[0, -1]]
        lines.append(f"{activation}, shortcut {shortcut}: γ₁ from {low:.4f} to {high:.4f}, {place}")
    running = data["running"].sel(activation="tanh", shortcut="residual").isel(sigma=-1)
    depths = data["depth"].values
    lines.append(
        f"tanh with residual shortcut at σ = {float(data['sigma'][-1]):g}: "
        + ", ".join(f"{float(running.sel(depth=n)):.4f} over {n} layers" for n in depths)
    )
    return "\n".join(lines)


TITLES = {
    "none": "no shortcut: φ(Wx)",
    "residual": "residual: x + φ(Wx)",
    "delta": "delta: (I − β k kᵀ)x + φ(Wx)",
}


def figure(data: xr.Dataset) -> Figure:
    """A row for each activation, a column for each shortcut."""
    fig, axes = plt.subplots(
        2, 3, figsize=(13, 7.6), sharex=True, sharey="row", layout="constrained"
    )
    sampled, linear, slopes = gf.plot.palette(3)
    fine, sigma = data["fine_sigma"].values, data["sigma"].values
    for row, activation in zip(axes, ACTIVATIONS, strict=True):
        for ax, shortcut in zip(row, SHORTCUTS, strict=True):
            one = data.sel(activation=activation, shortcut=shortcut)
            ax.axhline(0, color="0.6", lw=0.8)
            ax.plot(fine, one["at_zero"], color=linear, ls="--", lw=1.6)
            ax.plot(fine, one["at_infinity"], color=slopes, ls=(0, (5, 1, 1, 1)), lw=1.6)
            ax.plot(fine, one["mean_field"], color="black", lw=1.1)
            ax.errorbar(
                sigma,
                one["exponent"],
                2 * one["standard_error"],
                fmt="o",
                color=sampled,
                ms=5,
                mfc="white",
            )
            where, _ = zero(data, activation, shortcut)
            if math.isfinite(where):
                ax.axvline(where, color="0.6", lw=1, ls=":", zorder=0)
                ax.annotate(
                    f" γ₁ = 0 at σ = {where:.2f}",
                    (where, 0.02),
                    xycoords=("data", "axes fraction"),
                    color="0.3",
                    ha="left",
                )
            ax.set_title(f"{activation}, {TITLES[shortcut]}")
        low = min(float(data["exponent"].sel(activation=activation).min()), -0.2)
        high = float(data["exponent"].sel(activation=activation).max())
        row[0].set_ylim(1.1 * low, high + 0.25 * (high - low))
        row[0].set_ylabel("γ₁ per layer")
    for ax in axes[-1]:
        ax.set_xscale("log")
        ax.set_xlim(sigma[0] / 1.08, sigma[-1] * 1.08)
        ax.set_xticks([x for x in (0.1, 0.25, 0.5, 1, 2, 4, 8) if sigma[0] <= x <= sigma[-1]])
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xticks([], minor=True)
        ax.set_xlabel("scale σ of the weights (entries N(0, σ²/d))")
    _zoom(axes[0, 0], data, sampled, linear)
    running = data["running"].sel(activation="tanh", shortcut="residual").isel(sigma=-1)
    depths = data["depth"].values[[0, -1]]
    first, last = (f"{float(running.sel(depth=n)):.3f} over {n} layers" for n in depths)
    axes[0, 1].text(
        0.97,
        0.1,
        f"states grow like √depth and saturate:\nat σ = {sigma[-1]:g} γ₁ is {first},\n{last}",
        transform=axes[0, 1].transAxes,
        ha="right",
        color="0.3",
    )
    handles: list[Any] = [
        Line2D(
            [],
            [],
            color=sampled,
            marker="o",
            mfc="white",
            ls="",
            label="sampled, ± 2 standard errors",
        ),
        Line2D([], [], color="black", lw=1.1, label="wide layers (mean field)"),
        Line2D([], [], color=linear, ls="--", lw=1.6, label="Jacobians at x = 0, closed form"),
        Line2D(
            [],
            [],
            color=slopes,
            ls=(0, (5, 1, 1, 1)),
            lw=1.6,
            label="large x: two slopes, closed form",
        ),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    fig.suptitle(
        "Shortcuts hold γ₁ of tanh layers near 0 at all scales; that of ReLU layers still rises "
        f"(d = {data.attrs['dimension']}, β = {data.attrs['beta']:g})"
    )
    return fig


def _zoom(ax: Any, data: xr.Dataset, sampled: str, linear: str) -> None:
    """The edge of chaos of tanh layers, where the signs are decided, as an inset."""
    inset = ax.inset_axes((0.46, 0.16, 0.52, 0.36))
    near, fine = data["edge_sigma"], data["fine_edge"]
    inset.axhline(0, color="0.6", lw=0.8)
    inset.plot(fine, data["edge_at_zero"], color=linear, ls="--", lw=1.4)
    inset.plot(fine, data["edge_mean_field"], color="black", lw=1)
    inset.errorbar(
        near,
        data["edge_exponent"],
        2 * data["edge_error"],
        fmt="o",
        color=sampled,
        ms=3.5,
        mfc="white",
        lw=1,
    )
    size = max(0.06, 1.2 * float(abs(data["edge_exponent"].isel(edge_sigma=slice(1, None))).max()))
    inset.set_ylim(-size, size)
    inset.set_xlim(float(near[0]) - 0.02, float(near[-1]) + 0.02)
    inset.tick_params(labelsize=7.5)
    inset.set_title("near the edge of chaos", fontsize=8.5)
