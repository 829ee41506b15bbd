"""The top exponent of positive 2×2 matrices to many digits: Pollicott's determinant method."""

from __future__ import annotations

import fractions
import itertools
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError

__all__ = ["Determinant", "determinant"]

# Words, one of each class under rotation, that are visited in a minute or so.
MOST_WORDS = 2_000_000


class Determinant(NamedTuple):
    """γ_1 in high precision (numbers of mpmath).

    Attributes:
        exponent: γ_1 from words up to the full length.
        error: difference of the estimates from the two longest lengths.
        estimates: from words up to length 1, 2, ….
        derivative: ``dγ_1/dε`` at ε = 0 for probabilities ``(1−ε)p + ε e_i``, one per matrix; the
            numbers weighted with p sum to 0.
        digits: correct decimals by ``error``, at most those asked for.
    """

    exponent: Any
    error: Any
    estimates: list[Any]
    derivative: list[Any]
    digits: int

    def __float__(self) -> float:
        return float(self.exponent)

    def __repr__(self) -> str:
        import mpmath

        shown = mpmath.nstr(self.exponent, max(self.digits, 1) + 1)
        return (
            f"Determinant: gamma_1 = {shown}\n"
            f"  {self.digits} digits, error {mpmath.nstr(self.error, 2)} by the last two of "
            f"{len(self.estimates)} word lengths"
        )


