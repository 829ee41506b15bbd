"""Linear networks whose layers are not free matrices: delta, highway, orthogonal layers.

States of gradient flows (:class:`gradflow.DeltaNetworkFlow`, :class:`gradflow.ParameterFlow`), all
layers square and stacked, the first one reading the input.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.delta.operators import gate, guarded, rotation
from gradflow.errors import ArgumentError, ShapeError

__all__ = [
    "AbstractLayers",
    "DeltaNetwork",
    "DeltaShortcutNetwork",
    "HighwayNetwork",
    "OrthogonalNetwork",
]


class AbstractLayers(eqx.Module):
    """A linear network of h square layers ``M_1, …, M_h``, each a function of its parameters."""

    @abc.abstractmethod
    def matrices(self) -> Float[Array, "h d d"]:
        """The layers ``M_1, …, M_h`` as dense matrices, shape ``(h, d, d)``."""

    @property
    def _first(self) -> Array:
        return jax.tree.leaves(self)[0]

    @property
    def depth(self) -> int:
        """The number of layers h."""
        return self._first.shape[0]

    @property
    def widths(self) -> tuple[int, ...]:
        """``(d, …, d)``, h + 1 of them."""
        return (self._first.shape[-1],) * (self.depth + 1)

    def end_to_end(self) -> Float[Array, "d d"]:
        """The end-to-end map ``M_h ⋯ M_1``, shape ``(d, d)``."""
        first, *rest = self.matrices()
        for M in rest:
            first = M @ first
        return first

    def named_arrays(self) -> dict[str, tuple[Array, tuple[str, ...]]]:
        """The parameters by name, with the names of their dimensions, for the file format."""
        found = {}
        for name in self.__dataclass_fields__:
            array = getattr(self, name)
            found[name] = (array, ("layer", "entry", "column")[: array.ndim])
        return found

    @classmethod
    def from_named_arrays(cls, arrays: dict[str, Array]) -> Any:
        """The inverse of :meth:`named_arrays`, also for stacked parameters."""
        network = object.__new__(cls)
        for name in cls.__dataclass_fields__:
            object.__setattr__(network, name, arrays[name])
        return network

    def __repr__(self) -> str:
        first = self._first
        if not hasattr(first, "shape"):  # placeholders inside JAX transformations
            return type(self).__name__
        return f"{type(self).__name__}(depth={self.depth}, width={first.shape[-1]}, {first.dtype})"


def _rows(name: str, value: Any, shape: tuple[int, ...] | None, ndim: int) -> Array:
    array = _checks.real_array(name, value, ndim=ndim)
    if shape is not None and array.shape != shape:
        raise ShapeError(name, f"shape {array.shape}", f"the first argument needs {shape}")
    return array


def _directions(value: Any) -> Array:
    directions = _rows("directions", value, None, 2)
    if _checks.is_concrete(directions):
        zero = ~np.asarray(directions).any(axis=1)
        if zero.any():
            raise ArgumentError(
                f"directions[{int(np.argmax(zero))}]", "a zero vector", "it must not vanish"
            )
    return directions


class DeltaNetwork(AbstractLayers):
    """The linear delta network: layers ``M = I + β k (w − k)ᵀ``, ``k = k̃/‖k̃‖``, ``β = 2σ(g)``.

    The rewrite block whose value ``v(x) = wᵀx`` is linear in the state (arXiv 2601.00417), applied
    in O(d). Directions shorter than :data:`gradflow.delta.GUARD` are not brought to length 1.

    Args:
        directions: ``k̃`` of every layer, shape ``(h, d)``, none zero.
        values: w of every layer, shape ``(h, d)``.
        gate_logits: g of every layer, shape ``(h,)``.

    Raises:
        ValueError: shapes that do not fit, a zero direction, entries that are not finite.
    """

    directions: Float[Array, "*batch h d"]
    values: Float[Array, "*batch h d"]
    gate_logits: Float[Array, "*batch h"]

    def __init__(
        self,
        directions: ArrayLike | Sequence,
        values: ArrayLike | Sequence,
        gate_logits: ArrayLike | Sequence,
    ):
        self.directions = _directions(directions)
        shape = self.directions.shape
        self.values = _rows("values", values, shape, 2)
        self.gate_logits = _rows("gate_logits", gate_logits, shape[:1], 1)

    @classmethod
    def random(
        cls, key: Any, depth: int, width: int, *, scale: float = 1.0, beta: float = 1.0
    ) -> DeltaNetwork:
        """Random directions; values ``w = k + scale·N(0, 1/d)``, the identity map for scale 0.

        Args:
            key: random key or seed.
            depth: h ≥ 1.
            width: d ≥ 1.
            scale: size of the perturbation ``w − k`` of the identity, ≥ 0.
            beta: the gate of every layer at the start, in (0, 2).

        Directions have length about 1: the entries are N(0, 1/d).

        Raises:
            ValueError: an argument out of range.
        """
        depth = _checks.whole_number("depth", depth, 1)
        width = _checks.whole_number("width", width, 1)
        scale = _checks.real_scalar("scale", scale, minimum=0)
        beta = _checks.real_scalar("beta", beta, above=0, below=2)
        one, two = jax.random.split(_checks.random_key("key", key))
        root = np.sqrt(width)
        k = jax.random.normal(one, (depth, width)) / root
        w = jax.vmap(guarded)(k) + scale * jax.random.normal(two, (depth, width)) / root
        logit = np.log(beta) - np.log(2 - beta)
        return cls(k, w, jnp.full((depth,), logit, k.dtype))

    @property
    def unit_directions(self) -> Float[Array, "h d"]:
        """``k = k̃/‖k̃‖`` of every layer, shape ``(h, d)``."""
        return jax.vmap(guarded)(self.directions)

    @property
    def gates(self) -> Float[Array, "*batch h"]:
        """``β = 2σ(g)`` of every layer, shape ``(h,)``."""
        return gate(self.gate_logits)

    def _layers(self) -> tuple[Array, Array, Array]:
        return self.unit_directions, self.values, self.gates

    def matrices(self) -> Float[Array, "h d d"]:
        k, w, beta = self._layers()
        eye = jnp.eye(k.shape[1], dtype=k.dtype)
        return eye[None] + beta[:, None, None] * k[:, :, None] * (w - k)[:, None, :]

    def __call__(self, X: Array) -> Array:
        """``M_h ⋯ M_1 X`` for ``(d,)`` or ``(d, m)``, O(d) per layer and column."""
        X = jnp.asarray(X)
        d = self.directions.shape[-1]
        if X.ndim not in (1, 2) or X.shape[0] != d:
            raise ShapeError("X", f"shape {X.shape}", f"it must have {d} rows")

        def step(x, layer):
            k, w, beta = layer
            return x + beta * jnp.tensordot(k, (w - k) @ x, 0), None

        return jax.lax.scan(step, X, self._layers())[0]

    def end_to_end(self) -> Float[Array, "d d"]:
        """The end-to-end map ``M_h ⋯ M_1``, shape ``(d, d)``, in O(h d²)."""
        return self(jnp.eye(self.directions.shape[-1], dtype=self.directions.dtype))


class DeltaShortcutNetwork(AbstractLayers):
    """Delta shortcuts beside a dense branch, all trained: ``M = I − β k kᵀ + W``.

    Args:
        directions: ``k̃`` of every layer, shape ``(h, d)``, none zero.
        gate_logits: g of every layer, shape ``(h,)``.
        weights: the branches W, shape ``(h, d, d)``.

    With shortcuts that stay as they are, take :class:`gradflow.ResidualFlow`.

    Raises:
        ValueError: shapes that do not fit, a zero direction, entries that are not finite.
    """

    directions: Float[Array, "*batch h d"]
    gate_logits: Float[Array, "*batch h"]
    weights: Float[Array, "*batch h d d"]

    def __init__(
        self,
        directions: ArrayLike | Sequence,
        gate_logits: ArrayLike | Sequence,
        weights: ArrayLike | Sequence,
    ):
        self.directions = _directions(directions)
        h, d = self.directions.shape
        self.gate_logits = _rows("gate_logits", gate_logits, (h,), 1)
        self.weights = _rows("weights", weights, (h, d, d), 3)

    @property
    def gates(self) -> Float[Array, "*batch h"]:
        """``β = 2σ(g)`` of every layer, shape ``(h,)``."""
        return gate(self.gate_logits)

    def matrices(self) -> Float[Array, "h d d"]:
        k = jax.vmap(guarded)(self.directions)
        eye = jnp.eye(k.shape[1], dtype=k.dtype)
        erased = self.gates[:, None, None] * k[:, :, None] * k[:, None, :]
        return eye[None] - erased + self.weights


class HighwayNetwork(AbstractLayers):
    """Linear highway layers ``M = (1 − T) I + T W`` with one gate ``T = σ(g)`` per layer.

    Args:
        weights: W of every layer, shape ``(h, d, d)``.
        gate_logits: g of every layer, shape ``(h,)``.

    Raises:
        ValueError: shapes that do not fit, entries that are not finite.
    """

    weights: Float[Array, "*batch h d d"]
    gate_logits: Float[Array, "*batch h"]

    def __init__(self, weights: ArrayLike | Sequence, gate_logits: ArrayLike | Sequence):
        self.weights = _squares("weights", weights)
        self.gate_logits = _rows("gate_logits", gate_logits, self.weights.shape[:1], 1)

    @property
    def gates(self) -> Float[Array, "*batch h"]:
        """``T = σ(g)`` of every layer, shape ``(h,)``."""
        return jax.nn.sigmoid(self.gate_logits)

    def matrices(self) -> Float[Array, "h d d"]:
        T = self.gates[:, None, None]
        eye = jnp.eye(self.weights.shape[-1], dtype=self.weights.dtype)
        return (1 - T) * eye[None] + T * self.weights


class OrthogonalNetwork(AbstractLayers):
    """Rotations ``M = exp(S − Sᵀ)``; no parameters reach a map of negative determinant.

    Args:
        generators: S of every layer, shape ``(h, d, d)``.

    Raises:
        ValueError: another shape, entries that are not finite.
    """

    generators: Float[Array, "*batch h d d"]

    def __init__(self, generators: ArrayLike | Sequence):
        self.generators = _squares("generators", generators)

    def matrices(self) -> Float[Array, "h d d"]:
        return jax.vmap(rotation)(self.generators)


def _squares(name: str, value: Any) -> Array:
    array = _rows(name, value, None, 3)
    if array.shape[1] != array.shape[2]:
        raise ShapeError(name, f"shape {array.shape}", "it must be (h, d, d)")
    return array
