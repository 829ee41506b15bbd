"""The tangent kernel of a linear network."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ShapeError
from gradflow.network import LinearNetwork

__all__ = ["kernel_distance", "tangent_kernel"]


def tangent_kernel(net: LinearNetwork, X: ArrayLike) -> Float[Array, "m m"]:
    """The neural tangent kernel ``Σ_l A_l A_lᵀ ⊗ X B_lᵀ B_l Xᵀ`` on the rows of X.

    With ``A_l = W_h ⋯ W_{l+1}`` and ``B_l = W_{l-1} ⋯ W_1``; for two layers
    ``I ⊗ X W_1ᵀW_1 Xᵀ + W_2W_2ᵀ ⊗ XXᵀ``. Outputs vary slowly, samples fast.

    Args:
        net: the network.
        X: inputs, shape ``(N, d_0)``, one sample per row.

    Returns:
        symmetric positive semi-definite matrix of shape ``(d_h N, d_h N)``.
    """
    X = _checks.real_array("X", X, ndim=2)
    if X.shape[1] != net.widths[0]:
        raise ShapeError("X", f"shape {X.shape}", f"it must have {net.widths[0]} columns, d_0")
    hidden = [X]  # rows: the samples as layer l sees them, X B_lᵀ
    for w in net.weights[:-1]:
        hidden.append(hidden[-1] @ w.T)
    after = jnp.eye(net.widths[-1], dtype=net.weights[-1].dtype)
    kernel = jnp.zeros((net.widths[-1] * X.shape[0],) * 2, after.dtype)
    for w, seen in zip(reversed(net.weights), reversed(hidden), strict=True):
        kernel = kernel + jnp.kron(after @ after.T, seen @ seen.T)
        after = after @ w
    return kernel


def kernel_distance(k1: ArrayLike, k2: ArrayLike) -> Float[Array, ""]:
    """``1 − ⟨K_1, K_2⟩ / (‖K_1‖ ‖K_2‖)``: 0 for kernels equal up to scale, at most 1 for PSD ones.

    The cosine distance of Fort et al. (2020, arXiv 2010.15110).

    Args:
        k1, k2: kernels of equal shape.

    Raises:
        ValueError: shapes differ, or a kernel is zero.
    """
    k1, k2 = _checks.real_array("k1", k1, ndim=2), _checks.real_array("k2", k2, ndim=2)
    if k1.shape != k2.shape:
        raise ShapeError("k2", f"shape {k2.shape}", f"it must have the shape of k1, {k1.shape}")
    norms = [jnp.linalg.norm(k) for k in (k1, k2)]
    for name, norm in zip(("k1", "k2"), norms, strict=True):
        if _checks.is_concrete(norm) and float(norm) == 0:
            raise ShapeError(name, "a kernel of zeros", "it must not vanish")
    # As half a squared distance of unit vectors: no cancellation for nearly equal kernels.
    return 0.5 * jnp.sum((k1 / norms[0] - k2 / norms[1]) ** 2)
