"""Matrix products, also fast for very small matrices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

__all__ = ["product", "spectral_norm"]


def spectral_norm(a: np.ndarray) -> float:
    """The largest singular value of a finite NumPy matrix, faster than by all of them."""
    size = np.abs(a).max(initial=0.0)
    if size == 0:
        return 0.0
    a = a / size
    gram = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
    return float(size * np.sqrt(np.linalg.eigvalsh(gram)[-1]))


def product(a: Array, b: Array) -> Array:
    """``a @ b`` of two matrices.

    A compiled call of a matrix routine costs as much as some thousand flops, and under ``vmap`` one
    is made per lane. Very small products are written out instead, in a way that depends on the
    number of lanes, which only the compiler's input knows: hence a primitive.
    """
    compiled = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
    if not compiled or a.ndim != 2 or b.ndim != 2 or a.dtype != b.dtype or not _small(a, b, 1):
        return a @ b
    return _product.bind(a, b)


# The largest inner dimension, and size of the result, up to which writing out is faster (measured).
_ALONE = 12, 144
_FEW = 8, 64
_MANY = 6, 36
# Lanes that are few.
_SOME = 8


def _small(a: Any, b: Any, lanes: int) -> bool:
    inner, size = _ALONE if lanes == 1 else _FEW if lanes <= _SOME else _MANY
    return a.shape[-1] <= inner and a.shape[-2] * b.shape[-1] <= size


def _written_out(a: Array, b: Array) -> Array:
    lanes = math.prod(a.shape[:-2])
    if not _small(a, b, lanes):
        return jnp.matmul(a, b)
    if lanes <= _SOME:
        total = jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    else:
        total = a[..., :, :1] * b[..., :1, :]
        for i in range(1, a.shape[-1]):
            total = total + a[..., :, i : i + 1] * b[..., i : i + 1, :]
    # Without it the loop of the next product would do this one again for each of its terms.
    return jax.lax.optimization_barrier(total)


def _shape(a: Any, b: Any) -> Any:
    return jax.core.ShapedArray((*a.shape[:-1], b.shape[-1]), a.dtype)


def _batch(arguments: Any, dims: Any) -> tuple[Array, int]:
    size = next(x.shape[d] for x, d in zip(arguments, dims, strict=True) if d is not None)
    a, b = (
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(arguments, dims, strict=True)
    )
    return _product.bind(a, b), 0


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


_product = Primitive("small_product")
_product.def_impl(jax.jit(_written_out))
_product.def_abstract_eval(_shape)
mlir.register_lowering(_product, mlir.lower_fun(_written_out, multiple_results=False))
batching.primitive_batchers[_product] = _batch
ad.defbilinear(
    _product,
    lambda ct, a, b: _product.bind(ct, _transposed(b)),
    lambda ct, a, b: _product.bind(_transposed(a), ct),
)
