"""Solving ``(I − hA ⊗ J) x = r`` for a symmetric Jacobian: all of it, its stiff part, or no matrix.

A simplified Newton iteration for the stages of a Runge–Kutta method needs nothing exact from these:
an approximate solution only makes it take more rounds.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from gradflow.solvers.tableau import Tableau

__all__ = ["AbstractLinearisation", "Eigenbasis", "Krylov", "StiffSubspace", "scattered"]

Rate = Callable[[Any, Array], Array]
StageSolver = Callable[[Float[Array, "s n"]], tuple[Float[Array, "s n"], Any]]

# An eigenvalue of the scaled residual's Krylov space is resolved in a few dozen products.
_MAX_PRODUCTS = 200
_KRYLOV_TOLERANCE = 0.02
_POWER_ROUNDS = 8


def scattered(size: int, dtype: Any, which: int = 0) -> Float[Array, " size"]:
    """Fixed numbers in [−½, ½) without a pattern; ``which`` of many such vectors.

    Without trigonometric functions, which would take longer than a step that evaluates them anew.
    """
    multiples = (
        float(np.sqrt(2.0) + which * np.sqrt(3.0)) * jnp.arange(1, size + 1, dtype=dtype) ** 2
    )
    return multiples - jnp.floor(multiples) - 0.5


class AbstractLinearisation(eqx.Module):
    """A symmetric Jacobian at some state, kept over several steps."""

    # Whether the work at a new state is small beside a step, so that every step may do it.
    cheap: ClassVar[bool] = False

    @abc.abstractmethod
    def empty(self, n: int, dtype: Any) -> PyTree:
        """Arrays of the right shapes before the first state is known."""

    @abc.abstractmethod
    def at(self, rate: Rate, t: Any, y: Float[Array, " n"]) -> tuple[PyTree, Any]:
        """What is kept of the Jacobian at ``y``, and how many products with it that took."""

    @abc.abstractmethod
    def radius(self, kept: PyTree) -> Any:
        """The largest ``|λ|`` of what is kept, or a good lower bound of it."""

    @abc.abstractmethod
    def solver(self, kept: PyTree, rate: Rate, t: Any, h: Any, table: Tableau) -> StageSolver:
        """A function from ``r``, (s, n), to ``x`` with ``(I − hA ⊗ J) x ≈ r`` and the number of
        products with J; what does not depend on ``r`` is done once."""

    @abc.abstractmethod
    def damp(
        self, kept: PyTree, rate: Rate, t: Any, h: Any, r: Float[Array, " n"]
    ) -> tuple[Float[Array, " n"], Any]:
        """``(I − hJ)⁻¹ r`` roughly, and the number of products with J."""


class _Pairs(NamedTuple):
    vectors: Float[Array, "n m"]  # orthonormal columns
    values: Float[Array, " m"]
    background: Float[Array, ""]  # the value that stands for all other directions


class _Diagonal(AbstractLinearisation):
    """Known in eigenpairs, and a multiple of the identity on their complement."""

    def radius(self, kept):
        return jnp.maximum(jnp.max(jnp.abs(kept.values)), jnp.abs(kept.background))

    def solver(self, kept, rate, t, h, table):
        # (I − hλA)⁻¹, a real s × s matrix for every λ, from the pairs of eigenvalues of A.
        pieces = table.into[:, :, None] * table.back.T[:, None, :]

        def inverse(values):
            damped = 1 / (1 - h * jnp.asarray(table.gammas)[:, None] * values[None, :])
            parts = jnp.asarray(pieces.real)[..., None] * damped.real[:, None, None, :]
            parts -= jnp.asarray(pieces.imag)[..., None] * damped.imag[:, None, None, :]
            return jnp.sum(parts, axis=0)

        # The background on all of the space; on the pairs the difference to what they need.
        background = inverse(kept.background[None])
        correction = inverse(kept.values) - background
        background = background[:, :, 0].T

        def solve(r):
            along = jnp.sum(correction * (r @ kept.vectors)[:, None, :], axis=0)
            return background @ r + along @ kept.vectors.T, 0

        return solve

    def damp(self, kept, rate, t, h, r):
        c = 1 / (1 - h * kept.background)
        factors = 1 / (1 - h * kept.values) - c
        return c * r + kept.vectors @ (factors * (kept.vectors.T @ r)), 0


class Eigenbasis(_Diagonal):
    """All eigenpairs of the Jacobian, dense: for states of some hundred unknowns."""

    def empty(self, n, dtype):
        zero = jnp.zeros((), dtype)
        return _Pairs(jnp.zeros((n, n), dtype), jnp.zeros(n, dtype), zero)

    def at(self, rate, t, y):
        jacobian = jax.jacfwd(lambda x: rate(t, x))(y)
        values, vectors = jnp.linalg.eigh(0.5 * (jacobian + jacobian.T))
        return _Pairs(vectors, values, jnp.zeros((), y.dtype)), jnp.asarray(y.shape[0])


class StiffSubspace(_Diagonal):
    """The Jacobian on a subspace that holds the stiff directions; a constant elsewhere.

    A gradient flow of ``ℓ(W(θ))`` is stiff through ``GᵀG``, where ``G = ∂W/∂θ``: its range has no
    more dimensions than the map ``W`` has entries, and nearly is invariant under the whole
    Jacobian, also on plateaus.

    Args:
        directions: from a state to directions that span the subspace, stacked along the first axis
            of every leaf.
        count: how many they are.
        unravel: from a flat vector to the state.
        background: the value that stands for the Jacobian elsewhere.
    """

    directions: Callable[[PyTree], PyTree]
    count: int = eqx.field(static=True)
    unravel: Callable[[Array], PyTree] = eqx.field(static=True)
    background: Any
    cheap: ClassVar[bool] = True

    def empty(self, n, dtype):
        zero = jnp.zeros((), dtype)
        return _Pairs(jnp.zeros((n, self.count), dtype), jnp.zeros(self.count, dtype), zero)

    def at(self, rate, t, y):
        stacked = jax.vmap(lambda d: ravel_pytree(d)[0])(self.directions(self.unravel(y)))
        basis, _ = jnp.linalg.qr(stacked.T)
        _, product = jax.linearize(lambda x: rate(t, x), y)
        small = basis.T @ jax.vmap(product, in_axes=1, out_axes=1)(basis)
        values, turn = jnp.linalg.eigh(0.5 * (small + small.T))
        pairs = _Pairs(basis @ turn, values, jnp.asarray(self.background, y.dtype))
        return pairs, jnp.asarray(self.count)


class Krylov(AbstractLinearisation):
    """No matrix at all: conjugate gradients on the complex symmetric systems ``(I − hγJ) x = r``.

    Products with the Jacobian are directional derivatives of the right-hand side. Memory is that
    of a few states per stage.
    """

    def empty(self, n, dtype):
        return jnp.zeros(n, dtype), jnp.zeros((), dtype)

    def at(self, rate, t, y):
        _, product = jax.linearize(lambda x: rate(t, x), y)

        def again(_, carry):
            v, _ = carry
            v = product(v)
            size = jnp.linalg.norm(v)
            return jnp.where(size > 0, v / jnp.where(size > 0, size, 1.0), v), size

        # Power iteration from some of every direction.
        start = scattered(y.shape[0], y.dtype)
        start = start / jnp.linalg.norm(start)
        _, radius = jax.lax.fori_loop(0, _POWER_ROUNDS, again, (start, jnp.zeros((), y.dtype)))
        return (y, radius), jnp.asarray(_POWER_ROUNDS)

    def radius(self, kept):
        return kept[1]

    def solver(self, kept, rate, t, h, table):
        gammas, into, back = (jnp.asarray(x) for x in (table.gammas, table.into, table.back))
        _, product = jax.linearize(lambda x: rate(t, x), kept[0])
        shifts = h * gammas

        def apply(x):  # one row for every γ
            real = jax.vmap(product)(jnp.concatenate([x.real, x.imag]))
            return x - shifts[:, None] * jax.lax.complex(*jnp.split(real, 2))

        def solve(r):
            x, count = _conjugate_gradients(apply, into @ r)
            return jnp.real(back @ x), 2 * len(table.gammas) * count

        return solve

    def damp(self, kept, rate, t, h, r):
        _, product = jax.linearize(lambda x: rate(t, x), kept[0])
        x, count = _conjugate_gradients(lambda v: v - h * product(v[0])[None, :], r[None, :])
        return x[0], count


def _conjugate_gradients(apply: Callable, b: Array) -> tuple[Array, Any]:
    """``apply(x) = b`` for a symmetric operator, real or complex, on each row (van der Vorst &
    Melissen 1990: conjugate gradients with ``xᵀy`` in place of ``x^H y``)."""

    def dot(x, y):
        return jnp.sum(x * y, axis=1, keepdims=True)

    def size(x):
        return jnp.sqrt(jnp.sum(jnp.abs(x) ** 2, axis=1, keepdims=True))

    goal = _KRYLOV_TOLERANCE * size(b)

    def unsolved(carry):
        _, r, _, _, count = carry
        return (count < _MAX_PRODUCTS) & jnp.any(size(r) > goal)

    def once(carry):
        x, r, p, rho, count = carry
        q = apply(p)
        active = size(r) > goal
        alpha = jnp.where(active, rho / jnp.where(active, dot(p, q), 1), 0)
        x, r = x + alpha * p, r - alpha * q
        new = dot(r, r)
        p = r + jnp.where(active, new / jnp.where(active, rho, 1), 0) * p
        return x, r, p, new, count + 1

    x, _, _, _, count = jax.lax.while_loop(
        unsolved, once, (jnp.zeros_like(b), b, b, dot(b, b), jnp.asarray(0))
    )
    return x, count
