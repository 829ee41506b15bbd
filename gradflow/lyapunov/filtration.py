"""Invariant subspaces of a set of matrices, found from the matrices, and the exponent on each.

Furstenberg & Kifer (1983): the growth rate of ``A_n ⋯ A_1 x`` is almost surely one of finitely
many numbers, constant on the differences of a decreasing sequence of subspaces that all matrices
keep. These are found here by linear algebra on the algebra 𝒜 that the matrices generate:

* its radical is the kernel of the trace form ``tr(ab)`` (Dickson);
* the vectors that the radical kills are the sum of all minimal invariant subspaces (the socle);
* a random element of 𝒜 has, on the socle, eigenvectors that each generate all copies of one
  minimal subspace;
* in the quotient by what has been found the search goes on.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.lyapunov._frames import generator
from gradflow.lyapunov.closed_forms import closed_form
from gradflow.lyapunov.ensembles import AbstractEnsemble, Finite, check_independent
from gradflow.lyapunov.spectrum import exponents

__all__ = ["Factor", "Filtration", "InvariantSubspace", "filtration"]

# Relative size below which a component counts as zero: above what round-off leaves of one, far
# below couplings of interest.
_ZERO = 1e-7
# Products of random elements that add nothing before an algebra counts as closed.
_CLOSED = 6
LARGEST = 32


class Factor(NamedTuple):
    """All copies of one irreducible block of the joint block-triangular form, at one level.

    Attributes:
        dimension: of one copy.
        copies: how many.
        exponents: of all of them together, ``(copies · dimension,)``.
        standard_error: same shape; 0 where known in closed form.
    """

    dimension: int
    copies: int
    exponents: np.ndarray
    standard_error: np.ndarray


class InvariantSubspace(NamedTuple):
    """A subspace that all matrices keep, and the growth of its generic vectors.

    Attributes:
        basis: orthonormal columns, ``(d, n)``.
        exponent, standard_error: the largest exponent on it.
    """

    basis: np.ndarray
    exponent: float
    standard_error: float


class Filtration(NamedTuple):
    """Which starts grow at which rate.

    Attributes:
        subspaces: orthonormal bases ``(d, n_i)``, decreasing, the whole space first. A start in one
            and not in the next grows at the rate of the former.
        exponents: the rates, ``(levels,)``, decreasing.
        standard_error: of the rates; 0 where known in closed form.
        factors: the irreducible blocks: together they have all d exponents.
        invariant: all invariant subspaces that were found: for each kind of minimal one the sum of
            its copies, and the subspaces of the sequence of quotients, the whole space last.
    """

    subspaces: list[np.ndarray]
    exponents: np.ndarray
    standard_error: np.ndarray
    factors: list[Factor]
    invariant: list[InvariantSubspace]

    def exponent_along(self, x: Any, *, tol: float = 1e-9) -> float:
        """The growth rate from the start ``x``, a vector of length d.

        Args:
            x: not zero.
            tol: how far from a subspace, relative to its norm, counts as within.
        """
        x = np.asarray(x)
        if x.shape != self.subspaces[0].shape[:1]:
            raise ShapeError("x", f"shape {x.shape}", f"it must be {self.subspaces[0].shape[:1]}")
        size = np.linalg.norm(x)
        if not size > 0:
            raise ArgumentError("x", "a vector of norm 0", "its norm must be > 0")
        level = 0
        for i, basis in enumerate(self.subspaces):
            if np.linalg.norm(x - basis @ (basis.conj().T @ x)) <= tol * size:
                level = i
        return float(self.exponents[level])

    def __repr__(self) -> str:
        lines = [f"Filtration of {self.subspaces[0].shape[0]} dimensions"]
        for basis, rate, error in zip(
            self.subspaces, self.exponents, self.standard_error, strict=True
        ):
            lines.append(f"  dimension {basis.shape[1]}: rate {rate:.6g} ± {error:.1g}")
        blocks = ", ".join(f"{f.copies} x {f.dimension}" for f in self.factors)
        return "\n".join([*lines, f"  irreducible blocks: {blocks}"])


class _Compressed(AbstractEnsemble):
    """``Bᴴ A B`` for orthonormal columns B."""

    ensemble: AbstractEnsemble
    basis: Array

    @property
    def dimension(self) -> int:
        return self.basis.shape[1]

    @property
    def dtype(self) -> Any:
        return self.ensemble.dtype

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        A = self.ensemble.draw(key, chains, False)
        small = self.basis.conj().T @ A @ self.basis
        return jnp.moveaxis(small, 0, -1) if last else small


def filtration(
    ensemble: AbstractEnsemble,
    key: Any,
    *,
    steps: int = 2000,
    chains: int | None = None,
    progress: bool = False,
) -> Filtration:
    """The invariant subspaces of an ensemble and the growth rate on each.

    Of :class:`Finite` the matrices are taken as they are, of other laws as many are drawn as make
    it generic. Rates are those of blocks: in closed form where there is one (blocks of size 1,
    triangular and orthogonal ones of :class:`Finite`), sampled otherwise.

    Args:
        ensemble: independent matrices, d up to 32.
        key: random key or seed.
        steps, chains: of sampled rates, see :func:`exponents`.
        progress: show progress bars.

    Returns:
        the :class:`Filtration`. Rates closer than four standard errors count as one level.

    Raises:
        ValueError: no ensemble, matrices that are not independent, or d above 32.
    """
    key = _checks.random_key("key", key)
    check_independent("ensemble", ensemble)
    d = ensemble.dimension
    if d > LARGEST:
        raise ArgumentError("ensemble", f"d = {d}", f"it must be at most {LARGEST}")
    first, second, third = jax.random.split(key, 3)
    if isinstance(ensemble, Finite):
        matrices = np.asarray(ensemble.matrices)[np.asarray(ensemble.probabilities) > 0]
    else:
        matrices = np.asarray(ensemble.sample(first, 2 * d + 6))
    if not np.isfinite(matrices).all():
        raise ArgumentError("ensemble", "a drawn matrix with NaN", "every entry must be finite")
    size = np.linalg.norm(matrices, axis=(1, 2), keepdims=True)
    matrices = (matrices / np.where(size > 0, size, 1.0))[size.ravel() > 0]
    rng = generator(second)
    rates = _Rates(ensemble, matrices, third, steps, chains, progress, rng)

    factors: list[Factor] = []
    invariant: list[InvariantSubspace] = []
    V = np.zeros((d, 0), np.result_type(matrices, float))
    tops: list[tuple[float, float]] = []
    while V.shape[1] < d:
        pieces = _minimal(matrices, V, rng)
        first_level = V.shape[1] == 0
        for basis, dimension in pieces:
            gamma, error = rates(basis)
            factors.append(Factor(dimension, basis.shape[1] // dimension, gamma, error))
            tops.append((float(gamma[0]), float(error[0])))
            if first_level:
                invariant.append(InvariantSubspace(basis, *tops[-1]))
        V = _orthonormal(np.concatenate([V, *(basis for basis, _ in pieces)], axis=1))
        if not (first_level and len(pieces) == 1):
            invariant.append(InvariantSubspace(V, *max(tops)))

    levels = _levels(tops)
    subspaces: list[np.ndarray] = [np.eye(d, dtype=V.dtype)]
    values, errors = [levels[0][0]], [levels[0][1]]
    for (above, _), (rate, _) in itertools.pairwise(levels):
        bound = 0.5 * (rate + above) if rate > -np.inf else rate
        slow = _slowest(matrices, rates, bound, rng)
        # No start grows slower where the slow block is not invariant but a quotient.
        if 0 < slow.shape[1] < subspaces[-1].shape[1]:
            subspaces.append(slow)
            top = max(rates.top(basis) for basis in rates.inside(slow, matrices, rng))
            values.append(top[0])
            errors.append(top[1])
    return Filtration(subspaces, np.array(values), np.array(errors), factors, invariant)


def _levels(tops: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Distinct rates, largest first."""
    levels: list[tuple[float, float]] = []
    for rate, error in sorted(tops, key=lambda pair: -pair[0]):
        if levels:
            above, its_error = levels[-1]
            if rate == above or above - rate <= 4 * np.hypot(error, its_error) + 1e-12:
                continue
        levels.append((rate, error))
    return levels


