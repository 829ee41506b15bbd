"""Standard normal numbers in double precision from elementary operations.

``jax.random.normal`` inverts the error function, which takes a logarithm of the mathematical
library for each number: longer than all the rest of a step of small matrices. Here the logarithm,
sine and cosine of the method of Box & Muller are polynomials that vectorise, accurate to round-off.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradflow.lyapunov._frames import held

__all__ = ["normal"]

_ONE, _MANTISSA = np.uint64(0x3FF0000000000000), np.uint64(0x000FFFFFFFFFFFFF)
_TWO_52 = np.uint64(0x4330000000000000)  # 2^52, whose last bit is 1
# log m = 2s Σ s^{2j}/(2j+1), s = (m−1)/(m+1), |s| ≤ 0.172 for m between √½ and √2.
_LOG = [1 / (2 * j + 1) for j in range(12)]
_SIN = [(-1) ** j / math.factorial(2 * j + 1) for j in range(9)]
_COS = [(-1) ** j / math.factorial(2 * j) for j in range(10)]


def normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Standard normal numbers; complex ones have ``E|g|² = 1``."""
    dtype = jnp.dtype(dtype)
    if dtype == np.complex128:
        parts = normal(key, (2, *shape), np.float64) * math.sqrt(0.5)
        return jax.lax.complex(parts[0], parts[1])
    if dtype != np.float64:
        return jax.random.normal(key, shape, dtype)
    number = math.prod(shape)
    bits = jax.random.bits(key, (2, -(-number // 2)), np.uint64)
    radius = jnp.sqrt(-2 * _log(2.0 - _from_one_to_two(bits[0])))
    # A uniform angle: within ±π/4, and by how many quarters it is turned from two bits left over.
    angle = (_from_one_to_two(bits[1]) - 1.5) * (0.5 * math.pi)
    square = angle * angle
    sin, cos = angle * _horner(_SIN, square), _horner(_COS, square)
    quarter = (bits[1] & np.uint64(1)) == 1
    radius = jnp.where((bits[1] & np.uint64(2)) == 2, -radius, radius)
    pair = radius * jnp.where(quarter, -sin, cos), radius * jnp.where(quarter, cos, sin)
    # Fused with the concatenation none of this would vectorise.
    known = jax.random.key_data(key) if key.dtype != np.uint32 else key
    pair = held(pair, known.astype(float))
    return jnp.concatenate(pair)[:number].reshape(shape)


def _from_one_to_two(bits: Array) -> Array:
    """Uniform numbers in [1, 2) from the 52 leading bits."""
    return jax.lax.bitcast_convert_type((bits >> np.uint64(12)) | _ONE, jnp.float64)


def _log(x: Array) -> Array:
    """``log x`` for 0 < x ≤ 1, normal numbers only."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint64)
    m = jax.lax.bitcast_convert_type((bits & _MANTISSA) | _ONE, jnp.float64)
    # The exponent as a float without a conversion, which would not vectorise.
    e = jax.lax.bitcast_convert_type((bits >> np.uint64(52)) | _TWO_52, jnp.float64)
    e = e - (2.0**52 + 1023)
    large = m > math.sqrt(2)
    m, e = jnp.where(large, 0.5 * m, m), jnp.where(large, e + 1, e)
    s = (m - 1) / (m + 1)
    return e * math.log(2) + 2 * s * _horner(_LOG, s * s)


def _horner(coefficients: list[float], x: Array) -> Array:
    total = jnp.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total
