"""When each mode of the data is learnt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradflow import _checks
from gradflow.errors import ArgumentError

__all__ = ["LearningTimes", "learning_times"]


class LearningTimes(NamedTuple):
    """When each mode was learnt, and in which order.

    Attributes:
        times: one per mode of the data, strongest first; ``inf`` if not learnt in the run.
        order: the indices of the learnt modes, earliest first.
    """

    times: np.ndarray
    order: np.ndarray


def learning_times(traj: Any, fraction: float = 0.5) -> LearningTimes:
    """The time at which each mode first reaches a fraction of its strength in the data.

    A mode's strength is ``u_jᵀ W v_j`` along the data's singular vectors in the whitened frame
    (the recorded ``modes``), so that it is followed even where singular values cross. Between
    saved times the strength is taken as linear.

    Args:
        traj: a :class:`gradflow.Trajectory` of one run.
        fraction: between 0 and 1, both excluded.

    Raises:
        ValueError: the run's problem has no target, or a fraction out of range.
    """
    fraction = _checks.real_scalar("fraction", fraction, above=0, below=1)
    if traj.targets is None or "modes" not in traj.recorded:
        raise ArgumentError(
            "traj", "a run without a target", "only quadratic problems have modes to be learnt"
        )
    times, targets = np.asarray(traj.ts), np.asarray(traj.targets)
    if times.ndim != 1:
        raise ArgumentError("traj", "a batch of runs", "take one of them: traj.lane(i)")
    strengths = np.asarray(traj.recorded["modes"])
    negligible = targets.max(initial=0.0) * len(targets) * np.finfo(targets.dtype).eps
    learnt_at = np.full(len(targets), np.inf)
    for mode, target in enumerate(targets):
        reached = np.flatnonzero(strengths[:, mode] >= fraction * target)
        if target <= negligible or not len(reached):
            continue
        last = reached[0]
        learnt_at[mode] = times[last]
        if last > 0:
            low, high = strengths[last - 1, mode], strengths[last, mode]
            part = (fraction * target - low) / (high - low)
            learnt_at[mode] = times[last - 1] + part * (times[last] - times[last - 1])
    order = np.argsort(learnt_at, kind="stable")[: int(np.isfinite(learnt_at).sum())]
    return LearningTimes(learnt_at, order)
