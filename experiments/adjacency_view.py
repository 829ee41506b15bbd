"""The adjacency matrix, its powers and its commutator while a network learns.

``A`` holds the layers on its first block sub-diagonal, ``A^k`` all products of k consecutive
layers and ``A^h`` the end-to-end map. Of the diagonal blocks of ``AAᵀ − AᵀA``, which measure
non-normality, the interior ones are conserved: only the first and the last one move.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Widths of the layers, input first.
    widths: tuple[int, ...] = (4, 5, 5, 3)
    # Singular values of the target.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Scale of the Gaussian start: not small, so that the conserved blocks are seen.
    scale: float = 0.7
    # The times shown, increasing from 0.
    times: tuple[float, ...] = (0.0, 0.6, 12.0)
    # Relative tolerance of the solver; the absolute one is a hundredth of it.
    rtol: float = 1e-9
    # Seed of the start.
    seed: int = 1

    @classmethod
    def full(cls) -> Config:
        """A larger network."""
        return cls(widths=(16, 24, 24, 12), singular_values=(5.0, 4.0, 3.0, 2.0, 1.0), seed=0)


def compute(config: Config) -> xr.Dataset:
    """A, its powers up to the depth and its commutator at the times."""
    shape = (config.widths[-1], config.widths[0])
    flow = gf.GradientFlow(gf.Problem.from_singular_values(config.singular_values, shape))
    start = gf.initialize.gaussian(jax.random.key(config.seed), config.widths, config.scale)
    traj = gf.simulate(
        flow,
        start,
        config.times[-1],
        save=config.times,
        method=gf.Method(rtol=config.rtol, atol=config.rtol * 1e-2),
    )
    networks = [traj.network(i) for i in range(len(config.times))]
    powers = range(1, start.depth + 1)
    A = np.stack([np.asarray(net.adjacency()) for net in networks])
    return xr.Dataset(
        {
            "power": (
                ("time", "k", "to_node", "from_node"),
                np.stack([[np.asarray(net.power(k)) for k in powers] for net in networks]),
            ),
            "commutator": (
                ("time", "to_node", "from_node"),
                A @ A.transpose(0, 2, 1) - A.transpose(0, 2, 1) @ A,
            ),
            "nonnormality": ("time", np.asarray(traj["nonnormality"])),
        },
        coords={"time": np.asarray(traj.ts), "k": list(powers)},
        attrs={"runs": run_lines({"run": traj}), "widths": list(config.widths)},
    )


def block_changes(data: xr.Dataset) -> np.ndarray:
    """Largest change of any entry of each diagonal block of the commutator since the start."""
    ends = np.cumsum([0, *data.attrs["widths"]])
    change = np.abs(data["commutator"].values - data["commutator"].values[0]).max(axis=0)
    return np.array([change[a:b, a:b].max() for a, b in itertools.pairwise(ends)])


def summary(data: xr.Dataset) -> str:
    """How far each block of the commutator has moved, and how non-normal A is."""
    changes = ", ".join(f"{change:.1e}" for change in block_changes(data))
    norms = ", ".join(f"{norm:.3f}" for norm in data["nonnormality"].values)
    return (
        f"largest change of the commutator's diagonal blocks 0 … h: {changes}\n"
        f"non-normality ‖AAᵀ − AᵀA‖ at the times shown: {norms}"
    )


def figure(data: xr.Dataset) -> Figure:
    """Rows: times. Columns: A, its powers, the commutator with its conserved blocks framed."""
    widths = [int(w) for w in data.attrs["widths"]]
    depth = data.sizes["k"]
    names = ["A", *(f"A^{k}" for k in range(2, depth + 1))]
    stacks = [data["power"].values[:, k] for k in range(depth)] + [data["commutator"].values]
    titles = [f"${name}$" for name in names] + [r"$AA^\top - A^\top A$"]
    titles[depth - 1] += ", the end-to-end map"
    rows = data.sizes["time"]
    fig, axes = plt.subplots(
        rows, depth + 1, figsize=(2.7 * (depth + 1) + 0.6, 2.35 * rows + 1.3), layout="constrained"
    )
    labels = ["in", *(str(i) for i in range(1, len(widths) - 1)), "out"]
    ends = np.cumsum([0, *widths])
    for column, (stack, title) in enumerate(zip(stacks, titles, strict=True)):
        limit = np.abs(stack).max()
        for row in range(rows):
            ax = axes[row, column]
            gf.plot.adjacency(
                stack[row], ax, widths=widths, limit=limit, labels=labels, colorbar=False
            )
            ax.set_xlabel("from node" if row == rows - 1 else "")
            ax.set_ylabel(f"t = {float(data['time'][row]):g}\n\nto node" if column == 0 else "")
            if row == 0:
                ax.set_title(title)
            if column == depth:
                for a, b in itertools.pairwise(ends[1:-1]):
                    frame = Rectangle((a - 0.5, a - 0.5), b - a, b - a, fill=False, lw=2.0)
                    ax.add_patch(frame)
        fig.colorbar(
            axes[-1, column].images[0], ax=axes[:, column], location="bottom", shrink=0.9, pad=0.02
        )
    fig.suptitle(
        "Learning moves every product of layers, but not the framed blocks of the commutator"
    )
    return fig
