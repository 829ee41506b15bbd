"""How many modes the end-to-end map holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import ArrayLike
from matplotlib.axes import Axes

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.plotting._axes import axes_or_new, one_run
from gradflow.plotting.style import TIME_LABEL
from gradflow.trajectory import Trajectory

__all__ = ["effective_rank"]


def effective_rank(
    traj: Trajectory, ax: Axes | None = None, *, targets: ArrayLike | None = None, **line: Any
) -> Axes:
    """Draw the effective rank of the end-to-end map against time.

    The effective rank is ``exp(−Σ p_j ln p_j)``, ``p = σ/Σσ`` (Roy & Vetterli 2007), as in
    :func:`gradflow.observables.effective_rank`.

    Args:
        traj: one run with ``T`` saved times, fresh or loaded.
        ax: axes to draw on; those of a new figure if left out.
        targets: singular values, shape ``(r,)``, whose effective rank is drawn dashed; those of
            the data (``traj.targets``) are comparable if the inputs are whitened.
        line: passed on to ``ax.plot``: ``color=``, ``label=`` and so on.

    Returns:
        the axes.

    Raises:
        ValueError: a batch of runs, or a run that recorded no singular values.
    """
    traj = one_run(traj)
    if "singular_values" not in traj.recorded:
        raise ArgumentError(
            "traj",
            f"a run that recorded {', '.join(sorted(traj.recorded))}",
            "it must have recorded 'singular_values'",
        )
    ax = axes_or_new(ax)
    (curve,) = ax.plot(traj.ts, _effective_rank(np.asarray(traj.singular_values)), **line)
    if targets is not None:
        height = float(_effective_rank(np.asarray(_checks.real_array("targets", targets, ndim=1))))
        ax.axhline(height, color=curve.get_color(), linestyle="--", linewidth=1.0, alpha=0.8)
    ax.set_xlabel(TIME_LABEL)
    ax.set_ylabel("effective rank of $W$")
    return ax


def _effective_rank(values: np.ndarray) -> np.ndarray:
    total = values.sum(axis=-1, keepdims=True)
    p = values / np.where(total > 0, total, 1.0)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)
    return np.where(total[..., 0] > 0, np.exp(entropy), 0.0)
