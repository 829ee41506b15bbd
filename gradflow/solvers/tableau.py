"""Coefficients of Gauss–Legendre collocation."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

__all__ = ["GAMMA", "Tableau", "gauss"]

# Of the error estimate's extra node at the start of the step; any number of this order will do.
GAMMA = 0.1


class Tableau(NamedTuple):
    """Butcher coefficients and what the stage equations need of them.

    Attributes:
        c: nodes, in (0, 1).
        A: stage weights.
        end: ``bᵀA⁻¹``, the end value from the stage increments.
        error: ``(b̂ − b)ᵀA⁻¹``, where ``b̂`` also has the weight ``GAMMA`` at the start.
        gammas: eigenvalues of A, one of every complex pair.
        into, back: ``x ↦ Re(back · diag(…) · into · x)`` applies a real function of A.
        powers: from powers of θ to the values at θ of the Lagrange polynomials on (0, c).
    """

    c: np.ndarray
    A: np.ndarray
    end: np.ndarray
    error: np.ndarray
    gammas: np.ndarray
    into: np.ndarray
    back: np.ndarray
    powers: np.ndarray


@cache
def gauss(stages: int) -> Tableau:
    """The method with ``stages`` stages, of order ``2·stages``."""
    nodes, weights = np.polynomial.legendre.leggauss(stages)
    c, b = 0.5 * (nodes + 1), 0.5 * weights
    k = np.arange(1, stages + 1)
    vandermonde = c[:, None] ** (k - 1)
    # Stage conditions Σ_j a_ij c_j^{k−1} = c_i^k/k, and the same for the embedded weights.
    A = np.linalg.solve(vandermonde.T, (c[:, None] ** k / k).T).T
    embedded = np.linalg.solve(vandermonde.T, 1 / k - GAMMA * (k == 1))
    gammas, back = np.linalg.eig(A)
    into = np.linalg.inv(back)
    kept = gammas.imag > -1e-12
    twice = np.where(gammas.imag > 1e-12, 2.0, 1.0)
    inverse = np.linalg.inv(A)
    every = np.concatenate([[0.0], c])
    return Tableau(
        c,
        A,
        b @ inverse,
        (embedded - b) @ inverse,
        gammas[kept],
        into[kept],
        (back * twice)[:, kept],
        np.linalg.inv(every[:, None] ** np.arange(stages + 1)),
    )
