"""Laws of square matrices whose products are studied, layer after layer.

Depth is time: a product is ``A_n ⋯ A_1``, ``A_1`` read by the input. An ensemble says how the next
matrix is drawn; some also remember where they are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.lyapunov._frames import apply, held, orthonormalised
from gradflow.lyapunov._normal import normal

__all__ = [
    "AbstractEnsemble",
    "BlockTriangular",
    "Cyclic",
    "DeltaProduct",
    "Finite",
    "Gaussian",
    "Haar",
    "RankOneMixture",
    "Sampled",
    "delta_operator",
]

SUM_TOLERANCE = 1e-9


class AbstractEnsemble(eqx.Module):
    """A law of ``(d, d)`` matrices.

    Independent ensembles define :meth:`draw`; those with a memory define :meth:`start` and
    :meth:`advance`. ``last`` tells the layout: the chains as last or as first axis.
    """

    # Whether the matrices are independent and identically distributed.
    independent: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def dimension(self) -> int:
        """d."""

    @property
    def dtype(self) -> Any:
        """The type of the entries: the default float unless the law is complex."""
        return jnp.zeros(()).dtype

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        """Independent matrices, ``(d, d, chains)`` or ``(chains, d, d)``."""
        raise NotImplementedError

    def start(self, chains: int, last: bool) -> PyTree:
        """What is remembered between steps, at the first."""
        return ()

    def advance(self, key: Array, memory: PyTree, frames: Array, last: bool) -> tuple[Array, Any]:
        """The next matrix applied to ``frames``, and the memory after it."""
        return apply(self.draw(key, frames.shape[-1 if last else 0], last), frames, last), memory

    def sample(self, key: Any, number: int) -> Array:
        """``number`` matrices, shape ``(number, d, d)``.

        Independent, or consecutive ones of a single product where the law has a memory.

        Args:
            key: random key or seed.
            number: at least 1.
        """
        key = _checks.random_key("key", key)
        number = _checks.whole_number("number", number, 1)
        if self.independent:
            return _draw(self, key, number)
        return _consecutive(self, key, number)


@eqx.filter_jit
def _draw(ensemble: AbstractEnsemble, key: Array, number: int) -> Array:
    return ensemble.draw(key, number, False)


@eqx.filter_jit
def _consecutive(ensemble: AbstractEnsemble, key: Array, number: int) -> Array:
    d = ensemble.dimension

    def step(memory, k):
        image, memory = ensemble.advance(k, memory, jnp.eye(d, dtype=ensemble.dtype)[None], False)
        return memory, image[0]

    return jax.lax.scan(step, ensemble.start(1, False), jax.random.split(key, number))[1]


def _dtype(is_complex: bool) -> Any:
    real = jnp.zeros(()).dtype
    return jnp.result_type(real, jnp.complex64) if is_complex else real


def square_shape(d: int, chains: int, last: bool) -> tuple[int, int, int]:
    """Of a matrix for every chain."""
    return (d, d, chains) if last else (chains, d, d)


def for_all_chains(matrix: Array, last: bool) -> Array:
    """One matrix, broadcast over the chains."""
    return matrix[:, :, None] if last else matrix[None]


class Gaussian(AbstractEnsemble):
    """Gaussian matrices: rows with a given covariance, columns independent.

    ``A = σ L G`` with ``L Lᵀ`` the covariance (identity if left out) and the entries of G
    independent ``N(0, 1)``; complex ones have independent real and imaginary parts with
    ``E|G_ij|² = 1``.

    Args:
        d: dimension, at least 1.
        sigma: standard deviation of an entry, ≥ 0. It is *not* divided by √d.
        covariance: symmetric positive definite, shape ``(d, d)``: ``E A_ij A_kj = σ² Σ_ik``.
        complex: complex entries.

    Raises:
        ValueError: ``d < 1``, ``sigma < 0``, or a covariance that is not symmetric positive
            definite.
    """

    d: int = eqx.field(static=True)
    sigma: Array
    root: Array | None
    complex: bool = eqx.field(static=True)

    def __init__(
        self,
        d: int,
        sigma: Any = 1.0,
        *,
        covariance: ArrayLike | None = None,
        complex: bool = False,
    ):
        self.d = _checks.whole_number("d", d, 1)
        sigma = _checks.real_scalar("sigma", sigma, minimum=0)
        self.sigma = jnp.asarray(sigma, jnp.zeros(()).dtype)
        self.complex = bool(complex)
        self.root = None if covariance is None else _cholesky(covariance, self.d)

    @property
    def dimension(self) -> int:
        return self.d

    @property
    def dtype(self) -> Any:
        return _dtype(self.complex)

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        G = self.sigma * normal(key, square_shape(self.d, chains, last), self.dtype)
        if self.root is None:
            return G
        root = self.root.astype(self.dtype)
        return jnp.tensordot(root, G, 1) if last else root @ G


def _cholesky(covariance: ArrayLike, d: int) -> Array:
    covariance = _checks.real_array("covariance", covariance, ndim=2)
    if covariance.shape != (d, d):
        raise ShapeError("covariance", f"shape {covariance.shape}", f"it must have shape {(d, d)}")
    if not _checks.is_concrete(covariance):
        return jnp.linalg.cholesky(covariance)
    host = np.asarray(covariance)
    if np.abs(host - host.T).max() > 1e-10 * np.abs(host).max():
        raise ArgumentError("covariance", "an asymmetric matrix", "it must be symmetric")
    smallest = np.linalg.eigvalsh(host)[0]
    if smallest <= 0:
        raise ArgumentError(
            "covariance", f"smallest eigenvalue {smallest:.3g}", "it must be positive definite"
        )
    return jnp.asarray(np.linalg.cholesky(host))


class Haar(AbstractEnsemble):
    """Orthogonal (or unitary) matrices of Haar measure, times a scale.

    Args:
        d: dimension, at least 1.
        scale: every singular value, ≥ 0.
        special: determinant 1 only, SO(d).
        complex: unitary matrices.

    Raises:
        ValueError: ``d < 1``, ``scale < 0``, or ``special`` of unitary matrices.
    """

    d: int = eqx.field(static=True)
    scale: Array
    special: bool = eqx.field(static=True)
    complex: bool = eqx.field(static=True)

    def __init__(self, d: int, scale: Any = 1.0, *, special: bool = False, complex: bool = False):
        self.d = _checks.whole_number("d", d, 1)
        scale = _checks.real_scalar("scale", scale, minimum=0)
        self.scale = jnp.asarray(scale, jnp.zeros(()).dtype)
        self.special, self.complex = bool(special), bool(complex)
        if self.special and self.complex:
            raise ArgumentError("special", "True", "it must be False for unitary matrices")

    @property
    def dimension(self) -> int:
        return self.d

    @property
    def dtype(self) -> Any:
        return _dtype(self.complex)

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        G = normal(key, square_shape(self.d, chains, last), self.dtype)
        Q = _haar(G, last)
        if self.special:
            flip = jnp.linalg.det(jnp.moveaxis(Q, -1, 0) if last else Q)
            if last:
                Q = Q.at[:, 0].multiply(jnp.sign(flip)[None])
            else:
                Q = Q.at[:, :, 0].multiply(jnp.sign(flip)[:, None])
        return self.scale * Q


def _haar(G: Array, last: bool) -> Array:
    """Orthonormal columns with the signs for which Gaussian matrices give Haar measure."""
    if last:
        return orthonormalised(G, last)[0]
    Q, R = jnp.linalg.qr(G)
    diagonal = jnp.diagonal(R, axis1=1, axis2=2)
    return Q * (diagonal / jnp.where(diagonal == 0, 1.0, jnp.abs(diagonal)))[:, None, :]


class Finite(AbstractEnsemble):
    """Finitely many matrices, drawn independently with given probabilities.

    Args:
        matrices: shape ``(m, d, d)``, real or complex, or a sequence of square matrices.
        probabilities: m numbers ≥ 0 with sum 1; equal if left out.

    Raises:
        ValueError: no matrices, matrices that are not square or differ in shape, entries that are
            not finite, or probabilities that are negative, of another number or do not sum to 1.
    """

    matrices: Array
    probabilities: Array

    def __init__(self, matrices: Any, probabilities: Any = None):
        self.matrices = _matrices("matrices", matrices)
        self.probabilities = _probabilities(probabilities, self.matrices.shape[0])

    @property
    def dimension(self) -> int:
        return self.matrices.shape[-1]

    @property
    def dtype(self) -> Any:
        return self.matrices.dtype

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        return _choose(key, self.matrices, self.probabilities, chains, last)


def _choose(key: Array, choices: Array, probabilities: Array, chains: int, last: bool) -> Array:
    """Independent choices along the first axis, with the chains as last or first axis."""
    number = choices.shape[0]
    if number == 1:
        index = jnp.zeros(chains, int)
    else:
        # The last edge is left out: round-off in the sum must not draw what is not there.
        edges = jnp.cumsum(probabilities)[:-1]
        u = jax.random.uniform(key, (chains,), edges.dtype)
        index = jnp.sum(u[None, :] >= edges[:, None], axis=0)
    picked = choices[index]
    return jnp.moveaxis(picked, 0, -1) if last else picked


def _matrices(name: str, value: Any) -> Array:
    """A stack of square matrices, real or complex."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise ShapeError(name, "no matrices", "it must hold at least one")
        shapes = {np.shape(one) for one in value}
        if len(shapes) > 1:
            raise ShapeError(name, f"shapes {sorted(shapes)}", "all must have one shape (d, d)")
        if not any(isinstance(one, jax.core.Tracer) for one in jax.tree.leaves(value)):
            value = np.asarray(value)
            if np.issubdtype(value.dtype, np.integer):
                value = value.astype(float)
        else:
            value = jnp.stack([jnp.asarray(one) for one in value])
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.integer):
        value = value.astype(float)  # whole numbers are numbers
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.complexfloating):
        if _checks.is_concrete(value) and not np.isfinite(np.asarray(value)).all():
            raise ArgumentError(name, "entries that are not finite", "every entry must be finite")
        stack = jnp.asarray(value)
    else:
        stack = _checks.real_array(name, value)
    if stack.ndim != 3 or stack.shape[0] == 0 or stack.shape[1] != stack.shape[2]:
        raise ShapeError(
            name, f"shape {stack.shape}", "it must be (m, d, d): m square matrices, m >= 1"
        )
    return stack