def determinant(
    matrices: Any, probabilities: Any, word_length: int, *, digits: int = 30
) -> Determinant:
    """γ_1 of independent positive 2×2 matrices from all products of up to ``word_length`` of them.

    With ``λ_w`` the larger eigenvalue of the product over a word w,

    .. math:: T_n(t) = \\sum_{|w|=n} \\frac{p_w λ_w^t}{1 - \\det_w/λ_w^2}, \\quad
       D(z,t) = \\exp\\Bigl(-\\sum_n z^n T_n(t)/n\\Bigr), \\quad
       γ_1 = \\frac{∂_t D}{∂_z D}(1, 0).

    The coefficients of D fall faster than exponentially, so digits come quickly (Pollicott 2010,
    Inventiones 181). Words that are rotations of each other are visited once.

    Args:
        matrices: m matrices ``(2, 2)`` with entries > 0; whole numbers, fractions and strings such
            as ``"1/3"`` are taken exactly.
        probabilities: m numbers > 0 with sum 1, as exact as given.
        word_length: the longest words, at least 2.
        digits: decimals to work for, at least 1.

    Raises:
        ValueError: matrices that are not 2×2 or not positive, probabilities that are not positive
            or do not sum to 1, or more than two million words.
    """
    import mpmath

    word_length = _checks.whole_number("word_length", word_length, 2)
    digits = _checks.whole_number("digits", digits, 1)
    context = mpmath.mp.clone()
    context.dps = digits + 20
    found = _positive(context, matrices)
    p = _weights(context, probabilities, len(found))
    words = sum(len(found) ** n // n for n in range(1, word_length + 1))
    if words > MOST_WORDS:
        raise ArgumentError(
            "word_length",
            f"{word_length}, some {words:.2g} words of {len(found)} matrices",
            f"at most {MOST_WORDS} are visited: take shorter words, or sample by exponents",
        )
    estimates, derivative = _evaluate(context, found, p, word_length)
    error = abs(estimates[-1] - estimates[-2])
    floor = context.mpf(10) ** (-digits - 5)
    correct = int(context.floor(-context.log10(max(error, floor))))
    return Determinant(estimates[-1], error, estimates, derivative, max(0, min(digits, correct)))


def _number(context: Any, name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    try:
        if isinstance(value, str):
            value = fractions.Fraction(value.strip()) if "/" in value else value
        if isinstance(value, numbers.Rational):
            number = context.mpf(value.numerator) / value.denominator
        else:
            number = context.mpf(value)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ArgumentError(name, _checks.describe(value), "it must be a real number") from error
    if not context.isfinite(number):
        raise ArgumentError(name, str(value), "it must be finite")
    return number


def _listed(value: Any) -> Any:
    return np.asarray(value).tolist() if hasattr(value, "dtype") else value


def _positive(context: Any, matrices: Any) -> list[tuple[Any, Any, Any, Any]]:
    stack = _listed(matrices)
    if not isinstance(stack, Sequence) or isinstance(stack, str) or not stack:
        raise ShapeError("matrices", _checks.describe(matrices), "it must be a list of matrices")
    found = []
    for i, matrix in enumerate(stack):
        rows = _listed(matrix)
        square = isinstance(rows, Sequence) and len(rows) == 2
        rows = [_listed(row) for row in rows] if square else []
        if not square or any(not isinstance(r, Sequence) or len(r) != 2 for r in rows):
            raise ShapeError(
                f"matrices[{i}]",
                f"shape {np.shape(matrix)}",
                "the determinant method is for 2 x 2 matrices: sample others by exponents",
            )
        entries = [
            _number(context, f"matrices[{i}][{a}][{b}]", rows[a][b])
            for a, b in itertools.product(range(2), repeat=2)
        ]
        if min(entries) <= 0:
            raise ArgumentError(
                f"matrices[{i}]",
                f"an entry {context.nstr(min(entries), 6)}",
                "the determinant method needs all entries > 0: use method='projective' or sample",
            )
        found.append(tuple(entries))
    return found


def _weights(context: Any, probabilities: Any, number: int) -> list[Any]:
    values = _listed(probabilities)
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != number:
        raise ShapeError(
            "probabilities", _checks.describe(probabilities), f"it must have {number} entries"
        )
    p = [_number(context, f"probabilities[{i}]", x) for i, x in enumerate(values)]
    if min(p) <= 0:
        raise ArgumentError(
            "probabilities",
            context.nstr(min(p), 6),
            "every probability must be > 0: leave out matrices that are never drawn",
        )
    total = sum(p)
    # Floats such as 0.1 and 0.9 do not sum to 1 exactly.
    if abs(total - 1) > 1e-9:
        raise ArgumentError("probabilities", f"a sum of {context.nstr(total, 10)}", "it must be 1")
    return [x / total for x in p]


def _lyndon_words(letters: int, longest: int) -> Iterator[list[int]]:
    """Words that are smaller than all their rotations (Duval's algorithm)."""
    word = [-1]
    while word:
        word[-1] += 1
        yield word
        length = len(word)
        while len(word) < longest:
            word.append(word[-length])
        while word and word[-1] == letters - 1:
            word.pop()


def _evaluate(context: Any, matrices: list, p: list, longest: int) -> tuple[list, list]:
    """Estimates of γ_1 for all lengths, and derivatives along the directions ``e_i − p``."""
    m, zero = len(matrices), context.mpf(0)
    # T_n and its derivative in t at t = 0, and both once more differentiated along e_i − p.
    T = [zero] * (longest + 1)
    S = [zero] * (longest + 1)
    dT = [[zero] * m for _ in range(longest + 1)]
    dS = [[zero] * m for _ in range(longest + 1)]
    for word in _lyndon_words(m, longest):
        length = len(word)
        a, b, c, d = matrices[word[0]]
        for letter in word[1:]:
            e, f, g, h = matrices[letter]
            a, b, c, d = e * a + f * c, e * b + f * d, g * a + h * c, g * b + h * d
        half = (a + d) / 2
        determinant = a * d - b * c
        larger = half + context.sqrt(((a - d) / 2) ** 2 + b * c)
        ratio, log = determinant / larger**2, context.log(larger)
        weight = context.mpf(1)
        for letter in word:
            weight *= p[letter]
        counts = [word.count(i) for i in range(m)]
        # Powers of the word, and its rotations, which all count alike.
        w, r = context.mpf(1), context.mpf(1)
        for power in range(1, longest // length + 1):
            w, r, n = w * weight, r * ratio, power * length
            term = length * w / (1 - r)
            slope = term * power * log
            T[n] += term
            S[n] += slope
            for i in range(m):
                # d log p_w along e_i − p.
                factor = power * (counts[i] / p[i] - length)
                dT[n][i] += term * factor
                dS[n][i] += slope * factor
    # D = Σ c_n z^n with n c_n = −Σ T_j c_{n−j}; in t and along the directions by the chain rule.
    c, s = [context.mpf(1)], [zero]
    dc, ds = [[zero] * m], [[zero] * m]
    estimates: list[Any] = []
    for n in range(1, longest + 1):
        c.append(-sum((T[j] * c[n - j] for j in range(1, n + 1)), zero) / n)
        s.append(-sum((S[j] * c[n - j] + T[j] * s[n - j] for j in range(1, n + 1)), zero) / n)
        dc.append([zero] * m)
        ds.append([zero] * m)
        for i in range(m):
            dc[n][i] = (
                -sum((dT[j][i] * c[n - j] + T[j] * dc[n - j][i] for j in range(1, n + 1)), zero) / n
            )
            ds[n][i] = (
                -sum(
                    (
                        dS[j][i] * c[n - j]
                        + S[j] * dc[n - j][i]
                        + dT[j][i] * s[n - j]
                        + T[j] * ds[n - j][i]
                        for j in range(1, n + 1)
                    ),
                    zero,
                )
                / n
            )
        along_z = sum((k * c[k] for k in range(1, n + 1)), zero)
        along_t = sum(s, zero)
        estimates.append(along_t / along_z)
    derivative = []
    for i in range(m):
        change_z = sum((k * dc[k][i] for k in range(1, longest + 1)), zero)
        change_t = sum((ds[k][i] for k in range(longest + 1)), zero)
        derivative.append((change_t - estimates[-1] * change_z) / along_z)
    return estimates, derivative
