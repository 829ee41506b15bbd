"""Broad distinctions are learnt before fine ones: kingdoms split before species.

Eight living things and their properties form a tree. A property that holds for a whole branch
gives the branch's mode a larger singular value, and from a small start strength decides when a
mode is learnt (after Saxe, McClelland & Ganguli 2014, arXiv 1312.6120; inputs whitened).
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import gradflow as gf
from experiments._report import run_lines

LEVELS = (
    "what all living things share",
    "animals from plants",
    "birds from fish, trees from flowers",
    "each kind from its sibling",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Number of layers.
    depth: int = 2
    # Width of every hidden layer.
    hidden_width: int = 16
    # Strength of the end-to-end map's modes at the start, in random directions.
    start: float = 1e-4
    # End of the run.
    t1: float = 22.0
    # Relative tolerance of the solver; the absolute one is a hundredth of it.
    rtol: float = 1e-8
    # Number of saved times.
    points: int = 600
    # Seed of the start.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """A deeper and wider network."""
        return cls(depth=3, hidden_width=128, start=1e-5, t1=500.0, points=3000)


def tree_levels(V: np.ndarray) -> np.ndarray:
    """The tree level that each column of ``V`` (items, modes) distinguishes, 0 for the root."""
    # At level k the items fall into 2^k blocks of neighbours; averages over blocks are nested.
    items = len(V)
    averages = [np.zeros((items, items))]
    for level in range(len(LEVELS)):
        size = items >> level
        averages.append(np.kron(np.eye(1 << level), np.full((size, size), 1 / size)))
    shares = [
        np.sum(((fine - coarse) @ V) ** 2, axis=0) for coarse, fine in itertools.pairwise(averages)
    ]
    return np.argmax(shares, axis=0)


def compute(config: Config) -> xr.Dataset:
    """Modes against time with their tree level, and the items' similarity between the stages."""
    X, Y = gf.datasets.hierarchy()
    problem = gf.Problem.from_data(X, Y, whiten=True)
    widths = (X.shape[1], *[config.hidden_width] * (config.depth - 1), Y.shape[1])
    start = gf.initialize.balanced(
        jax.random.key(config.seed), widths, config.start ** (1 / config.depth)
    )
    method = gf.Method(rtol=config.rtol, atol=config.rtol * 1e-2)
    traj = gf.simulate(
        gf.GradientFlow(problem), start, config.t1, save=config.points, method=method
    )
    levels = tree_levels(np.asarray(problem.singular_bases()[1]))
    learnt = gf.observables.learning_times(traj).times
    stages = _stages(learnt, levels, np.asarray(traj.ts))
    similarities = [_similarity(np.asarray(traj.network(i).end_to_end())) for i in stages]
    return xr.Dataset(
        {
            "modes": (("time", "mode"), np.asarray(traj["modes"])),
            "singular_value": ("mode", np.asarray(problem.singular_values)),
            "level": ("mode", levels),
            "learning_time": ("mode", learnt),
            "stage_time": ("stage", np.asarray(traj.ts)[np.array(stages)]),
            "similarity": (("stage", "item", "other_item"), np.stack(similarities)),
        },
        coords={"time": np.asarray(traj.ts), "item": list(gf.datasets.HIERARCHY_ITEMS)},
        attrs={"runs": run_lines({f"{config.depth} layers": traj})},
    )


def _stages(learnt: np.ndarray, levels: np.ndarray, ts: np.ndarray) -> list[int]:
    """Saved indices half-way between the learning of one level and the next, and the last one."""
    stages = []
    for level in range(len(LEVELS) - 1):
        done, due = learnt[levels == level].max(), learnt[levels == level + 1].min()
        stages.append(int(np.searchsorted(ts, min(0.5 * (done + due), ts[-1]))))
    return [*stages, len(ts) - 1]


def _similarity(W: np.ndarray) -> np.ndarray:
    """Cosines between the predicted property vectors of the items, the columns of ``W``."""
    # Every input is one-hot and equally frequent, so whitening only rescales the columns.
    columns = W / np.linalg.norm(W, axis=0)
    return columns.T @ columns


def summary(data: xr.Dataset) -> str:
    """Learning times by tree level, and the similarity of an animal and a plant, two birds, …"""
    lines = []
    for level, name in enumerate(LEVELS):
        chosen = data["level"].values == level
        times = data["learning_time"].values[chosen]
        lines.append(
            f"{name}: singular value {data['singular_value'].values[chosen].mean():.3f}, "
            f"half learnt at t = {times.min():.2f} to {times.max():.2f}"
        )
    for stage in range(data.sizes["stage"]):
        one = data["similarity"].values[stage]
        lines.append(
            f"t = {float(data['stage_time'][stage]):.2f}: cosines robin-owl {one[0, 1]:.2f}, "
            f"robin-trout {one[0, 2]:.2f}, robin-oak {one[0, 4]:.2f}"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Modes by tree level against time, and item similarities between the stages below."""
    stages = data.sizes["stage"]
    fig = plt.figure(figsize=(10.5, 6.6), layout="constrained")
    grid = fig.add_gridspec(2, stages, height_ratios=(1.25, 1))
    top = fig.add_subplot(grid[0, :])
    colours = gf.plot.palette(len(LEVELS))
    named = set()
    for mode, level in enumerate(data["level"].values):
        label = None if level in named else LEVELS[level]
        named.add(level)
        top.axhline(
            float(data["singular_value"][mode]), color=colours[level], ls="--", lw=1.0, alpha=0.8
        )
        top.plot(data["time"], data["modes"][:, mode], color=colours[level], label=label)
    for name, t in zip("ABCDEF", data["stage_time"].values, strict=False):
        top.axvline(t, color="0.4", ls=":", lw=1.2)
        top.annotate(
            name,
            (t, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            xytext=(0, 2),
            textcoords="offset points",
            fontweight="bold",
        )
    top.set_xlim(0, float(data["time"][-1]))
    top.set_xlabel(gf.plot.TIME_LABEL)
    top.set_ylabel(r"mode strength $u_j^\top W\, v_j$")
    top.legend(loc="center right", bbox_to_anchor=(1.0, 0.545))
    items = data["item"].values
    maps = []
    for stage in range(stages):
        ax = fig.add_subplot(grid[1, stage])
        image = ax.imshow(data["similarity"][stage], cmap="cividis", vmin=0, vmax=1)
        ax.set_title(f"{'ABCDEF'[stage]}: t = {float(data['stage_time'][stage]):.1f}")
        ax.set_xticks(range(len(items)), items, rotation=90)
        ax.set_yticks(range(len(items)), items if stage == 0 else [""] * len(items))
        ax.tick_params(length=0)
        maps.append(ax)
    fig.colorbar(image, ax=maps, label="cosine of predicted properties", shrink=0.8, pad=0.02)
    fig.suptitle("Kingdoms split before species: broad distinctions are learnt first")
    return fig