def _probabilities(value: Any, number: int, name: str = "probabilities") -> Array:
    if value is None:
        return jnp.full(number, 1 / number)
    array = _checks.real_array(name, value, ndim=1)
    if array.shape != (number,):
        raise ShapeError(name, f"{array.shape[0]} numbers", f"it must have {number}, one each")
    if _checks.is_concrete(array):
        host = np.asarray(array, float)
        if host.min() < 0:
            raise ArgumentError(name, f"{host.min():g}", "every probability must be >= 0")
        total = host.sum()
        tolerance = SUM_TOLERANCE if array.dtype == np.float64 else 1e-5
        if abs(total - 1) > tolerance:
            raise ArgumentError(name, f"a sum of {total:.10g}", "the sum must be 1")
    return array


class RankOneMixture(Finite):
    """A rank-one matrix ``u vᵀ`` with probability p, ``B`` otherwise.

    Args:
        p: in (0, 1].
        u, v: vectors of length d.
        B: matrix, shape ``(d, d)``.

    Raises:
        ValueError: shapes that do not fit, or ``p`` out of range.
    """

    p: Array
    u: Array
    v: Array

    def __init__(self, p: Any, u: ArrayLike, v: ArrayLike, B: ArrayLike):
        p = _checks.real_scalar("p", p, above=0, maximum=1)
        self.u, self.v = _checks.real_array("u", u, ndim=1), _checks.real_array("v", v, ndim=1)
        B = _checks.real_array("B", B, ndim=2)
        d = self.u.shape[0]
        for name, array, shape in (("v", self.v, (d,)), ("B", B, (d, d))):
            if array.shape != shape:
                raise ShapeError(name, f"shape {array.shape}", f"it must have shape {shape}, as u")
        self.p = jnp.asarray(p, B.dtype)
        super().__init__(
            jnp.stack([jnp.outer(self.u, self.v).astype(B.dtype), B]),
            jnp.stack([self.p, 1 - self.p]),
        )


