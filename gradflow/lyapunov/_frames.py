"""Frames of many chains at once, and their orthonormalisation.

Two layouts. Up to :data:`SMALL` rows the chains are the last axis, ``(d, k, chains)``, and products
and Gram–Schmidt are written out, each a loop over chains: a call of LAPACK per chain would cost
more than the arithmetic. Above, the chains come first, ``(chains, d, k)``, for LAPACK.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

__all__ = ["SMALL", "apply", "chains_last", "generator", "held", "orthonormalised"]

SMALL = 8
# A column is taken to vanish below this many times d · eps of its length before projection.
_VANISHES = 8


def chains_last(d: int) -> bool:
    """Whether the chains are the last axis for matrices with ``d`` rows."""
    return d <= SMALL


def apply(matrices: Array, frames: Array, last: bool) -> Array:
    """``A F`` for every chain."""
    if not last:
        return matrices @ frames
    matrices = held(matrices, frames)
    total = matrices[:, 0, None, :] * frames[None, 0]
    for i in range(1, frames.shape[0]):
        total = total + matrices[:, i, None, :] * frames[None, i]
    return total


def held(values: PyTree, by: Array) -> PyTree:
    """``values``, computed here and once.

    XLA fuses what is computed with each of its uses, and would draw a random number anew for each;
    barriers against that are gone before it fuses. Past a conditional it does not go.

    Args:
        values: arrays.
        by: any array that is there already.
    """
    # True also of nan, but XLA does not know.
    always = jnp.abs(by[(0,) * by.ndim]) != -1
    return jax.lax.cond(always, lambda x: x, lambda x: jax.tree.map(jnp.zeros_like, x), values)


def orthonormalised(frames: Array, last: bool) -> tuple[Array, Array, Array]:
    """``F = Q R`` for every chain.

    Args:
        frames: ``(d, k, chains)`` or ``(chains, d, k)``.
        last: which of the two.

    Returns:
        Q like ``frames``; ``log |R_jj|``, shape ``(k, chains)``, ``−inf`` where a column vanishes
        against its length before projection; and which columns do, same shape.
    """
    d = frames.shape[0] if last else frames.shape[1]
    small = _VANISHES * d * jnp.finfo(frames.dtype).eps
    if not last:
        Q, R = jnp.linalg.qr(frames)
        rest = jnp.abs(jnp.diagonal(R, axis1=1, axis2=2)).T
        length = jnp.linalg.norm(R, axis=1).T
        gone = rest <= small * length
        return Q, jnp.where(gone, -jnp.inf, jnp.log(jnp.where(gone, 1.0, rest))), gone
    frames = held(frames, frames)
    k = frames.shape[1]
    real = jnp.finfo(frames.dtype).dtype
    nothing = jnp.zeros((k, frames.shape[2]), real)

    def column(j, carry):
        Q, sizes, lengths, rests = carry
        v = jax.lax.dynamic_index_in_dim(frames, j, 1, keepdims=False)
        # Scaled, so that squares neither overflow nor underflow.
        size = jnp.max(jnp.abs(v), axis=0)
        v = v / jnp.where(size > 0, size, 1.0)[None]
        length = _norm(v)
        # Gram-Schmidt, twice: orthogonal to round-off whatever the condition. Later columns of Q
        # are still 0.
        for _ in range(2 if k > 1 else 0):
            along = jnp.sum(Q.conj() * v[:, None], axis=0)
            v = v - jnp.sum(Q * along[None], axis=1)
        rest = _norm(v)
        v = v / jnp.where(rest > 0, rest, 1.0)[None]
        Q = jax.lax.dynamic_update_index_in_dim(Q, v, j, 1)
        return (
            Q,
            *(
                jax.lax.dynamic_update_index_in_dim(rows, row, j, 0)
                for rows, row in ((sizes, size), (lengths, length), (rests, rest))
            ),
        )

    start = (jnp.zeros_like(frames), nothing, nothing, nothing)
    Q, size, length, rest = jax.lax.fori_loop(0, k, column, start)
    # Never nan, also where the frame was: those are found in the logarithms.
    gone = rest <= small * length
    # Two logarithms: the product may underflow.
    logs = jnp.log(jnp.where(gone, 1.0, rest)) + jnp.log(jnp.where(size > 0, size, 1.0))
    return Q, jnp.where(gone, -jnp.inf, logs), gone


def _norm(v: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.real(v * v.conj()), axis=0))


def generator(key: Any) -> np.random.Generator:
    """Random numbers of the host from a concrete JAX key."""
    data = jax.random.key_data(key) if key.dtype != np.uint32 else key
    return np.random.default_rng(np.asarray(data).ravel().tolist())
