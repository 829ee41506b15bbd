"""Stationary measures on projective space, and the top exponent as an integral over them.

Furstenberg & Kifer (1983): ``γ_1 = max ∬ log ‖Au‖ dμ(A) dν(u)`` over the stationary measures ν on
the space of lines. For d = 2 that is a circle of angles θ in [0, π), and ν the fixed vector of a
sparse matrix; for any d it can be sampled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import scipy.sparse.linalg
from jaxtyping import Array

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.lyapunov._frames import chains_last
from gradflow.lyapunov.ensembles import (
    AbstractEnsemble,
    Finite,
    check_ensemble,
    check_independent,
)
from gradflow.lyapunov.spectrum import _begin, _group

__all__ = ["StationaryMeasure", "sample_stationary", "stationary_measure"]

# Nodes of Gauss-Legendre quadrature in a cell of the Ulam operator.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)
# Lines that are kept by all matrices are kept to this angle.
_SAME_LINE = 1e-9


class StationaryMeasure(NamedTuple):
    """A discretised stationary measure on the lines of the plane.

    Attributes:
        angles: of the nodes (or centres of cells), ascending in [0, π), shape ``(n,)``.
        mass: of each, summing to 1, ``(n,)``: the measure with the largest exponent.
        density: mass per angle, ``(n,)``.
        exponent: ``∬ log ‖Au‖ dμ dν`` of it: γ_1.
        measures: all extremal stationary measures that were told apart, ``(number, n)``.
        exponents: their integrals, ``(number,)``, largest first.
        unique: whether there is one only: the multiplicity of the eigenvalue 1 is ``number``.
        invariant_lines: angles of the lines that all matrices keep.
        operator: the transition matrix, rows summing to 1, ``(n, n)`` sparse.
    """

    angles: np.ndarray
    mass: np.ndarray
    density: np.ndarray
    exponent: float
    measures: np.ndarray
    exponents: np.ndarray
    unique: bool
    invariant_lines: np.ndarray
    operator: Any

    def __repr__(self) -> str:
        lines = [
            f"StationaryMeasure on {len(self.angles)} lines: gamma_1 = {self.exponent:.10g}",
            "  unique"
            if self.unique
            else f"  NOT unique: {len(self.measures)} measures with exponents "
            + ", ".join(f"{x:.6g}" for x in self.exponents[:4])
            + (", ..." if len(self.exponents) > 4 else ""),
        ]
        if len(self.invariant_lines):
            lines.append(
                "  invariant lines at angles " + ", ".join(f"{x:.4g}" for x in self.invariant_lines)
            )
        return "\n".join(lines)


def stationary_measure(
    ensemble: AbstractEnsemble,
    bins: int,
    *,
    operator: str = "linear",
    samples: int = 1000,
    key: Any = 0,
) -> StationaryMeasure:
    """The stationary measure of an ensemble of real 2×2 matrices on the lines of the plane.

    ``"linear"``: the image of a node is shared out to its two neighbours so that its angle is kept
    on average. Where the product contracts on average the error in γ_1 is of order 2 in the width
    of the cells, if no matrix is singular. Its density is jagged from node to node, by a few per
    cent that do not shrink with the cells: take integrals or sums over several nodes of it, and for
    a density to look at ``"ulam"``. ``"ulam"``: cells instead of nodes, each mapped to those
    that its image covers, with exact overlaps (Ulam 1960); order 1. Lines that all matrices keep
    are nodes of their own, so that measures that sit on them are told apart.

    Args:
        ensemble: independent real matrices with d = 2. Of :class:`Finite` the matrices are taken
            as they are, of other laws as many as ``samples``, whose sampling error then dominates.
        bins: number of nodes or cells, at least 4.
        operator: ``"linear"`` or ``"ulam"``.
        samples: matrices drawn from other laws, at least 1.
        key: random key or seed for them.

    Returns:
        the :class:`StationaryMeasure`.

    Raises:
        ValueError: matrices of another size, complex or not independent, one of them zero, or a
            number out of range.
    """
    check_independent("ensemble", ensemble)
    if ensemble.dimension != 2:
        raise ArgumentError(
            "ensemble", f"d = {ensemble.dimension}", "it must be d = 2: use sample_stationary"
        )
    if np.issubdtype(ensemble.dtype, np.complexfloating):
        raise ArgumentError("ensemble", "complex matrices", "it must be real: use exponents")
    bins = _checks.whole_number("bins", bins, 4)
    operator = _checks.choice("operator", operator, ("linear", "ulam"))
    matrices, p = _law(ensemble, samples, key)
    if (np.abs(matrices).max(axis=(1, 2)) == 0).any():
        raise ArgumentError("ensemble", "a matrix of zeros", "every matrix must map lines to lines")
    kept = invariant_lines(matrices)
    edges = np.pi * np.arange(bins) / bins
    if operator == "linear":
        angles, widths = _nodes(edges, kept)
        P = _linear(matrices, p, angles)
        growth = p @ _log_stretch(matrices, angles)
    else:
        widths = np.full(bins, np.pi / bins)
        angles = edges + 0.5 * widths
        P = _ulam(matrices, p, edges)
        inner = angles[:, None] + 0.5 * widths[:, None] * _NODES
        values = p @ _log_stretch(matrices, inner.ravel())
        growth = values.reshape(inner.shape) @ (_WEIGHTS / 2)
    measures = _closed_classes(P)
    with np.errstate(invalid="ignore"):
        exponents = np.array([_mean(growth, nu) for nu in measures])
    order = np.argsort(-exponents, kind="stable")
    measures, exponents = measures[order], exponents[order]
    return StationaryMeasure(
        angles,
        measures[0],
        measures[0] / widths,
        float(exponents[0]),
        measures,
        exponents,
        len(measures) == 1,
        kept,
        P,
    )


def _mean(values: np.ndarray, mass: np.ndarray) -> float:
    held = mass > 0
    return float(values[held] @ mass[held])


def _law(ensemble: AbstractEnsemble, samples: int, key: Any) -> tuple[np.ndarray, np.ndarray]:
    """Matrices and their probabilities."""
    if isinstance(ensemble, Finite):
        p = np.asarray(ensemble.probabilities, float)
        return np.asarray(ensemble.matrices, float)[p > 0], p[p > 0]
    samples = _checks.whole_number("samples", samples, 1)
    drawn = np.asarray(ensemble.sample(key, samples), float)
    if not np.isfinite(drawn).all():
        raise ArgumentError("ensemble", "a drawn matrix with NaN", "every entry must be finite")
    return drawn, np.full(samples, 1 / samples)


def invariant_lines(matrices: np.ndarray) -> np.ndarray:
    """Angles in [0, π) of the lines that all 2×2 matrices keep; none if they keep all lines."""
    scale = np.abs(matrices).max(axis=(1, 2), keepdims=True)
    scaled = matrices / scale
    # A matrix with eigenvectors of its own: not a multiple of the identity.
    spread = np.abs(scaled - scaled[:, :1, :1] * np.eye(2)).max(axis=(1, 2))
    if spread.max() <= _SAME_LINE:
        return np.empty(0)
    values, vectors = np.linalg.eig(scaled[int(np.argmax(spread))])
    found: list[float] = []
    for value, v in zip(values, vectors.T, strict=True):
        if abs(np.imag(value)) > _SAME_LINE:
            continue
        v = np.real(v)
        images = scaled @ v
        if np.abs(images[:, 0] * v[1] - images[:, 1] * v[0]).max() > _SAME_LINE:
            continue
        angle = float(np.arctan2(v[1], v[0])) % np.pi
        angle = 0.0 if np.pi - angle < _SAME_LINE else angle
        if not any(abs(angle - other) < 1e-7 for other in found):
            found.append(angle)
    return np.sort(found)


def _nodes(edges: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes with the invariant lines among them, and the widths that belong to each."""
    angles = np.array(edges)
    for line in kept:
        # In place of the nearest node, so that no cell becomes tiny.
        away = np.abs((angles - line + np.pi / 2) % np.pi - np.pi / 2)
        angles[int(np.argmin(away))] = line
    angles = np.sort(angles)
    gaps = np.diff(np.append(angles, angles[0] + np.pi))
    return angles, 0.5 * (gaps + np.roll(gaps, 1))


