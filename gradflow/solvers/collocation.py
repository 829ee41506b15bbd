"""Gauss–Legendre collocation for gradient flows: law-keeping, and cheap where stiff."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from diffrax import RESULTS
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

__all__ = ["CollocationInterpolation", "GaussLegendre"]

_MAX_ITERATIONS = 12
# Of the error estimate's extra node at the start of the step; any number of this order will do.
_GAMMA = 0.1


class _Tableau(NamedTuple):
    c: np.ndarray  # nodes
    A: np.ndarray  # stage weights
    end: np.ndarray  # bᵀA⁻¹: the end value from the stage increments
    error: np.ndarray  # (b̂ − b)ᵀA⁻¹
    gammas: np.ndarray  # eigenvalues of A
    to_eigen: np.ndarray  # A = from_eigen · diag(gammas) · to_eigen
    from_eigen: np.ndarray


@cache
def _tableau(stages: int) -> _Tableau:
    nodes, weights = np.polynomial.legendre.leggauss(stages)
    c, b = 0.5 * (nodes + 1), 0.5 * weights
    powers = np.arange(1, stages + 1)
    vandermonde = c[:, None] ** (powers - 1)
    # Stage conditions Σ_j a_ij c_j^{k−1} = c_i^k/k, and the same for the embedded weights.
    A = np.linalg.solve(vandermonde.T, (c[:, None] ** powers / powers).T).T
    moments = 1 / powers - _GAMMA * (powers == 1)
    embedded = np.linalg.solve(vandermonde.T, moments)
    gammas, from_eigen = np.linalg.eig(A)
    inverse = np.linalg.inv(A)
    return _Tableau(
        c, A, b @ inverse, (embedded - b) @ inverse, gammas, np.linalg.inv(from_eigen), from_eigen
    )


def _lagrange(theta: Any, nodes: np.ndarray) -> Array:
    """Values at ``theta`` of the Lagrange polynomials on the nodes."""
    differences = nodes[:, None] - nodes[None, :] + np.eye(len(nodes))
    factors = jnp.where(np.eye(len(nodes), dtype=bool), 1.0, (theta - nodes)[None, :])
    return jnp.prod(factors / differences, axis=1)


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
        theta = (t0 - self.t0) / jnp.where(span == 0, 1.0, span)
        weights = _lagrange(theta, np.concatenate([[0.0], _tableau(stages).c]))[1:]
        return jax.tree.map(
            lambda y, z: y + jnp.tensordot(weights, z, axes=1), self.y0, self.increments
        )


class _State(NamedTuple):
    vectors: Float[Array, "n n"]  # of the Jacobian, from an earlier step
    values: Float[Array, " n"]
    old: Any  # whether the Jacobian is to be made anew
    increments: Float[Array, "stages n"]  # of the last accepted step, with its size
    size: Any


class GaussLegendre(diffrax.AbstractAdaptiveSolver):
    """Gauss–Legendre collocation with ``stages`` stages, order ``2·stages``, for gradient flows.

    Keeps every quadratic invariant, so the laws ``C_i``, to the accuracy of its stage equations, at
    any step size (Cooper 1987; Hairer, Lubich & Wanner, *Geometric Numerical Integration*, IV.2).
    The stage equations are solved to round-off by a simplified Newton iteration. The Jacobian of a
    gradient flow is symmetric, minus the Hessian: in one orthogonal eigenbasis, kept over many
    steps, all of the linear systems are diagonal. The iteration starts from the last step's
    polynomial. The error is estimated by an embedded formula of order ``stages`` on the same
    stages and the start of the step, damped in the stiff directions.

    Args:
        stages: s ≥ 2.
        floor: absolute size of round-off in the state; increments below it count as solved.

    Only for flows whose Jacobian is symmetric, and of a size for which a dense ``(n, n)`` matrix
    is no trouble.
    """

    stages: int = eqx.field(static=True, default=4)
    floor: Any = 1e-15

    # Superconvergence and the laws hold at the ends of steps, not between them.
    lands_on_saves: ClassVar[bool] = True

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar[Callable[..., CollocationInterpolation]] = CollocationInterpolation

    def order(self, terms: Any) -> int:
        return 2 * self.stages

    def error_order(self, terms: Any) -> int:
        return self.stages + 1

    def init(self, terms: Any, t0: Any, t1: Any, y0: PyTree, args: Any) -> _State:
        flat, _ = ravel_pytree(y0)
        n = flat.shape[0]
        return _State(
            jnp.zeros((n, n), flat.dtype),
            jnp.zeros(n, flat.dtype),
            jnp.asarray(True),
            jnp.zeros((self.stages, n), flat.dtype),
            jnp.zeros((), flat.dtype),
        )

    def func(self, terms: Any, t0: Any, y0: PyTree, args: Any) -> PyTree:
        return terms.vf(t0, y0, args)

    def step(self, terms, t0, t1, y0, args, solver_state: _State, made_jump):
        del made_jump
        table = _tableau(self.stages)
        start, unravel = ravel_pytree(y0)
        h = terms.contr(t0, t1)

        def rate(t, flat):
            return ravel_pytree(terms.vf(t, unravel(flat), args))[0]

        def eigensystem(_):
            jacobian = jax.jacfwd(lambda y: rate(t0, y))(start)
            values, vectors = jnp.linalg.eigh(0.5 * (jacobian + jacobian.T))
            return vectors, values

        def kept(_):
            return solver_state.vectors, solver_state.values

        guess = self._predict(solver_state, h)
        basis = jax.lax.cond(solver_state.old, eigensystem, kept, None)
        solved = self._solve(rate, t0, h, start, guess, *basis)

        def again(_):
            fresh = eigensystem(None)
            return fresh, self._solve(rate, t0, h, start, jnp.zeros_like(guess), *fresh)

        fail = ~solved[1] & ~solver_state.old
        basis, solved = jax.lax.cond(fail, again, lambda _: (basis, solved), None)
        increments, converged, iterations = solved

        end = start + table.end @ increments
        # (I − hγJ)⁻¹ [hγ f(y0) + Σ (b̂ − b)_i h k_i]
        vectors, values = basis
        error = h * _GAMMA * rate(t0, start) + table.error @ increments
        error = vectors @ ((vectors.T @ error) / (1 - h * _GAMMA * values))
        error = jnp.where(converged, error, jnp.inf)
        # A Jacobian that takes this many iterations is worth making anew.
        state = _State(basis[0], basis[1], iterations > 7, increments, h)
        dense = {"y0": y0, "increments": jax.vmap(unravel)(increments)}
        return unravel(end), unravel(error), dense, state, RESULTS.successful

    def _predict(self, state: _State, h: Any) -> Array:
        """The last step's polynomial at this step's nodes, less its end; zero at the first step."""
        table = _tableau(self.stages)
        nodes = np.concatenate([[0.0], table.c])
        ratio = h / jnp.where(state.size == 0, 1.0, state.size)
        # Far beyond its step a polynomial is worse than nothing.
        usable = (state.size != 0) & (ratio < 3.0)
        ends = _lagrange(1.0, nodes)[1:] @ state.increments
        weights = jax.vmap(lambda c: _lagrange(1 + c * ratio, nodes)[1:])(jnp.asarray(table.c))
        return jnp.where(usable, weights @ state.increments - ends[None, :], 0.0)

    def _solve(self, rate, t0, h, start, guess, vectors, values):
        """Stage increments ``Z = hA f(y0 + Z)`` to round-off; whether, and in how many rounds."""
        table = _tableau(self.stages)
        times = t0 + h * jnp.asarray(table.c)
        A, to_eigen, from_eigen = (
            jnp.asarray(x) for x in (table.A, table.to_eigen, table.from_eigen)
        )
        damping = 1 - h * jnp.asarray(table.gammas)[:, None] * values[None, :]
        roundoff = 4 * jnp.finfo(start.dtype).eps

        def newton(carry):
            Z, size, _, count = carry
            rates = jax.vmap(rate)(times, start[None, :] + Z)
            residual = (Z - h * (A @ rates)) @ vectors
            change = jnp.real(from_eigen @ ((to_eigen @ residual) / damping)) @ vectors.T
            new = Z - change
            scale = jnp.max(jnp.abs(start)) + jnp.max(jnp.abs(new))
            return new, jnp.max(jnp.abs(change)) / (roundoff * scale + self.floor), size, count + 1

        def unsolved(carry):
            _, size, previous, count = carry
            # Near round-off increments stop falling: below 100 of its units that is the end.
            stalled = (size > 0.5 * previous) & (size < 100)
            hopeless = (count > 2) & ~(size < 2 * previous)
            return (count < _MAX_ITERATIONS) & (size > 1) & ~stalled & ~hopeless

        begin = (guess, jnp.asarray(1e300, start.dtype), jnp.asarray(1e300, start.dtype), 0)
        Z, size, _, count = jax.lax.while_loop(unsolved, newton, begin)
        return Z, size < 100, count
