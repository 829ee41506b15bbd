"""The one loop: integrate a flow and write down what happens."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jaxtyping import Array, ArrayLike, PyTree

from gradflow import _checks
from gradflow.choice import choose, working_type
from gradflow.errors import ArgumentError, PrecisionWarning
from gradflow.flows.base import AbstractFlow
from gradflow.method import Method
from gradflow.recording import Recorder, check_observe, rate_norm
from gradflow.solvers import GuardedSteps, PredictiveSteps
from gradflow.trajectory import Status, Trajectory, describe_state

__all__ = ["simulate"]

LOG_POINTS = 200
LOG_DECADES = 6


def simulate(
    flow: AbstractFlow,
    state: PyTree,
    t1: float,
    *,
    t0: float = 0.0,
    save: int | str | ArrayLike | Sequence[float] = 200,
    observe: Mapping[str, Callable[[PyTree], PyTree]] | None = None,
    method: Method = Method(),  # noqa: B008 - immutable
    stop_gradient_norm: float | None = None,
    save_states: bool = True,
    progress: bool = False,
) -> Trajectory:
    """Integrate ``ẋ = f(t, x)`` from ``state`` at ``t0`` to ``t1``.

    Compiles once for a flow and state of given shapes, number of saved times, solver and
    observables; other tolerances, horizons, saved times, starts and data of the same shapes use
    the same program. Works inside ``jax.vmap`` (over starts, say) and, with explicit solvers,
    ``jax.grad``; where the numbers of start or data are traced, ``"auto"`` is explicit.

    Args:
        flow: the right-hand side.
        state: the start; a :class:`gradflow.LinearNetwork` for :class:`gradflow.GradientFlow`.
        t1: the end, ≥ ``t0``, in units of gradient-flow time.
        t0: the start time.
        save: a number of equally spaced times from ``t0`` to ``t1`` (at least 2), ``"log"`` for
            ``t0`` and 199 geometrically spaced times over the last six decades, or an array of
            strictly increasing times in ``[t0, t1]``.
        observe: further observables by name, functions of the state in JAX operations. Pass the
            same function objects again to avoid compiling again.
        method: solver, tolerances and bounds.
        stop_gradient_norm: end the run with ``Status.STATIONARY`` at the first step where
            ``‖f‖`` is at most this absolute number. That happens at saddles too: the status says
            nothing about minimum or saddle.
        save_states: whether to store the state at every saved time. Without it the observables
            are evaluated during the solve and no more than one state is held.
        progress: show a progress bar.

    Returns:
        the :class:`gradflow.Trajectory`. A run that meets ``max_steps`` or overflows returns up
        to there with its status set.

    Raises:
        ValueError: an argument out of range or of the wrong kind, or a tolerance that the
            state's floating point type cannot keep; the message names it.

    Warns:
        PrecisionWarning: ``atol`` is coarser than a thousandth of the start's largest weight.
    """
    if not isinstance(flow, AbstractFlow):
        raise ArgumentError("flow", _checks.describe(flow), "it must be a flow, e.g. GradientFlow")
    if not isinstance(method, Method):
        raise ArgumentError("method", _checks.describe(method), "it must be a gradflow.Method")
    state = flow.check_state(state)
    t0 = _checks.real_scalar("t0", t0)
    t1 = _checks.real_scalar("t1", t1)
    if _checks.is_concrete(t0, t1) and t1 < t0:
        raise ArgumentError("t1", f"{t1:g}", f"it must be >= t0 = {t0:g}")
    if stop_gradient_norm is not None:
        stop_gradient_norm = _checks.real_scalar(
            "stop_gradient_norm", stop_gradient_norm, minimum=0
        )
    observe = check_observe(observe, flow)
    dtype = working_type(flow, state)
    _checks.reachable_tolerance("rtol", method.rtol, dtype)
    state = jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), state)
    _warn_if_coarse(state, method.atol)
    grid = _save_times(save, t0, t1, dtype)
    horizon = float(t1 - t0) if _checks.is_concrete(t0, t1) else None
    chosen = choose(method, flow, state, t1, horizon)

    def number(value):
        # On the host, where it takes no dispatch, unless it is traced.
        return np.asarray(value, dtype) if _checks.is_concrete(value) else jnp.asarray(value, dtype)

    started = time.perf_counter()
    result = _integrate(
        flow,
        state,
        grid,
        number(t0),
        number(t1),
        number(method.rtol),
        number(method.atol),
        number(-1.0 if stop_gradient_norm is None else stop_gradient_norm),
        None if method.step_size is None else number(method.step_size),
        observe,
        chosen.solver,
        max_steps=method.max_steps,
        stops=stop_gradient_norm is not None,
        land_on_saves=chosen.land_on_saves,
        per_step=chosen.evaluations_per_step,
        save_states=bool(save_states),
        progress=bool(progress),
    )
    concrete = _checks.is_concrete(result)
    if concrete:
        jax.block_until_ready(result)
    seconds = time.perf_counter() - started if concrete else float("nan")
    trajectory = Trajectory(
        **result,
        seconds=number(seconds),
        solver=chosen.name,
        reason=chosen.reason,
        config=_configuration(flow, state, t0, t1, save, method, stop_gradient_norm),
    )
    return trajectory.trimmed() if concrete else trajectory


@eqx.filter_jit
def _integrate(
    flow: AbstractFlow,
    state: PyTree,
    grid: Array,
    t0: Array,
    t1: Array,
    rtol: Array,
    atol: Array,
    threshold: Array,
    step_size: Array | None,
    observe: dict[str, Callable],
    solver: diffrax.AbstractSolver,
    *,
    max_steps: int,
    stops: bool,
    land_on_saves: bool,
    per_step: int | None,
    save_states: bool,
    progress: bool,
) -> dict[str, Any]:
    """Integrate, and return the fields of a trajectory with all rows (see :func:`_fill`)."""
    record = Recorder(flow, observe, state, t0)
    fixed = step_size is not None
    if fixed:
        controller: Any = diffrax.ConstantStepSize()
    elif isinstance(solver, diffrax.AbstractERK) and not land_on_saves:
        # PI control damps the accept-reject cycle at the stability limit, where an explicit
        # method spends the tail of a run.
        controller = diffrax.PIDController(rtol=rtol, atol=atol, pcoeff=0.4, icoeff=0.3)
    else:
        landings = grid if land_on_saves else None
        controller = PredictiveSteps(rtol=rtol, atol=atol, norm=optimistix.rms_norm, stops=landings)
    controller = GuardedSteps(
        controller=controller,
        rtol=rtol,
        atol=atol,
        norm=optimistix.rms_norm,
        size=(lambda y: flow.loss(y) + rate_norm(flow, t0, y)) if fixed else None,
    )
    event = None
    if stops:
        event = diffrax.Event(lambda t, y, args, **_: rate_norm(flow, t, y) <= threshold)
    what = (lambda t, y, args: y) if save_states else (lambda t, y, args: record(t, y))
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(flow.vector_field),
        solver,
        t0,
        t1,
        step_size,
        state,
        saveat=diffrax.SaveAt(
            subs=[diffrax.SubSaveAt(ts=grid, fn=what), diffrax.SubSaveAt(t1=True)],
            controller_state=True,
        ),
        stepsize_controller=controller,
        event=event,
        max_steps=max_steps,
        throw=False,
        progress_meter=(diffrax.TqdmProgressMeter() if progress else diffrax.NoProgressMeter()),
    )
    (saved_times, (final_time,)), (saved, last) = solution.ts, solution.ys
    final = jax.tree.map(lambda x: x[0], last)
    result = solution.result
    failed = ~(
        (result == diffrax.RESULTS.successful)
        | (result == diffrax.RESULTS.event_occurred)
        | (result == diffrax.RESULTS.max_steps_reached)
    )
    reached = jnp.sum(jnp.isfinite(saved_times))

    # A start that already meets the stopping rule, or whose rate overflows, goes nowhere.
    first_norm = rate_norm(flow, t0, state)
    stays = (stops & (first_norm <= threshold)) | ~jnp.isfinite(first_norm)
    stays = stays | (t1 <= t0)
    final = jax.tree.map(lambda a, b: jnp.where(stays, a, b), state, final)
    final_time = jnp.where(stays, t0, final_time)
    reached = jnp.where(stays, 0, reached)
    final_record = record(final_time, final)
    norm = final_record["gradient_norm"]
    code = jnp.where(
        failed | ~jnp.isfinite(first_norm),
        int(Status.DIVERGED),
        jnp.where(
            norm <= jnp.maximum(threshold, 0),
            int(Status.STATIONARY),
            jnp.where(
                (result == diffrax.RESULTS.max_steps_reached) & ~stays,
                int(Status.MAX_STEPS),
                int(Status.REACHED_END),
            ),
        ),
    )
    rows = _fill(
        record, grid, saved_times, saved, final_time, final, final_record, reached, save_states
    )
    return {
        **rows,
        "targets": flow.target_strengths(),
        "final": final,
        "final_time": final_time,
        "final_loss": final_record["loss"],
        "final_gradient_norm": norm,
        "code": code,
        "step_counts": jnp.where(stays, 0, _counts(solution, per_step)),
    }


def _counts(solution: diffrax.Solution, per_step: int | None) -> Array:
    """Accepted and rejected steps, evaluations and stiff steps; −1 for what nobody counts."""
    accepted = solution.stats["num_accepted_steps"]
    rejected = solution.stats["num_rejected_steps"]
    state: Any = solution.controller_state
    _, told = state
    evaluations, stiff = told.astype(accepted.dtype)
    if per_step is not None:
        evaluations = per_step * (accepted + rejected)
    return jnp.stack([accepted, rejected, evaluations, stiff])


def _fill(
    record, grid, times, saved, final_time, final, final_record, reached, save_states
) -> dict[str, Any]:
    """Rows at the saved times; those that the run did not reach repeat its final state.

    The number of rows to keep is the number of finite ones, and one more for the final state of
    a run that stopped between saved times.
    """
    valid = jnp.arange(grid.shape[0]) < reached

    def padded(rows, last):
        shape = (-1,) + (1,) * (rows.ndim - 1)
        return jnp.where(valid.reshape(shape), rows, last[None])

    times = padded(times, final_time)
    states = None
    if save_states:
        states = jax.tree.map(padded, saved, final)
        # One row at a time: a vmap over all rows would hold all their intermediates at once.
        recorded = jax.lax.map(lambda row: record(*row), (times, states))
    else:
        recorded = jax.tree.map(padded, saved, final_record)
    previous = jnp.where(reached > 0, times[jnp.maximum(reached - 1, 0)], -jnp.inf)
    stopped_between = (reached < grid.shape[0]) & (final_time > previous)
    keep = reached + stopped_between
    finite = jnp.isfinite(recorded["loss"]) & jnp.isfinite(recorded["gradient_norm"])
    keep = jnp.minimum(keep, jnp.sum(jnp.cumprod(finite)))
    return {"ts": times, "states": states, "recorded": recorded, "rows": keep}


def _save_times(save: Any, t0: Any, t1: Any, dtype: Any) -> Array:
    if isinstance(save, str):
        _checks.choice("save", save, ("log",), ", a number of points, or an array of times")
        ratios = np.geomspace(10.0**-LOG_DECADES, 1.0, LOG_POINTS - 1)
        return _spread(np.concatenate([[0.0], ratios]), t0, t1, dtype)
    if isinstance(save, bool) or save is None:
        raise ArgumentError(
            "save", _checks.describe(save), 'it must be a number of points, "log" or an array'
        )
    if np.ndim(save) == 0:
        return _spread(np.linspace(0.0, 1.0, _checks.whole_number("save", save, 2)), t0, t1, dtype)
    if hasattr(save, "dtype") and jnp.issubdtype(save.dtype, jnp.integer):
        save = jnp.asarray(save, dtype)  # whole times are times
    times = _checks.real_array("save", save, ndim=1).astype(dtype)
    if _checks.is_concrete(times, t0, t1):
        host = np.asarray(times)
        if np.any(np.diff(host) <= 0):
            raise ArgumentError(
                "save", "times that do not increase", "they must be strictly increasing: sort them"
            )
        low, high = np.asarray(t0, dtype), np.asarray(t1, dtype)
        if host[0] < low or host[-1] > high:
            raise ArgumentError(
                "save",
                f"times from {host[0]:g} to {host[-1]:g}",
                f"they must lie in [t0, t1] = [{t0:g}, {t1:g}]",
            )
    return times


def _spread(parts: np.ndarray, t0: Any, t1: Any, dtype: Any) -> Array:
    """``t0 + parts·(t1 − t0)``, exact at both ends; a single time for a horizon of 0."""
    if _checks.is_concrete(t0, t1):
        if t0 == t1:
            return jnp.asarray([t0], dtype)
        times = (t0 + parts * (t1 - t0)).astype(dtype)
        times[-1] = t1
        return jnp.asarray(np.unique(times))
    return jnp.minimum(t0 + jnp.asarray(parts, dtype) * (t1 - t0), t1).astype(dtype)


def _warn_if_coarse(state: PyTree, atol: float) -> None:
    if not _checks.is_concrete(state):
        return
    largest = max((float(np.abs(leaf).max()) for leaf in jax.tree.leaves(state)), default=0.0)
    if 0 < largest < 1e3 * atol:
        warnings.warn(
            f"atol: {atol:g} is coarse for a start whose largest weight is {largest:.2g}, so the "
            f"length of its plateau would be noise; pass Method(atol={largest * 1e-6:.0e}) or less",
            PrecisionWarning,
            stacklevel=3,
        )


def _configuration(flow, state, t0, t1, save, method, stop_gradient_norm) -> str:
    def plain(value):
        return float(value) if _checks.is_concrete(value) else "traced"

    options = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    if not isinstance(method.solver, str):
        options["solver"] = type(method.solver).__name__
    return json.dumps(
        {
            **flow.describe(),
            "state": describe_state(state),
            "t0": plain(t0),
            "t1": plain(t1),
            "save": save if isinstance(save, (int, str)) else "array",
            "method": options,
            "stop_gradient_norm": None if stop_gradient_norm is None else plain(stop_gradient_norm),
        }
    )
