"""The scale above which a residual connection makes γ_1 worse, against the width of the layers.

For Gaussian ``A = σG/√d`` a residual connection brings γ_1 closer to 0 below σ*(d) and takes it
further away above. At σ* the two exponents are opposite, ``γ_1(I + A) = −γ_1(A)``. With d → ∞ they
are ``½ log(1 + σ²)`` and ``log σ``, so that ``σ* → √((√5 − 1)/2)``, the root of 1 over the golden
ratio.
"""

from __future__ import annotations

import dataclasses

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from tqdm.auto import tqdm

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Largest width of the closed form.
    widest: int = 1000
    # Widths, evenly spaced in the logarithm and rounded.
    widths: int = 40
    # Widths at which the threshold is also found from sampled exponents alone.
    sampled: tuple[int, ...] = (2, 4)
    # Depth of the sampled products, after the burn-in.
    steps: int = 300
    # Sampled products for each exponent.
    chains: int = 256
    # Seed of the matrices.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More widths, deeper and wider sampled products."""
        return cls(widest=10_000, widths=80, sampled=(2, 4, 8, 12), steps=4000)


def compute(config: Config) -> xr.Dataset:
    """σ*(d) from the closed form and from samples."""
    widths = np.unique(np.geomspace(2, config.widest, config.widths).round().astype(int))
    exact = [gf.lyapunov.threshold(int(d)) for d in widths]
    keys = jax.random.split(jax.random.key(config.seed), len(config.sampled))
    found = [
        gf.lyapunov.sampled_threshold(
            key, d, steps=config.steps, chains=config.chains, bracket=(0.6, 1.4)
        )
        for key, d in zip(keys, tqdm(config.sampled, leave=False, disable=None), strict=True)
    ]
    error = max(one.standard_error for one in found)
    return xr.Dataset(
        {
            "threshold": ("d", exact),
            "sampled": ("sampled_d", [one.sigma for one in found]),
            "standard_error": ("sampled_d", [one.standard_error for one in found]),
            "exact_at_sampled": (
                "sampled_d",
                [gf.lyapunov.threshold(d) for d in config.sampled],
            ),
        },
        coords={"d": widths, "sampled_d": list(config.sampled)},
        attrs={
            "runs": (
                f"{len(exact)} thresholds from closed forms; {len(found)} from sampled exponents, "
                f"{config.chains} chains of {config.steps} steps each, largest standard error "
                f"{error:.1e}"
            ),
            "limit": gf.lyapunov.threshold_limit(),
        },
    )


def summary(data: xr.Dataset) -> str:
    """The ends of the curve, how it approaches its limit, and the samples."""
    widths, sigma, limit = data["d"].values, data["threshold"].values, data.attrs["limit"]
    lines = [
        f"σ* falls from {sigma[0]:.6f} at d = {widths[0]} to {sigma[-1]:.6f} at d = {widths[-1]}; "
        f"limit {limit:.6f}",
        f"at the largest widths σ* − limit = {rate(data):.4f}/d",
    ]
    for d in data["sampled_d"].values:
        one = data.sel(sampled_d=d)
        off = float(one["sampled"] - one["exact_at_sampled"])
        lines.append(
            f"d = {d}: sampled {float(one['sampled']):.4f} ± {float(one['standard_error']):.1g}, "
            f"{off / float(one['standard_error']):+.1f} standard errors off the closed form"
        )
    return "\n".join(lines)


def rate(data: xr.Dataset) -> float:
    """c of ``σ*(d) ≈ limit + c/d``, from the largest width."""
    return float((data["threshold"][-1] - data.attrs["limit"]) * data["d"][-1])


def figure(data: xr.Dataset) -> Figure:
    """The threshold against the width with its limit, and the distance from the limit."""
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.7), layout="constrained", width_ratios=(1.4, 1)
    )
    line, marked, _ = gf.plot.palette(3)
    widths, sigma, limit = data["d"].values, data["threshold"].values, data.attrs["limit"]
    low, high = 0.7, max(1.2, 1.03 * float(sigma.max()))
    left.fill_between(widths, sigma, high, color="0.88", lw=0)
    left.plot(widths, sigma, color=line, label="σ*(d), closed form")
    left.errorbar(
        data["sampled_d"],
        data["sampled"],
        2 * data["standard_error"],
        fmt="o",
        color=marked,
        mfc="white",
        capsize=3,
        label="from sampled exponents, ± 2 standard errors",
    )
    left.axhline(limit, color="black", ls="--", lw=1.2, label=f"limit √((√5 − 1)/2) = {limit:.4f}")
    middle = float(np.sqrt(widths[0] * widths[-1]))
    left.text(middle, 0.35 * limit + 0.65 * high, "|γ₁| grows", ha="center", va="center")
    left.text(middle, 0.5 * (low + limit), "|γ₁| shrinks", ha="center", va="center")
    left.set_ylim(low, high)
    left.set_ylabel("scale σ of the weights (entries N(0, σ²/d))")
    left.set_title("effect of a residual connection on γ₁")
    left.legend(loc="upper right")
    gap = sigma - limit
    right.plot(widths, gap, color=line, label="σ*(d) − limit")
    right.plot(
        widths,
        rate(data) / widths,
        color="black",
        ls=(0, (1, 2)),
        label=f"{rate(data):.3f}/d",
    )
    right.set_yscale("log")
    right.set_ylabel("distance of σ* from its limit")
    right.set_title("wide layers")
    right.legend(loc="upper right")
    for ax in (left, right):
        ax.set_xscale("log")
        # Room for the marker at the smallest width.
        ax.set_xlim(0.9 * widths[0], widths[-1])
        ax.set_xlabel("width d of the layers")
    fig.suptitle("How large random weights may be before a residual connection does harm")
    return fig
