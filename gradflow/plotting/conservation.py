"""How well the conserved quantities are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from gradflow.errors import ArgumentError
from gradflow.plotting._axes import axes_or_new, one_run
from gradflow.plotting.style import TIME_LABEL
from gradflow.trajectory import Trajectory

__all__ = ["drift"]


def drift(traj: Trajectory, ax: Axes | None = None, *, each: bool = False, **line: Any) -> Axes:
    """Draw the drift of the conserved quantities against time on a log axis.

    The drift is the largest entry of ``|C_i(t) − C_i(t_0)|``: the exact flow has none, so this is
    the solver's error. Drifts below the machine epsilon, 0 included, are drawn at it.

    Args:
        traj: one run with ``T`` saved times, fresh or loaded.
        ax: axes to draw on; those of a new figure if left out.
        each: draw one curve per conserved matrix ``C_i`` and name them, instead of their maximum.
        line: passed on to ``ax.plot``: ``color=``, ``label=`` and so on.

    Returns:
        the axes; a dotted line marks the machine epsilon of the run's floating point type.

    Raises:
        ValueError: a batch of runs, or a run without conserved quantities.
    """
    traj = one_run(traj)
    drifts = np.asarray(traj.recorded["law_drift"])
    if not drifts.shape[-1]:
        raise ArgumentError("traj", "a run without conserved quantities", "it must have some")
    epsilon = float(np.finfo(drifts.dtype).eps)
    ax = axes_or_new(ax)
    ax.set_yscale("log")
    ax.axhline(epsilon, color="0.5", linestyle=":", linewidth=1.0)
    drifts = np.maximum(drifts, epsilon)
    if each:
        for law in range(drifts.shape[1]):
            ax.plot(traj.ts, drifts[:, law], **{"label": f"$C_{{{law + 1}}}$", **line})
        ax.legend()
    else:
        ax.plot(traj.ts, drifts.max(axis=1), **line)
    ax.set_xlabel(TIME_LABEL)
    ax.set_ylabel(r"drift $\max\,|C_i(t) - C_i(0)|$")
    return ax
