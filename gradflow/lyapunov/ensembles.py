"""Laws of square matrices whose products are studied, layer after layer.

Depth is time: a product is ``A_n ⋯ A_1``, ``A_1`` read by the input. An ensemble says how the next
matrix is drawn; :class:`Layers` and :class:`Cyclic` also remember where they are.
"""

from __future__ import annotations

import abc
import functools
import inspect
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
from gradflow.network import LinearNetwork

__all__ = [
    "AbstractEnsemble",
    "BlockTriangular",
    "Cyclic",
    "DeltaProduct",
    "Finite",
    "Gaussian",
    "Haar",
    "Layers",
    "RankOneMixture",
    "Sampled",
    "Shortcut",
    "delta",
    "delta_operator",
    "network_layers",
    "residual",
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


def _square(d: int, chains: int, last: bool) -> tuple[int, int, int]:
    return (d, d, chains) if last else (chains, d, d)


def _matrix(matrix: Array, last: bool) -> Array:
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
        G = self.sigma * normal(key, _square(self.d, chains, last), self.dtype)
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
        G = normal(key, _square(self.d, chains, last), self.dtype)
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
    unit = _unit("k", _checks.real_array("k", k, ndim=1))
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
        self.directions = _unit("directions", directions)
        self.probabilities = _probabilities(probabilities, directions.shape[0])

    @property
    def dimension(self) -> int:
        return self.d

    def direction(self, key: Array, chains: int, last: bool) -> Array:
        """Unit vectors, ``(d, chains)`` or ``(chains, d)``."""
        if self.directions is None:
            return _sphere(key, self.d, chains, last)
        assert self.probabilities is not None
        return _choose(key, self.directions, self.probabilities, chains, last)

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        k = self.direction(key, chains, last)
        eye = _matrix(jnp.eye(self.d, dtype=self.dtype), last)
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


def _sphere(key: Array, d: int, chains: int, last: bool) -> Array:
    g = normal(key, (d, chains) if last else (chains, d), jnp.zeros(()).dtype)
    return g / jnp.linalg.norm(g, axis=0 if last else 1, keepdims=True)


def _unit(name: str, directions: Array) -> Array:
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
        A = self.coupling * normal(above, _square(d, chains, last), self.dtype)
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
        matrix = _matrix(self.matrices[memory], last)
        return apply(matrix, frames, last), (memory + 1) % number


class Layers(AbstractEnsemble):
    """Jacobians of random layers along their own orbit ``x_{l+1} = f(β_l, x_l)``.

    (Borkar, arXiv 2606.17013.) Jacobians are never formed: frames are pushed forward by
    ``jax.linearize``.

    Args:
        f: ``f(parameters, x)`` in JAX operations, or ``f(x, parameters)`` if its first argument is
            named ``x``; returns an array like ``x``. Pass the same function object again to avoid
            compiling again.
        sample_parameters: ``sample_parameters(key)`` returns the parameters of one layer, any
            pytree of arrays. A function is part of the program, as f is. A callable pytree, such as
            an :class:`equinox.Module` with ``__call__`` or a :class:`jax.tree_util.Partial`, holds
            data: with other arrays and floats of the same shapes nothing is compiled again, and
            exponents can be mapped over them or differentiated by them.
        x0: start of the orbit, shape ``(d,)``.
        limit: x_∞, shape ``(d,)``: where given, all Jacobians are taken there, which is what the
            exponents are along an orbit that converges to it.

    Raises:
        ValueError: functions that are none, an ``x0`` or ``limit`` that is no vector of finite
            floats, or an ``f`` that changes the shape of x.
    """

    independent: ClassVar[bool] = False
    f: Callable = eqx.field(static=True)
    # The leaves of sample_parameters: what is data, None elsewhere; and the rest, None where data.
    sample_data: tuple[Array | None, ...]
    sample_rest: tuple[Any, ...] = eqx.field(static=True)
    sample_structure: Any = eqx.field(static=True)
    x0: Array
    limit: Array | None
    # What is added to f: nothing, x itself, or (I − β k kᵀ) x.
    beta: Array | None
    direction: Array | None
    swapped: bool = eqx.field(static=True)

    def __init__(
        self,
        f: Callable[[Any, Array], Array],
        sample_parameters: Callable[[Array], PyTree],
        x0: ArrayLike | Sequence,
        *,
        limit: ArrayLike | None = None,
    ):
        for name, function in (("f", f), ("sample_parameters", sample_parameters)):
            if not callable(function):
                raise ArgumentError(name, _checks.describe(function), "it must be a function")
        self.f = f
        self.swapped = _first_argument(f) == "x"
        dtype = jnp.zeros(()).dtype
        leaves, self.sample_structure = jax.tree.flatten(sample_parameters)
        # Never weakly typed, which would be another program.
        leaves = [jnp.asarray(x, dtype) if isinstance(x, float) else x for x in leaves]
        data = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves]
        self.sample_data = tuple(
            jnp.asarray(x) if yes else None for x, yes in zip(leaves, data, strict=True)
        )
        self.sample_rest = tuple(None if yes else x for x, yes in zip(leaves, data, strict=True))
        self.x0 = _checks.real_array("x0", x0, ndim=1).astype(dtype)
        self.limit = self.beta = self.direction = None
        if limit is not None:
            self.limit = _checks.real_array("limit", limit, ndim=1).astype(dtype)
            if self.limit.shape != self.x0.shape:
                raise ShapeError(
                    "limit", f"shape {self.limit.shape}", f"it must be like x0, {self.x0.shape}"
                )
        try:
            found = _image.eval_shape(
                (f, self.swapped, self.sample_structure, self.sample_rest),
                self.sample_data,
                self.x0,
                jax.random.key(0),
            )
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                "f", f"a function that fails at x0: {error}", "f(parameters, x) must take x0"
            ) from error
        if getattr(found, "shape", None) != self.x0.shape:
            raise ShapeError(
                "f",
                f"a function that returns {_checks.describe(found)}",
                f"it must return an array like x0, shape {self.x0.shape}: its Jacobian is square",
            )

    @property
    def sample_parameters(self) -> Callable[[Array], PyTree]:
        """The function that draws the parameters of one layer."""
        return _rejoined(self.sample_structure, self.sample_rest, self.sample_data)

    def layer(self, parameters: PyTree, k: Array | None, x: Array) -> Array:
        """One layer, with its shortcut if there is one."""
        y = _applied(self.f, self.swapped, parameters, x)
        if self.beta is None:
            return y
        assert k is not None
        return y + x - self.beta * k * jnp.dot(k, x)

    @property
    def dimension(self) -> int:
        return self.x0.shape[0]

    def start(self, chains: int, last: bool) -> PyTree:
        return jnp.tile(self.x0[:, None], (1, chains)) if last else jnp.tile(self.x0, (chains, 1))

    def advance(self, key: Array, memory: PyTree, frames: Array, last: bool) -> tuple[Array, Any]:
        axis = -1 if last else 0
        keys = jax.random.split(key, frames.shape[axis])

        def one(key, x, frame):
            first, second = jax.random.split(key)
            parameters = self.sample_parameters(first)
            k = None
            if self.beta is not None:
                g = jax.random.normal(second, x.shape, x.dtype)
                k = g / jnp.linalg.norm(g) if self.direction is None else self.direction
            at = x if self.limit is None else self.limit
            y, push = jax.linearize(lambda x: self.layer(parameters, k, x), at)
            return jax.vmap(push, in_axes=-1, out_axes=-1)(frame), y

        return jax.vmap(one, in_axes=(0, axis, axis), out_axes=axis)(keys, memory, frames)

    def orbit(self, key: Any, steps: int) -> Array:
        """``x_0, …, x_steps`` for one draw of the parameters, shape ``(steps + 1, d)``."""
        key, steps = _checks.random_key("key", key), _checks.whole_number("steps", steps, 1)
        free = eqx.tree_at(lambda e: e.limit, self, None, is_leaf=lambda leaf: leaf is None)
        return jnp.concatenate([self.x0[None], _orbit(free, key, steps)])


