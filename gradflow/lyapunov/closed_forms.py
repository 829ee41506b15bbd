"""Closed forms of Lyapunov exponents, on the host in double precision: oracles for the samplers.

Where the law of a matrix is invariant under conjugation with orthogonal matrices, ``|A x|`` has one
law for all unit x, and ``γ_1 + … + γ_k = E ½ log det`` of the Gram matrix of the first k columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.integrate
import scipy.optimize
import scipy.special
from jaxtyping import ArrayLike
from scipy.special import digamma, gammaln

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.lyapunov import ensembles, shortcuts

__all__ = [
    "closed_form",
    "correlated_gaussian_top",
    "cyclic",
    "delta_gaussian_top",
    "delta_product",
    "gaussian",
    "rank_one_mixture",
    "residual_gaussian",
    "residual_haar_top",
    "threshold",
    "threshold_limit",
    "triangular",
]

THRESHOLD_LIMIT = math.sqrt((math.sqrt(5) - 1) / 2)


def gaussian(d: int, sigma: float, *, complex: bool = False) -> np.ndarray:
    """Independent entries ``N(0, σ²)``: ``γ_k = log σ + ½[log 2 + ψ((d−k+1)/2)]`` (Newman 1986).

    Complex entries with ``E|g|² = σ²``: ``γ_k = log σ + ½ ψ(d−k+1)``.

    Args:
        d: dimension, at least 1.
        sigma: ≥ 0; 0 gives ``−inf``.
        complex: complex entries.

    Returns:
        all exponents, shape ``(d,)``, largest first.
    """
    d = _checks.whole_number("d", d, 1)
    sigma = _checks.real_scalar("sigma", sigma, minimum=0)
    freedom = np.arange(d, 0, -1.0)
    if complex:
        return _log(sigma) + 0.5 * digamma(freedom)
    return _log(sigma) + 0.5 * (math.log(2) + digamma(freedom / 2))


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def correlated_gaussian_top(covariance: ArrayLike, sigma: float = 1.0) -> float:
    """γ_1 of real Gaussian matrices with the given covariance of rows: ``log σ + ½E log gᵀΣg``.

    From ``log x = ∫ (e^{−t} − e^{−tx})/t dt``, with ``E e^{−t gᵀΣg} = Π (1 + 2λ_i t)^{−1/2}``.

    Args:
        covariance: Σ, symmetric positive definite, ``(d, d)``.
        sigma: ≥ 0.
    """
    values = np.linalg.eigvalsh(np.asarray(covariance, float))
    scale = values.sum()
    values = values / scale

    def integrand(s):
        t = math.exp(s)
        return math.exp(-t) - math.exp(-0.5 * np.log1p(2 * values * t).sum())

    # In s = log t; for small t the difference is (1 − Σλ)t + O(t²) = O(t²).
    tail = -2 * math.log(1e-17) / len(values) + 2 * abs(math.log(values[-1])) + 10
    pieces = [-25.0, -8.0, -2.0, 2.0, 8.0, max(40.0, tail)]
    total = sum(_quad(integrand, a, b) for a, b in itertools.pairwise(pieces))
    return _log(sigma) + 0.5 * (math.log(scale) + total)


def residual_gaussian(
    d: int, epsilon: float, k: int | None = None, *, complex: bool = False
) -> np.ndarray:
    """The exponents of ``I + εG``, entries of G independent ``N(0, 1)``.

    ``γ_1 = log ε + ½[log 2 + Σ_j Pois(j; 1/(2ε²)) ψ(d/2 + j)]``. For the others, the j-th diagonal
    entry of R is a non-central χ with n = d−k+1 degrees of freedom, whose non-centrality is
    ``ν/ε²``, ν the squared distance of a basis vector from the span of the columns before it. By
    symmetry ν of one column follows from the column before in one dimension less, so that the
    Poisson indices form a Markov chain,

    .. math:: i_1 \\sim \\mathrm{Pois}(x), \\quad \\nu \\sim \\mathrm{Beta}(n/2 + i_j, j/2), \\quad
       i_{j+1} \\sim \\mathrm{Pois}(\\nu x), \\qquad x = 1/(2ε²),

    and ``γ_k = log ε + ½[log 2 + E ψ(n/2 + i_k)]``. Complex entries, ``E|g|² = 1``, double all
    degrees of freedom at half the variance.

    Args:
        d: dimension, at least 1.
        epsilon: > 0.
        k: how many of the leading exponents; all if left out.
        complex: complex entries.

    Returns:
        shape ``(k,)``, largest first.
    """
    d = _checks.whole_number("d", d, 1)
    epsilon = _checks.real_scalar("epsilon", epsilon, minimum=0)
    k = d if k is None else _checks.whole_number("k", k, 1)
    if k > d:
        raise ArgumentError("k", str(k), f"there are d = {d} exponents")
    if epsilon == 0:
        return np.zeros(k)
    if complex:
        epsilon, unit = epsilon / math.sqrt(2), 2
    else:
        unit = 1
    x = 1 / (2 * epsilon**2)
    return np.array([_residual_gaussian(unit * (d - m + 1), m, unit, x) for m in range(1, k + 1)])


def _window(x: float) -> np.ndarray:
    """Where a Poisson variable of mean x or less down to a fraction of it is found."""
    reach = 12 * math.sqrt(x) + 60
    return np.arange(max(0, math.floor(x - reach)), math.ceil(x + reach) + 1)


def _residual_gaussian(n: int, k: int, unit: int, x: float) -> float:
    top = _window(x)
    p = np.exp(top * math.log(x) - x - gammaln(top + 1.0))
    # log ε + ½ log 2 + ½ψ(n/2+i) = ½E[ψ(n/2+i) − log x]: near cancelling for small ε.
    if k == 1:
        return 0.5 * float(np.sum(p * _above_log(n / 2 + top, x)))
    # Later indices may be much smaller than x.
    every = np.arange(0, top[-1] + 1)
    full = np.zeros(len(every))
    full[top] = p
    p = full
    nodes = int(12 * math.sqrt(x) + 64)
    for j in range(1, k):
        b = unit * j / 2
        # Gauss-Jacobi for (1−ν)^{b−1} ν^{n/2−1} on (0, 1); the rest of the density is smooth.
        z, w = scipy.special.roots_jacobi(nodes, b - 1, n / 2 - 1)
        nu = 0.5 * (1 + z)
        norm = gammaln(n / 2 + every + b) - gammaln(n / 2 + every) - gammaln(b)
        log_w = np.log(np.maximum(w, 1e-300)) - (b + n / 2 - 1) * math.log(2)
        kept = p > 1e-40
        density = (
            np.exp(log_w[:, None] + norm[None, kept] + every[None, kept] * np.log(nu)[:, None])
            @ p[kept]
        )
        mean = nu * x
        log_pois = every[:, None] * np.log(mean)[None] - mean[None] - gammaln(every + 1.0)[:, None]
        p = np.exp(log_pois) @ density
    return 0.5 * float(np.sum(p * _above_log(n / 2 + every, x)))


def _above_log(y: np.ndarray, x: float) -> np.ndarray:
    """``ψ(y) − log x``."""
    return digamma(y) - math.log(x)


def delta_product(d: int, beta: float) -> np.ndarray:
    """``I − β k kᵀ`` with k uniform on the sphere.

    ``γ_1 + … + γ_m = ½E log(1 − β(2−β) B_m)``, ``B_m ~ Beta(m/2, (d−m)/2)``; all sum to
    ``log |1−β|``.

    Args:
        d: dimension, at least 1.
        beta: a number.

    Returns:
        all exponents, shape ``(d,)``, largest first; the last is ``−inf`` at β = 1.
    """
    d = _checks.whole_number("d", d, 1)
    beta = _checks.real_scalar("beta", beta)
    c = beta * (2 - beta)
    sums = [0.0] + [0.5 * _log_of_beta(c, m / 2, (d - m) / 2) for m in range(1, d)]
    return np.diff([*sums, _log(abs(1 - beta))])


def _log_of_beta(c: float, a: float, b: float) -> float:
    """``E log(1 − cB)``, ``B ~ Beta(a, b)``, c ≤ 1."""
    return _over_beta(lambda B, rest: math.log(rest + (1 - c) * B), a, b)


def _over_beta(f: Callable[[float, float], float], a: float, b: float) -> float:
    """``E f(B, 1 − B)``, ``B ~ Beta(a, b)``, by the substitution ``B = sin²θ``."""
    norm = math.exp(gammaln(a + b) - gammaln(a) - gammaln(b))

    def integrand(theta):
        s, c = math.sin(theta), math.cos(theta)
        return 2 * s ** (2 * a - 1) * c ** (2 * b - 1) * f(s * s, c * c)

    mode = math.asin(math.sqrt(a / (a + b)))
    width = 6 / math.sqrt(a + b)
    half = math.pi / 2
    cuts = sorted({0.0, max(0.0, mode - width), mode, min(half, mode + width), half})
    # The logarithm may be singular at the right end: double exponential there would be overkill,
    # a few geometric pieces are not.
    cuts = sorted({*cuts, *(half * (1 - 10.0**-e) for e in (1, 2, 4, 6))})
    return norm * sum(_quad(integrand, x, y) for x, y in itertools.pairwise(cuts))


def _quad(f: Callable[[float], float], a: float, b: float) -> float:
    return scipy.integrate.quad(f, a, b, epsabs=1e-14, epsrel=1e-12, limit=200)[0]


def residual_haar_top(d: int, scale: float = 1.0, *, special: bool = False) -> float:
    """γ_1 of ``I + sO``, O orthogonal of Haar measure: ``½E log(1 + s² + 2s t)``.

    t is a coordinate of a uniform unit vector; at s = 1,
    ``½[2 log 2 + ψ((d−1)/2) − ψ(d−1)]``: log 2 − ½ for d = 3.

    Args:
        d: dimension, at least 1.
        scale: s ≥ 0.
        special: of determinant 1; makes a difference for d = 1 only.
    """
    d = _checks.whole_number("d", d, 1)
    scale = _checks.real_scalar("scale", scale, minimum=0)
    if d == 1:
        plus = math.log(1 + scale)
        return plus if special else 0.5 * (plus + _log(abs(1 - scale)))
    half = (d - 1) / 2
    if scale == 1:
        return 0.5 * (2 * math.log(2) + digamma(half) - digamma(2 * half))
    if scale == 0:
        return 0.0
    # 1 + s² + 2s(1 − 2B) = (1+s)² (1 − cB).
    c = 4 * scale / (1 + scale) ** 2
    return math.log(1 + scale) + 0.5 * _log_of_beta(c, half, half)


def delta_gaussian_top(d: int, beta: float, sigma: float) -> float:
    """γ_1 of ``I − β k kᵀ + σG``, k uniform on the sphere, entries of G ``N(0, 1)``.

    ``|Δe_1|² = 1 − β(2−β)B``, ``B ~ Beta(½, (d−1)/2)``, is the non-centrality times σ² of a χ² with
    d degrees of freedom.
    """
    d = _checks.whole_number("d", d, 1)
    beta, sigma = _checks.real_scalar("beta", beta), _checks.real_scalar("sigma", sigma, minimum=0)
    if sigma == 0:
        return float(delta_product(d, beta)[0])
    c = beta * (2 - beta)

    def mean_log(length):  # of |x + σg|, |x|² = length
        x = length / (2 * sigma**2)
        if x == 0:
            return math.log(sigma) + 0.5 * (math.log(2) + digamma(d / 2))
        i = _window(x)
        p = np.exp(i * math.log(x) - x - gammaln(i + 1.0))
        return math.log(sigma) + 0.5 * (math.log(2) + float(np.sum(p * digamma(d / 2 + i))))

    if d == 1:
        return mean_log((1 - beta) ** 2)
    return _over_beta(lambda B, rest: mean_log(max(rest + (1 - c) * B, 0.0)), 0.5, (d - 1) / 2)


def rank_one_mixture(p: float, u: ArrayLike, v: ArrayLike, B: ArrayLike) -> float:
    """γ_1 where ``u vᵀ`` has probability p and B 1−p: ``p² Σ_n (1−p)ⁿ log |vᵀBⁿu|``.

    Args:
        p: in (0, 1].
        u, v: vectors of length d.
        B: matrix, ``(d, d)``.

    Returns:
        γ_1; ``−inf`` if some ``vᵀBⁿu`` vanishes.
    """
    p = _checks.real_scalar("p", p, above=0, maximum=1)
    u, v, B = (np.asarray(x) for x in (u, v, B))
    w, grown, total, weight = u, 0.0, 0.0, p * p
    n = 0
    while weight * (n + 40) > 1e-17 or n < 1:
        size = np.linalg.norm(w)
        along = abs(np.vdot(v.conj(), w))
        if size == 0 or along <= 1e-15 * size * np.linalg.norm(v):
            return -math.inf
        total += weight * (grown + math.log(along))
        grown += math.log(size)
        w, weight, n = B @ (w / size), weight * (1 - p), n + 1
        # log|vᵀw| of w scaled to 1 plus what was scaled away.
        if weight == 0:
            break
    return total


def triangular(diagonals: ArrayLike, probabilities: ArrayLike) -> np.ndarray:
    """Finitely many triangular matrices: ``E log |a_ii|``, largest first.

    Args:
        diagonals: ``(m, d)``.
        probabilities: ``(m,)``.
    """
    diagonals, p = np.asarray(diagonals), np.asarray(probabilities, float)
    with np.errstate(divide="ignore"):
        logs = np.log(np.abs(diagonals[p > 0]))
    return np.sort(p[p > 0] @ logs)[::-1]


def cyclic(matrices: ArrayLike) -> np.ndarray:
    """A periodic product: ``(1/m) log |eigenvalue of A_m ⋯ A_1|``, largest first.

    Args:
        matrices: ``(m, d, d)``, in the order in which they are applied.
    """
    stack = np.asarray(matrices)
    total, grown = np.eye(stack.shape[-1], dtype=stack.dtype), 0.0
    for A in stack:
        total = A @ total
        size = np.abs(total).max()
        if size == 0:
            return np.full(stack.shape[-1], -np.inf)
        total, grown = total / size, grown + math.log(size)
    moduli = np.abs(np.linalg.eigvals(total))
    moduli[moduli <= 1e-14 * moduli.max(initial=0)] = 0
    with np.errstate(divide="ignore"):
        return np.sort((np.log(moduli) + grown) / len(stack))[::-1]


def closed_form(ensemble: ensembles.AbstractEnsemble) -> np.ndarray | None:
    """What is known of an ensemble's exponents in closed form.

    Args:
        ensemble: any.

    Returns:
        shape ``(d,)``, largest first, ``nan`` where there is no closed form; None where there is
        none at all.
    """
    ensembles.check_ensemble("ensemble", ensemble)
    d = ensemble.dimension
    partial = np.full(d, np.nan)
    if isinstance(ensemble, ensembles.Gaussian):
        sigma = float(ensemble.sigma)
        if ensemble.root is None or d == 1:
            stretch = 1.0 if ensemble.root is None else float(ensemble.root[0, 0])
            return gaussian(d, sigma * stretch, complex=ensemble.complex)
        root = np.asarray(ensemble.root)
        total = gaussian(d, sigma, complex=ensemble.complex).sum() + np.log(np.diag(root)).sum()
        if ensemble.complex:
            return None
        partial[0] = correlated_gaussian_top(root @ root.T, sigma)
        if d == 2:
            partial[1] = total - partial[0]
        return partial
    if isinstance(ensemble, ensembles.Haar):
        return np.full(d, _log(float(ensemble.scale)))
    if isinstance(ensemble, ensembles.DeltaProduct) and ensemble.directions is None:
        return delta_product(d, float(ensemble.beta))
    if isinstance(ensemble, ensembles.Cyclic):
        return cyclic(np.asarray(ensemble.matrices))
    if isinstance(ensemble, ensembles.Finite):
        return _finite(np.asarray(ensemble.matrices), np.asarray(ensemble.probabilities, float))
    if isinstance(ensemble, ensembles.BlockTriangular):
        parts = [closed_form(block) for block in ensemble.blocks]
        if any(part is None or np.isnan(part).any() for part in parts):
            return None
        return np.sort(np.concatenate([part for part in parts if part is not None]))[::-1]
    if isinstance(ensemble, shortcuts.Shortcut):
        return _shortcut(ensemble, partial)
    return None


def _shortcut(ensemble: Any, partial: np.ndarray) -> np.ndarray | None:
    inner, d = ensemble.ensemble, ensemble.dimension
    plain = ensemble.beta is None or float(ensemble.beta) == 0
    if isinstance(inner, ensembles.Gaussian) and inner.root is None:
        sigma = float(inner.sigma)
        if plain:
            return residual_gaussian(d, sigma, complex=inner.complex)
        if ensemble.fixed is None and not inner.complex:
            partial[0] = delta_gaussian_top(d, float(ensemble.beta), sigma)
            return partial
    if not plain:
        return None
    if isinstance(inner, ensembles.Haar) and not inner.complex:
        partial[0] = residual_haar_top(d, float(inner.scale), special=inner.special)
        return partial
    eye = np.eye(d)
    if isinstance(inner, ensembles.Finite):
        return _finite(eye + np.asarray(inner.matrices), np.asarray(inner.probabilities, float))
    if isinstance(inner, ensembles.Cyclic):
        return cyclic(eye + np.asarray(inner.matrices))
    return None


def _finite(matrices: np.ndarray, p: np.ndarray) -> np.ndarray | None:
    """Triangular, orthogonal, single, and rank-one matrices."""
    matrices, p = matrices[p > 0], p[p > 0]
    d = matrices.shape[-1]
    if len(p) == 1:
        return cyclic(matrices)
    below = np.tril(np.ones((d, d), bool), -1)
    if not matrices[:, below].any() or not matrices[:, below.T].any():
        return triangular(np.diagonal(matrices, axis1=1, axis2=2), p)
    gram = np.einsum("mji,mjk->mik", matrices.conj(), matrices)
    scale = np.real(np.trace(gram, axis1=1, axis2=2)) / d
    if np.abs(gram - scale[:, None, None] * np.eye(d)).max() <= 1e-14 * scale.max():
        return np.full(d, 0.5 * float(p @ np.log(scale))) if scale.min() > 0 else None
    values = np.linalg.svd(matrices, compute_uv=False)
    ranks = (values > 1e-14 * d * values[:, :1]).sum(axis=1)
    known = np.where(np.arange(d) >= ranks.min(), -np.inf, np.nan)
    if len(p) == 2 and ranks.min() == 1:
        one = int(np.argmin(ranks))
        U, s, V = np.linalg.svd(matrices[one])
        known[0] = rank_one_mixture(p[one], s[0] * U[:, 0], V[0], matrices[1 - one])
    return None if np.isnan(known).all() else known


def threshold(d: int) -> float:
    """σ*(d): below it a residual connection brings γ_1 of ``σG/√d`` closer to 0, above it does not.

    The smallest positive σ with ``|γ_1(I + σG/√d)| = |γ_1(σG/√d)|``.

    Args:
        d: dimension, at least 2.

    Raises:
        ValueError: ``d < 2``.
    """
    d = _checks.whole_number("d", d, 2)
    root = math.sqrt(d)

    def gap(log_sigma):
        epsilon = math.exp(log_sigma) / root
        return float(residual_gaussian(d, epsilon, 1)[0] + gaussian(d, epsilon)[0])

    # The plain exponent is negative here, and both rise with σ.
    return math.exp(scipy.optimize.brentq(gap, math.log(0.2), math.log(3.0), xtol=1e-13))


def threshold_limit() -> float:
    """σ* as d → ∞: ``√((√5 − 1)/2)``, where ``1 + σ² = σ^{−2}``."""
    return THRESHOLD_LIMIT
