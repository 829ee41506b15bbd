"""Decoupled modes: independent scalar chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.flows.base import AbstractFlow

__all__ = ["ModeFlow"]


class ModeFlow(AbstractFlow):
    """``ȧ_i = (s − Π_k a_k) Π_{k≠i} a_k`` for every mode: the gradient flow of an aligned network.

    The diagonal entries of the layers of a decoupled start (:func:`gradflow.initialize.decoupled`)
    obey this exactly (Saxe et al. 2014, arXiv 1312.6120); ``a_{i+1}² − a_i²`` is conserved.

    Args:
        singular_values: s ≥ 0 of the whitened target, shape ``(r,)``.
        depth: h ≥ 1.

    The state is the array of diagonal entries, shape ``(h, r)``.

    Raises:
        ValueError: a negative singular value, or a depth below 1.
    """

    singular_values: Float[Array, " modes"]
    depth: int = eqx.field(static=True)
    symmetric_jacobian: ClassVar[bool] = True

    def __init__(self, singular_values: ArrayLike | Sequence[float], depth: int):
        values = _checks.real_array("singular_values", singular_values, ndim=1)
        if _checks.is_concrete(values) and float(values.min()) < 0:
            raise ArgumentError("singular_values", f"{float(values.min())}", "each must be >= 0")
        self.singular_values = values
        self.depth = _checks.whole_number("depth", depth, 1)

    def vector_field(self, t: Any, state: Array, args: Any = None) -> Array:
        """``(s − u) Π_{k≠i} a_k``, shape ``(h, r)``."""
        ones = jnp.ones_like(state[:1])
        # Products of the others without division, so that zeros are no trouble.
        before = jnp.concatenate([ones, jnp.cumprod(state[:-1], axis=0)])
        after = jnp.concatenate([jnp.cumprod(state[:0:-1], axis=0)[::-1], ones])
        error = self.singular_values - jnp.prod(state, axis=0)
        return error[None, :] * before * after

    def loss(self, state: Array) -> Float[Array, ""]:
        """``½ Σ (s − u)²``, a scalar."""
        return 0.5 * jnp.sum((self.singular_values - jnp.prod(state, axis=0)) ** 2)

    def conserved(self, state: Array) -> list[Array]:
        """``a_{i+1}² − a_i²`` for i = 1 … h−1, each of shape ``(r,)``."""
        return list(state[1:] ** 2 - state[:-1] ** 2)

    def check_state(self, state: Any) -> Array:
        a = _checks.real_array("state", state, ndim=2)
        wanted = (self.depth, len(self.singular_values))
        if a.shape != wanted:
            raise ShapeError("state", f"shape {a.shape}", f"it must be {wanted}, (layers, modes)")
        return a

    def observables(self) -> dict[str, Callable[[Array], Any]]:
        """``modes``, the products u of each chain; ``singular_values``, their sizes descending."""
        return {
            "singular_values": lambda a: jnp.sort(jnp.abs(jnp.prod(a, axis=0)))[::-1],
            "modes": lambda a: jnp.prod(a, axis=0),
        }

    def target_strengths(self) -> Float[Array, " modes"]:
        return self.singular_values

    def fastest_rate(self, state: Array) -> float | None:
        """The larger of ``h s^{2−2/h}`` and ``Σ_i Π_{k≠i} a_k²`` at the start."""
        if not _checks.is_concrete(state, self.singular_values):
            return None
        a, top = np.asarray(state), float(self.singular_values.max())
        others = [np.prod(np.delete(a, i, axis=0) ** 2, axis=0) for i in range(self.depth)]
        return max(float(np.sum(others, axis=0).max()), self.depth * top ** (2 - 2 / self.depth))

    def describe(self) -> dict[str, Any]:
        return {
            "flow": type(self).__name__,
            "depth": self.depth,
            "problem": f"{len(self.singular_values)} decoupled modes",
        }
