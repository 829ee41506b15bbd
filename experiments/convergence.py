"""How fast three methods find the largest exponent of positive matrices: error against work.

Sampled products err like one over the square root of the number of matrices. The operator on lines,
with the lines discretised, errs like the square of the width of its cells. The determinant method
looks at all products up to some length; for positive 2×2 matrices its error falls faster than any
power, and passes round-off of double precision with some twenty products.
"""

from __future__ import annotations

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Two positive 2×2 matrices, row by row, and the probability of the first.
    first: tuple[float, float, float, float] = (2.0, 1.0, 1.0, 1.0)
    second: tuple[float, float, float, float] = (3.0, 1.0, 2.0, 1.0)
    probability: float = 0.5
    # Longest words of the determinant method, and decimals it works with.
    word_length: int = 8
    digits: int = 30
    # Numbers of lines of the operator.
    bins: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    # Depth of the sampled products, and how many there are.
    steps: int = 10_000
    chains: int = 64
    # Seed of the matrices.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Longer words, more lines and deeper products."""
        return cls(
            word_length=12,
            digits=60,
            bins=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            steps=200_000,
            chains=256,
        )


def compute(config: Config) -> xr.Dataset:
    """Errors of all methods, each with the number of matrices that were multiplied."""
    matrices = [np.reshape(m, (2, 2)).tolist() for m in (config.first, config.second)]
    p = [config.probability, 1 - config.probability]
    found = gf.lyapunov.determinant(matrices, p, config.word_length + 1, digits=config.digits)
    truth = found.exponent
    words = np.arange(1, config.word_length + 1)
    ensemble = gf.lyapunov.Finite(matrices, p)
    single = [
        gf.lyapunov.exponents(
            seed,
            ensemble,
            config.steps,
            1,
            chains=1,
            burn_in=100,
            checkpoints=400,
        )
        for seed in range(config.seed, config.seed + config.chains)
    ]
    steps = np.asarray(single[0].running_steps)
    running = np.array([np.asarray(run.running)[:, 0] for run in single])
    # Every chain is one estimate: their root mean square error.
    sampled = np.sqrt(np.mean((running - float(truth)) ** 2, axis=0))
    kept = np.unique(np.geomspace(1, len(steps), 25).round().astype(int)) - 1
    lines = [
        gf.lyapunov.stationary_measure(ensemble, bins, operator=kind).exponent
        for kind in ("linear", "ulam")
        for bins in config.bins
    ]
    off = np.abs(np.array(lines).reshape(2, -1) - float(truth))
    return xr.Dataset(
        {
            "sampled_error": ("products", sampled[kept]),
            "line_error": (("operator", "bins"), off),
            "word_error": ("word", [float(abs(e - truth)) for e in found.estimates[:-1]]),
            # All words of a length up to n, rotations counted once each by the method itself.
            "word_products": ("word", np.cumsum(2.0**words / words)),
        },
        coords={
            "products": steps[kept],
            "operator": ["linear", "ulam"],
            "bins": list(config.bins),
            "word": words,
        },
        attrs={
            "runs": (
                f"determinant: words up to {config.word_length + 1}, error of the reference "
                f"{float(found.error):.1e}\nsampled: {config.chains} products of {config.steps} "
                f"matrices each\noperators on lines: {config.bins[0]} to {config.bins[-1]} lines"
            ),
            "exponent": float(truth),
            "reference_error": float(found.error),
        },
    )


def order(work: np.ndarray, error: np.ndarray) -> float:
    """Slope of log error against log work."""
    return float(np.polyfit(np.log(work), np.log(error), 1)[0])


def orders(data: xr.Dataset) -> dict[str, float]:
    """Orders of the methods that have one."""
    return {
        "sampled": order(data["products"].values, data["sampled_error"].values),
        **{
            str(kind): order(data["bins"].values, data["line_error"].sel(operator=kind).values)
            for kind in data["operator"].values
        },
    }


def summary(data: xr.Dataset) -> str:
    """The exponent and how each method approaches it."""
    slopes = orders(data)
    words = data["word_error"].values
    return "\n".join(
        [
            f"γ₁ = {data.attrs['exponent']:.15f}",
            f"sampled: error like n^{slopes['sampled']:.2f}, "
            f"{float(data['sampled_error'][-1]):.1e} after {int(data['products'][-1])} matrices",
            f"operator on lines: like n^{slopes['linear']:.2f} (linear), n^{slopes['ulam']:.2f} "
            f"(Ulam), {float(data['line_error'][0, -1]):.1e} with {int(data['bins'][-1])} lines",
            f"determinant: {words[4]:.1e} with words up to 5, {words[-1]:.1e} with words up to "
            f"{int(data['word'][-1])}, {float(data['word_products'][-1]):.0f} products",
        ]
    )


def figure(data: xr.Dataset) -> Figure:
    """Error against the number of products, for all methods."""
    fig, ax = plt.subplots(figsize=(8.5, 5.4), layout="constrained")
    colours = gf.plot.palette(4)
    slopes = orders(data)
    lines = data["line_error"]
    curves: dict[str, tuple[xr.DataArray, xr.DataArray, str]] = {
        "sampled": (data["products"], data["sampled_error"], "sampled products"),
        "ulam": (2 * data["bins"], lines.sel(operator="ulam"), "operator on cells (Ulam)"),
        "linear": (2 * data["bins"], lines.sel(operator="linear"), "operator on lines, linear"),
    }
    for (name, (work, error, text)), colour, mark in zip(
        curves.items(), colours[:3], "os^", strict=True
    ):
        label = f"{text}: error ∝ work^({slopes[name]:.2f})"
        ax.plot(work, error, mark + "-", color=colour, ms=4.5, lw=1.3, label=label)
    ax.plot(
        data["word_products"],
        data["word_error"],
        "D-",
        color=colours[3],
        ms=5,
        lw=1.3,
        label="determinant method, words up to n = 1, 2, …",
    )
    ax.axhline(2.2e-16, color="0.6", lw=1, ls="--", zorder=0)
    ax.annotate(
        "round-off of double precision",
        (1, 2.2e-16),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color="0.4",
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("work: matrices sampled, images of lines, or words")
    ax.set_ylabel("error of γ₁ per layer")
    ax.legend(loc="center right", bbox_to_anchor=(1, 0.3))
    ax.set_title("Products of all short words beat sampling by many digits", weight="bold")
    return fig
