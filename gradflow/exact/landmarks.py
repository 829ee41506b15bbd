"""Curvature at a balanced minimum, and the step size it allows."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ArgumentError

__all__ = ["max_learning_rate", "sharpness"]


def sharpness(singular_values: ArrayLike | Sequence[float], depth: int) -> Float[Array, ""]:
    """The largest Hessian eigenvalue at a balanced global minimum, ``h s_1^{2−2/h}``.

    From the eigenvalues ``Σ_l s_i^{2(h−l)/h} s_k^{2(l−1)/h}`` over all pairs of modes. No global
    minimum of the same loss is flatter in this sense (Mulayoff & Michaeli 2020).

    Args:
        singular_values: of the whitened target, ≥ 0, shape ``(r,)``, any order.
        depth: h ≥ 1.

    Raises:
        ValueError: a negative singular value, or a depth below 1.
    """
    depth = _checks.whole_number("depth", depth, 1)
    values = _checks.real_array("singular_values", singular_values, ndim=1)
    if _checks.is_concrete(values) and float(values.min()) < 0:
        raise ArgumentError("singular_values", f"{float(values.min())}", "each must be >= 0")
    return depth * jnp.max(values) ** (2 - 2 / depth)


def max_learning_rate(singular_values: ArrayLike | Sequence[float], depth: int) -> Float[Array, ""]:
    """``2 / sharpness``: below it gradient descent is stable at a balanced global minimum.

    Arguments and errors as for :func:`sharpness`; infinite where the sharpness is 0.
    """
    return 2 / sharpness(singular_values, depth)
