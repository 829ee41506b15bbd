"""Step size control: predictive, landing on saved times, and ending hopeless runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["Costed", "GuardedSteps", "PredictiveSteps"]

_SAFETY = 0.8
_SHRINK = 0.2
_GROW = 5.0


class Costed(NamedTuple):
    """An error estimate, and what the step that it is of was.

    The only way by which a count also reaches the outside from steps that are rejected.
    """

    error: Any
    evaluations: Any  # right-hand sides
    order: Any = None  # of the error, where it differs from step to step
    stiff: Any = 0.0  # 1 if the step was made by the solver for stiff phases


class _Memory(NamedTuple):
    proposal: Any  # the size of the step, were it not for saved times
    size: Any  # of the last accepted step that no saved time cut short, and its error
    error: Any


class PredictiveSteps(diffrax.AbstractAdaptiveStepSizeController):
    """Gustafsson's predictive control, which expects the error to go on changing as it did.

    On the way out of a plateau each step must be shorter than the last by about the same factor:
    control from one error alone would see every other step rejected. (Gustafsson 1994; Hairer &
    Wanner, *Solving Ordinary Differential Equations II*, IV.8.)

    Args:
        rtol, atol: tolerances.
        norm: of the scaled error.
        stops: increasing times at which steps must end, or None.
    """

    rtol: Any
    atol: Any
    norm: Callable[[Any], Any]
    stops: Array | None = None

    def wrap(self, direction: Any) -> PredictiveSteps:
        return self

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        first = diffrax.PIDController(rtol=self.rtol, atol=self.atol, norm=self.norm)
        t1, _ = first.init(terms, t0, t1, y0, dt0, args, func, error_order)
        size = t1 - t0
        memory = _Memory(size, jnp.zeros_like(size), jnp.ones_like(size))
        return self._land(t0, size), memory

    def adapt_step_size(self, t0, t1, y0, y1_candidate, args, y_error, error_order, state):
        def scaled(a, b, e):
            b = jnp.where(jnp.isnan(b).any(), a, b)
            return e / (self.atol + self.rtol * jnp.maximum(jnp.abs(a), jnp.abs(b)))

        error = self.norm(jax.tree.map(scaled, y0, y1_candidate, y_error))
        keep = error < 1
        h = t1 - t0
        # Below this an estimate is round-off and says little.
        error = jnp.where(jnp.isnan(error), jnp.inf, jnp.maximum(error, 1e-12))
        factor = error ** (-1 / error_order)
        trend = (h / state.size) * (state.error / jnp.maximum(error, 1e-2)) ** (1 / error_order)
        known = keep & (state.size > 0)
        factor = factor * jnp.where(known, jnp.minimum(trend, 1.0), 1.0)
        factor = jnp.clip(_SAFETY * factor, _SHRINK, jnp.where(keep, _GROW, _SAFETY))
        # A step cut short by a saved time has nothing against the size that was planned.
        cut = keep & (h < 0.99 * state.proposal)
        proposal = jnp.where(cut, jnp.maximum(state.proposal, factor * h), factor * h)
        told = keep & ~cut
        memory = _Memory(
            proposal,
            jnp.where(told, h, state.size),
            jnp.where(told, jnp.maximum(error, 1e-2), state.error),
        )
        start = jnp.where(keep, t1, t0)
        return keep, start, self._land(start, proposal), False, memory, diffrax.RESULTS.successful

    def _land(self, start: Any, size: Any) -> Any:
        """The end of a step of this size; on the next stop, or half-way, if that is near."""
        end = start + size
        if self.stops is None:
            return end
        index = jnp.searchsorted(self.stops, start, side="right")
        last = self.stops.shape[0] - 1
        stop = jnp.where(index > last, jnp.inf, self.stops[jnp.minimum(index, last)])
        ahead = stop - start
        halved = jnp.where(ahead < 2 * size, start + 0.5 * ahead, end)
        return jnp.where(ahead <= 1.001 * size, stop, halved)


class GuardedSteps(diffrax.AbstractAdaptiveStepSizeController):
    """Wraps a controller; stops at an overflow or when a step no longer advances time.

    A candidate state with an entry that is not finite is never accepted. A fixed step cannot
    retry, so there the run stops at the last finite state; an adaptive controller shrinks the
    step, and stops once it is lost in the round-off of t (a solution that blows up). Its state is
    the wrapped one's and what :class:`Costed` errors have told: the numbers of evaluations and of
    stiff steps, −1 if nothing.
    """

    controller: diffrax.AbstractStepSizeController
    # Also for fixed steps: implicit solvers take the tolerance of their iteration from here.
    rtol: Any
    atol: Any
    # For fixed steps: a number of the state (loss, gradient) that overflows before the state does.
    size: Callable[[Any], Any] | None
    norm: Callable[[Any], Any]

    def wrap(self, direction: Any) -> GuardedSteps:
        return eqx.tree_at(lambda s: s.controller, self, self.controller.wrap(direction))

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        t1, state = self.controller.init(terms, t0, t1, y0, dt0, args, func, error_order)
        # Floats, as diffrax makes of all parts of an error.
        return t1, (state, -jnp.ones(2, jnp.result_type(t1)))

    def adapt_step_size(self, t0, t1, y0, y1_candidate, args, y_error, error_order, state):
        inner, counts = state
        if isinstance(y_error, Costed):
            told = jnp.stack([y_error.evaluations, y_error.stiff]).astype(counts.dtype)
            counts = jnp.maximum(counts, 0) + told
            if y_error.order is not None:
                error_order = y_error.order
            y_error = y_error.error
        keep, next_t0, next_t1, made_jump, inner, result = self.controller.adapt_step_size(
            t0, t1, y0, y1_candidate, args, y_error, error_order, inner
        )
        leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(y1_candidate)]
        finite: Any = jnp.stack(leaves).all()
        if self.size is not None:
            finite = finite & jnp.isfinite(self.size(y1_candidate))
            failed = ~finite
            next_t0 = jnp.where(finite, next_t0, t0)
        else:
            advance = 2 * jnp.finfo(jnp.result_type(next_t0)).eps * jnp.abs(next_t0)
            failed = ~(next_t1 - next_t0 > advance)
        result = diffrax.RESULTS.where(failed, diffrax.RESULTS.dt_min_reached, result)
        return keep & finite, next_t0, next_t1, made_jump, (inner, counts), result
