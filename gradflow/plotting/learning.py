"""The modes of the data as they are learnt."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import ArrayLike
from matplotlib.axes import Axes

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.observables import learning_times
from gradflow.plotting._axes import axes_or_new, one_run
from gradflow.plotting.style import TIME_LABEL, palette
from gradflow.trajectory import Trajectory

__all__ = ["modes"]

_LABELS = {
    "modes": r"mode strength $u_j^\top W C_x^{1/2} v_j$",
    "singular_values": r"singular value $\sigma_j$ of $W$",
}
_LEGEND_LIMIT = 8


def modes(
    traj: Trajectory,
    ax: Axes | None = None,
    *,
    quantity: str | None = None,
    count: int | None = None,
    targets: ArrayLike | None = None,
    fraction: float | None = 0.5,
    colours: Any = None,
    legend: bool = True,
) -> Axes:
    """Draw the strength of every mode against time, and the data's values as dashed lines.

    Args:
        traj: one run with ``T`` saved times, fresh or loaded.
        ax: axes to draw on; those of a new figure if left out.
        quantity: ``"modes"``, the strengths along the data's singular vectors in the whitened
            frame, or ``"singular_values"`` of the end-to-end map, both ``(T, r)``; the modes if
            the run has them.
        count: draw the ``count`` strongest modes only, ≥ 1.
        targets: the values drawn dashed, shape ``(r,)``; for the modes the data's strengths if
            left out, for the singular values none (the data's belong to the whitened frame).
        fraction: a dot marks where a mode first reaches this fraction of its strength in the
            data (:func:`gradflow.observables.learning_times`); None for no dots.
        colours: one matplotlib colour per mode; a colour-blind-safe palette if left out.
        legend: whether to name the modes, at most 8 of them.

    Returns:
        the axes.

    Raises:
        ValueError: a batch of runs, a run without such a quantity, too few colours or targets,
            or a number out of range.
    """
    traj = one_run(traj)
    if quantity is None:
        quantity = "modes" if "modes" in traj.recorded else "singular_values"
    _checks.choice("quantity", quantity, tuple(_LABELS))
    if quantity not in traj.recorded:
        raise ArgumentError(
            "traj",
            f"a run that recorded {', '.join(sorted(traj.recorded))}",
            f"it must have recorded {quantity!r}",
        )
    times, strengths = np.asarray(traj.ts), np.asarray(traj.recorded[quantity])
    shown = strengths.shape[1]
    if count is not None:
        shown = min(shown, _checks.whole_number("count", count, 1))
    colours = palette(shown) if colours is None else list(colours)
    if len(colours) < shown:
        raise ArgumentError("colours", f"{len(colours)} colours", f"there are {shown} modes")
    if targets is None and quantity == "modes":
        targets = traj.targets
    dashed = None if targets is None else np.asarray(_checks.real_array("targets", targets, ndim=1))
    if dashed is not None and len(dashed) < shown:
        raise ShapeError("targets", f"{len(dashed)} values", f"there are {shown} modes")
    ax = axes_or_new(ax)
    for mode in range(shown):
        label = f"mode {mode + 1}"
        if dashed is not None:
            label += f" (data {dashed[mode]:.3g})"
            ax.axhline(dashed[mode], color=colours[mode], linestyle="--", linewidth=1.0, alpha=0.8)
        ax.plot(times, strengths[:, mode], color=colours[mode], label=label)
    if fraction is not None and traj.targets is not None and "modes" in traj.recorded:
        learnt_at = learning_times(traj, fraction).times
        for mode in range(shown):
            if not np.isfinite(learnt_at[mode]):
                continue
            height = np.interp(learnt_at[mode], times, strengths[:, mode])
            ax.plot(
                learnt_at[mode], height, "o", color=colours[mode], markeredgecolor="white", zorder=3
            )
    ax.set_xlabel(TIME_LABEL)
    ax.set_ylabel(_LABELS[quantity])
    if legend and shown <= _LEGEND_LIMIT:
        ax.legend()
    return ax
