"""The saddles that a run passes on its way down."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.landscape import _chain, hessian
from gradflow.landscape.classify import nearest
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["Passage", "saddle_passages"]


class Passage(NamedTuple):
    """One saddle that a run came close to.

    Attributes:
        signature: of the saddle, modes counted from 1.
        value: its critical value.
        time: when the end-to-end map was nearest; ``saved_index`` counts it among the saved times.
        distance: how close in the quotient, ``‖W C_x^{1/2} − U_S U_Sᵀ Σ‖_F`` at that time.
        gradient_norm: the gradient's norm at that time; ``smallest_gradient`` the smallest within
            the plateau.
        loss: at that time.
        start, end, duration: when the distance was within the bound, interpolated linearly between
            saved times.
        inertia: (negative, zero, positive) of the Hessian at that time, with the tolerance; None
            above 4,000 parameters.
        smallest_eigenvalue: of that Hessian, or None.
    """

    signature: tuple[int, ...]
    value: float
    time: float
    saved_index: int
    distance: float
    gradient_norm: float
    smallest_gradient: float
    loss: float
    start: float
    end: float
    duration: float
    inertia: hessian.Inertia | None
    smallest_eigenvalue: float | None


def saddle_passages(
    traj: Any, problem: Problem, *, within: float = 0.2, tol: float = 1e-3
) -> list[Passage]:
    """Which saddles a run approached: when, how close, for how long, and the inertia there.

    At every saved time the nearest critical value's map is found in the quotient. A stretch of
    times with the same nearest signature is a passage if the distance falls below ``within`` times
    the strongest mode that is left to learn. Global minima are left out. Save densely enough to
    resolve the transitions.

    Args:
        traj: a run of networks with stored states: ``traj.ts`` and ``traj.states.weights``, shapes
            ``(times,)`` and ``(times, d_i, d_{i-1})``.
        problem: the loss it descended, with a target.
        within: fraction > 0.
        tol: eigenvalues up to this fraction of the sharpness of a balanced minimum count as zero.

    Returns:
        the passages in the order of time.

    Raises:
        ValueError: a run without stored states or of other states than networks, a batch of runs,
            a problem without a target, or widths that do not fit it.
    """
    modes = _chain.modes_of(problem)
    within = _checks.real_scalar("within", within, above=0)
    tol = _checks.real_scalar("tol", tol, minimum=0)
    states, ts = getattr(traj, "states", None), np.asarray(getattr(traj, "ts", np.zeros((0, 0))))
    if not isinstance(states, LinearNetwork):
        raise ArgumentError(
            "traj", _checks.describe(states), "it needs stored states that are networks"
        )
    if ts.ndim != 1:
        raise ArgumentError("traj", "a batch of runs", "look at one at a time: traj.lane(i)")
    problem.check_widths(states.widths)
    widths = states.widths
    top = modes.admissible(widths)
    stacks = [np.asarray(w, dtype=float) for w in states.weights]
    maps = stacks[0]
    for w in stacks[1:]:
        maps = w @ maps
    found = [nearest(modes, widths, W)[:2] for W in maps]
    passages = []
    for first, last in _stretches([signature for signature, _ in found]):
        signature = found[first][0]
        left = [modes.s[i] for i in range(modes.number) if i + 1 not in signature]
        is_minimum = modes.value(signature) <= modes.value(tuple(range(1, top + 1))) * (
            1 + 1e-12
        ) + 1e-12 * float(np.sum(modes.s**2))
        if is_minimum:
            continue
        bound = within * float(max(left))
        distances = np.array([found[i][1] for i in range(first, last + 1)])
        index = first + int(distances.argmin())
        if found[index][1] > bound:
            continue
        start, end = _crossings(ts, found, first, last, index, bound)
        inside = [i for i in range(first, last + 1) if start <= ts[i] <= end] or [index]
        chains = {i: _chain.Chain([stack[i] for stack in stacks]) for i in inside}
        slopes = {i: _slope(problem, chain) for i, chain in chains.items()}
        counts = _inertia(problem, chains[index], tol)
        passages.append(
            Passage(
                signature=signature,
                value=modes.value(signature),
                time=float(ts[index]),
                saved_index=index,
                distance=found[index][1],
                gradient_norm=slopes[index],
                smallest_gradient=min(slopes.values()),
                loss=_chain.loss_value(problem, maps[index]),
                start=start,
                end=end,
                duration=end - start,
                inertia=counts,
                smallest_eigenvalue=None if counts is None else counts.smallest,
            )
        )
    return passages


def _stretches(labels: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """First and last index of every run of equal labels."""
    ends = [i for i in range(1, len(labels)) if labels[i] != labels[i - 1]]
    return list(zip([0, *ends], [*(e - 1 for e in ends), len(labels) - 1], strict=True))


def _crossings(
    ts: np.ndarray, found: list, first: int, last: int, index: int, bound: float
) -> tuple[float, float]:
    """When the distance came below the bound and rose above it again, around ``index``."""

    def outwards(step: int, end: int) -> float:
        i = index
        while i != end and found[i + step][1] <= bound:
            i += step
        if i == end:
            return float(ts[i])
        inner, outer = found[i][1], found[i + step][1]
        return float(ts[i] + (ts[i + step] - ts[i]) * (bound - inner) / (outer - inner))

    return outwards(-1, first), outwards(1, last)


def _slope(problem: Problem, chain: _chain.Chain) -> float:
    return _chain.norm(_chain.gradient(chain, _chain.residual(problem, chain.product)))


def _inertia(problem: Problem, chain: _chain.Chain, tol: float) -> hessian.Inertia | None:
    if chain.parameters > hessian.DENSE_LIMIT:
        return None
    values = scipy.linalg.eigvalsh(hessian.dense(problem, chain))
    scale = hessian.scales(problem, chain, float(np.abs(values).max())).curvature
    return hessian.counted(problem, chain, values, tol * scale)
