"""From a small start deep networks pass through the best low-rank approximations of the data.

Networks of three layers and more start balanced, in random directions, with all singular values
of all layers equal to a scale a. The path is drawn in the plane of loss and effective rank, where
the best approximations of the data of rank r (loss ``½ Σ_{i>r} s_i²``) are points and learning one
mode after another, ``u`` from 0 to ``s_{r+1}``, is the curve between two of them. How close a run
comes to a point is set by the next mode, which is still of order ``a^h`` when the last is learnt.
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
from matplotlib.ticker import MultipleLocator

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the data, strongest first.
    singular_values: tuple[float, ...] = (4.0, 2.0, 1.0, 0.5)
    # Widths from input to output.
    widths: tuple[int, ...] = (8, 6, 6, 4)
    # Scales of the start (singular value of every layer), evenly spaced in the logarithm.
    smallest: float = 0.015
    largest: float = 1.2
    # Number of scales.
    scales: int = 8
    # Random starts of every scale.
    seeds: int = 3
    # Relative tolerance of the solver; the absolute one is 1e-6 of the smallest scale.
    rtol: float = 1e-8
    # Number of saved times, evenly spaced in each run until its last mode is learnt.
    points: int = 1000
    # Seed of the starts.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Deeper and wider, more modes, more scales and seeds."""
        return cls(
            singular_values=(4.0, 2.8, 2.0, 1.4, 1.0),
            widths=(16, 16, 16, 16, 12),
            smallest=0.02,
            scales=15,
            seeds=10,
            points=6000,
        )


def compute(config: Config) -> xr.Dataset:
    """Loss, effective rank and distances to the best approximations along runs of all scales."""
    s, depth = np.array(config.singular_values), len(config.widths) - 1
    problem = gf.Problem.from_singular_values(s, (config.widths[-1], config.widths[0]))
    flow, target = gf.GradientFlow(problem), np.asarray(problem.target)
    ranks = np.arange(len(s) + 1)
    best = np.stack([_truncated(target, int(r)) for r in ranks])
    scales = np.geomspace(config.smallest, config.largest, config.scales)
    keys = jax.random.split(jax.random.key(config.seed), config.seeds)
    # Long enough for a start that is ten times weaker in the last mode.
    ends = 1.3 * _last_learnt(s, 0.1 * scales**depth, depth)
    nets = [gf.initialize.balanced(key, config.widths, a) for a in scales for key in keys]
    saves = np.linspace(0, 1, config.points) * ends[:, None]
    method = gf.Method(rtol=config.rtol, atol=1e-6 * config.smallest)

    runs, nearest = [], []
    for net, save in zip(nets, np.repeat(saves, config.seeds, axis=0), strict=True):
        traj = gf.simulate(flow, net, save[-1], save=save, method=method)
        W1, *deeper = map(np.asarray, traj.states.weights)
        maps = functools.reduce(lambda product, W: W @ product, deeper, W1)
        gaps = maps[:, None] - best[None]
        nearest.append(np.sqrt(np.sum(gaps**2, axis=(2, 3))).min(axis=0))
        runs.append(traj)

    def table(values):
        return np.asarray(values).reshape(config.scales, config.seeds, *np.shape(values)[1:])

    aligned = np.stack(
        [_aligned_distances(s, a, ts, depth) for a, ts in zip(scales, saves, strict=True)]
    )
    path = [_one_at_a_time(s, r) for r in ranks[:-1]]
    return xr.Dataset(
        {
            "loss": (("scale", "seed", "time"), table([traj.loss for traj in runs])),
            "rank": (("scale", "seed", "time"), table([traj["effective_rank"] for traj in runs])),
            "t": (("scale", "time"), saves),
            "nearest": (("scale", "seed", "r"), table(nearest)),
            "aligned_nearest": (("scale", "r"), aligned),
            "path_loss": (("arc", "step"), np.stack([loss for loss, _ in path])),
            "path_rank": (("arc", "step"), np.stack([rank for _, rank in path])),
        },
        coords={
            "scale": scales,
            "r": ranks,
            "r_loss": ("r", [0.5 * np.sum(s[r:] ** 2) for r in ranks]),
            "r_rank": ("r", [_effective_rank(s[:r]) for r in ranks]),
        },
        attrs={
            "runs": run_lines(
                {
                    f"scale {a:.3g}, {config.seeds} starts": runs[i * config.seeds :][
                        : config.seeds
                    ]
                    for i, a in enumerate(scales)
                }
            ),
            "depth": depth,
        },
    )


def _truncated(target: np.ndarray, rank: int) -> np.ndarray:
    U, values, Vt = np.linalg.svd(target, full_matrices=False)
    return (U[:, :rank] * values[:rank]) @ Vt[:rank]


def _effective_rank(values: np.ndarray) -> float:
    if not np.any(values):
        return 0.0
    return float(gf.observables.effective_rank(gf.LinearNetwork([np.diag(values)])))


def _last_learnt(s: np.ndarray, u0: np.ndarray, depth: int) -> np.ndarray:
    """When the last aligned mode is learnt to a thousandth."""
    last = s.min()
    escape = np.asarray(gf.exact.escape_time(last, np.minimum(u0, 0.1 * last), depth))
    return escape + np.log(1e3) / (depth * last ** (2 - 2 / depth))