class _Rates:
    """Exponents of blocks, each computed once."""

    def __init__(self, ensemble, matrices, key, steps, chains, progress, rng):
        self.ensemble, self.matrices, self.key = ensemble, matrices, key
        self.options = {"steps": steps, "chains": chains, "progress": progress}
        self.element = np.tensordot(rng.standard_normal(len(matrices)), matrices, 1)
        self.known: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def __call__(self, basis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Isomorphic blocks have the same eigenvalues of a random element.
        values = np.linalg.eigvals(basis.conj().T @ self.element @ basis)
        values = values[np.lexsort((np.imag(values).round(6), np.real(values).round(6)))]
        for seen, gamma, error in self.known:
            if seen.shape == values.shape and np.allclose(seen, values, rtol=1e-5, atol=1e-7):
                return gamma, error
        gamma, error = self._compute(basis)
        self.known.append((values, gamma, error))
        return gamma, error

    def top(self, basis: np.ndarray) -> tuple[float, float]:
        gamma, error = self(basis)
        return float(gamma[0]), float(error[0])

    def inside(self, V: np.ndarray, matrices: np.ndarray, rng: Any) -> list[np.ndarray]:
        """Bases of the irreducible blocks of an invariant subspace, all copies of one together."""
        small = V.conj().T @ matrices @ V
        found: list[np.ndarray] = []
        W = np.zeros((V.shape[1], 0), V.dtype)
        while W.shape[1] < V.shape[1]:
            pieces = _minimal(small, W, rng)
            found += [V @ basis for basis, _ in pieces]
            W = _orthonormal(np.concatenate([W, *(basis for basis, _ in pieces)], axis=1))
        return found

    def _compute(self, basis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ensemble = self.ensemble
        if isinstance(ensemble, Finite):
            matrices = np.asarray(ensemble.matrices)
            small = basis.conj().T @ matrices @ basis
            # Round-off is no entry: a nilpotent block has exponent −∞.
            size = np.linalg.norm(matrices, axis=(1, 2), keepdims=True)
            small = np.where(np.abs(small) > 1e-14 * size, small, 0.0)
            block: AbstractEnsemble = Finite(small, ensemble.probabilities)
            exact = closed_form(block)
            if exact is not None and not np.isnan(exact).any():
                return exact, np.zeros(len(exact))
        else:
            block = _Compressed(ensemble, jnp.asarray(basis, ensemble.dtype))
        found = exponents(self.key, block, **self.options)
        return np.asarray(found.exponents), np.asarray(found.standard_error)


def _slowest(matrices: np.ndarray, rates: _Rates, bound: float, rng: Any) -> np.ndarray:
    """The largest invariant subspace whose blocks all have rates up to ``bound``."""
    d = matrices.shape[-1]
    V = np.zeros((d, 0), np.result_type(matrices, float))
    while V.shape[1] < d:
        slow = [basis for basis, _ in _minimal(matrices, V, rng) if rates.top(basis)[0] <= bound]
        if not slow:
            break
        V = _orthonormal(np.concatenate([V, *slow], axis=1))
    return V


def _minimal(matrices: np.ndarray, V: np.ndarray, rng: Any) -> list[tuple[np.ndarray, int]]:
    """Minimal invariant subspaces of the quotient by V, all copies of one kind together.

    Args:
        matrices: ``(m, d, d)``.
        V: orthonormal basis of an invariant subspace, ``(d, v)``.
        rng: random numbers.

    Returns:
        orthonormal bases orthogonal to V, ``(d, n)``, and the dimension of one copy of each.
    """
    d = matrices.shape[-1]
    W = np.linalg.qr(np.concatenate([V, rng.standard_normal((d, d))], axis=1))[0][:, V.shape[1] : d]
    small = W.conj().T @ matrices @ W
    algebra = _algebra(small, rng)
    socle = _socle(algebra)
    inner = socle.conj().T @ algebra @ socle
    complex_field = np.iscomplexobj(matrices)
    theta = np.tensordot(rng.standard_normal(len(inner)), inner, 1)
    values, vectors = np.linalg.eig(theta)
    scale = max(np.abs(values).max(), 1e-300)
    pieces: list[tuple[np.ndarray, int]] = []
    for i, value in enumerate(values):
        if any(
            np.linalg.norm(vectors[:, i] - C @ (C.conj().T @ vectors[:, i])) < 1e-5
            for C, _ in pieces
        ):
            continue
        alike = np.abs(values - value) < 1e-6 * scale
        N = vectors[:, alike]
        if not complex_field:
            N = np.concatenate([N.real, N.imag], axis=1)
        images = np.concatenate(list(inner @ N), axis=1)
        C = _orthonormal(images)
        copies = int(alike.sum())
        pieces.append((C, max(1, C.shape[1] // copies)))
    return [(W @ socle @ C, dimension) for C, dimension in pieces]


def _algebra(matrices: np.ndarray, rng: Any) -> np.ndarray:
    """A basis of the algebra generated by the matrices and the identity, ``(number, d, d)``."""
    d = matrices.shape[-1]
    dtype = np.result_type(matrices, float)
    basis = np.zeros((0, d * d), dtype)

    def add(x):
        nonlocal basis
        x = x.ravel()
        size = np.linalg.norm(x)
        if size == 0:
            return False
        x = x / size
        for _ in range(2):
            x = x - basis.T @ (basis.conj() @ x)
        rest = np.linalg.norm(x)
        if rest <= _ZERO:
            return False
        basis = np.concatenate([basis, x[None] / rest])
        return True

    add(np.eye(d, dtype=dtype))
    for A in matrices:
        add(A)
    misses = 0
    while misses < _CLOSED and len(basis) < d * d:
        a, b = (np.tensordot(rng.standard_normal(len(basis)), basis, 1) for _ in range(2))
        misses = 0 if add(a.reshape(d, d) @ b.reshape(d, d)) else misses + 1
    return basis.reshape(-1, d, d)


def _socle(algebra: np.ndarray) -> np.ndarray:
    """The sum of all minimal invariant subspaces: what the radical kills."""
    form = np.einsum("aij,bji->ab", algebra, algebra)
    radical = np.tensordot(_kernel(form).T, algebra, 1)
    d = algebra.shape[-1]
    if len(radical) == 0:
        return np.eye(d, dtype=algebra.dtype)
    return _kernel(radical.reshape(-1, d))


def _kernel(M: np.ndarray) -> np.ndarray:
    """Orthonormal basis of the kernel, ``(columns, n)``."""
    _, s, Vh = np.linalg.svd(M)
    rank = int(np.sum(s > _ZERO * max(s[0], 1e-300)))
    return Vh[rank:].conj().T


def _orthonormal(M: np.ndarray) -> np.ndarray:
    """Orthonormal basis of the span of the columns."""
    U, s, _ = np.linalg.svd(M, full_matrices=False)
    return U[:, s > _ZERO * s[0]]
