"""The state of a deep linear network, and the convention that everything else follows.

**Convention** (stated here once; ``docs/conventions.md`` repeats it for readers):

* ``h`` layers with weights ``W_1, …, W_h``, ``W_i`` of shape ``(d_i, d_{i-1})``; ``W_1`` reads
  the input. The end-to-end map is ``W_{1:h} = W_h ⋯ W_1`` of shape ``(d_h, d_0)``.
* The adjacency matrix ``A = blk_1(W_1, …, W_h)`` has node blocks ``0 … h`` of sizes
  ``d_0 … d_h`` and ``W_i`` at block row ``i``, block column ``i-1``: the first block
  *sub*-diagonal. ``A^k`` holds all products of ``k`` consecutive layers, ``A^h`` holds the
  end-to-end map in its bottom-left corner, and ``A^{h+1} = 0``.
* Gradient flow has unit speed, ``Ẇ = −∂L/∂W``.
* Conserved quantities are ``C_i = W_{i+1}ᵀ W_{i+1} − W_i W_iᵀ``, ``i = 1 … h−1``.
* Covariances are ``C_x = XᵀX/N`` and ``C_yx = YᵀX/N`` (rows of X and Y are samples).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow._products import product
from gradflow.errors import ArgumentError, PatternError, ShapeError

__all__ = ["LinearNetwork", "adjacency_flow", "block_offsets"]


def block_offsets(widths: Sequence[int]) -> tuple[int, ...]:
    """Start of every node block in the adjacency matrix, and its size ``n`` at the end."""
    return (0, *(int(total) for total in np.cumsum(widths)))


class LinearNetwork(eqx.Module):
    """A deep linear network ``x ↦ W_h ⋯ W_1 x``: a tuple of weight matrices.

    A pytree whose leaves are the weights, so that it passes through ``jax.jit``, ``jax.vmap``
    and ``jax.grad``, and can be the state of a differential equation.

    Args:
        weights: the matrices ``[W_1, …, W_h]``, ``W_i`` of shape ``(d_i, d_{i-1})``; real
            floats (nested lists of numbers are converted, integer and complex arrays refused).
            All are brought to one common floating point type.

    Raises:
        ValueError: no layers, entries that are not finite real floats, or widths that do not
            chain.
    """

    weights: tuple[Float[Array, "..."], ...]

    def __init__(self, weights: Iterable[ArrayLike | Sequence]):
        if hasattr(weights, "ndim") and not isinstance(weights, (list, tuple)):
            raise ArgumentError(
                "weights", _checks.describe(weights), "it must be a sequence [W_1, ..., W_h]"
            )
        arrays = [
            _checks.real_array(f"weights[{i}] (W_{i + 1})", w, ndim=2)
            for i, w in enumerate(weights)
        ]
        if not arrays:
            raise ArgumentError("weights", "no layers", "it must have at least one matrix")
        for i in range(1, len(arrays)):
            if arrays[i].shape[1] != arrays[i - 1].shape[0]:
                raise ShapeError(
                    f"weights[{i}] (W_{i + 1})",
                    f"shape {arrays[i].shape}",
                    f"it must have {arrays[i - 1].shape[0]} columns, the rows of W_{i}",
                )
        dtype = jnp.result_type(*arrays)
        self.weights = tuple(w.astype(dtype) for w in arrays)

    @property
    def depth(self) -> int:
        """The number of layers ``h``."""
        return len(self.weights)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths ``(d_0, …, d_h)``."""
        return (self.weights[0].shape[-1], *(w.shape[-2] for w in self.weights))

    def end_to_end(self) -> Float[Array, "*batch d_out d_in"]:
        """The end-to-end map ``W_{1:h} = W_h ⋯ W_1``, shape ``(d_h, d_0)``."""
        return consecutive_product(self.weights)

    def adjacency(self) -> Float[Array, "n n"]:
        """The adjacency matrix ``A = blk_1(W_1, …, W_h)``, shape ``(n, n)``, ``n = Σ d_i``."""
        return self.power(1)

    def power(self, k: int) -> Float[Array, "n n"]:
        """``A^k`` from products of ``k`` consecutive layers, shape ``(n, n)``.

        ``A^0`` is the identity and ``A^k`` is exactly zero for ``k > h``. Costs the products
        of ``k`` layers, not powers of an ``(n, n)`` matrix.

        Raises:
            ValueError: ``k`` is not a whole number ≥ 0.
        """
        k = _checks.whole_number("k", k, 0)
        offsets = block_offsets(self.widths)
        n, dtype = offsets[-1], self.weights[0].dtype
        if k == 0:
            return jnp.eye(n, dtype=dtype)
        power = jnp.zeros((n, n), dtype=dtype)
        for column in range(self.depth - k + 1):
            row = column + k
            block = consecutive_product(self.weights[column:row])
            power = power.at[
                offsets[row] : offsets[row + 1], offsets[column] : offsets[column + 1]
            ].set(block)
        return power

    @classmethod
    def from_adjacency(cls, A: ArrayLike, widths: Iterable[int]) -> LinearNetwork:
        """The network of an adjacency matrix; the inverse of :meth:`adjacency`.

        Args:
            A: matrix of shape ``(n, n)``, ``n = Σ widths``.
            widths: ``(d_0, …, d_h)``.

        Raises:
            ValueError: ``A`` has another size, or any entry off the block sub-diagonal pattern
                (the message names the largest one). The comparison is exact.
        """
        widths = _checks.layer_widths("widths", widths)
        offsets = block_offsets(widths)
        A = _checks.real_array("A", A, ndim=2)
        if A.shape != (offsets[-1], offsets[-1]):
            raise ShapeError(
                "A",
                f"shape {A.shape}",
                f"widths {widths} need shape ({offsets[-1]}, {offsets[-1]})",
            )
        blocks = [
            (slice(offsets[i], offsets[i + 1]), slice(offsets[i - 1], offsets[i]))
            for i in range(1, len(widths))
        ]
        if _checks.is_concrete(A):
            off_pattern = np.array(A)
            for block in blocks:
                off_pattern[block] = 0
            if off_pattern.any():
                row, column = np.unravel_index(np.abs(off_pattern).argmax(), off_pattern.shape)
                raise PatternError(
                    "A",
                    f"{off_pattern[row, column]:.3g} at entry ({row}, {column})",
                    "entries off the first block sub-diagonal must be exactly 0 for widths "
                    f"{widths}: set them to 0 first, or check the widths",
                )
        return cls([A[block] for block in blocks])

    def named_arrays(self) -> dict[str, tuple[Array, tuple[str, ...]]]:
        """The weights as ``{"W1": (array, names of its dimensions), …}``, for the file format."""
        return {
            f"W{i + 1}": (w, (f"node_{i + 1}", f"node_{i}")) for i, w in enumerate(self.weights)
        }

    @classmethod
    def from_named_arrays(cls, arrays: dict[str, Array]) -> LinearNetwork:
        """The inverse of :meth:`named_arrays`, also for stacked weights."""
        return cls._unchecked(tuple(arrays[f"W{i + 1}"] for i in range(len(arrays))))

    @classmethod
    def _unchecked(cls, weights: tuple[Array, ...]) -> LinearNetwork:
        network = object.__new__(cls)
        object.__setattr__(network, "weights", weights)
        return network

    def with_weights(self, weights: tuple[Array, ...]) -> LinearNetwork:
        """A network with other weights of the same shapes, without checking them again."""
        return self._unchecked(weights)

    def __repr__(self) -> str:
        first = self.weights[0]
        # Inside JAX transformations leaves may be placeholders without shape or type.
        if not hasattr(first, "shape"):
            return f"LinearNetwork({self.depth} layers)"
        batch = f", batch={first.shape[:-2]}" if first.ndim > 2 else ""
        widths = str(self.widths)
        if self.depth > 8:
            widths = f"({', '.join(map(str, self.widths[:3]))}, ..., {self.widths[-1]}), "
            widths += f"{self.depth} layers"
        return f"LinearNetwork(widths={widths}, {first.dtype}{batch})"