def delta_operator(beta: ArrayLike, k: ArrayLike) -> Array:
    """``Δ(β, k) = I − β k kᵀ / ‖k‖²``.

    Args:
        beta: a number.
        k: vector of length d, not zero.

    Returns:
        a matrix, shape ``(d, d)``.
    """
    unit = unit_directions("k", _checks.real_array("k", k, ndim=1))
    return jnp.eye(unit.shape[0], dtype=unit.dtype) - beta * jnp.outer(unit, unit)


class DeltaProduct(AbstractEnsemble):
    """Delta operators ``I − β k kᵀ`` with random or given directions k.

    Args:
        d: dimension, at least 1.
        beta: a number; 1 is a projection, 2 a reflection.
        directions: shape ``(m, d)``, one of which is drawn at each step, normalised; uniform on the
            sphere if left out.
        probabilities: of the directions; equal if left out.

    Raises:
        ValueError: shapes that do not fit, a direction of zero norm, or bad probabilities.
    """

    d: int = eqx.field(static=True)
    beta: Array
    directions: Array | None
    probabilities: Array | None

    def __init__(
        self,
        d: int,
        beta: Any,
        *,
        directions: ArrayLike | None = None,
        probabilities: ArrayLike | None = None,
    ):
        self.d = _checks.whole_number("d", d, 1)
        self.beta = jnp.asarray(_checks.real_scalar("beta", beta), jnp.zeros(()).dtype)
        if directions is None:
            if probabilities is not None:
                raise ArgumentError(
                    "probabilities", "some", "it must be left out without directions"
                )
            self.directions = self.probabilities = None
            return
        directions = _checks.real_array("directions", directions, ndim=2)
        if directions.shape[1] != self.d:
            raise ShapeError(
                "directions", f"shape {directions.shape}", f"it must have {self.d} columns"
            )
        self.directions = unit_directions("directions", directions)
        self.probabilities = _probabilities(probabilities, directions.shape[0])

    @property
    def dimension(self) -> int:
        return self.d

    def direction(self, key: Array, chains: int, last: bool) -> Array:
        """Unit vectors, ``(d, chains)`` or ``(chains, d)``."""
        if self.directions is None:
            return on_sphere(key, self.d, chains, last)
        assert self.probabilities is not None
        return _choose(key, self.directions, self.probabilities, chains, last)

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        k = self.direction(key, chains, last)
        eye = for_all_chains(jnp.eye(self.d, dtype=self.dtype), last)
        outer = k[:, None] * k[None, :] if last else k[:, :, None] * k[:, None, :]
        return eye - self.beta * outer

    def advance(self, key: Array, memory: PyTree, frames: Array, last: bool) -> tuple[Array, Any]:
        k = self.direction(key, frames.shape[-1 if last else 0], last)
        return rewritten(frames, self.beta, k, last), memory


