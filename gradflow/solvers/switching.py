"""Explicit while a flow is easy, another solver where it is stiff, by what the steps measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from diffrax import RESULTS
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from gradflow.solvers.controllers import Costed
from gradflow.solvers.explicit import REACH, STAGES, explicit_step
from gradflow.solvers.resteps import Restep

__all__ = ["Switching"]

# An explicit step this near to the end of its stability interval is held up by stiffness.
_LIMITED = 0.6 * REACH
# A step of the other solver that an explicit one could take as well, with room to grow.
_EASY = 0.3 * REACH
# Of such steps in a row before going back.
_CALM = 3


class _State(NamedTuple):
    stiff: Any  # whether the other solver is at work
    count: Any  # of steps that speak for a change
    slope: Array  # f at the start of the step, from an explicit step
    known: Any  # whether it is: whether the last step was explicit
    other: PyTree  # the other solver's state


class Switching(diffrax.AbstractAdaptiveSolver):
    """Dormand–Prince 8(7), and ``stiff`` once stability, not accuracy, limits the steps.

    Every explicit step measures ``h|λ|`` on its last two stages. When that has stayed near the end
    of the stability interval for some steps, and the rest of the run is long enough to repay it,
    ``stiff`` takes over; when ``stiff`` takes steps that are well inside the interval, the explicit
    method comes back.

    Args:
        stiff: a solver with ``step`` on flat vectors and ``between`` for saved times, and
            ``spectral_radius(state)`` for ``|λ|``.
        field: the vector field ``f(t, y, args)``.
        end: the time at which the run ends.
        price: the time of a step of ``stiff`` in explicit steps.
        costed: hand evaluations and the order of the error to the step size controller along with
            the error.
    """

    stiff: Any
    field: Callable
    end: Any
    price: Any
    costed: bool = eqx.field(static=True, default=True)

    lands_on_saves: ClassVar[bool] = False
    term_structure: ClassVar = diffrax.AbstractTerm

    @property
    def interpolation_cls(self) -> Callable[..., diffrax.AbstractLocalInterpolation]:  # type: ignore[override]
        return partial(Restep, self)

    def order(self, terms: Any) -> int:
        return 8

    def error_order(self, terms: Any) -> int:
        return 8

    def init(self, terms: Any, t0: Any, t1: Any, y0: PyTree, args: Any) -> _State:
        flat, term = self._flat(y0)
        return _State(
            jnp.asarray(False),
            jnp.asarray(0),
            term.vf(t0, flat, None),
            jnp.asarray(True),
            self.stiff.init(term, t0, t1, flat, None),
        )

    def func(self, terms: Any, t0: Any, y0: PyTree, args: Any) -> PyTree:
        return terms.vf(t0, y0, args)

    def _flat(self, y0: PyTree) -> tuple[Array, diffrax.ODETerm]:
        flat, unravel = ravel_pytree(y0)

        def rate(t, y, args):
            return ravel_pytree(self.field(t, unravel(y), args))[0]

        return flat, diffrax.ODETerm(rate)

    def step(self, terms, t0, t1, y0, args, solver_state: _State, made_jump):
        del made_jump
        start, term = self._flat(y0)
        unravel = ravel_pytree(y0)[1]
        h = t1 - t0
        state = solver_state
        shapes = jax.eval_shape(
            lambda: self.stiff.step(term, t0, t1, start, None, state.other, state.known)
        )
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[2])

        def explicitly():
            slope, evaluations = jax.lax.cond(
                state.known,
                lambda: (state.slope, jnp.asarray(STAGES - 1.0, start.dtype)),
                lambda: (term.vf(t0, start, None), jnp.asarray(1.0 * STAGES, start.dtype)),
            )
            made = explicit_step(lambda t, y: term.vf(t, y, None), t0, h, start, slope)
            held_up = made.stiffness > _LIMITED
            count = jnp.clip(state.count + jnp.where(held_up, 1, -1), 0, None)
            # As many explicit steps lie ahead; the other solver needs some dozen.
            ahead = (self.end - t1) / h
            change = (count >= 5 + self.price) & (ahead > 10 * self.price)
            new = _State(
                change,
                jnp.where(change, 0, count),
                made.slopes[-1],
                jnp.asarray(True),
                state.other,
            )
            told = Costed(made.error, evaluations, jnp.asarray(8.0, start.dtype))
            return made.end, told, slope, empty, new

        def stiffly():
            y1, told, dense, other, _ = self.stiff.step(
                term, t0, t1, start, None, state.other, state.known
            )
            calm = jnp.abs(h) * self.stiff.spectral_radius(other) < _EASY
            count = jnp.where(calm, state.count + 1, 0)
            change = count >= _CALM
            new = _State(
                ~change, jnp.where(change, 0, count), state.slope, jnp.asarray(False), other
            )
            order = self.stiff.error_order(term) if told.order is None else told.order
            told = Costed(
                told.error,
                jnp.asarray(told.evaluations, start.dtype),
                jnp.asarray(order, start.dtype),
            )
            return y1, told, jnp.zeros_like(start), dense, new

        end, told, slope, dense, new = jax.lax.cond(state.stiff, stiffly, explicitly)
        stiff = state.stiff.astype(start.dtype)
        error: Any = Costed(unravel(told.error), told.evaluations, told.order, stiff)
        if not self.costed:
            error = error.error
        y1 = unravel(end)
        # Not both: one of them is of a step that was not made.
        memory = (dense["info"], None) if self._inside else (None, (state.other, state.known))
        info = (y0, state.stiff, slope, memory)
        return y1, error, {"y1": y1, "info": info}, new, RESULTS.successful

    @property
    def _inside(self) -> bool:
        """Whether the other solver knows how to reach times inside a step of its own."""
        return hasattr(self.stiff, "between")

    def between(self, t0: Any, t1: Any, t: Any, info: PyTree) -> PyTree:
        """The state at ``t`` inside a step from ``t0`` to ``t1``."""
        y0, stiff, slope, (inside, before) = info
        start, term = self._flat(y0)
        unravel = ravel_pytree(y0)[1]

        def stiffly():
            if self._inside:
                solver = eqx.tree_at(
                    lambda s: s.field, self.stiff, term.vector_field, is_leaf=lambda x: x is None
                )
                return solver.between(t0, t1, t, inside)
            return self.stiff.step(term, t0, t, start, None, *before)[0]

        def explicitly():
            rate = term.vector_field
            return explicit_step(lambda s, y: rate(s, y, None), t0, t - t0, start, slope).end

        return unravel(jax.lax.cond(stiff, stiffly, explicitly))
