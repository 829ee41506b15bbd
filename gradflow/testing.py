"""Assertions on trajectories and networks for users' own tests."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.flows import GradientFlow
from gradflow.network import LinearNetwork
from gradflow.problem import Problem
from gradflow.trajectory import Trajectory

__all__ = ["assert_conserved", "assert_critical", "assert_loss_decreases", "assert_nilpotent"]


def assert_conserved(traj: Trajectory, atol: float) -> None:
    """Assert that no conserved matrix has moved by more than ``atol`` in any entry.

    Args:
        traj: a run; every saved time is checked.
        atol: tolerance on ``|C_i(t) − C_i(t_0)|`` (with weight decay λ, on
            ``|C_i(t) − e^{−2λ(t−t_0)}C_i(t_0)|``).

    Raises:
        AssertionError: naming the worst law (``C_i``, or its number in the flow's ``conserved``),
            its drift, when, and the tolerance.
    """
    atol = _checks.real_scalar("atol", atol, minimum=0)
    drifts = np.asarray(_trajectory(traj).recorded["law_drift"])
    if not drifts.size:
        return
    worst = np.unravel_index(np.argmax(drifts), drifts.shape)
    if not drifts[worst] <= atol:
        # Other flows list blocks, entries, lengths: no C_i.
        matrices = json.loads(traj.config)["flow"] in ("GradientFlow", "ResidualFlow")
        name = "C_" if matrices else "number "
        offending = [f"{name}{i + 1}" for i in np.flatnonzero(~(drifts.max(axis=0) <= atol))]
        raise AssertionError(
            f"conservation law {name}{worst[-1] + 1} drifted by {drifts[worst]:.3g} at "
            f"t = {float(traj.ts[worst[0]]):.6g}, tolerance {atol:.3g} "
            f"(laws beyond it: {', '.join(offending)}; solver {traj.solver})"
        )


def assert_loss_decreases(traj: Trajectory, *, rtol: float = 1e-12) -> None:
    """Assert that the loss falls, or stays, from each saved time to the next.

    Args:
        traj: a run.
        rtol: allowed rise as a fraction of the loss at the start, for round-off.

    Raises:
        AssertionError: naming the largest rise, between which times, and the tolerance.
    """
    rtol = _checks.real_scalar("rtol", rtol, minimum=0)
    loss, times = np.asarray(_trajectory(traj).loss), np.asarray(traj.ts)
    rises = np.diff(loss)
    if not rises.size:
        return
    worst, allowed = int(np.argmax(rises)), rtol * loss[0]
    if not rises[worst] <= allowed:
        raise AssertionError(
            f"the loss rose by {rises[worst]:.3g} from {loss[worst]:.6g} at t = {times[worst]:.6g} "
            f"to {loss[worst + 1]:.6g} at t = {times[worst + 1]:.6g}, tolerance {allowed:.3g} "
            f"({int((rises > allowed).sum())} such rises)"
        )


def assert_nilpotent(net: LinearNetwork | Trajectory) -> None:
    """Assert that ``A^{h+1} = 0`` and the zero block pattern hold exactly.

    ``A`` is multiplied out densely, so that the check owes nothing to the block structure.

    Args:
        net: a network, or a run with stored states (every saved time is checked).

    Raises:
        AssertionError: naming the size of the largest entry that should be 0, and when.
    """
    if isinstance(net, Trajectory):
        for i, t in enumerate(np.asarray(net.ts)):
            _assert_nilpotent(net.network(i), f" at t = {t:.6g}")
    else:
        _assert_nilpotent(net, "")


def _assert_nilpotent(net: LinearNetwork, when: str) -> None:
    A = np.asarray(net.adjacency())
    levels = np.repeat(np.arange(net.depth + 1), net.widths)
    off_pattern = np.where(levels[:, None] == levels[None, :] + 1, 0.0, A)
    if off_pattern.any():
        raise AssertionError(
            f"A has an entry of size {np.abs(off_pattern).max():.3g} off its block pattern{when}; "
            "it must be exactly 0"
        )
    top = np.linalg.matrix_power(A, net.depth + 1)
    if top.any():
        raise AssertionError(
            f"A^{net.depth + 1} has an entry of size {np.abs(top).max():.3g}{when}; "
            "it must be exactly 0"
        )


def assert_critical(problem: Problem, net: LinearNetwork, atol: float = 1e-8) -> None:
    """Assert that the gradient of the loss vanishes at a network.

    Args:
        problem: the loss.
        net: the network.
        atol: tolerance on the Frobenius norm of the gradient of each layer.

    Raises:
        AssertionError: naming the layer with the largest gradient, its norm and the tolerance.
    """
    atol = _checks.real_scalar("atol", atol, minimum=0)
    flow = GradientFlow(problem)
    rates = flow.vector_field(0.0, flow.check_state(net)).weights
    norms = np.array([float(jnp.linalg.norm(rate)) for rate in rates])
    worst = int(np.argmax(norms))
    if not norms[worst] <= atol:
        raise AssertionError(
            f"not a critical point: the gradient of layer {worst + 1} has norm {norms[worst]:.3g}, "
            f"tolerance {atol:.3g}"
        )


def _trajectory(traj: Any) -> Trajectory:
    if not isinstance(traj, Trajectory):
        raise ArgumentError("traj", _checks.describe(traj), "it must be a gradflow.Trajectory")
    if traj.ts.ndim != 1:
        raise ArgumentError("traj", "a batch of runs", "check one at a time: traj.lane(i)")
    return traj
