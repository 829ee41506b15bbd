"""The top exponent by whichever method is most exact, and what can be checked beforehand."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.lyapunov.closed_forms import closed_form
from gradflow.lyapunov.determinant import determinant
from gradflow.lyapunov.ensembles import AbstractEnsemble, Finite, check_ensemble
from gradflow.lyapunov.layers import Layers
from gradflow.lyapunov.projective import stationary_measure
from gradflow.lyapunov.spectrum import exponents

__all__ = ["Assumptions", "TopExponent", "assumptions", "top_exponent"]

METHODS = ("auto", "closed form", "determinant", "projective", "sampled")
# Words that a determinant may visit without being asked for them.
_WORDS = 20_000
_LONGEST = 12
_BINS = 2000


class TopExponent(NamedTuple):
    """γ_1 and how it was found.

    Attributes:
        exponent: γ_1 per step.
        error: round-off for a closed form; for the determinant and projective methods the change
            between two resolutions; one standard error of sampling.
        method: ``"closed form"``, ``"determinant"``, ``"projective"`` or ``"sampled"``.
        details: the result of the method that was used, or None.
    """

    exponent: float
    error: float
    method: str
    details: Any

    def __float__(self) -> float:
        return self.exponent

    def __repr__(self) -> str:
        return f"TopExponent: {self.exponent:.12g}, error {self.error:.1g}, {self.method}"


def top_exponent(
    ensemble: AbstractEnsemble,
    method: str = "auto",
    *,
    key: Any = 0,
    error: float = 1e-3,
    steps: int = 100_000,
    chains: int | None = None,
    progress: bool = False,
) -> TopExponent:
    """The largest Lyapunov exponent of an ensemble.

    Args:
        ensemble: any.
        method: ``"closed form"``; ``"determinant"``, for positive 2×2 :class:`Finite`;
            ``"projective"``, for independent real 2×2 matrices; ``"sampled"``; or ``"auto"``, the
            first of these that gives a sure error (the projective one for :class:`Finite` without
            singular matrices only).
        key: random key or seed, where sampled.
        error: wanted standard error, where sampled, > 0.
        steps: the most steps per chain, where sampled.
        chains: where sampled, see :func:`exponents`.
        progress: show a progress bar, where sampled.

    Raises:
        ValueError: no ensemble, an unknown method, or one that does not apply.
    """
    check_ensemble("ensemble", ensemble)
    method = _checks.choice("method", method, METHODS)
    if method in ("auto", "closed form"):
        known = closed_form(ensemble)
        if known is not None and not np.isnan(known[0]):
            gamma = float(known[0])
            size = 0.0 if np.isinf(gamma) else 1e-12 * max(1.0, abs(gamma))
            return TopExponent(gamma, size, "closed form", None)
        if method == "closed form":
            raise ArgumentError(
                "method", "'closed form'", f"none is known of this {type(ensemble).__name__}"
            )
    finite = isinstance(ensemble, Finite) and ensemble.dimension == 2
    finite = finite and not jnp.issubdtype(ensemble.dtype, jnp.complexfloating)
    if method == "determinant" or (method == "auto" and finite and _is_positive(ensemble)):
        if not isinstance(ensemble, Finite):
            raise ArgumentError(
                "method", "'determinant'", f"it needs Finite, not {type(ensemble).__name__}"
            )
        p = np.asarray(ensemble.probabilities)
        number = int((p > 0).sum())
        # The last of them is also the error estimate's.
        length = min(_LONGEST, max(2, int(np.log(_WORDS) / np.log(max(number, 2)))))
        found = determinant(np.asarray(ensemble.matrices)[p > 0], p[p > 0], length, digits=16)
        # Positive matrices may hardly contract; then words of this length are too short.
        if method == "determinant" or found.error < 1e-9:
            return TopExponent(float(found.exponent), float(found.error), "determinant", found)
    if method == "projective" or (method == "auto" and finite and _is_regular(ensemble)):
        fine = stationary_measure(ensemble, _BINS, key=key)
        coarse = stationary_measure(ensemble, _BINS // 2, key=key)
        change = abs(fine.exponent - coarse.exponent)
        if method == "projective" or change < error:
            return TopExponent(fine.exponent, change, "projective", fine)
    run = exponents(
        key, ensemble, steps, 1, error=error, chains=chains, progress=progress, checkpoints=256
    )
    return TopExponent(float(run.exponents[0]), float(run.standard_error[0]), "sampled", run)


def _is_positive(ensemble: Any) -> bool:
    kept = np.asarray(ensemble.probabilities) > 0
    return bool((np.asarray(ensemble.matrices)[kept] > 0).all())


def _is_regular(ensemble: Any) -> bool:
    values = np.linalg.svd(np.asarray(ensemble.matrices), compute_uv=False)
    return bool((values[:, 1] > 1e-12 * values[:, 0]).all())


class Assumptions(NamedTuple):
    """What the multiplicative ergodic theorem assumes, looked at in a sample.

    Attributes:
        log_plus: mean of ``log⁺ ‖A‖``.
        standard_error: of it, as if matrices were independent.
        tail_index: α where the tail of ``log⁺ ‖A‖`` falls like ``x^{−α}`` (Hill's estimate from
            the largest twentieth); ``inf`` if it is bounded or falls faster than any such law. The
            mean exists for α > 1.
        integrable: whether the sample says so: α above 1 by two of its standard errors.
        orbit: of :class:`Layers`: ``"converges"``, ``"bounded"`` or ``"diverges"``; else None.
        orbit_step: the last ``|x_{l+1} − x_l|`` relative to the largest ``|x|``; else None.
        limit_distance: of the end of the orbit from the given limit, or None.
        samples: how many matrices were looked at.
    """

    log_plus: float
    standard_error: float
    tail_index: float
    integrable: bool
    orbit: str | None
    orbit_step: float | None
    limit_distance: float | None
    samples: int

    def __repr__(self) -> str:
        verdict = "integrable" if self.integrable else "NOT shown to be integrable"
        lines = [
            f"Assumptions, from {self.samples} matrices",
            f"  E log+ |A| = {self.log_plus:.4g} ± {self.standard_error:.1g}, tail index "
            f"{self.tail_index:.3g}: {verdict}",
        ]
        if self.orbit is not None:
            far = "" if self.limit_distance is None else f", {self.limit_distance:.2g} from limit"
            lines.append(f"  the orbit {self.orbit}: last step {self.orbit_step:.2g}{far}")
        return "\n".join(lines)


def assumptions(ensemble: AbstractEnsemble, key: Any, *, samples: int = 4000) -> Assumptions:
    """Integrability ``E log⁺ ‖A‖ < ∞`` and convergence of the orbit, empirically.

    Args:
        ensemble: any; of one with a memory, consecutive matrices are looked at.
        key: random key or seed.
        samples: matrices, at least 200.

    Raises:
        ValueError: no ensemble, too few samples, or a matrix that is not finite.
    """
    key = _checks.random_key("key", key)
    check_ensemble("ensemble", ensemble)
    samples = _checks.whole_number("samples", samples, 200)
    first, second = jax.random.split(key)
    drawn = np.asarray(ensemble.sample(first, samples))
    if np.isnan(drawn).any():
        raise ArgumentError("ensemble", "a Jacobian with NaN", "every entry must be a number")
    norms = np.full(samples, np.inf)
    finite = np.isfinite(drawn).all(axis=(1, 2))
    norms[finite] = np.linalg.norm(drawn[finite], ord=2, axis=(1, 2))
    values = np.maximum(np.log(np.maximum(norms, 1e-300)), 0.0)
    alpha, error = _tail_index(values)
    orbit = step = far = None
    if isinstance(ensemble, Layers):
        x = np.asarray(ensemble.orbit(second, samples), float)
        orbit, step = _orbit_verdict(x)
        if ensemble.limit is not None:
            far = float(np.linalg.norm(x[-1] - np.asarray(ensemble.limit)))
    spread = values.std(ddof=1) if np.isfinite(values).all() else np.inf
    return Assumptions(
        float(values.mean()),
        float(spread / np.sqrt(samples)),
        alpha,
        bool(np.isfinite(values).all() and alpha - 2 * error > 1),
        orbit,
        step,
        far,
        samples,
    )


def _tail_index(values: np.ndarray) -> tuple[float, float]:
    """Hill's estimate and its standard error."""
    number = len(values) // 20
    ordered = np.sort(values)[::-1]
    base = ordered[number]
    if not base > 0 or ordered[0] == base:
        return np.inf, 0.0
    if not np.isfinite(ordered[0]):
        return 0.0, 0.0
    alpha = 1 / np.mean(np.log(ordered[:number] / base))
    return float(alpha), float(alpha / np.sqrt(number))


def _orbit_verdict(x: np.ndarray) -> tuple[str, float]:
    if not np.isfinite(x).all():
        return "diverges", np.inf
    sizes = np.linalg.norm(x, axis=1)
    moves = np.linalg.norm(np.diff(x, axis=0), axis=1)
    scale = max(float(sizes.max()), 1e-300)
    last = float(moves[-max(1, len(moves) // 20) :].max()) / scale
    if last < 1e-6:
        return "converges", last
    # A stationary orbit does not grow from the second quarter to the last; sums of steps do.
    quarter = len(sizes) // 4
    grown = np.median(sizes[-quarter:]) > 1.3 * np.median(sizes[quarter : 2 * quarter])
    return ("diverges" if grown else "bounded"), last