def _image_angles(matrices: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Angles of the images in [0, π), ``(m, n)``; where the line is lost that of the range."""
    x, y = np.cos(angles), np.sin(angles)
    u = matrices[:, :, :1] * x + matrices[:, :, 1:] * y
    size = np.abs(matrices).max(axis=(1, 2))[:, None]
    lost = np.hypot(u[:, 0], u[:, 1]) <= 1e-15 * size
    strongest = np.abs(matrices).sum(axis=1).argmax(axis=1)
    span = np.take_along_axis(matrices, strongest[:, None, None], axis=2)[:, :, 0]
    found = np.where(
        lost, np.arctan2(span[:, 1], span[:, 0])[:, None], np.arctan2(u[:, 1], u[:, 0])
    )
    found = found % np.pi
    return np.where(found >= np.pi, 0.0, found)


def _log_stretch(matrices: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """``log ‖A u‖``, ``(m, n)``."""
    u = matrices[:, :, :1] * np.cos(angles) + matrices[:, :, 1:] * np.sin(angles)
    with np.errstate(divide="ignore"):
        return np.log(np.hypot(u[:, 0], u[:, 1]))


def _linear(matrices: np.ndarray, p: np.ndarray, angles: np.ndarray) -> Any:
    n, m = len(angles), len(p)
    images = _image_angles(matrices, angles)
    left = (np.searchsorted(angles, images, side="right") - 1) % n
    right = (left + 1) % n
    gap = (angles[right] - angles[left]) % np.pi
    share = ((images - angles[left]) % np.pi) / gap
    # The lines that are kept stay kept to round-off.
    share[share < 1e-12] = 0.0
    share[share > 1 - 1e-12] = 1.0
    rows = np.broadcast_to(np.arange(n), (m, n)).ravel()
    weight = np.broadcast_to(p[:, None], (m, n))
    return _matrix(
        np.concatenate([rows, rows]),
        np.concatenate([left.ravel(), right.ravel()]),
        np.concatenate([(weight * (1 - share)).ravel(), (weight * share).ravel()]),
        n,
    )


def _ulam(matrices: np.ndarray, p: np.ndarray, edges: np.ndarray) -> Any:
    """Shares of each cell whose image falls into each other cell, exactly."""
    n = len(edges)
    rows, columns, values = [], [], []
    for A, weight in zip(matrices, p, strict=True):
        adjugate = np.array([[A[1, 1], -A[0, 1]], [-A[1, 0], A[0, 0]]])
        regular = abs(np.linalg.det(A)) > 1e-14 * np.abs(A).max() ** 2
        cuts = edges
        if regular:
            # The map of lines is a homeomorphism: cut at the edges and at those that land on edges.
            cuts = np.sort(np.concatenate([edges, _image_angles(adjugate[None], edges)[0]]))
        lengths = np.diff(np.append(cuts, np.pi))
        kept = lengths > 0
        middle = (cuts + 0.5 * lengths)[kept]
        rows.append(np.minimum((middle * n / np.pi).astype(int), n - 1))
        image = _image_angles(A[None], middle)[0]
        columns.append(np.minimum((image * n / np.pi).astype(int), n - 1))
        values.append(weight * lengths[kept] * n / np.pi)
    return _matrix(np.concatenate(rows), np.concatenate(columns), np.concatenate(values), n)


def _matrix(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, n: int) -> Any:
    kept = values > 0
    P = scipy.sparse.csr_array((values[kept], (rows[kept], columns[kept])), shape=(n, n))
    P.sum_duplicates()
    return scipy.sparse.diags_array(1 / P.sum(axis=1)) @ P


def _closed_classes(P: Any) -> np.ndarray:
    """The stationary vector of each closed class of states, ``(number, n)``."""
    n = P.shape[0]
    number, label = scipy.sparse.csgraph.connected_components(P, directed=True, connection="strong")
    P = scipy.sparse.csr_array(P)
    start = np.repeat(np.arange(n), np.diff(P.indptr))
    leaves = np.zeros(number, bool)
    leaves[label[start[label[start] != label[P.indices]]]] = True
    measures = []
    for component in np.flatnonzero(~leaves):
        states = np.flatnonzero(label == component)
        measure = np.zeros(n)
        measure[states] = _stationary(P[states][:, states])
        measures.append(measure)
    return np.array(measures)


def _stationary(P: Any) -> np.ndarray:
    """The fixed probability vector of an irreducible chain."""
    n = P.shape[0]
    if n == 1:
        return np.ones(1)
    if n <= 1500:
        M = np.eye(n) - P.toarray().T
        M[0] = 1.0
        mass = np.linalg.solve(M, np.eye(n)[0])
    else:
        # One balance equation is implied by the others: fix one entry and solve for the rest.
        M = scipy.sparse.csc_array(scipy.sparse.eye_array(n) - P.T)
        pivot = int(np.argmax(P.T @ np.full(n, 1.0)))
        others = np.delete(np.arange(n), pivot)
        mass = np.ones(n)
        right = -M[:, [pivot]].toarray().ravel()[others]
        mass[others] = scipy.sparse.linalg.spsolve(M[others][:, others], right)
    mass = np.maximum(mass, 0.0)
    return mass / mass.sum()


def sample_stationary(
    key: Any, ensemble: AbstractEnsemble, samples: int, *, burn_in: int = 200
) -> Array:
    """Independent directions from a stationary measure, for any d.

    Each is the end of a chain of its own from a random direction: where the measure is not unique,
    they come from the one that generic starts are drawn to.

    Args:
        key: random key or seed.
        ensemble: any.
        samples: how many, at least 1.
        burn_in: steps of each chain, at least 1.

    Returns:
        unit vectors, shape ``(samples, d)``, of either sign.
    """
    key = _checks.random_key("key", key)
    check_ensemble("ensemble", ensemble)
    samples = _checks.whole_number("samples", samples, 1)
    burn_in = _checks.whole_number("burn_in", burn_in, 1)
    last = chains_last(ensemble.dimension)
    state = _begin(ensemble, key, None, 1, samples, 1, last)
    frames = _walk(ensemble, key, state, burn_in, last)
    return frames[:, 0].T if last else frames[:, :, 0]


@eqx.filter_jit
def _walk(ensemble, key, state, steps, last: bool) -> Array:
    def step(_, state):
        return _group(ensemble, key, state, 1, last)[0]

    return jax.lax.fori_loop(0, steps, step, state).frames
