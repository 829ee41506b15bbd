"""Step size control that ends a hopeless run instead of walking it to ``max_steps``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

__all__ = ["GuardedSteps"]


class GuardedSteps(diffrax.AbstractAdaptiveStepSizeController):
    """Wraps a controller; stops at an overflow or when a step no longer advances time.

    A candidate state with an entry that is not finite is never accepted. A fixed step cannot
    retry, so there the run stops at the last finite state; an adaptive controller shrinks the
    step, and stops once it is lost in the round-off of t (a solution that blows up).
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
        return self.controller.init(terms, t0, t1, y0, dt0, args, func, error_order)

    def adapt_step_size(self, t0, t1, y0, y1_candidate, args, y_error, error_order, state):
        keep, next_t0, next_t1, made_jump, state, result = self.controller.adapt_step_size(
            t0, t1, y0, y1_candidate, args, y_error, error_order, state
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
        return keep & finite, next_t0, next_t1, made_jump, state, result
