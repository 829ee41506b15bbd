"""What every picture does first: check its run, find its axes."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.trajectory import Trajectory

__all__ = ["axes_or_new", "log_safe", "one_run"]


def axes_or_new(ax: Axes | None) -> Axes:
    """``ax``, or the axes of a new figure."""
    if ax is None:
        return plt.subplots(layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise ArgumentError("ax", _checks.describe(ax), "it must be matplotlib axes")
    return ax


def one_run(traj: Any) -> Trajectory:
    """``traj`` if it is a single run; otherwise ``ValueError``."""
    if not isinstance(traj, Trajectory):
        raise ArgumentError("traj", _checks.describe(traj), "it must be a gradflow.Trajectory")
    if np.ndim(traj.ts) != 1:
        raise ShapeError(
            "traj", f"a batch of {np.shape(traj.code)} runs", "draw one of them: traj.lane(i)"
        )
    return traj


def log_safe(values: Any) -> np.ndarray:
    """``values`` with gaps where a log axis has no place for them."""
    values = np.asarray(values, dtype=float)
    return np.where(values > 0, values, np.nan)
