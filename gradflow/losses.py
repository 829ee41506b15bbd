"""Losses of the end-to-end map beyond the quadratic one, for :meth:`gradflow.Problem.from_loss`.

Each is a callable pytree, so that its data can change without compiling again. The conservation
laws ``C_i`` hold for all of them, since they need no more than ``L = ℓ(W_h ⋯ W_1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError

__all__ = ["CrossEntropy", "Huber", "Masked"]


class CrossEntropy(eqx.Module):
    """Mean cross-entropy of ``softmax(W x)``: its infimum 0 is reached only at infinity.

    Args:
        X: inputs, shape ``(N, d_0)``.
        Y: label probabilities, shape ``(N, d_h)``, rows ≥ 0 that sum to 1 (one-hot labels).

    Raises:
        ValueError: shapes that do not fit, or rows of ``Y`` that are no probabilities.
    """

    X: Float[Array, "N d_in"]
    Y: Float[Array, "N d_out"]

    def __init__(self, X: ArrayLike, Y: ArrayLike):
        self.X = _checks.real_array("X", X, ndim=2)
        self.Y = _checks.real_array("Y", Y, ndim=2)
        if self.X.shape[0] != self.Y.shape[0]:
            raise ShapeError(
                "Y", f"{self.Y.shape[0]} rows", f"it must have as many as X, {self.X.shape[0]}"
            )
        if _checks.is_concrete(self.Y):
            Y_host = np.asarray(self.Y)
            if Y_host.min() < 0 or not np.allclose(Y_host.sum(axis=1), 1, atol=1e-6):
                raise ArgumentError("Y", "rows that are no probabilities", "use one-hot labels")

    def __call__(self, W: Float[Array, "d_out d_in"]) -> Float[Array, ""]:
        """``−(1/N) Σ_n Σ_k Y_nk ln softmax(W x_n)_k`` ≥ 0 for one-hot labels."""
        return -jnp.sum(self.Y * jax.nn.log_softmax(self.X @ W.T, axis=1)) / self.X.shape[0]


class Huber(eqx.Module):
    """``Σ huber(target − W)``: quadratic up to ``threshold``, linear beyond.

    Args:
        target: shape ``(d_h, d_0)``.
        threshold: where the loss turns linear, > 0.
    """

    target: Float[Array, "d_out d_in"]
    threshold: Float[Array, ""]

    def __init__(self, target: ArrayLike | Sequence, threshold: float = 1.0):
        self.target = _checks.real_array("target", target, ndim=2)
        self.threshold = jnp.asarray(
            _checks.real_scalar("threshold", threshold, above=0), self.target.dtype
        )

    def __call__(self, W: Float[Array, "d_out d_in"]) -> Float[Array, ""]:
        """``Σ ½e²`` where ``|e| ≤ threshold``, ``threshold (|e| − threshold/2)`` beyond."""
        error = jnp.abs(self.target - W)
        inside = jnp.minimum(error, self.threshold)
        return jnp.sum(inside * (error - 0.5 * inside))


class Masked(eqx.Module):
    """Matrix completion: ``½ Σ_{observed} (target − W)²``.

    Args:
        target: shape ``(d_h, d_0)``; entries that are not observed do not matter.
        mask: same shape, True where observed.

    Raises:
        ValueError: shapes that differ, or nothing observed.
    """

    target: Float[Array, "d_out d_in"]
    mask: Array

    def __init__(self, target: ArrayLike | Sequence, mask: ArrayLike | Sequence):
        self.target = _checks.real_array("target", target, ndim=2)
        mask = jnp.asarray(mask)
        if mask.shape != self.target.shape or mask.dtype != bool:
            raise ShapeError(
                "mask", _checks.describe(mask), f"it must be boolean of shape {self.target.shape}"
            )
        if _checks.is_concrete(mask) and not bool(mask.any()):
            raise ArgumentError("mask", "all False", "an entry must be observed")
        self.mask = mask

    def __call__(self, W: Float[Array, "d_out d_in"]) -> Float[Array, ""]:
        """``½ Σ mask · (target − W)²``."""
        return 0.5 * jnp.sum(jnp.where(self.mask, self.target - W, 0.0) ** 2)
