"""QR steps per second of Lyapunov spectra: ``gf.lyapunov.exponents`` against NumPy.

All draw matrices with independent Gaussian entries, multiply a frame by them, factorise it by QR
at every step and add up the logarithms of the diagonal: the whole spectrum. A step is one matrix of
one chain. The peers are a loop over chains and steps, as such programs are mostly written, and a
loop over steps with all chains stacked in one array. Ours is timed after compilation, which is
reported apart. All times are the best of some repeats.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this benchmark."""

    # Dimensions, and the number of chains and of steps of ours for each of them.
    dimensions: tuple[int, ...] = (4, 16, 64)
    chains: tuple[int, ...] = (1000, 64, 16)
    steps: tuple[int, ...] = (500, 150, 80)
    # Steps of all chains together on which the loop is timed, and of the stacked one.
    loop: tuple[int, ...] = (10_000, 4_000, 600)
    stacked: tuple[int, ...] = (40_000, 6_000, 640)
    # Steps between orthonormalisations of ours.
    qr_every: int = 1
    # Entries are N(0, scale²/d).
    scale: float = 1.0
    # Timed repeats of everything.
    repeats: int = 3
    # Seed.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More dimensions and longer runs."""
        return cls(
            dimensions=(2, 4, 8, 16, 32, 64, 128),
            chains=(1000, 1000, 1000, 256, 64, 16, 16),
            steps=(4000, 2000, 500, 250, 250, 200, 40),
            loop=(20_000, 20_000, 10_000, 8_000, 4_000, 2_000, 500),
            stacked=(200_000, 100_000, 50_000, 20_000, 8_000, 3_000, 640),
            repeats=5,
        )


OURS = "gf.lyapunov.exponents"
LOOP = "NumPy, loop"
STACKED = "NumPy, stacked chains"
METHODS = (OURS, LOOP, STACKED)


def compute(config: Config) -> xr.Dataset:
    """Steps per second of all methods, compile times, and how far the spectra are from exact."""
    shape = (len(METHODS), len(config.dimensions))
    rate, deviation = np.zeros(shape), np.zeros(shape)
    compile_seconds = []
    rows = zip(
        config.dimensions, config.chains, config.steps, config.loop, config.stacked, strict=True
    )
    for i, (d, chains, steps, loop, stacked) in enumerate(rows):
        sigma = config.scale / np.sqrt(d)
        ensemble = gf.lyapunov.Gaussian(d, sigma)
        exact = gf.lyapunov.closed_form(ensemble)
        assert exact is not None

        ours = functools.partial(
            gf.lyapunov.exponents,
            config.seed,
            ensemble,
            steps,
            chains=chains,
            burn_in=0,
            qr_every=config.qr_every,
        )
        began = time.perf_counter()
        ours()
        first = time.perf_counter() - began
        run, seconds = _best(ours, config.repeats)
        compile_seconds.append(max(first - seconds, 0.0))
        rate[0, i] = chains * steps / seconds
        deviation[0, i] = np.abs(np.asarray(run.exponents) - exact).max()
        alone, seconds = _best(
            functools.partial(numpy_loop, config.seed, d, sigma, loop), config.repeats
        )
        rate[1, i] = loop / seconds
        deviation[1, i] = np.abs(alone - exact).max()
        each = max(1, stacked // chains)
        together, seconds = _best(
            functools.partial(numpy_stacked, config.seed, d, sigma, each, chains),
            config.repeats,
        )
        rate[2, i] = each * chains / seconds
        deviation[2, i] = np.abs(together - exact).max()
    return xr.Dataset(
        {
            "rate": (("row", "dimension"), rate),
            "deviation": (("row", "dimension"), deviation),
            "compile_seconds": ("dimension", compile_seconds),
            "chains": ("dimension", list(config.chains)),
        },
        coords={"row": list(METHODS), "dimension": list(config.dimensions)},
        attrs={"runs": f"spectra of Gaussian matrices, best of {config.repeats} repeats"},
    )


def numpy_loop(seed: int, d: int, sigma: float, steps: int) -> np.ndarray:
    """The spectrum from one chain, a step at a time, shape ``(d,)``."""
    rng = np.random.default_rng(seed)
    Q, total = np.eye(d), np.zeros(d)
    for _ in range(steps):
        Q, R = np.linalg.qr(sigma * rng.standard_normal((d, d)) @ Q)
        total += np.log(np.abs(np.diag(R)))
    return total / steps


def numpy_stacked(seed: int, d: int, sigma: float, steps: int, chains: int) -> np.ndarray:
    """The spectrum from many chains in one array, shape ``(d,)``."""
    rng = np.random.default_rng(seed)
    Q, total = np.tile(np.eye(d), (chains, 1, 1)), np.zeros((chains, d))
    for _ in range(steps):
        Q, R = np.linalg.qr(sigma * rng.standard_normal((chains, d, d)) @ Q)
        total += np.log(np.abs(np.diagonal(R, axis1=1, axis2=2)))
    return total.mean(axis=0) / steps


def _best(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The last result, and the shortest time in seconds."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
    return result, min(seconds)


def ratios(data: xr.Dataset) -> dict[str, np.ndarray]:
    """How many times as many steps per second ours makes, by peer, for each dimension."""
    rate = dict(zip(data["row"].values, data["rate"].values, strict=True))
    return {peer: rate[OURS] / rate[peer] for peer in (LOOP, STACKED)}


def summary(data: xr.Dataset) -> str:
    """The table of steps per second, and the ratios."""
    found = ratios(data)
    lines = [
        f"{'d':>4} {'chains':>7} {'ours, steps/s':>14} {'loop':>10} {'stacked':>10} "
        f"{'ours / loop':>12} {'ours / stacked':>15} {'compile':>8}"
    ]
    for i, d in enumerate(data["dimension"].values):
        rate = data["rate"].isel(dimension=i).values
        lines.append(
            f"{d:>4} {int(data['chains'][i]):>7} {rate[0]:>14,.0f} {rate[1]:>10,.0f} "
            f"{rate[2]:>10,.0f} {found[LOOP][i]:>11.1f}x {found[STACKED][i]:>14.1f}x "
            f"{float(data['compile_seconds'][i]):>6.1f} s"
        )
    far = data["deviation"].sel(row=OURS).max()
    lines.append(f"largest deviation of our exponents from the closed form: {float(far):.1e}")
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Steps per second against the dimension."""
    fig, ax = plt.subplots(figsize=(7.0, 4.6), layout="constrained")
    d = data["dimension"].values
    for name, colour, marker in zip(METHODS, gf.plot.palette(len(METHODS)), "osD", strict=True):
        ours = name == OURS
        ax.plot(
            d,
            data["rate"].sel(row=name).values,
            color=colour,
            marker=marker,
            lw=2.6 if ours else 1.8,
            ls="-" if ours else "--",
            label=name,
        )
    found = ratios(data)[LOOP]
    for x, y, ratio in zip(d, data["rate"].sel(row=OURS).values, found, strict=True):
        ax.annotate(
            f"× {ratio:.3g}", (x, y), xytext=(0, 9), textcoords="offset points", ha="center"
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(d, [str(x) for x in d])
    ax.margins(x=0.1, y=0.12)
    ax.set_xlabel("dimension d")
    ax.set_ylabel("QR steps per second")
    ax.set_title(
        f"Whole spectra, {found[0]:.0f} times as fast as a loop at d = {d[0]}",
        fontweight="bold",
    )
    ax.legend()
    return fig
