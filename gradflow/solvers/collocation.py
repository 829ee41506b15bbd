"""Gauss–Legendre collocation for gradient flows: law-keeping, and cheap where stiff."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from diffrax import RESULTS
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from gradflow.solvers.controllers import Costed
from gradflow.solvers.linearisation import AbstractLinearisation, Eigenbasis
from gradflow.solvers.resteps import Restep
from gradflow.solvers.tableau import GAMMA, gauss

__all__ = ["CollocationInterpolation", "GaussLegendre"]

_MAX_ITERATIONS = 15
# Rounds of Newton's iteration that are as dear as a new Jacobian is, roughly.
_PATIENCE = 6


def _lagrange(theta: Any, stages: int) -> Array:
    """Values at ``theta`` of the Lagrange polynomials on the nodes but that at 0."""
    powers = theta ** jnp.arange(stages + 1)
    return powers @ jnp.asarray(gauss(stages).powers)[:, 1:]


class CollocationInterpolation(diffrax.AbstractLocalInterpolation):
    """The collocation polynomial of a step; exact at its ends, of order ``stages`` between."""

    t0: Any  # type: ignore[misc]
    t1: Any  # type: ignore[misc]
    y0: PyTree
    increments: PyTree  # of the stages, stacked

    def evaluate(self, t0: Any, t1: Any | None = None, left: bool = True) -> PyTree:
        if t1 is not None:
            return jax.tree.map(jnp.subtract, self.evaluate(t1), self.evaluate(t0))
        stages = jax.tree.leaves(self.increments)[0].shape[0]
        span = self.t1 - self.t0
        weights = _lagrange((t0 - self.t0) / jnp.where(span == 0, 1.0, span), stages)
        return jax.tree.map(
            lambda y, z: y + jnp.tensordot(weights, z, axes=1), self.y0, self.increments
        )


class CollocationState(NamedTuple):
    """What a step hands to the next one."""

    kept: PyTree  # the Jacobian of an earlier step
    old: Any  # whether it is to be made anew
    increments: Float[Array, "stages n"]  # of the last accepted step, with its size
    size: Any


class GaussLegendre(diffrax.AbstractAdaptiveSolver):
    """Gauss–Legendre collocation with ``stages`` stages, order ``2·stages``, for gradient flows.

    Keeps every quadratic invariant, so the laws ``C_i``, to the accuracy of its stage equations, at
    any step size (Cooper 1987; Hairer, Lubich & Wanner, *Geometric Numerical Integration*, IV.2).
    The stage equations are solved to round-off by a simplified Newton iteration. The Jacobian of a
    gradient flow is symmetric, minus the Hessian: in one orthogonal basis, kept over several
    steps, all of the linear systems are diagonal. The iteration starts from the last step's
    polynomial. The error is estimated by an embedded formula of order ``stages`` on the same
    stages and the start of the step, damped in the stiff directions.

    Args:
        stages: s ≥ 2.
        floor: absolute size of round-off in the state; increments below it count as solved.
        linearisation: how the Jacobian is kept and inverted.
        field: the vector field ``f(t, y, args)`` once more, so that states at saved times can be
            had from steps that end there; without it the steps themselves should.
        costed: hand the number of evaluations to the step size controller along with the error.

    Only for flows whose Jacobian is symmetric.
    """

    stages: int = eqx.field(static=True, default=4)
    floor: Any = 1e-15
    linearisation: AbstractLinearisation = Eigenbasis()
    field: Callable | None = None
    costed: bool = eqx.field(static=True, default=False)

    term_structure: ClassVar = diffrax.AbstractTerm

    @property
    def lands_on_saves(self) -> bool:
        """Superconvergence and the laws hold at the ends of steps, not between them."""
        return self.field is None

    @property
    def interpolation_cls(self) -> Callable[..., diffrax.AbstractLocalInterpolation]:  # type: ignore[override]
        return CollocationInterpolation if self.field is None else partial(Restep, self)

    def order(self, terms: Any) -> int:
        return 2 * self.stages

    def error_order(self, terms: Any) -> int:
        return 3 * (self.stages + 1) // 2

    def init(self, terms: Any, t0: Any, t1: Any, y0: PyTree, args: Any) -> CollocationState:
        flat, _ = ravel_pytree(y0)
        n = flat.shape[0]
        return CollocationState(
            self.linearisation.empty(n, flat.dtype),
            jnp.asarray(True),
            jnp.zeros((self.stages, n), flat.dtype),
            jnp.zeros((), flat.dtype),
        )

    def func(self, terms: Any, t0: Any, y0: PyTree, args: Any) -> PyTree:
        return terms.vf(t0, y0, args)

    def step(self, terms, t0, t1, y0, args, solver_state: CollocationState, made_jump):
        if made_jump is not False:
            # Of another state: neither the Jacobian nor the polynomial is of use.
            solver_state = solver_state._replace(
                old=solver_state.old | made_jump,
                size=jnp.where(made_jump, 0.0, solver_state.size),
            )
        start, unravel = ravel_pytree(y0)
        h = terms.contr(t0, t1)

        def rate(t, flat):
            return ravel_pytree(terms.vf(t, unravel(flat), args))[0]

        attempt = self.attempt(rate, t0, h, start, solver_state)
        y1 = unravel(attempt.end)
        if self.field is None:
            dense = {"y0": y0, "increments": jax.vmap(unravel)(attempt.state.increments)}
        else:
            state = attempt.state
            dense = {"y1": y1, "info": (y0, state.increments, state.kept)}
        error: Any = unravel(attempt.error)
        if self.costed:
            count = jnp.asarray(attempt.evaluations, attempt.end.dtype)
            order = jnp.asarray(1.5 * (self.stages + 1), attempt.end.dtype)
            error = Costed(error, count, order, jnp.ones_like(count))
        return y1, error, dense, attempt.state, RESULTS.successful

    def between(self, t0: Any, t1: Any, t: Any, info: PyTree) -> PyTree:
        """The end of a step from ``t0`` to ``t``, inside a step from ``t0`` to ``t1``."""
        y0, increments, kept = info
        start, unravel = ravel_pytree(y0)
        field: Any = self.field

        def rate(t, flat):
            return ravel_pytree(field(t, unravel(flat), None))[0]

        table = gauss(self.stages)
        part = (t - t0) / (t1 - t0)
        guess = jax.vmap(lambda c: _lagrange(c * part, self.stages))(jnp.asarray(table.c))
        solved = self._solve(rate, t0, t - t0, start, guess @ increments, kept)
        end = jnp.asarray(table.end) @ solved[0]
        # Hardly ever: shorter steps are easier than the one that has just succeeded.
        polynomial = _lagrange(part, self.stages) @ increments
        return unravel(start + jnp.where(solved[1], end, polynomial))

    def spectral_radius(self, state: CollocationState) -> Any:
        """The largest ``|λ|`` of the kept Jacobian, roughly."""
        return self.linearisation.radius(state.kept)

    def attempt(self, rate: Callable, t0: Any, h: Any, start: Array, state: CollocationState):
        """One step on flat vectors."""
        table, model = gauss(self.stages), self.linearisation
        guess = self._predict(state, h)

        def unsolved(trial: _Trial):
            # With the Jacobian of this very state a failure means that the step is too long.
            return ~trial.converged & ~trial.fresh

        def solve(trial: _Trial) -> _Trial:
            first = trial.rounds == 0
            new = jnp.where(first, state.old, True)
            kept, products = jax.lax.cond(
                new, lambda: model.at(rate, t0, start), lambda: (trial.kept, jnp.asarray(0))
            )
            begin = jnp.where(first, guess, 0.0)
            Z, converged, rounds, used = self._solve(rate, t0, h, start, begin, kept)
            return _Trial(kept, Z, converged, new, rounds, trial.used + used + products)

        no, none = jnp.asarray(False), jnp.asarray(0)
        trial = _Trial(state.kept, guess, no, no, none, none)
        trial = jax.lax.while_loop(unsolved, solve, trial)
        kept, increments, converged = trial.kept, trial.increments, trial.converged
        # (I − hγJ)⁻¹ [hγ f(y0) + Σ (b̂ − b)_i h k_i]
        error = h * GAMMA * rate(t0, start) + jnp.asarray(table.error) @ increments
        error, more = model.damp(kept, rate, t0, h * GAMMA, error)
        error = error * self._sharpen(error, start)
        return _Attempt(
            start + jnp.asarray(table.end) @ increments,
            jnp.where(converged, error, jnp.inf),
            CollocationState(kept, trial.rounds > _PATIENCE, increments, h),
            trial.used + more + 1,
        )

    def _sharpen(self, error: Array, start: Array) -> Any:
        """A factor that brings the estimate, of order s, half-way to the error, of order 2s."""
        scale = jnp.max(jnp.abs(start))
        ratio = jnp.max(jnp.abs(error)) / jnp.where(scale > 0, scale, 1.0)
        return jnp.sqrt(jnp.minimum(ratio, 1.0))

    def _predict(self, state: CollocationState, h: Any) -> Array:
        """The last step's polynomial at this step's nodes, less its end; zero at the first step."""
        table = gauss(self.stages)
        ratio = h / jnp.where(state.size == 0, 1.0, state.size)
        # Far beyond its step a polynomial is worse than nothing.
        usable = (state.size != 0) & (ratio < 3.0)
        thetas = 1 + jnp.asarray(np.append(table.c, 0.0)) * ratio
        weights = (thetas[:, None] ** jnp.arange(self.stages + 1)[None, :]) @ jnp.asarray(
            table.powers
        )[:, 1:]
        weights = weights[:-1] - weights[-1:]
        return jnp.where(usable, weights @ state.increments, 0.0)

    def _solve(self, rate, t0, h, start, guess, kept):
        """Stage increments ``Z = hA f(y0 + Z)`` to round-off; whether, and at what cost."""
        table = gauss(self.stages)
        times = t0 + h * jnp.asarray(table.c)
        A = jnp.asarray(table.A)
        roundoff = 4 * jnp.finfo(start.dtype).eps
        solve = self.linearisation.solver(kept, rate, t0, h, table)

        def newton(carry):
            Z, size, _, count, used = carry
            rates = jax.vmap(rate)(times, start[None, :] + Z)
            residual = Z - h * (A @ rates)
            change, products = solve(residual)
            new = Z - change
            scale = jnp.max(jnp.abs(start)) + jnp.max(jnp.abs(new))
            unit = roundoff * scale + self.floor + jnp.finfo(start.dtype).tiny
            now = jnp.max(jnp.abs(change)) / unit
            return new, now, size, count + 1, used + products + len(table.c)

        def remaining(size, previous, count):
            # The next change would be this one times the ratio of the last two.
            return size * jnp.where(count < 2, 1.0, jnp.minimum(size / previous, 1.0))

        def unsolved(carry):
            _, size, previous, count, _ = carry
            ratio = size / previous
            # Near round-off increments stop falling: below 100 of its units that is the end.
            stalled = (ratio > 0.5) & (size < 100)
            hopeless = (count > 2) & ~(ratio < 2)
            unfinished = remaining(size, previous, count) > 1
            return (count < _MAX_ITERATIONS) & unfinished & ~stalled & ~hopeless

        far = jnp.asarray(1e300, start.dtype)
        begin = (guess, far, far, jnp.asarray(0), jnp.asarray(0))
        Z, size, previous, count, used = jax.lax.while_loop(unsolved, newton, begin)
        converged = (size < 100) | (remaining(size, previous, count) <= 1)
        return Z, converged, count, used


class _Trial(NamedTuple):
    """An attempt at the stage equations."""

    kept: PyTree
    increments: Array
    converged: Any
    fresh: Any  # whether the Jacobian is of this state
    rounds: Any
    used: Any  # evaluations, of all attempts


class _Attempt(NamedTuple):
    end: Array
    error: Array
    state: CollocationState
    evaluations: Any
