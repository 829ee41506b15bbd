"""The loss as it falls."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from gradflow import _checks
from gradflow.plotting._axes import axes_or_new, log_safe, one_run
from gradflow.plotting.style import TIME_LABEL
from gradflow.trajectory import Trajectory

__all__ = ["loss"]


def loss(traj: Trajectory, ax: Axes | None = None, *, floor: float = 0.0, **line: Any) -> Axes:
    """Draw the loss against time on a log axis.

    Args:
        traj: one run with ``T`` saved times, fresh or loaded.
        ax: axes to draw on; those of a new figure if left out.
        floor: subtracted from the loss, for instance the ``irreducible_loss`` of the problem.
        line: passed on to ``ax.plot``: ``color=``, ``label=`` and so on.

    Returns:
        the axes. Where the loss is not above ``floor`` the curve has a gap.

    Raises:
        ValueError: a batch of runs, or a floor that is no finite number.
    """
    traj = one_run(traj)
    floor = _checks.real_scalar("floor", floor)
    ax = axes_or_new(ax)
    ax.set_yscale("log")
    ax.plot(np.asarray(traj.ts), log_safe(np.asarray(traj.loss) - floor), **line)
    ax.set_xlabel(TIME_LABEL)
    ax.set_ylabel("loss" if floor == 0 else f"loss − {floor:.4g}")
    return ax