def rewritten(frames: Array, beta: Array, k: Array, last: bool) -> Array:
    """``(I − β k kᵀ) F`` for every chain."""
    k = held(k, frames)
    if last:
        along = jnp.sum(k[:, None] * frames, axis=0, keepdims=True)
        return frames - beta * k[:, None] * along
    along = jnp.einsum("ni,nij->nj", k, frames)
    return frames - beta * k[:, :, None] * along[:, None, :]


def on_sphere(key: Array, d: int, chains: int, last: bool) -> Array:
    """A direction for every chain, uniform on the sphere."""
    g = normal(key, (d, chains) if last else (chains, d), jnp.zeros(()).dtype)
    return g / jnp.linalg.norm(g, axis=0 if last else 1, keepdims=True)


def unit_directions(name: str, directions: Array) -> Array:
    """Directions brought to norm 1; an error that calls them ``name`` if one vanishes."""
    norms = jnp.linalg.norm(directions, axis=-1, keepdims=True)
    if _checks.is_concrete(norms) and bool((norms == 0).any()):
        raise ArgumentError(name, "a direction of norm 0", "every direction must have a norm > 0")
    return directions / norms


class BlockTriangular(AbstractEnsemble):
    """Independent blocks on the diagonal, Gaussian entries above them.

    The first block acts on an invariant subspace, spanned by the first basis vectors.

    Args:
        blocks: ensembles of the diagonal blocks, from the top left.
        coupling: standard deviation of the entries above the blocks, ≥ 0.

    Raises:
        ValueError: no blocks, blocks whose matrices are not independent, or a coupling < 0.
    """

    blocks: tuple[AbstractEnsemble, ...]
    coupling: Array

    def __init__(self, blocks: Sequence[AbstractEnsemble], coupling: Any = 1.0):
        self.blocks = tuple(blocks)
        if not self.blocks:
            raise ArgumentError("blocks", "no ensembles", "it must hold at least one")
        for i, block in enumerate(self.blocks):
            check_independent(f"blocks[{i}]", block)
        coupling = _checks.real_scalar("coupling", coupling, minimum=0)
        self.coupling = jnp.asarray(coupling, jnp.zeros(()).dtype)

    @property
    def dimension(self) -> int:
        return sum(block.dimension for block in self.blocks)

    @property
    def dtype(self) -> Any:
        return jnp.result_type(*(block.dtype for block in self.blocks))

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        d = self.dimension
        above, *keys = jax.random.split(key, 1 + len(self.blocks))
        A = self.coupling * normal(above, square_shape(d, chains, last), self.dtype)
        offset = 0
        for k, block in zip(keys, self.blocks, strict=True):
            here = slice(offset, offset + block.dimension)
            below = slice(offset + block.dimension, d)
            B = block.draw(k, chains, last).astype(A.dtype)
            if last:
                A = A.at[here, here].set(B).at[below, here].set(0)
            else:
                A = A.at[:, here, here].set(B).at[:, below, here].set(0)
            offset += block.dimension
        return A


