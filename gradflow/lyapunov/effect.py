"""What a shortcut does to a spectrum: which exponents come closer to 0, and which do not.

Borkar (arXiv 2606.17013, Theorem 4.1) has a residual connection make the spectrum a smaller
perturbation of the identity's. Read as "every modulus shrinks" that is not universal (``A = I``
goes from 0 to log 2), so it is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.stats
from tqdm import tqdm

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.lyapunov import closed_forms, ensembles, shortcuts
from gradflow.lyapunov.ensembles import AbstractEnsemble, check_ensemble
from gradflow.lyapunov.spectrum import Spectrum, exponents

__all__ = [
    "PhaseDiagram",
    "ResidualEffect",
    "SampledThreshold",
    "phase_diagram",
    "residual_effect",
    "sampled_threshold",
]


class ResidualEffect(NamedTuple):
    """The spectra with and without a shortcut.

    Attributes:
        plain, residual: the two :class:`Spectrum`.
        change: ``|γ_j^res| − |γ_j|``, shape ``(k,)``; ``−inf`` where the shortcut makes an exponent
            finite.
        change_error: its standard error, ``(k,)``.
        verdict: for each exponent ``"shrank"``, ``"grew"`` or ``"undecided"``.
        level: confidence of each verdict.
    """

    plain: Spectrum
    residual: Spectrum
    change: np.ndarray
    change_error: np.ndarray
    verdict: tuple[str, ...]
    level: float

    @property
    def shrank(self) -> np.ndarray:
        """Where ``|γ|`` shrank, ``(k,)``."""
        return np.array([word == "shrank" for word in self.verdict])

    def __repr__(self) -> str:
        lines = [f"ResidualEffect at level {self.level:g}: {self.residual.name}"]
        for j, word in enumerate(self.verdict[:6]):
            lines.append(
                f"  gamma_{j + 1}: {float(self.plain.exponents[j]):.5g} -> "
                f"{float(self.residual.exponents[j]):.5g}, {word}"
            )
        if len(self.verdict) > 6:
            counts = {w: self.verdict.count(w) for w in ("shrank", "grew", "undecided")}
            lines.append("  of all: " + ", ".join(f"{n} {w}" for w, n in counts.items() if n))
        return "\n".join(lines)


def residual_effect(
    ensemble: AbstractEnsemble,
    key: Any,
    *,
    steps: int = 4000,
    k: int | None = None,
    beta: float | None = None,
    level: float = 0.99,
    chains: int | None = None,
    error: float | None = None,
    progress: bool = False,
) -> ResidualEffect:
    """Both spectra, sampled independently, and for each exponent whether its modulus shrank.

    Args:
        ensemble: without the shortcut.
        key: random key or seed.
        steps, k, chains, error, progress: of both, as for :func:`exponents`.
        beta: with the delta operator of this β as shortcut, instead of the identity.
        level: confidence of a verdict, in (0, 1): otherwise it is "undecided".

    Raises:
        ValueError: as for :func:`exponents`.
    """
    check_ensemble("ensemble", ensemble)
    level = _checks.real_scalar("level", level, above=0, below=1)
    first, second = jax.random.split(_checks.random_key("key", key))
    other = shortcuts.residual(ensemble) if beta is None else shortcuts.delta(ensemble, beta)
    options: dict[str, Any] = {"chains": chains, "error": error, "progress": progress}
    plain = exponents(first, ensemble, steps, k, **options)
    changed = exponents(second, other, steps, k, **options)
    before, after = (np.asarray(r.exponents, float) for r in (plain, changed))
    errors = np.hypot(plain.standard_error, changed.standard_error)
    degrees = min(plain.degrees, changed.degrees)
    change, verdict = compare(before, after, errors, level, degrees)
    return ResidualEffect(plain, changed, change, errors, verdict, level)


def compare(
    before: np.ndarray, after: np.ndarray, errors: np.ndarray, level: float, degrees: int
) -> tuple[np.ndarray, tuple[str, ...]]:
    """``|after| − |before|`` and the verdict on each."""
    with np.errstate(invalid="ignore"):
        change = np.abs(after) - np.abs(before)
    # Both −inf: nothing changed.
    change = np.where(np.isnan(change), 0.0, change)
    # Round-off of means of exact increments is not a change.
    bound = scipy.stats.t.ppf(0.5 + 0.5 * level, degrees) * np.asarray(errors) + 1e-12
    words = np.where(change < -bound, "shrank", np.where(change > bound, "grew", "undecided"))
    return change, tuple(str(word) for word in words)


class PhaseDiagram(NamedTuple):
    """The effect of a shortcut over dimension and scale.

    Attributes:
        dimensions, scales: the axes, ``(D,)`` and ``(S,)``.
        plain, residual: the exponent without and with the identity as shortcut, ``(D, S)``.
        verdict: −1 where its modulus shrank, +1 where it grew, 0 where undecided, ``(D, S)``.
        which: which exponent, counted from 1.
        exact: where closed forms were used on both sides, ``(D, S)``.
    """

    dimensions: np.ndarray
    scales: np.ndarray
    plain: np.ndarray
    residual: np.ndarray
    verdict: np.ndarray
    which: int
    exact: np.ndarray

    def __repr__(self) -> str:
        shares = [float(np.mean(self.verdict == v)) for v in (-1, 1, 0)]
        return (
            f"PhaseDiagram of gamma_{self.which}: {len(self.dimensions)} dimensions x "
            f"{len(self.scales)} scales\n  |gamma| shrank in {shares[0]:.0%}, grew in "
            f"{shares[1]:.0%}, undecided in {shares[2]:.0%} of the cells"
        )


def phase_diagram(
    dimensions: Sequence[int],
    scales: Sequence[float],
    *,
    family: Callable[[int, float], AbstractEnsemble] | None = None,
    which: int = 1,
    key: Any = 0,
    steps: int = 2000,
    chains: int | None = None,
    level: float = 0.99,
    progress: bool = False,
) -> PhaseDiagram:
    """Where a residual connection brings an exponent closer to 0.

    Args:
        dimensions: d, each at least ``which``.
        scales: σ, each ≥ 0.
        family: ``family(d, σ)`` returns an ensemble; ``Gaussian(d, σ/√d)`` if left out.
        which: which exponent, counted from 1.
        key: random key or seed, for cells without closed forms.
        steps, chains, level: for those, as for :func:`residual_effect`.
        progress: show a progress bar.

    Raises:
        ValueError: an empty axis, or a ``which`` above some d.
    """
    which = _checks.whole_number("which", which, 1)
    level = _checks.real_scalar("level", level, above=0, below=1)
    ds = [_checks.whole_number("dimensions", d, 1) for d in dimensions]
    ss = [_checks.real_scalar("scales", s, minimum=0) for s in scales]
    if not ds or not ss:
        raise ArgumentError("dimensions" if not ds else "scales", "nothing", "it must not be empty")
    if min(ds) < which:
        raise ArgumentError("which", str(which), f"the smallest dimension is {min(ds)}")
    make = family or (lambda d, s: ensembles.Gaussian(d, s / math.sqrt(d)))
    key = _checks.random_key("key", key)
    shape = (len(ds), len(ss))
    plain, changed, exact = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    verdict = np.zeros(shape, int)
    code = {"shrank": -1, "grew": 1, "undecided": 0}
    cells = [(a, b) for a in range(shape[0]) for b in range(shape[1])]
    for n, (a, b) in enumerate(tqdm(cells, desc="phase diagram", disable=not progress)):
        ensemble = make(ds[a], ss[b])
        other = shortcuts.residual(ensemble)
        pair, errors, degrees = [], [], 1000
        for part, one in enumerate((ensemble, other)):
            value = _closed(one, which)
            if value is None:
                run = exponents(
                    jax.random.fold_in(key, 2 * n + part), one, steps, which, chains=chains
                )
                pair.append(float(run.exponents[-1]))
                errors.append(float(run.standard_error[-1]))
                degrees = min(degrees, run.degrees)
            else:
                pair.append(value)
                errors.append(0.0)
        exact[a, b] = max(errors) == 0
        plain[a, b], changed[a, b] = pair
        error = np.array([math.hypot(*errors)])
        _, (word,) = compare(np.array(pair[:1]), np.array(pair[1:]), error, level, degrees)
        verdict[a, b] = code[word]
    return PhaseDiagram(np.array(ds), np.array(ss), plain, changed, verdict, which, exact)


def _closed(ensemble: AbstractEnsemble, index: int) -> float | None:
    if isinstance(ensemble, shortcuts.Shortcut) and isinstance(
        ensemble.ensemble, ensembles.Gaussian
    ):
        inner = ensemble.ensemble
        if ensemble.beta is None and inner.root is None:  # no need of all d
            found = closed_forms.residual_gaussian(
                inner.d, float(inner.sigma), index, complex=inner.complex
            )
            return float(found[-1])
    known = closed_forms.closed_form(ensemble)
    if known is None or np.isnan(known[index - 1]):
        return None
    return float(known[index - 1])


class SampledThreshold(NamedTuple):
    """σ* from samples, with its standard error."""

    sigma: float
    standard_error: float


def sampled_threshold(
    key: Any,
    d: int,
    *,
    steps: int = 4000,
    chains: int = 256,
    family: Callable[[int, float], AbstractEnsemble] | None = None,
    bracket: tuple[float, float] = (0.5, 1.5),
    progress: bool = False,
) -> SampledThreshold:
    """σ*(d) of :func:`threshold` from sampled exponents only, for any family of ensembles.

    The root of ``γ_1(I + A_σ) + γ_1(A_σ)`` by the secant method, all samples from the same random
    numbers, so that the function is smooth in σ.

    Args:
        key: random key or seed.
        d: dimension, at least 1.
        steps, chains: as for :func:`exponents`.
        family: ``family(d, σ)`` returns an ensemble; ``Gaussian(d, σ/√d)`` if left out.
        bracket: two values of σ with the root in between.
        progress: show progress bars.

    Raises:
        ValueError: no change of sign between the ends of the bracket.
    """
    make = family or (lambda d, s: ensembles.Gaussian(d, s / math.sqrt(d)))
    first, second = jax.random.split(_checks.random_key("key", key))
    options: dict[str, Any] = {"chains": chains, "progress": progress}

    def gap(sigma):
        ensemble = make(d, sigma)
        a = exponents(first, ensemble, steps, 1, **options)
        b = exponents(second, shortcuts.residual(ensemble), steps, 1, **options)
        value = float(a.exponents[0] + b.exponents[0])
        return value, math.hypot(float(a.standard_error[0]), float(b.standard_error[0]))

    low, high = bracket
    (f_low, _), (f_high, error) = gap(low), gap(high)
    if not f_low < 0 < f_high:
        raise ArgumentError(
            "bracket",
            f"{bracket}, where the sum of the exponents is {f_low:.3g} and {f_high:.3g}",
            "it must be negative at the lower end and positive at the upper one",
        )
    for _ in range(20):
        # Illinois: false position that does not get stuck at one end.
        sigma = (low * f_high - high * f_low) / (f_high - f_low)
        value, error = gap(sigma)
        if abs(value) < 0.01 * error:
            break
        if value < 0:
            low, f_low, f_high = sigma, value, f_high * (0.5 if value * f_low > 0 else 1.0)
        else:
            high, f_high, f_low = sigma, value, f_low * (0.5 if value * f_high > 0 else 1.0)
    step = 0.02 * sigma
    slope = (gap(sigma + step)[0] - gap(sigma - step)[0]) / (2 * step)
    return SampledThreshold(float(sigma), float(error / abs(slope)))
