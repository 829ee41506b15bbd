"""Many starts at once: lanes side by side in one program, batches of them on all cores."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree
from tqdm import tqdm

from gradflow import _checks
from gradflow.choice import choose, working_type
from gradflow.errors import ArgumentError, ShapeError
from gradflow.flows.base import AbstractFlow
from gradflow.flows.gradient import GradientFlow
from gradflow.method import Method
from gradflow.network import LinearNetwork
from gradflow.recording import Recorder, check_observe, rate_norm
from gradflow.simulate import _configuration, _fill, _integrate, _save_times, _warn_if_coarse
from gradflow.solvers import PredictiveSteps
from gradflow.solvers.linearisation import scattered
from gradflow.solvers.stabilised import _table
from gradflow.trajectory import Status, Trajectory

__all__ = ["ensemble"]

# Lanes of a batch: enough to fill vector units, few enough for their stages to stay in the cache.
_LANES = 64
_STAGE_ENTRIES = 2**16
# What a batch, and what all batches before their observables are recorded, may hold of states at
# saved times, in entries.
_ROW_ENTRIES = 2**25
_HELD_ENTRIES = 2**26
_MARCHED = ("auto", "explicit", "stabilised")


def ensemble(
    flow: AbstractFlow,
    states: PyTree | Sequence[PyTree],
    t1: float,
    *,
    lanes_per_batch: int | None = None,
    workers: int | None = None,
    progress: bool = False,
    t0: float = 0.0,
    save: int | str | ArrayLike | Sequence[float] = 200,
    observe: Mapping[str, Callable[[PyTree], PyTree]] | None = None,
    method: Method = Method(),  # noqa: B008 - immutable
    stop_gradient_norm: float | None = None,
    save_states: bool = True,
) -> Trajectory:
    """Integrate one flow from many starts: as ``jax.vmap`` of :func:`gradflow.simulate`, faster.

    The starts are cut into batches of one size (the last one filled up with copies), so that one
    program serves all; batches run in threads, on all cores. In a batch all lanes step together,
    each with its own step size and error control, so that a lane that fails disturbs no other. The
    gain over a loop is largest for small networks: some 7 times per core for widths of 5, less than
    2 from 20 on.

    ``"auto"`` takes explicit steps of order 5 (Tsitouras), and stabilised ones of order 4
    (Runge–Kutta–Chebyshev) while stability holds up most of a batch. Steps, though not their
    accuracy, so depend on the lanes of a batch. ``"explicit"`` and ``"stabilised"`` take
    one kind only; other solvers and fixed steps run as :func:`gradflow.simulate` under
    ``jax.vmap``, without gain over a loop. Other starts, as many or more, tolerances, horizons and
    data of the same shapes do not compile again.

    Args:
        flow: the right-hand side.
        states: the starts, stacked along the first axis of every array, such as the
            :class:`gradflow.LinearNetwork` that ``jax.vmap`` of an initialiser returns; or a
            sequence of starts of equal shapes.
        t1: the end, ≥ ``t0``, in units of gradient-flow time.
        lanes_per_batch: starts in one batch; chosen by the size of a start if left out. While a
            batch runs its states at all saved times are held, whatever ``save_states`` is; of
            several batches up to half a gigabyte.
        workers: batches that run at once; the number of cores if left out. One after the other
            where steps call LAPACK (the right-hand side of :class:`gradflow.EndToEndFlow`, solvers
            under ``jax.vmap``), as XLA's threads could wait for each other for ever.
        progress: show a progress bar over the starts.
        t0, save, observe, method, stop_gradient_norm, save_states: as for
            :func:`gradflow.simulate`; ``max_steps`` holds for every lane.

    Returns:
        a :class:`gradflow.Trajectory` whose arrays have the runs as first axis. All have the full
        number of rows, those past a run's end repeating its final one; ``lane(i)`` is one run
        without them. ``stats.seconds`` is the wall time of the whole call.

    Raises:
        ValueError: no starts, starts of unequal shapes, or an argument out of range or of the
            wrong kind; the message names it.

    Warns:
        PrecisionWarning: ``atol`` is coarser than a thousandth of some start's largest weight.
    """
    if not isinstance(flow, AbstractFlow):
        raise ArgumentError("flow", _checks.describe(flow), "it must be a flow, e.g. GradientFlow")
    if not isinstance(method, Method):
        raise ArgumentError("method", _checks.describe(method), "it must be a gradflow.Method")
    states, count = _stacked(flow, states)
    t0 = _checks.real_scalar("t0", t0)
    t1 = _checks.real_scalar("t1", t1, minimum=t0)
    if stop_gradient_norm is not None:
        stop_gradient_norm = _checks.real_scalar(
            "stop_gradient_norm", stop_gradient_norm, minimum=0
        )
    observe = check_observe(observe, flow)
    dtype = working_type(flow, states)
    _checks.reachable_tolerance("rtol", method.rtol, dtype)
    states = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), states)
    grid = _save_times(save, t0, t1, dtype)
    workers = _checks.whole_number("workers", os.cpu_count() if workers is None else workers, 1)
    if lanes_per_batch is None:
        lanes = _default_lanes(states, count, workers, grid.shape[0])
    else:
        lanes = _checks.whole_number("lanes_per_batch", lanes_per_batch, 1)
    largest = _largest_entries(states)
    finite = np.isfinite(largest)
    if finite.any():
        _warn_if_coarse(largest[finite].min(), method.atol)

    def number(value: Any) -> Any:
        return np.asarray(value, dtype)

    first = jax.tree.map(lambda leaf: jnp.asarray(leaf[int(np.argmax(finite))]), states)
    numbers = (
        grid,
        number(t0),
        number(t1),
        number(method.rtol),
        number(method.atol),
        number(-1.0 if stop_gradient_norm is None else stop_gradient_norm),
    )
    stops, save_states = stop_gradient_norm is not None, bool(save_states)
    if method.solver in _MARCHED and method.step_size is None:
        kind = str(method.solver)
        name, reason = _MARCH_NAMES[kind], f"solver={kind!r}, lanes in step"
        if kind == "auto":
            reason = "auto: explicit, stabilised while most of a batch is stiff; lanes in step"

        def integrate(batch):
            return _march(flow, batch, *numbers, number(method.max_steps), kind=kind, stops=stops)

        def finish(batch, marched):
            return _fields(
                flow,
                batch,
                marched,
                grid,
                number(t0),
                numbers[-1],
                observe,
                save_states=save_states,
            )

        at_once = 1 if _calls_lapack(flow, first) else workers
    else:
        chosen = choose(method, flow, first, t1, t1 - t0)
        name, reason = chosen.name, f"{chosen.reason}, under jax.vmap"
        step_size = None if method.step_size is None else number(method.step_size)

        def integrate(batch):
            return _mapped(
                flow,
                batch,
                *numbers,
                step_size,
                observe,
                chosen.solver,
                max_steps=method.max_steps,
                land_on_saves=chosen.land_on_saves,
                per_step=chosen.evaluations_per_step,
                stops=stops,
                save_states=save_states,
            )

        def finish(batch, result):
            return result

        at_once = 1

    started = time.perf_counter()
    with tqdm(total=count, desc="ensemble", unit="run", disable=not progress) as bar:
        held = max(at_once, _HELD_ENTRIES // (lanes * _size(states) * grid.shape[0]))
        result = _in_batches(integrate, finish, states, count, lanes, at_once, held, bar)
    seconds = time.perf_counter() - started
    targets = flow.target_strengths()
    config = _configuration(flow, first, t0, t1, save, method, stop_gradient_norm)
    result["targets"] = None if targets is None else jnp.tile(targets, (count, 1))
    return Trajectory(
        **result,
        seconds=jnp.full(count, seconds, dtype),
        solver=name,
        reason=reason,
        config=config,
    )


_MARCH_NAMES = {
    "auto": "Tsit5/OrthogonalChebyshev",
    "explicit": "Tsit5",
    "stabilised": "OrthogonalChebyshev",
}


def _stacked(flow: AbstractFlow, states: Any) -> tuple[PyTree, int]:
    """The starts as one pytree with the runs along the first axis, and how many they are."""
    if isinstance(states, (list, tuple)) and not hasattr(states, "_fields"):
        if not states:
            raise ArgumentError("states", "no starts", "it must hold at least one start")
        starts = []
        for i, one in enumerate(states):
            try:
                starts.append(flow.check_state(one))
            except ValueError as error:
                raise ArgumentError(f"states[{i}]", "a refused start", str(error)) from error
            if _shapes(starts[i]) != _shapes(starts[0]):
                raise ShapeError(
                    f"states[{i}]",
                    f"arrays of shapes {_shapes(starts[i])}",
                    f"all starts must have the shapes of the first, {_shapes(starts[0])}",
                )
        return jax.tree.map(lambda *leaves: np.stack(leaves), *starts), len(starts)
    counts = {shape[:1] for shape in _shapes(states)}
    if len(counts) != 1 or counts == {()}:
        raise ShapeError(
            "states",
            f"arrays of shapes {_shapes(states)}",
            "it must be starts stacked along the first axis of every array, or a list of starts",
        )
    (count,) = counts.pop()
    if count == 0:
        raise ShapeError("states", "no starts", "it must hold at least one start")
    if isinstance(states, LinearNetwork) and states.weights[0].ndim != 3:
        raise ShapeError(
            "states",
            f"weights of {states.weights[0].ndim} dimensions",
            "they must have 3, the first one counting the starts; pass a single start in a list",
        )
    try:
        return jax.vmap(flow.check_state)(states), count
    except ValueError as error:
        raise ArgumentError("states", "starts that are refused", str(error)) from error


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _size(states: PyTree) -> int:
    """The number of entries of one start."""
    return sum(leaf[0].size for leaf in jax.tree.leaves(states))


def _largest_entries(states: PyTree) -> np.ndarray:
    """The largest absolute entry of every start."""
    sizes = [np.abs(x).reshape(len(x), -1).max(axis=1, initial=0) for x in jax.tree.leaves(states)]
    return np.max(sizes, axis=0)


def _default_lanes(states: PyTree, count: int, workers: int, saves: int) -> int:
    size = _size(states)
    fits = min(_LANES, _STAGE_ENTRIES // size, _ROW_ENTRIES // (size * saves))
    # Powers of two, so that ensembles of different size share their programs.
    needed = 2 ** (-(-count // workers) - 1).bit_length()
    return max(1, min(fits, needed))


def _in_batches(
    integrate: Callable[[PyTree], Any],
    finish: Callable[[PyTree, Any], dict[str, Any]],
    states: PyTree,
    count: int,
    lanes: int,
    at_once: int,
    held: int,
    bar: tqdm,
) -> dict[str, Any]:
    """Batches of ``lanes`` starts through both functions, and the results in order.

    ``integrate`` runs for ``at_once`` batches at a time, ``finish`` alone, after ``held`` of them.
    """
    lows = range(0, count, lanes)
    x64 = jnp.zeros(()).dtype == np.float64

    def batch(low: int) -> PyTree:
        index = np.minimum(np.arange(low, low + lanes), count - 1)
        return jax.tree.map(lambda leaf: leaf[index], states)

    def job(low: int) -> tuple[PyTree, Any]:
        part = batch(low)
        with _checks.precision(x64):
            done = jax.block_until_ready(integrate(part))
        bar.update(min(lanes, count - low))
        return part, done

    results = []
    with ThreadPoolExecutor(at_once) as pool:
        for k in range(0, len(lows), held):
            futures = [pool.submit(job, low) for low in lows[k : k + held]]
            try:
                done = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            results += [jax.tree.map(np.asarray, finish(*one)) for one in done]
    return jax.tree.map(lambda *parts: jnp.asarray(np.concatenate(parts)[:count]), *results)


# Primitives that are calls of LAPACK. On processors a batch of them is shared out among XLA's
# threads by one of these, which waits for the others: several programs that do so at once can all
# wait for each other, for ever.
_LAPACK = re.compile(
    r"\b(cholesky\w*|eigh?|geqrf|geqp3|hessenberg|householder_product|lu|ormqr|schur|svd"
    r"|triangular_solve|tridiagonal\w*|ffi_call|\w+_callback)\["
)


def _calls_lapack(flow: AbstractFlow, state: PyTree) -> bool:
    arrays, static = eqx.partition(flow, eqx.is_array)
    return bool(_LAPACK.search(str(_field.trace(static, arrays, 0.0, state).jaxpr)))


@functools.partial(jax.jit, static_argnums=0)
def _field(static: Any, arrays: Any, t: Any, state: PyTree) -> PyTree:
    return eqx.combine(arrays, static).vector_field(t, state)


@eqx.filter_jit
def _mapped(
    flow, states, grid, t0, t1, rtol, atol, threshold, step_size, observe, solver, **options
) -> dict[str, Any]:
    """The loop of :func:`gradflow.simulate` under ``jax.vmap``."""

    def one(state):
        return _integrate(
            flow,
            state,
            grid,
            t0,
            t1,
            rtol,
            atol,
            threshold,
            step_size,
            observe,
            solver,
            progress=False,
            **options,
        )

    return jax.vmap(one)(states)


class _Step(NamedTuple):
    """A step of all lanes."""

    t: Float[Array, " lanes"]  # where it ends
    end: Float[Array, "n lanes"]
    slope: Float[Array, "n lanes"]  # f at the end
    error: Float[Array, "n lanes"]
    radius: Float[Array, " lanes"]  # what is known of the spectral radius at its start
    steepness: Float[Array, " lanes"]  # and what its last stages show
    leading: Float[Array, "n lanes"]
    evaluations: Array
    order: Array


class _March(NamedTuple):
    """Where all lanes are."""

    t: Float[Array, " lanes"]
    y: Float[Array, "n lanes"]
    slope: Float[Array, "n lanes"]
    until: Float[Array, " lanes"]  # the planned end of the next step
    memory: PyTree  # of the step size controller
    radius: Float[Array, " lanes"]  # estimate of the spectral radius
    leading: Float[Array, "n lanes"]  # and of the direction that goes with it
    rows: Float[Array, "lanes saves n"]
    row: Array  # how many of them are written
    counts: Array  # (4, lanes): accepted, rejected, evaluations, stiff
    failed: Array
    active: Array
    stiff: Array  # whether the next step is a stabilised one; a single flag
    votes: Array  # for a change


class _Marched(NamedTuple):
    """Where all lanes ended; lanes are the first axis."""

    t: Float[Array, " lanes"]
    y: Float[Array, "lanes n"]
    rows: Float[Array, "lanes saves n"]
    row: Array
    counts: Array
    failed: Array
    out_of_steps: Array


# The reach of Tsitouras' method on the negative real axis.
_REACH = 3.3
# Steps beyond which a change repays its attempt.
_AHEAD = 10
_VOTES = 4
# Of lanes that must be stiff: a stiff lane's explicit steps cost less than an easy one's others.
_SHARE = 0.8
_RADIUS_SAFETY = 1.1
# An estimate's loss per step, so that a large value that was met once is forgotten: after an
# explicit step, which does not always see the steepest direction, and after a stabilised one.
_FADE = 0.98
_DOUBT = 0.95
# A step's own work, in evaluations.
_OVERHEAD = 3


@eqx.filter_jit
def _march(
    flow: AbstractFlow,
    states: PyTree,
    grid: Array,
    t0: Array,
    t1: Array,
    rtol: Array,
    atol: Array,
    threshold: Array,
    max_steps: Array,
    *,
    kind: str,
    stops: bool,
) -> _Marched:
    """Integrate a batch.

    Within the loop lanes are the last axis, where sums over a state and products with a lane's own
    numbers are loops over lanes.
    """
    first = jax.tree.map(lambda leaf: leaf[0], states)
    unravel = ravel_pytree(first)[1]
    lanes = jax.tree.leaves(states)[0].shape[0]
    y0 = jax.vmap(lambda state: ravel_pytree(state)[0], out_axes=-1)(states)
    rate = _lanes_field(flow, first)
    controller = PredictiveSteps(
        rtol=rtol, atol=atol, norm=optimistix.rms_norm, stops=jnp.append(grid, t1)
    )
    every = jnp.arange(lanes)
    saves = grid.shape[0]
    times = jnp.full(lanes, t0)
    slope = rate(times, y0)
    norm = jnp.sqrt(jnp.sum(slope**2, axis=0))
    stays = (stops & (norm <= threshold)) | ~jnp.isfinite(norm) | (t1 <= t0)

    def begin(y):
        def func(terms, t, y, args):
            return ravel_pytree(flow.vector_field(t, unravel(y), args))[0]

        return controller.init(None, t0, t1, y, None, None, func, 5)

    until, memory = jax.vmap(begin, in_axes=-1)(y0)
    row = jnp.where(~stays & (grid[0] <= t0), 1, 0)
    start = _March(
        times,
        y0,
        slope,
        until,
        memory,
        jnp.zeros_like(times),
        _unit(slope, 1.0 + jnp.arange(len(y0))),
        jnp.zeros((lanes, saves, y0.shape[0]), y0.dtype).at[:, 0].set(y0.T),
        row,
        jnp.zeros((4, lanes), int),
        jnp.zeros(lanes, bool),
        ~stays,
        jnp.asarray(kind == "stabilised"),
        jnp.asarray(0),
    )

    def adapt(t, until, keep, error, order, memory):
        # Of a state 0 the error in units of the tolerances is told as it is.
        zero = jnp.zeros_like(t)
        error = jnp.where(keep, error * atol, jnp.inf)
        return controller.adapt_step_size(t, until, zero, zero, None, error, order, memory)

    def advance(now: _March) -> _March:
        explicit = lambda: _explicit_step(rate, now)  # noqa: E731
        stabilised = lambda: _stabilised_step(rate, now, rtol)  # noqa: E731
        if kind == "auto":
            made = jax.lax.cond(now.stiff, stabilised, explicit)
        else:
            made = explicit() if kind == "explicit" else stabilised()
        scale = atol + rtol * jnp.maximum(jnp.abs(now.y), jnp.abs(made.end))
        error = jnp.sqrt(jnp.mean((made.error / scale) ** 2, axis=0))
        finite = jnp.isfinite(made.end).all(axis=0) & jnp.isfinite(made.slope).all(axis=0)
        keep, _, until, _, memory, _ = jax.vmap(adapt, in_axes=(0, 0, 0, 0, None, 0))(
            now.t, made.t, finite, error, made.order, now.memory
        )
        keep = keep & now.active
        t = jnp.where(keep, made.t, now.t)
        # Written as simulate does it: a step that is lost in the round-off of t ends the run.
        failed = now.active & ~(until - t > 2 * jnp.finfo(t.dtype).eps * jnp.abs(t)) & (t < t1)
        y = jnp.where(keep[None, :], made.end, now.y)
        slope = jnp.where(keep[None, :], made.slope, now.slope)
        landed = keep & (t == grid[jnp.minimum(now.row, saves - 1)]) & (now.row < saves)
        place = jnp.where(landed, now.row, saves)
        rows = now.rows.at[every, place].set(y.T, mode="drop")
        tried = now.active.astype(int)
        spent = jnp.stack(
            [keep, now.active & ~keep, tried * made.evaluations, tried * now.stiff]
        ).astype(int)
        counts = now.counts + spent
        active = now.active & (t < t1) & ~failed & (counts[0] + counts[1] < max_steps)
        if stops:
            active = active & ~(jnp.sqrt(jnp.sum(slope**2, axis=0)) <= threshold)
        # A step that blew up says nothing of how steep the flow is.
        radius = jnp.maximum(made.radius, jnp.where(keep, made.steepness, 0.0))
        new = _March(
            t, y, slope, jnp.where(active, until, t), memory, radius, made.leading, rows,
            now.row + landed, counts, now.failed | failed, active, now.stiff, now.votes,
        )  # fmt: skip
        return _decide(new, made.t - now.t, t1) if kind == "auto" else new

    last = jax.lax.while_loop(lambda now: jnp.any(now.active), advance, start)

    out_of_steps = (last.counts[0] + last.counts[1] >= max_steps) & (last.t < t1) & ~stays
    return _Marched(last.t, last.y.T, last.rows, last.row, last.counts.T, last.failed, out_of_steps)


@eqx.filter_jit
def _fields(
    flow: AbstractFlow,
    states: PyTree,
    marched: _Marched,
    grid: Array,
    t0: Array,
    threshold: Array,
    observe: dict[str, Callable],
    *,
    save_states: bool,
) -> dict[str, Any]:
    """The fields of a trajectory, with the lanes as first axis."""
    unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], states))[1]

    def lane(state, run):
        record = Recorder(flow, observe, state, t0)
        final = unravel(run.y)
        final_record = record(run.t, final)
        norm = final_record["gradient_norm"]
        code = jnp.where(
            run.failed | ~jnp.isfinite(rate_norm(flow, t0, state)),
            int(Status.DIVERGED),
            jnp.where(
                norm <= jnp.maximum(threshold, 0),
                int(Status.STATIONARY),
                jnp.where(run.out_of_steps, int(Status.MAX_STEPS), int(Status.REACHED_END)),
            ),
        )
        saved = jax.vmap(unravel)(run.rows)
        filled = _fill(
            record, grid, grid, saved, run.t, final, final_record, run.row, save_states=True
        )
        return {
            **filled,
            "states": filled["states"] if save_states else None,
            "final": final,
            "final_time": run.t,
            "final_loss": final_record["loss"],
            "final_gradient_norm": norm,
            "code": code,
            "step_counts": run.counts,
        }

    return jax.vmap(lane)(states, marched)


def _decide(now: _March, h: Array, t1: Array) -> _March:
    """Which kind of step comes next, by what most lanes would gain from."""
    z = h * now.radius
    planned = (now.until - now.t) * now.radius
    limited = (z > 0.6 * _REACH) & ((t1 - now.t) * now.radius > _AHEAD * _REACH)
    calm = planned < 0.3 * _REACH
    wanted = jnp.where(now.stiff, calm, limited) & now.active
    share = jnp.where(now.stiff, 1 - _SHARE, _SHARE)
    most = jnp.sum(wanted) >= share * jnp.sum(now.active)
    votes = jnp.maximum(now.votes + jnp.where(most, 1, -1), 0)
    change = votes >= _VOTES
    return now._replace(stiff=now.stiff ^ change, votes=jnp.where(change, 0, votes))


def _stages(rate, t, h, base, slopes, A, c, first: int) -> tuple[Array, Array, Array]:
    """Stages ``x_i = base + h Σ_j A_ij f_j`` from ``first`` on: slopes, and the last two points."""
    A, c = jnp.asarray(A, base.dtype), jnp.asarray(c, base.dtype)

    def stage(i, carry):
        slopes, point, _ = carry
        new = base + h[None, :] * jnp.tensordot(A[i], slopes, 1)
        return slopes.at[i].set(rate(t + c[i] * h, new)), new, point

    return jax.lax.fori_loop(first, len(c), stage, (slopes, base, base))


def _steepness(y, end, before, slopes) -> Array:
    """``|Δf|/|Δx|`` between the last two stages, a lower bound of the Lipschitz constant of f."""
    moved, turned = _norms(end - before), _norms(slopes[-1] - slopes[-2])
    # Below this the quotient is one of round-off.
    visible = moved > 1e4 * jnp.finfo(y.dtype).eps * _norms(y)
    return jnp.where(visible, turned / jnp.where(visible, moved, 1.0), 0.0)


def _norms(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x**2, axis=0))


def _unit(x: Array, spare: Array) -> Array:
    """Every lane divided by its norm; for those without a direction that of ``spare``."""
    size = _norms(x)
    usable = jnp.isfinite(size) & (size > 0)
    spare = spare / jnp.sqrt(jnp.sum(spare**2))
    scaled = x / jnp.where(usable, size, 1.0)[None, :]
    return jnp.where(usable[None, :], scaled, spare[:, None])


def _explicit_step(rate: Callable, now: _March) -> _Step:
    """A step with the method of Tsitouras, of order 5; its last two stages end the step."""
    tableau = diffrax.Tsit5.tableau
    A = np.zeros((7, 7))
    for i, weights in enumerate(tableau.a_lower):
        A[i + 1, : i + 1] = weights
    h = jnp.where(now.active, now.until - now.t, 0.0)
    slopes = jnp.zeros((7, *now.y.shape), now.y.dtype).at[0].set(now.slope)
    c = np.append(0.0, tableau.c)
    slopes, end, before = _stages(rate, now.t, h, now.y, slopes, A, c, 1)
    error = h[None, :] * jnp.tensordot(jnp.asarray(tableau.b_error, h.dtype), slopes, 1)
    return _Step(
        now.until,
        end,
        slopes[-1],
        error,
        _FADE * now.radius,
        _steepness(now.y, end, before, slopes),
        now.leading,
        jnp.asarray(6),
        jnp.asarray(5.0, h.dtype),
    )


def _stabilised_step(rate: Callable, now: _March, rtol: Array) -> _Step:
    """A step with one member for all lanes of the orthogonal Runge–Kutta–Chebyshev family.

    The number of stages is the one that brings the lanes furthest per evaluation; a lane whose
    planned step is out of its reach makes a shorter one.
    """
    table, dtype = _table(), now.y.dtype
    # One round of power iteration, with a difference for the product with the Jacobian.
    size = _norms(now.y)
    shift = jnp.sqrt(jnp.finfo(dtype).eps) * jnp.where(size > 0, size, 1.0)
    moved = rate(now.t, now.y + shift[None, :] * now.leading)
    image = (moved - now.slope) / shift[None, :]
    found = jnp.maximum(_norms(image), _DOUBT * now.radius)
    found = jnp.where(jnp.isfinite(found), found, now.radius)
    leading = _unit(image, scattered(len(image), dtype))
    reach, noise = jnp.asarray(table.reach, dtype), jnp.asarray(table.noise, dtype)
    numbers = jnp.asarray(table.stages)
    radius = _RADIUS_SAFETY * found
    planned = jnp.where(now.active, now.until - now.t, 0.0)
    # Of planned steps: lanes near the end of a run plan long ones, and can wait for the others.
    z = jnp.maximum(planned * radius, jnp.finfo(dtype).tiny)
    share = jnp.minimum(1.0, reach[:, None] / z[None, :])
    progress = jnp.sum(jnp.where(now.active[None, :], share, 0.0), axis=1)
    quiet = noise * jnp.finfo(dtype).eps <= rtol
    quiet = quiet | (jnp.arange(len(table.stages)) == 0)
    # Where nothing decays the shortest is as good as any.
    gain = jnp.where(quiet, progress / (numbers + _OVERHEAD), -1.0)
    member = jnp.argmax(gain)
    longest = reach[member] / jnp.where(radius > 0, radius, 1.0)
    cut = (radius > 0) & (planned > longest)
    h = jnp.where(cut, longest, planned)
    t = jnp.where(cut, jnp.minimum(now.t + h, now.until), now.until)

    first, finish, nodes, weights = (
        jnp.asarray(x, dtype)[member] for x in (table.first, table.finish, table.nodes, table.error)
    )
    recurrence = jnp.asarray(table.recurrence, dtype)
    offset = jnp.asarray(table.offset)[member]

    def stage(j, carry):
        last, older = carry
        mu, nu, kappa, c = recurrence[offset + j]
        slope = rate(now.t + c * h, last)
        return (mu * h)[None, :] * slope + nu * last + kappa * older, last

    y = now.y + (first * h)[None, :] * now.slope
    y, _ = jax.lax.fori_loop(0, numbers[member] - 5, stage, (y, now.y))
    A = jnp.pad(finish, ((1, 0), (0, 1)))
    slopes = jnp.zeros((5, *y.shape), dtype)
    c = jnp.append(nodes, 1.0)
    slopes, end, before = _stages(rate, now.t, h, y, slopes, A, c, 0)
    error = h[None, :] * jnp.tensordot(weights, slopes, 1)
    return _Step(
        t,
        end,
        slopes[-1],
        error,
        found,
        _steepness(now.y, end, before, slopes),
        leading,
        numbers[member] + 1,
        jnp.asarray(4.0, dtype),
    )


# Widths up to which products are written out, lanes last.
_SMALL = 8


def _lanes_field(flow: AbstractFlow, state: PyTree) -> Callable[[Array, Array], Array]:
    """``f`` on flat states with lanes along the last axis."""
    unravel = ravel_pytree(state)[1]
    plain = type(flow).vector_field is GradientFlow.vector_field
    if plain and isinstance(state, LinearNetwork) and max(state.widths) <= _SMALL:
        return _small_gradients(flow, state)

    def rate(t, flat):
        return ravel_pytree(flow.vector_field(t, unravel(flat)))[0]

    return jax.vmap(rate, in_axes=(0, -1), out_axes=-1)


def _small_gradients(flow: Any, state: LinearNetwork) -> Callable[[Array, Array], Array]:
    """The field of :class:`gradflow.GradientFlow`, every product a loop over lanes.

    Several times faster than its ``jax.vmap``, whose innermost loops are over a row of weights.
    """
    shapes = [w.shape for w in state.weights]
    ends = np.cumsum([0, *(m * n for m, n in shapes)])
    residual = jax.vmap(flow.problem.residual, in_axes=-1, out_axes=-1)

    def product(a, b):
        total = a[:, :1] * b[:1]
        for i in range(1, a.shape[1]):
            total = total + a[:, i : i + 1] * b[i : i + 1]
        return jax.lax.optimization_barrier(total)

    def rate(t, flat):
        del t
        parts = zip(ends, ends[1:], shapes, strict=False)
        weights = [flat[low:high].reshape(*shape, -1) for low, high, shape in parts]
        prefixes = [weights[0]]
        for w in weights[1:]:
            prefixes.append(product(w, prefixes[-1]))
        carried = jax.lax.optimization_barrier(residual(prefixes[-1]))
        gradients = []
        for w, prefix in zip(reversed(weights[1:]), reversed(prefixes[:-1]), strict=True):
            gradients.append(product(carried, prefix.swapaxes(0, 1)))
            carried = product(w.swapaxes(0, 1), carried)
        gradients.append(carried)
        flattened = [g.reshape(-1, flat.shape[-1]) for g in reversed(gradients)]
        return jnp.concatenate(flattened) - flow.weight_decay * flat

    return rate