def _rejoined(structure: Any, rest: tuple[Any, ...], data: tuple[Array | None, ...]) -> Any:
    leaves = [r if x is None else x for x, r in zip(data, rest, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _applied(f: Callable, swapped: bool, parameters: PyTree, x: Any) -> Array:
    x = jnp.asarray(x)
    return f(x, parameters) if swapped else f(parameters, x)


# Never run: a program, so that layers which differ in numbers only are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _image(fixed: tuple, data: tuple[Array | None, ...], x0: Array, key: Array) -> Array:
    f, swapped, structure, rest = fixed
    return _applied(f, swapped, _rejoined(structure, rest, data)(key), x0)


@eqx.filter_jit
def _orbit(ensemble: Layers, key: Array, steps: int) -> Array:
    frame = jnp.zeros((1, ensemble.dimension, 1), ensemble.dtype)

    def step(memory, k):
        _, memory = ensemble.advance(k, memory, frame, False)
        return memory, memory[0]

    return jax.lax.scan(step, ensemble.start(1, False), jax.random.split(key, steps))[1]


def _first_argument(f: Callable) -> str | None:
    try:
        return next(iter(inspect.signature(f).parameters), None)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return None


class Shortcut(AbstractEnsemble):
    """``I − β k kᵀ + J``, J of another ensemble; see :func:`residual` and :func:`delta`."""

    ensemble: AbstractEnsemble
    beta: Array | None
    fixed: Array | None

    # Overrides the class variable: a wrapped ensemble is as independent as what it wraps.
    @property
    def independent(self) -> bool:  # type: ignore[override]
        return self.ensemble.independent

    @property
    def dimension(self) -> int:
        return self.ensemble.dimension

    @property
    def dtype(self) -> Any:
        return self.ensemble.dtype

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        eye = _matrix(jnp.eye(self.dimension, dtype=self.dtype), last)
        if self.beta is None:
            return eye + self.ensemble.draw(key, chains, last)
        first, second = jax.random.split(key)
        k = self._direction(second, chains, last)
        eye = jnp.broadcast_to(eye, _square(self.dimension, chains, last))
        return rewritten(eye, self.beta, k, last) + self.ensemble.draw(first, chains, last)

    def start(self, chains: int, last: bool) -> PyTree:
        return self.ensemble.start(chains, last)

    def advance(self, key: Array, memory: PyTree, frames: Array, last: bool) -> tuple[Array, Any]:
        if self.beta is None:
            images, memory = self.ensemble.advance(key, memory, frames, last)
            return frames + images, memory
        first, second = jax.random.split(key)
        images, memory = self.ensemble.advance(first, memory, frames, last)
        k = self._direction(second, frames.shape[-1 if last else 0], last)
        return rewritten(frames, self.beta, k, last) + images, memory

    def _direction(self, key: Array, chains: int, last: bool) -> Array:
        if self.fixed is None:
            return _sphere(key, self.dimension, chains, last)
        k = self.fixed[:, None] if last else self.fixed[None]
        return jnp.broadcast_to(k, (self.dimension, chains) if last else (chains, self.dimension))


def residual(ensemble: AbstractEnsemble) -> AbstractEnsemble:
    """With the identity as shortcut: ``J ↦ I + J``.

    Of :class:`Layers`, the layers become ``x + f(β, x)``: the orbit is that of the residual layers,
    not the old one.

    Args:
        ensemble: any.

    Raises:
        ValueError: it is none.
    """
    check_ensemble("ensemble", ensemble)
    if isinstance(ensemble, Layers):
        return _layers_with(ensemble, jnp.zeros((), ensemble.dtype), None)
    return Shortcut(ensemble, None, None)


def delta(
    ensemble: AbstractEnsemble, beta: Any, *, direction: ArrayLike | None = None
) -> AbstractEnsemble:
    """With a delta operator as shortcut: ``J ↦ (I − β k kᵀ) + J``.

    β = 0 is :func:`residual`, β = 1 forgets what is along k, β = 2 reflects it (Zhang, Liu, Wang &
    Gu, arXiv 2601.00417). Of :class:`Layers`, the layers become ``(I − β k kᵀ) x + f(β, x)``.

    Args:
        ensemble: any.
        beta: a number.
        direction: k, a vector of length d, normalised; drawn at each step, uniform on the sphere,
            if left out.

    Raises:
        ValueError: no ensemble, a direction of another length or of zero norm.
    """
    check_ensemble("ensemble", ensemble)
    real = jnp.finfo(ensemble.dtype).dtype
    beta = jnp.asarray(_checks.real_scalar("beta", beta), real)
    k = None
    if direction is not None:
        k = _checks.real_array("direction", direction, ndim=1)
        if k.shape != (ensemble.dimension,):
            raise ShapeError(
                "direction", f"length {k.shape[0]}", f"it must have {ensemble.dimension} entries"
            )
        k = _unit("direction", k).astype(real)
    if isinstance(ensemble, Layers):
        return _layers_with(ensemble, beta, k)
    return Shortcut(ensemble, beta, k)


def _layers_with(ensemble: Layers, beta: Array, direction: Array | None) -> Layers:
    if ensemble.beta is not None:
        raise ArgumentError("ensemble", "layers with a shortcut", "it must not have one already")
    if direction is None and _checks.is_concrete(beta) and float(beta) == 0:
        # Any direction will do where nothing is taken away, and none need be drawn.
        direction = jnp.zeros_like(ensemble.x0).at[0].set(1.0)
    return eqx.tree_at(
        lambda e: (e.beta, e.direction),
        ensemble,
        (beta, direction),
        is_leaf=lambda leaf: leaf is None,
    )


def network_layers(net: Any, *, order: str = "random", at: int | None = None) -> AbstractEnsemble:
    """The layers of a network, at any time of its training, as an ensemble.

    Args:
        net: a :class:`gradflow.LinearNetwork` whose layers are square and of one size, or a run of
            one, with stored states. Layers that are not square are left out where the others agree.
        order: ``"random"``, each step an independent choice among the layers; ``"cyclic"``, the
            layers in their order, again and again.
        at: which saved time of a run; the last if left out.

    Returns:
        :class:`Finite` or :class:`Cyclic`.

    Raises:
        ValueError: no network or run of one, no square layers, or ones of several sizes.
    """
    order = _checks.choice("order", order, ("random", "cyclic"))
    weights = layer_weights(net, at)
    square = [w for w in weights if w.shape[0] == w.shape[1]]
    sizes = {w.shape[0] for w in square}
    # A network of square layers between a wider input and output counts, two sizes do not.
    if len(sizes) != 1:
        shapes = ", ".join(str(w.shape) for w in weights)
        raise ShapeError(
            "net", f"layers of shapes {shapes}", "its square layers must be of one size"
        )
    return Finite(jnp.stack(square)) if order == "random" else Cyclic(jnp.stack(square))


def layer_weights(net: Any, at: int | None = None) -> tuple[Array, ...]:
    """``W_1, …, W_h`` of a network, or of a run at a saved time."""
    states = getattr(net, "states", None)
    if isinstance(states, LinearNetwork):
        index = -1 if at is None else at
        saved = states.weights[0].shape[0]
        if not isinstance(index, (int, np.integer)) or not -saved <= index < saved:
            raise ArgumentError("at", _checks.describe(at), f"it must count {saved} saved times")
        return tuple(w[index] for w in states.weights)
    if not isinstance(net, LinearNetwork):
        raise ArgumentError(
            "net",
            _checks.describe(net),
            "it must be a gradflow.LinearNetwork or a run with stored states of one",
        )
    if at is not None:
        raise ArgumentError("at", _checks.describe(at), "it must be left out for a network")
    if net.weights[0].ndim != 2:
        raise ShapeError("net", f"a batch {net!r}", "it must be one network")
    return net.weights


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