class Sampled(AbstractEnsemble):
    """Independent matrices from a function of yours.

    Args:
        sample: ``sample(key)`` returns a matrix of shape ``(d, d)``, in JAX operations. Pass the
            same function object again to avoid compiling again.
        d: dimension, at least 1.

    Raises:
        ValueError: ``sample`` is no function, or returns another shape.
    """

    function: Callable[[Array], Array] = eqx.field(static=True)
    d: int = eqx.field(static=True)
    kind: Any = eqx.field(static=True)

    def __init__(self, sample: Callable[[Array], Array], d: int):
        self.d = _checks.whole_number("d", d, 1)
        if not callable(sample):
            raise ArgumentError(
                "sample", _checks.describe(sample), "it must be a function of a key"
            )
        found = jax.eval_shape(sample, jax.random.key(0))
        if getattr(found, "shape", None) != (self.d, self.d):
            raise ShapeError(
                "sample",
                f"a function that returns {_checks.describe(found)}",
                f"it must return a square matrix of shape {(self.d, self.d)}",
            )
        self.function, self.kind = sample, jnp.result_type(found.dtype, jnp.zeros(()).dtype)

    @property
    def dimension(self) -> int:
        return self.d

    @property
    def dtype(self) -> Any:
        return self.kind

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        keys = jax.random.split(key, chains)
        drawn = jax.vmap(self.function, out_axes=-1 if last else 0)(keys)
        return drawn.astype(self.kind)


class Cyclic(AbstractEnsemble):
    """A given sequence of matrices, again and again: nothing is random.

    Args:
        matrices: shape ``(m, d, d)``, in the order in which they are applied.

    Raises:
        ValueError: as for :class:`Finite`.
    """

    independent: ClassVar[bool] = False
    matrices: Array

    def __init__(self, matrices: Any):
        self.matrices = _matrices("matrices", matrices)

    @property
    def dimension(self) -> int:
        return self.matrices.shape[-1]

    @property
    def dtype(self) -> Any:
        return self.matrices.dtype

    def start(self, chains: int, last: bool) -> PyTree:
        return jnp.zeros((), int)

    def advance(self, key: Array, memory: PyTree, frames: Array, last: bool) -> tuple[Array, Any]:
        number = self.matrices.shape[0]
        matrix = for_all_chains(self.matrices[memory], last)
        return apply(matrix, frames, last), (memory + 1) % number


def check_ensemble(name: str, value: Any) -> AbstractEnsemble:
    """``value`` if it is an ensemble."""
    if not isinstance(value, AbstractEnsemble):
        raise ArgumentError(
            name, _checks.describe(value), "it must be an ensemble of gradflow.lyapunov"
        )
    return value


def check_independent(name: str, value: Any) -> AbstractEnsemble:
    """``value`` if it is an ensemble of independent matrices."""
    check_ensemble(name, value)
    if not value.independent:
        raise ArgumentError(
            name,
            type(value).__name__,
            "its matrices must be independent of each other: sample it by exponents instead",
        )
    return value