def consecutive_product(weights: Sequence[Float[Array, "..."]]) -> Float[Array, "..."]:
    """``W_b ⋯ W_a`` for consecutive layers, multiplied from the narrower end."""
    if weights[-1].shape[-2] < weights[0].shape[-1]:
        total = weights[-1]
        for w in reversed(weights[:-1]):
            total = product(total, w)
        return total
    total = weights[0]
    for w in weights[1:]:
        total = product(w, total)
    return total


def adjacency_flow(A: ArrayLike, target: ArrayLike, widths: Iterable[int]) -> Float[Array, "n n"]:
    """The dense right-hand side ``f(A)`` of ``Ȧ = f(A)``: the readable reference.

    .. math:: f(A) = \\sum_{j=1}^{h} (A^{h-j})^\\top (E - A^h) (A^{j-1})^\\top,
       \\qquad E = \\mathrm{blk}_h(\\Sigma),

    for the whitened loss ``½‖Σ − W_{1:h}‖_F²`` (Wendin & Altafini, arXiv 2511.10362). Costs
    O(h n³); :class:`gradflow.GradientFlow` computes the same numbers in O(h d³).

    Args:
        A: adjacency matrix, shape ``(n, n)``.
        target: Σ, shape ``(d_h, d_0)``.
        widths: ``(d_0, …, d_h)``.

    Returns:
        ``f(A)``, shape ``(n, n)``, with entries only on the first block sub-diagonal.

    Raises:
        ValueError: shapes that do not fit ``widths``.
    """
    widths = _checks.layer_widths("widths", widths)
    A = _checks.real_array("A", A, ndim=2)
    target = _checks.real_array("target", target, ndim=2)
    n, h = sum(widths), len(widths) - 1
    if A.shape != (n, n):
        raise ShapeError("A", f"shape {A.shape}", f"widths {widths} need shape ({n}, {n})")
    if target.shape != (widths[-1], widths[0]):
        raise ShapeError(
            "target",
            f"shape {target.shape}",
            f"widths {widths} need shape ({widths[-1]}, {widths[0]})",
        )
    E = jnp.zeros((n, n), A.dtype).at[n - widths[-1] :, : widths[0]].set(target)
    powers = [jnp.eye(n, dtype=A.dtype)]
    for _ in range(h):
        powers.append(A @ powers[-1])
    residual = E - powers[h]
    rate = jnp.zeros_like(A)
    for j in range(1, h + 1):
        rate = rate + powers[h - j].T @ residual @ powers[j - 1].T
    return rate
