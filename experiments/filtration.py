"""Two starts, two rates: growth through depth inside and outside an invariant subspace.

All matrices keep a subspace, on which they grow more slowly than elsewhere. By Furstenberg & Kifer
the growth rate of ``|A_n ⋯ A_1 x|`` is one of finitely many numbers and is decided by where x lies:
inside the subspace, which is found from the matrices alone, it is the lower one. A start that
leaves the subspace ever so little follows the lower rate until the higher one has overtaken.
"""

from __future__ import annotations

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import gradflow as gf
from experiments._report import spectrum_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Number of matrices in the law, drawn once with equal probabilities.
    matrices: int = 6
    # Dimension of the invariant subspace and of the rest.
    inside: int = 2
    outside: int = 2
    # Scales of the two diagonal blocks: the invariant subspace's and the rest's.
    inside_scale: float = 0.8
    outside_scale: float = 0.8
    # How far the third start is outside of the subspace.
    distance: float = 1e-12
    # Depth, and number of independent products.
    steps: int = 200
    chains: int = 64
    # Depth of the products from which the rates are found.
    rate_steps: int = 2000
    # Seed of the law and of the products.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Larger blocks, deeper and more products."""
        return cls(matrices=12, inside=3, outside=3, steps=400, chains=256, rate_steps=20_000)


def law(config: Config) -> gf.lyapunov.Finite:
    """Block-triangular matrices; the first basis vectors span what they keep."""
    rng = np.random.default_rng(config.seed)
    a, d = config.inside, config.inside + config.outside
    A = rng.standard_normal((config.matrices, d, d))
    A[:, :a, :a] *= config.inside_scale
    A[:, a:, a:] *= config.outside_scale
    A[:, a:, :a] = 0
    return gf.lyapunov.Finite(A)


def compute(config: Config) -> xr.Dataset:
    """Growth from three starts, and the rates and subspaces of the filtration."""
    ensemble, a = law(config), config.inside
    found = gf.lyapunov.filtration(ensemble, config.seed, steps=config.rate_steps)
    first, last = np.eye(ensemble.dimension)[[0, -1]]
    starts = {
        "outside": first + last,
        "inside": first,
        "almost inside": first + config.distance * last,
    }
    runs = {
        name: gf.lyapunov.exponents(
            config.seed + 1,
            ensemble,
            config.steps,
            start=x,
            chains=config.chains,
            burn_in=0,
            checkpoints=config.steps,
            qr_every=1,
        )
        for name, x in starts.items()
    }
    # The third start counts as outside.
    within = min(1e-9, 0.1 * config.distance)
    depth = np.asarray(runs["inside"].running_steps)
    growth = np.array([np.asarray(r.running)[:, 0] * depth for r in runs.values()])
    kept = found.subspaces[-1]
    # Sine of the angle between what was found and what was built in.
    away = np.linalg.norm(kept[a:]) if kept.shape[1] == a else np.nan
    return xr.Dataset(
        {
            "growth": (("start", "depth"), growth),
            "spread": (
                "start",
                [np.asarray(r.chain_means).std() * config.steps for r in runs.values()],
            ),
            "rate": ("start", [found.exponent_along(x, tol=within) for x in starts.values()]),
            "level_rate": ("level", found.exponents),
            "level_error": ("level", found.standard_error),
            "level_dimension": ("level", [V.shape[1] for V in found.subspaces]),
        },
        coords={"start": list(starts), "depth": depth},
        attrs={
            "runs": spectrum_lines(runs),
            "distance": config.distance,
            "subspace_error": float(away),
        },
    )


def fitted_rates(data: xr.Dataset) -> np.ndarray:
    """Slope of the mean logarithm over the second half of the depth, per start."""
    depth = data["depth"].values
    late = depth > depth[-1] / 2
    return np.polyfit(depth[late], data["growth"].values[:, late].T, 1)[0]


def overtaking(data: xr.Dataset) -> float:
    """The depth at which the higher rate has made up for the small distance."""
    high, low = data["level_rate"].values[[0, -1]]
    return float(-np.log(data.attrs["distance"]) / (high - low))


def summary(data: xr.Dataset) -> str:
    """The filtration, and the slopes from the three starts."""
    levels = zip(
        data["level_dimension"].values,
        data["level_rate"].values,
        data["level_error"].values,
        strict=True,
    )
    lines = [
        "filtration: " + ", ".join(f"dimension {n}: {g:.4f} ± {e:.1g}" for n, g, e in levels),
        f"the subspace found is within {data.attrs['subspace_error']:.1e} of the one built in",
    ]
    for name, slope, rate in zip(
        data["start"].values, fitted_rates(data), data["rate"].values, strict=True
    ):
        lines.append(f"start {name}: slope {slope:.4f} over the second half, predicted {rate:.4f}")
    lines.append(f"the third start changes its rate at about depth {overtaking(data):.0f}")
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Logarithm of the norm against depth from three starts, with the slopes predicted."""
    fig, ax = plt.subplots(figsize=(8.5, 5.2), layout="constrained")
    colours = gf.plot.palette(data.sizes["start"])
    depth = data["depth"].values
    labels = {
        "outside": "start outside the subspace",
        "inside": "start inside it",
        "almost inside": f"start at a distance of {data.attrs['distance']:g} from it",
    }
    for name, colour in zip(data["start"].values, colours, strict=True):
        ax.plot(depth, data["growth"].sel(start=name), color=colour, label=labels[str(name)])
    rates = data["level_rate"].values
    for i, (rate, text) in enumerate(zip(rates, data["level_dimension"].values, strict=True)):
        style = ("--", (0, (1, 2)), "-.")[i % 3]
        where = "whole space" if i == 0 else f"invariant subspace, dimension {text}"
        label = f"{where}: {rate:.3f} × depth".replace("-", "−")
        ax.plot(depth, rate * depth, color="black", ls=style, lw=1.3, label=label)
    turn = overtaking(data)
    if turn < depth[-1]:
        ax.axvline(turn, 0.25, 1, color="0.8", lw=1, zorder=0)
        ax.annotate(
            " the higher rate takes over",
            (turn, 1),
            xycoords=("data", "axes fraction"),
            va="top",
            color="0.4",
        )
    ax.set_xlim(0, depth[-1])
    ax.set_xlabel("depth n (layers)")
    ax.set_ylabel("mean of log |A_n ⋯ A_1 x|, natural logarithm")
    ax.legend(loc="lower left")
    ax.set_title("Where a start lies decides at which of two rates it grows", weight="bold")
    return fig
