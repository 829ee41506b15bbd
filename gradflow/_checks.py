"""Argument, shape and precision checks shared by all floors.

Checks on *values* (finite, positive, sorted) are skipped for traced arrays, which have
none yet; checks on shapes and types always run.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from gradflow.errors import ArgumentError, PrecisionError, ShapeError

X64_REMEDY = 'jax.config.update("jax_enable_x64", True)'


def is_concrete(*trees: Any) -> bool:
    """Whether no leaf of the trees is a tracer."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def describe(value: Any) -> str:
    """A short description of a value for an error message."""
    if isinstance(value, (str, bytes, bool, int, float, complex, type(None))):
        return repr(value)
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        if shape == () and is_concrete(value):
            return f"{value} ({dtype})"
        return f"an array of shape {tuple(shape)} and type {dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} {text[:57]}..."


def real_array(
    name: str, value: ArrayLike | Sequence, ndim: int | None = None, *, allow_empty: bool = False
) -> Array:
    """``value`` as a JAX array of floats; refuses what is not a finite real float array.

    Nested sequences of Python numbers are read as floats; *arrays* of integers, booleans or
    complex numbers are refused rather than silently converted.
    """
    is_array = hasattr(value, "dtype")
    if is_array:
        # numpy's issubdtype knows nothing of bfloat16 and its kin, JAX's does.
        if not jnp.issubdtype(value.dtype, jnp.floating):  # type: ignore[union-attr]
            raise ArgumentError(
                name, describe(value), "it must hold real floats: convert it with .astype(float)"
            )
        array = value
    else:
        leaves = jax.tree.leaves(value, is_leaf=lambda leaf: leaf is None)
        if any(isinstance(leaf, complex) for leaf in leaves):
            raise ArgumentError(name, "complex numbers", "it must hold real floats")
        if any(leaf is None for leaf in leaves):  # which numpy would read as nan
            raise ArgumentError(name, describe(value), "it must be an array of real numbers")
        try:
            convert = np.asarray if is_concrete(value) else jnp.asarray
            array = convert(value, dtype=float)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                name, describe(value), "it must be an array of real numbers"
            ) from error
    if ndim is not None and np.ndim(array) != ndim:
        raise ShapeError(name, describe(array), f"it must have {ndim} dimension(s)")
    if not allow_empty and np.size(array) == 0:
        raise ShapeError(name, describe(array), "it must not be empty")
    if is_concrete(array):
        host = np.asarray(array)
        finite = np.isfinite(host.astype(float))
        if not finite.all():
            first = tuple(int(i) for i in np.argwhere(~finite)[0])
            where = f" at index {first}" if first else ""
            raise ArgumentError(
                name,
                f"{host[first]}{where} ({int((~finite).sum())} such entries)",
                "every entry must be finite",
            )
    return jnp.asarray(array)


def real_scalar(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """``value`` as a float (or a traced scalar), within the bounds."""
    bounds = []
    if minimum is not None:
        bounds.append(f">= {minimum:g}")
    if above is not None:
        bounds.append(f"> {above:g}")
    if maximum is not None:
        bounds.append(f"<= {maximum:g}")
    if below is not None:
        bounds.append(f"< {below:g}")
    wanted = "it must be a finite real number" + (" " + " and ".join(bounds) if bounds else "")
    if isinstance(value, jax.core.Tracer):
        if value.ndim != 0:
            raise ShapeError(name, describe(value), "it must be a scalar")
        return value
    if isinstance(value, (bool, str, complex)) or value is None:
        raise ArgumentError(name, describe(value), wanted)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(name, describe(value), wanted) from error
    fits = (
        np.isfinite(number)
        and (minimum is None or number >= minimum)
        and (above is None or number > above)
        and (maximum is None or number <= maximum)
        and (below is None or number < below)
    )
    if not fits:
        raise ArgumentError(name, describe(value), wanted)
    return number


def whole_number(name: str, value: Any, minimum: int) -> int:
    """``value`` as an int of at least ``minimum``."""
    wanted = f"it must be a whole number >= {minimum}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(name, describe(value), wanted)
    number = int(value.__index__())
    if number < minimum:
        raise ArgumentError(name, describe(value), wanted)
    return number


def layer_widths(name: str, value: Iterable[int]) -> tuple[int, ...]:
    """``value`` as a tuple of at least two widths (d_0, …, d_h), each at least 1."""
    try:
        entries = list(value)
    except TypeError as error:
        raise ArgumentError(
            name, describe(value), "it must be a sequence (d_0, ..., d_h) of layer widths"
        ) from error
    if len(entries) < 2:
        raise ArgumentError(
            name, describe(entries), "it must have at least two entries (d_0, ..., d_h)"
        )
    return tuple(whole_number(f"{name}[{i}]", entry, 1) for i, entry in enumerate(entries))


def random_key(name: str, value: Any) -> Array:
    """``value`` as a JAX random key; a whole number, traced or not, is taken as a seed."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        if value.shape != ():
            raise ShapeError(name, describe(value), "it must be a single key: use jax.vmap")
        return value
    if isinstance(value, (jax.Array, np.ndarray)) and value.dtype == jnp.uint32:
        if value.shape != (2,):
            raise ShapeError(name, describe(value), "a raw key must have shape (2,)")
        return jnp.asarray(value)
    if isinstance(value, jax.core.Tracer) and jnp.issubdtype(value.dtype, jnp.integer):
        return jax.random.key(value)
    if hasattr(value, "__index__") and not isinstance(value, bool):
        return jax.random.key(whole_number(name, value, 0))
    raise ArgumentError(name, describe(value), "it must be a jax.random.key or a whole-number seed")


def choice(name: str, value: Any, options: Sequence[str], extra: str = "") -> str:
    """``value`` if it is one of ``options``; otherwise an error with the nearest option."""
    if isinstance(value, str) and value in options:
        return value
    near = difflib.get_close_matches(str(value), options, n=1) if isinstance(value, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    listed = ", ".join(repr(option) for option in options)
    raise ArgumentError(name, describe(value), f"it must be one of {listed}{extra}{hint}")


def reachable_tolerance(name: str, value: float, dtype: Any) -> None:
    """Refuse a relative tolerance that ``dtype`` cannot keep, naming the flag to set."""
    smallest = 10 * float(jnp.finfo(dtype).eps)
    if value < smallest:
        remedy = f"{jnp.dtype(dtype).name} keeps {smallest:.1e} at best: loosen {name}"
        if jnp.finfo(dtype).bits < 64:
            remedy += f", or run in float64 by {X64_REMEDY} at the top of the program"
        raise PrecisionError(name, f"{value:g}", remedy)


def precision(x64: bool) -> Any:
    """A context in which JAX has the given ``jax_enable_x64``, in this thread only."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(x64)
    return importlib.import_module("jax.experimental").enable_x64(x64)  # before JAX 0.8
