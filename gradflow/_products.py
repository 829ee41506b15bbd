"""Matrix products, also fast for very small matrices."""

from __future__ import annotations

import jax
from jaxtyping import Array

__all__ = ["product"]

# Inner dimension and size of the result up to which a sum of outer products is faster.
_INNER = 8
_RESULT = 64


def product(a: Array, b: Array) -> Array:
    """``a @ b``.

    A compiled call of a matrix routine costs as much as some thousand flops, and under ``vmap`` one
    is made per lane. Very small products are written out instead, each as one loop over all lanes.
    """
    inner, size = a.shape[-1], a.shape[-2] * b.shape[-1]
    small = inner <= _INNER and size <= _RESULT
    if not small or not isinstance(a, jax.core.Tracer):
        return a @ b
    total = a[..., :, :1] * b[..., :1, :]
    for i in range(1, inner):
        total = total + a[..., :, i : i + 1] * b[..., i : i + 1, :]
    # Without it the loop of the next product would do this one again for each of its terms.
    return jax.lax.optimization_barrier(total)
