"""Heteroclinic runs: from next to a saddle down to the next critical point, integrated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gradflow import _checks
from gradflow.exact import escape_time
from gradflow.flows import GradientFlow
from gradflow.landscape import Classification, arc, classify
from gradflow.method import Method
from gradflow.network import LinearNetwork
from gradflow.problem import Problem
from gradflow.simulate import simulate
from gradflow.trajectory import Trajectory

__all__ = ["Connection", "heteroclinic"]


class Connection(NamedTuple):
    """A run between two critical points.

    Attributes:
        trajectory: the run, its states stored.
        start, end: classifications of the saddle it left and of the state it ended in.
        start_distance, end_distance: of the first and last whitened end-to-end map from the
            critical maps (Frobenius).
        reached: whether both ends are critical points of the signatures asked for.
    """

    trajectory: Trajectory
    start: Classification
    end: Classification
    start_distance: float
    end_distance: float
    reached: bool


def heteroclinic(
    problem: Problem,
    widths: Iterable[int],
    S1: Iterable[int],
    S2: Iterable[int],
    *,
    offset: float = 0.1,
    t1: float | None = None,
    stop_gradient_norm: float = 1e-8,
    save: Any = 200,
    method: Method = Method(rtol=1e-10, atol=1e-13),  # noqa: B008 - immutable
    key: Any = None,
) -> Connection:
    """Gradient flow from next to the saddle of ``S1`` to the critical point of ``S2 ⊃ S1``.

    Starts on the arc of :func:`gradflow.landscape.arc` at ``τ = offset``, on which whitened flow
    stays. Other modes unstable at the lower point grow from round-off once it is reached: the run
    stops when the gradient falls to ``stop_gradient_norm``.

    Args:
        problem: a loss with a target. With coloured inputs the flow leaves the arc, and may end
            elsewhere; the result says so.
        widths: ``(d_0, …, d_h)``.
        S1, S2: signatures, mode numbers from 1; S1 a proper subset of S2.
        offset: τ of the start, in (0, 1).
        t1: longest time in units of the flow; from the closed form of the weakest new mode if left
            out.
        stop_gradient_norm: the gradient norm that ends the run, > 0.
        save, method: as for :func:`gradflow.simulate`.
        key: random key or seed for random hidden bases. Those are no longer balanced, and the run
            leaves the arc while the map stays on its own.

    Returns:
        a :class:`Connection`.

    Raises:
        ValueError: as for :func:`gradflow.landscape.arc`, or a number out of range.
    """
    offset = _checks.real_scalar("offset", offset, above=0, below=1)
    stop_gradient_norm = _checks.real_scalar("stop_gradient_norm", stop_gradient_norm, above=0)
    widths = _checks.layer_widths("widths", widths)
    higher, lower = tuple(sorted(S1)), tuple(sorted(S2))
    at = arc(problem, widths, higher, lower, key=key)
    start = at(offset)
    if t1 is None:
        t1 = _long_enough(problem, len(widths) - 1, set(lower) - set(higher), offset)
    traj = simulate(
        GradientFlow(problem),
        start,
        t1,
        save=save,
        method=method,
        stop_gradient_norm=stop_gradient_norm,
    )
    first, last = classify(problem, at(0.0)), classify(problem, traj.final)
    distances = [_distance(problem, net, S) for net, S in ((start, higher), (traj.final, lower))]
    reached = (
        first.signature == higher
        and last.signature == lower
        and "not_critical" not in (first.kind, last.kind)
    )
    return Connection(traj, first, last, distances[0], distances[1], reached)


def _long_enough(problem: Problem, depth: int, modes: set[int], offset: float) -> float:
    """When the weakest new mode is learnt to round-off, with a margin."""
    s = np.asarray(problem.singular_values)[[i - 1 for i in modes]].min()
    slowest = 1.0
    if problem.input_covariance is not None:
        spectrum = np.linalg.eigvalsh(np.asarray(problem.input_covariance))
        slowest = float(spectrum[spectrum > spectrum[-1] * 1e-10][0])
    escape = float(escape_time(s, offset**depth * s, depth, fraction=0.9))
    return (escape + 40 / (depth * s ** (2 - 2 / depth))) / min(1.0, slowest)


def _distance(problem: Problem, net: LinearNetwork, signature: tuple[int, ...]) -> float:
    left, right = problem.singular_bases()
    index = jnp.asarray([i - 1 for i in signature], dtype=int)
    s = problem.singular_values[index]
    target = (left[:, index] * s[None, :]) @ right[:, index].T
    return float(jnp.linalg.norm(problem.whitened(net.end_to_end()) - target))