def _aligned_distances(s: np.ndarray, a: float, ts: np.ndarray, depth: int) -> np.ndarray:
    """Smallest distance to each best approximation of an aligned start, by the closed form."""
    modes = np.asarray(gf.exact.mode(s[None, :], np.full((1, 1), a**depth), ts[:, None], depth))
    kept = np.arange(len(s))[None, :] < np.arange(len(s) + 1)[:, None]
    gaps = modes[:, None, :] - np.where(kept, s[None, :], 0.0)[None]
    return np.sqrt(np.sum(gaps**2, axis=2)).min(axis=0)


def _one_at_a_time(s: np.ndarray, learnt: int) -> tuple[np.ndarray, np.ndarray]:
    """Loss and effective rank while the next mode grows and all before it are learnt."""
    u = s[learnt] * np.linspace(0, 1, 60)[1:]
    loss = 0.5 * ((s[learnt] - u) ** 2 + np.sum(s[learnt + 1 :] ** 2))
    rank = [_effective_rank(np.append(s[:learnt], one)) for one in u]
    return loss, np.array(rank)


def slopes(data: xr.Dataset, name: str = "nearest", count: int = 3) -> np.ndarray:
    """d ln(distance) / d ln(scale) of the smallest scales, for r = 1 up to the last plateau."""
    inner = data.isel(scale=slice(0, count), r=slice(1, -1))
    logs = np.log(inner[name].values)
    logs = logs.mean(axis=1) if "seed" in inner[name].dims else logs
    return np.polyfit(np.log(inner["scale"].values), logs, 1)[0]


def summary(data: xr.Dataset) -> str:
    """The closest approach to every plateau at every scale, and its power law."""
    lines = []
    for a in data["scale"].values:
        one = data["nearest"].sel(scale=a).isel(r=slice(1, -1))
        near = ", ".join(f"{x:.1e}" for x in np.exp(np.log(one.values).mean(axis=0)))
        lines.append(f"scale {a:.3g}: distance to the best approximation of rank 1, 2, …: {near}")
    found = ", ".join(f"{x:.2f}" for x in slopes(data))
    aligned = ", ".join(f"{x:.2f}" for x in slopes(data, "aligned_nearest"))
    lines.append(
        f"distance ∝ scale^p with p = {found} at the smallest scales (closed form of an aligned "
        f"start: {aligned}; in the limit {data.attrs['depth']})"
    )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Paths in the plane of loss and effective rank, and closest approach against scale."""
    fig, (plane, near) = plt.subplots(
        1, 2, figsize=(12.5, 5.0), width_ratios=(1.5, 1), layout="constrained"
    )
    scales = data["scale"].values
    chosen = np.unique(np.linspace(0, len(scales) - 1, 5).round().astype(int))
    colours = plt.colormaps["viridis"](np.linspace(0, 0.88, len(chosen)))
    top = float(np.sqrt(2 * data["r_loss"][0]))
    for i, colour in zip(chosen, colours, strict=True):
        one = data.isel(scale=i, seed=0)
        plane.plot(
            np.sqrt(2 * one["loss"]), one["rank"], color=colour, label=f"a = {scales[i]:.2g}"
        )
    for loss, rank in zip(data["path_loss"], data["path_rank"], strict=True):
        plane.plot(np.sqrt(2 * loss), rank, color="black", ls=(0, (2, 2)), lw=1.3)
    points: dict[str, Any] = {
        "color": "black",
        "marker": "o",
        "ls": "",
        "ms": 9,
        "mfc": "white",
        "mew": 1.6,
    }
    plane.plot(np.sqrt(2 * data["r_loss"][1:]), data["r_rank"][1:], **points, zorder=5)
    for r in data["r"].values[1:]:
        at = float(np.sqrt(2 * data["r_loss"][r])), float(data["r_rank"][r])
        plane.annotate(f"rank {r}", at, xytext=(9, -12), textcoords="offset points")
    plane.set_xlim(1.12 * top, -0.09 * top)
    plane.set_ylim(0.5, data.sizes["r"] - 0.8)
    plane.yaxis.set_major_locator(MultipleLocator(1))
    plane.set_xlabel(
        r"distance to the data $\|\Sigma - W\| = \sqrt{2\,\mathrm{loss}}$, falls to the right"
    )
    plane.set_ylabel("effective rank of the end-to-end map")
    handles, labels = plane.get_legend_handles_labels()
    handles += [
        Line2D([], [], color="black", ls=(0, (2, 2)), lw=1.3),
        Line2D([], [], **points),
    ]
    labels += ["one mode at a time ($a \\to 0$)", "best approximation of rank r"]
    fig.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    plane.set_title("paths of single runs, by scale a of the start")
    inner = data["r"].values[1:-1]
    for r, colour, p in zip(inner, gf.plot.palette(len(inner)), slopes(data), strict=True):
        near.plot(scales, data["aligned_nearest"][:, r], color=colour, lw=1.4)
        near.plot(scales, data["nearest"][:, :, r], "o", ms=4.5, mfc="none", color=colour)
        near.plot([], [], "o-", mfc="none", color=colour, label=f"rank {r}: fitted slope {p:.2f}")
    near.set_xscale("log")
    near.set_yscale("log")
    near.set_xlabel("scale a of the start (singular value of the layers)")
    near.set_ylabel("smallest distance to the best approximation")
    near.set_title("closest approach; lines: closed form, aligned start")
    low = scales[[0, len(scales) // 3]]
    depth = data.attrs["depth"]
    guide = 0.25 * float(data["nearest"][0, :, inner].min()) * (low / low[0]) ** depth
    near.plot(low, guide, color="black", lw=1.2, ls=(0, (2, 2)), label=f"slope {depth}")
    near.legend(loc="upper left")
    fig.suptitle(
        "Small starts pass through the best approximations of rank 1, 2, …; large ones do not"
    )
    return fig
