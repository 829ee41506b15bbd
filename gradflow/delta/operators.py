"""The delta operator ``Δ = I − β k kᵀ``: identity, projection and reflection with one gate between.

Zhang, Liu, Wang & Gu, *Deep delta learning* (arXiv 2601.00417).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError

__all__ = [
    "GUARD",
    "DeltaOperator",
    "determinant",
    "gate",
    "gate_logit",
    "guarded",
    "inverse",
    "operator",
    "regime",
    "spectrum",
    "unit",
]

# Directions shorter than this are divided by it instead of by their length.
GUARD = 1e-12


def gate(logit: Any) -> Array:
    """``β = 2σ(g)`` in [0, 2], of any shape; 0 and 2 only where ``g`` is infinite or saturated."""
    return 2 * jax.nn.sigmoid(jnp.asarray(logit))


def gate_logit(beta: Any) -> Array:
    """``g = ln β − ln(2 − β)``, the inverse of :func:`gate`; infinite at β = 0 and 2.

    Raises:
        ValueError: a gate outside [0, 2].
    """
    beta = check_gates("beta", beta)
    return jnp.log(beta) - jnp.log(2 - beta)


def check_gates(name: str, value: Any, ndim: int | None = None) -> Array:
    """``value`` as an array of gates in [0, 2]; refused otherwise."""
    gates = _checks.real_array(name, value, ndim=ndim)
    if _checks.is_concrete(gates):
        host = np.asarray(gates)
        outside = (host < 0) | (host > 2)
        if outside.any():
            first = tuple(int(i) for i in np.argwhere(outside)[0])
            where = f" at index {first}" if first else ""
            raise ArgumentError(name, f"{host[first]:g}{where}", "a gate must lie in [0, 2]")
    return gates


def unit(name: str, direction: Any) -> Float[Array, " d"]:
    """``k/‖k‖`` of a given direction of any length but 0 (a traced zero stays zero).

    Raises:
        ValueError: a zero direction, or no vector of finite real floats.
    """
    k = _checks.real_array(name, direction, ndim=1)
    largest = jnp.max(jnp.abs(k))
    if _checks.is_concrete(k) and float(largest) == 0:
        raise ArgumentError(name, f"a zero vector of length {k.shape[0]}", "it must not vanish")
    # Scaled first, so that no square under- or overflows.
    scale = jax.lax.stop_gradient(jnp.where(largest > 0, largest, 1.0))
    return guarded(k / scale)


def guarded(direction: Float[Array, " d"], guard: float = GUARD) -> Float[Array, " d"]:
    """``k̃ / max(‖k̃‖, guard)``: a unit vector, or a shorter one where ``k̃`` nearly vanishes.

    Value and gradient are finite everywhere, at zero too; below the guard the map is linear.
    """
    squares = jnp.sum(direction**2)
    long = squares > guard**2
    return jnp.where(long, direction / jnp.sqrt(jnp.where(long, squares, 1.0)), direction / guard)


class DeltaOperator(eqx.Module):
    """``Δ = I − β k kᵀ`` with a unit vector k, kept as the pair (β, k).

    ``op @ X`` costs O(d) per column. :meth:`matrix` gives the dense form, which is also what
    NumPy and JAX see where they need an array.

    Attributes:
        beta: β, a scalar.
        direction: k, shape ``(d,)``.
    """

    beta: Float[Array, ""]
    direction: Float[Array, " d"]

    def __matmul__(self, X: Any) -> Array:
        """``Δ X`` for a vector ``(d,)`` or a matrix ``(d, m)``."""
        X = jnp.asarray(X)
        if X.ndim not in (1, 2) or X.shape[0] != self.direction.shape[0]:
            raise ShapeError(
                "X", f"shape {X.shape}", f"it must have {self.direction.shape[0]} rows"
            )
        k = self.direction
        return X - self.beta * jnp.tensordot(k, k @ X, 0)

    @property
    def T(self) -> DeltaOperator:
        """The transpose: the operator itself, which is symmetric."""
        return self

    @property
    def shape(self) -> tuple[int, int]:
        return (self.direction.shape[0], self.direction.shape[0])

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> Any:
        return self.direction.dtype

    def matrix(self) -> Float[Array, "d d"]:
        """The dense form, shape ``(d, d)``."""
        k = self.direction
        return jnp.eye(k.shape[0], dtype=k.dtype) - self.beta * jnp.outer(k, k)

    def __jax_array__(self) -> Array:
        return self.matrix()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy  # the dense form is made anew each time
        return np.asarray(self.matrix(), dtype=dtype)

    def spectrum(self) -> Float[Array, " d"]:
        """The eigenvalues, see :func:`spectrum`."""
        return _spectrum(self.beta, self.direction.shape[0])

    def determinant(self, columns: int = 1) -> Float[Array, ""]:
        """The determinant on states of so many columns, see :func:`determinant`."""
        return (1 - self.beta) ** _checks.whole_number("columns", columns, 1)

    def inverse(self) -> DeltaOperator:
        """``Δ⁻¹ = I + β/(1−β) k kᵀ``, the operator with gate ``β/(β−1)``.

        Raises:
            ValueError: β = 1, where Δ is a projection.
        """
        if _checks.is_concrete(self.beta) and float(self.beta) == 1:
            raise ArgumentError("beta", "1", "a projection has no inverse: take another gate")
        return DeltaOperator(self.beta / (self.beta - 1), self.direction)


def operator(beta: Any, k: ArrayLike | Sequence) -> DeltaOperator:
    """``Δ(β, k) = I − β k kᵀ / ‖k‖²``.

    Args:
        beta: the gate, in [0, 2]: 0 identity, 1 projection, 2 Householder reflection.
        k: the direction, shape ``(d,)``, of any length but 0.

    Returns:
        a :class:`DeltaOperator` of shape ``(d, d)``: apply it with ``@``.

    Raises:
        ValueError: a gate outside [0, 2], or a zero direction.
    """
    direction = unit("k", k)
    beta = jnp.asarray(_gate("beta", beta), direction.dtype)
    return DeltaOperator(beta, direction)


def _gate(name: str, beta: Any) -> Any:
    return _checks.real_scalar(name, beta, minimum=0, maximum=2)


def _spectrum(beta: Any, d: int) -> Array:
    return jnp.ones(d).at[-1].set(1 - beta)


def spectrum(beta: Any, d: int) -> Float[Array, " d"]:
    """Eigenvalues of ``Δ`` in d dimensions: 1, d − 1 times, and 1 − β along k; descending.

    Raises:
        ValueError: a gate outside [0, 2], or d < 1.
    """
    return _spectrum(_gate("beta", beta), _checks.whole_number("d", d, 1))


def determinant(beta: Any, columns: int = 1) -> Float[Array, ""]:
    """``(1 − β)^m``, the determinant of ``I_m ⊗ Δ`` on states of shape ``(d, m)``.

    Args:
        beta: the gate, in [0, 2].
        columns: m, the number of columns of the state.

    Raises:
        ValueError: a gate outside [0, 2], or m < 1.
    """
    return (1 - jnp.asarray(_gate("beta", beta))) ** _checks.whole_number("columns", columns, 1)


def inverse(beta: Any, k: ArrayLike | Sequence) -> DeltaOperator:
    """``Δ(β, k)⁻¹ = I + β/(1−β) k kᵀ``, applied in O(d) like ``Δ``.

    Raises:
        ValueError: β = 1, a gate outside [0, 2], or a zero direction.
    """
    return operator(beta, k).inverse()


def regime(beta: float) -> str:
    """What ``Δ`` does along k: the name of the gate's regime.

    ``"identity"`` (β = 0), ``"contraction"`` (0 < β < 1: shrinks, keeps the sign),
    ``"projection"`` (β = 1), ``"over-relaxed"`` (1 < β < 2: shrinks and turns the sign),
    ``"reflection"`` (β = 2).

    Raises:
        ValueError: a gate outside [0, 2], or a traced one, which has no value yet.
    """
    beta = _gate("beta", beta)
    if not _checks.is_concrete(beta):
        raise ArgumentError("beta", "a traced number", "a regime is a name: pass a number")
    named = {0.0: "identity", 1.0: "projection", 2.0: "reflection"}
    return named.get(float(beta), "contraction" if beta < 1 else "over-relaxed")


# The series gives exp of a matrix of norm 1/2 to round-off; the squarings reach norms of 2^19.
_TERMS = 14
_SQUARINGS = 20


def rotation(generator: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """``exp(S − Sᵀ)``, the rotation that S generates, of determinant 1.

    By the power series of a scaled-down exponent and squarings: products only, in two loops, which
    compile and differentiate far sooner than a general exponential. Orthogonal to a few units of
    round-off times ``‖S − Sᵀ‖``; NaN where that is above 5e5.

    Args:
        generator: S, shape ``(d, d)``.
    """
    A = generator - generator.T
    norm = jax.lax.stop_gradient(jnp.max(jnp.sum(jnp.abs(A), axis=1)))
    needed = jnp.ceil(jnp.log2(jnp.maximum(2 * norm, 1.0)))
    A = A * jnp.where(needed <= _SQUARINGS, 2.0**-needed, jnp.nan)
    eye = jnp.eye(len(A), dtype=A.dtype)

    def horner(X, n):
        return eye + A @ X / n, None

    def square(X, n):
        return jnp.where(n < needed, X @ X, X), None

    X, _ = jax.lax.scan(horner, eye, jnp.arange(_TERMS, 0.0, -1.0, A.dtype))
    return jax.lax.scan(square, X, jnp.arange(_SQUARINGS, dtype=A.dtype))[0]
