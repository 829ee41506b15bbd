"""Closed forms of a single mode: scalar chains ``u = a_h ⋯ a_1`` driven to the strength ``s``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ArgumentError

__all__ = [
    "escape_time",
    "infinite_depth_mode",
    "mode",
    "mode_time",
    "unbalanced_mode",
    "unbalanced_mode_time",
]

# Terms of the two power series in z and in 1 − z, each used up to 1/2: 2⁻⁶⁰ is below round-off.
_TERMS = 60
# The Newton iterations below start within a few units of a convex problem's root.
_ITERATIONS = 60


def mode(s: ArrayLike, u0: ArrayLike, t: ArrayLike, depth: int) -> Float[Array, "..."]:
    """A balanced mode, ``u̇ = h u^{2−2/h} (s − u)``, ``u(0) = u_0``.

    Depth 1 is exponential, depth 2 logistic. For h > 2 the equation is separable,

    .. math:: h s^{2-2/h} t = F(u/s) - F(u_0/s), \\qquad
       F(x) = -\\frac{x^{2/h-1}}{1-2/h} + x^{2/h} \\sum_{k \\ge 0} \\frac{x^k}{k + 2/h} ,

    and inverted by Newton's method in ``ln(x/(1−x))``, where F is monotone and concave. Near
    x = 1 the sum is taken from its expansion in 1 − x with the logarithm split off, and for
    ``u_0 > s`` the same sum in 1/x is used, so no digits are lost in either limit. ``s = 0`` decays
    like ``[(2h−2)t + u_0^{−(2h−2)/h}]^{−h/(2h−2)}``. (Saxe et al. 2014, arXiv 1312.6120.)

    Args:
        s: the data's singular value, ≥ 0.
        u0: strength at time 0, > 0.
        t: times ≥ 0, in units of gradient-flow time.
        depth: h ≥ 1.

    Returns:
        ``u(t)``, of the broadcast shape of ``s``, ``u0`` and ``t``.

    Raises:
        ValueError: a negative ``s`` or ``t``, ``u0 ≤ 0``, or a depth below 1.
    """
    depth = _checks.whole_number("depth", depth, 1)
    s, u0, t = _mode_arguments(s, u0, t)
    return _mode(s, u0, t, depth)


def infinite_depth_mode(s: ArrayLike, u0: ArrayLike, t: ArrayLike) -> Float[Array, "..."]:
    """The limit h → ∞ with time scaled by h: ``u̇ = u² (s − u)``, ``u(0) = u_0``.

    ``u(t)`` is the limit of ``mode(s, u0, t/h, depth=h)``. Arguments, shape and errors as for
    :func:`mode`.
    """
    s, u0, t = _mode_arguments(s, u0, t)
    return _mode(s, u0, t, None)


def unbalanced_mode(
    s: ArrayLike, a0: ArrayLike, b0: ArrayLike, t: ArrayLike
) -> Float[Array, "..."]:
    """Two layers from any start: ``u = ab`` with ``ȧ = b(s − ab)``, ``ḃ = a(s − ab)``.

    Obeys ``u̇ = √(c² + 4u²)(s − u)`` with the conserved ``c = a² − b²``. As a 2 × 2 Riccati equation
    it is solved by exponentials of ``[[c/2, s], [s, −c/2]]``, here without cancellation for
    any size and sign of c, s and t.

    Args:
        s: the data's singular value (any sign).
        a0, b0: the weights of the two layers at time 0 (any sign; both 0 stays at 0).
        t: times ≥ 0.

    Returns:
        ``u(t)``, of the broadcast shape of the arguments.

    Raises:
        ValueError: a negative time, or numbers that are not finite.
    """
    s, a0, b0, t = _broadcast(s=s, a0=a0, b0=b0, t=t)
    _refuse("t", t, t < 0, "it must be >= 0")
    half_c = 0.5 * (a0 - b0) * (a0 + b0)
    half_rate = jnp.hypot(half_c, s)
    # Eigenvectors (cos φ, sin φ) and (−sin φ, cos φ) with eigenvalues ±half_rate.
    angle = 0.5 * jnp.arctan2(s, half_c)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    growing, decaying = cos * a0 + sin * b0, cos * b0 - sin * a0
    # Everything below is divided by exp(half_rate t), the square by exp(2 half_rate t).
    fade = jnp.exp(-2 * half_rate * t)
    a = cos * growing - sin * decaying * fade
    b = sin * growing + cos * decaying * fade
    safe = jnp.where(half_rate > 0, half_rate, 1.0)
    lag = jnp.where(half_rate > 0, -jnp.expm1(-2 * half_rate * t) / (2 * safe), t)
    return a * b / (fade + growing**2 * lag + decaying**2 * lag * fade)


def unbalanced_mode_time(
    s: ArrayLike, a0: ArrayLike, b0: ArrayLike, u: ArrayLike
) -> Float[Array, "..."]:
    """When the product of two layers reaches ``u``: the inverse of :func:`unbalanced_mode`.

    With ``c = a² − b²``, ``r = √(c² + 4u²)`` and ``K = √(c² + 4s²)``,

    .. math:: t = \\frac1K \\Bigl[\\ln \\frac{K + c + 2s (2u + r - c)/(2u + r + c)}
       {c/(K + 2s) + 4s/(2u + r + c) - 1}\\Bigr]_{u_0}^{u}

    for c ≥ 0 (the layers are interchangeable), the logistic law at c = 0.

    Args:
        s: the data's singular value, > 0.
        a0, b0: the weights of the two layers at time 0, with ``a_0 b_0 < s``.
        u: strength to be reached.

    Returns:
        times of the broadcast shape; ``inf`` where ``u`` is not between ``a_0 b_0`` and ``s``, or
        where the start is the origin.

    Raises:
        ValueError: ``s ≤ 0``, or numbers that are not finite.
    """
    s, a0, b0, u = _broadcast(s=s, a0=a0, b0=b0, u=u)
    _refuse("s", s, s <= 0, "it must be > 0")
    c = jnp.abs((a0 - b0) * (a0 + b0))
    K = jnp.hypot(c, 2 * s)
    start = a0 * b0

    def clock(x):
        r = jnp.hypot(c, 2 * x)
        # 2x + r without cancellation for x < 0.
        grown = jnp.where(x >= 0, 2 * x + r, c**2 / jnp.where(x < 0, r - 2 * x, 1.0))
        above = K + c + 2 * s * (grown - c) / (grown + c)
        return jnp.log(above / (c / (K + 2 * s) + 4 * s / (grown + c) - 1))

    met = (u >= start) & (u < s)
    inner = jnp.where(met, u, 0.5 * (start + s))
    elapsed = (clock(inner) - clock(start)) / K
    return jnp.where(met & (jnp.abs(a0) + jnp.abs(b0) > 0), elapsed, jnp.inf)


def mode_time(s: ArrayLike, u0: ArrayLike, u: ArrayLike, depth: int) -> Float[Array, "..."]:
    """When a balanced mode that starts at ``u0`` passes ``u``: the inverse of :func:`mode`.

    Args:
        s: the data's singular value, > 0.
        u0: strength at time 0, > 0.
        u: strength to be passed, > 0.
        depth: h ≥ 1.

    Returns:
        times ≥ 0 of the broadcast shape; ``inf`` where ``u`` does not lie between ``u0`` and ``s``.

    Raises:
        ValueError: an argument out of range.
    """
    depth = _checks.whole_number("depth", depth, 1)
    s, u0, u = _broadcast(s=s, u0=u0, u=u)
    _refuse("s", s, s <= 0, "it must be > 0: a mode of strength 0 is not learnt")
    _refuse("u0", u0, u0 <= 0, "it must be > 0")
    _refuse("u", u, u <= 0, "it must be > 0")
    return _mode_time(s, u0, u, depth)


@partial(jax.jit, static_argnames="depth")
def _mode_time(s: Array, u0: Array, u: Array, depth: int) -> Array:
    rising = (u0 <= u) & (u < s)
    falling = (s < u) & (u <= u0)
    if depth == 1:
        between = jnp.where(rising | falling, s - u, 1.0)
        return jnp.where(rising | falling, jnp.log1p((u - u0) / between), jnp.inf)
    speed = depth * s ** (2 - 2 / depth)

    def elapsed(integral, first, last, met):
        first, last = (jnp.where(met, x, 0.5) for x in (first, last))
        return (integral(_logit(last), depth) - integral(_logit(first), depth)) / speed

    up = elapsed(_below, u0 / s, u / s, rising)
    down = elapsed(_above, s / u0, s / u, falling)
    return jnp.where(rising, up, jnp.where(falling, down, jnp.inf))


def escape_time(
    s: ArrayLike, u0: ArrayLike, depth: int, fraction: float = 0.5
) -> Float[Array, "..."]:
    """When a balanced mode first reaches ``fraction · s``: the length of its plateau.

    Exact, by :func:`mode_time`: ``ln(s/u_0)/(2s)`` up to a constant for h = 2 and
    ``≈ u_0^{−(1−2/h)}/((h−2)s)`` for h > 2 as ``u_0 → 0``.

    Args:
        s: the data's singular value, > 0.
        u0: strength at time 0, > 0.
        depth: h ≥ 1.
        fraction: of ``s``, in (0, 1).

    Returns:
        times ≥ 0, 0 where ``u0`` is beyond already, of the broadcast shape of ``s`` and ``u0``.

    Raises:
        ValueError: an argument out of range.
    """
    fraction = _checks.real_scalar("fraction", fraction, above=0, below=1)
    s, u0 = _broadcast(s=s, u0=u0)
    beyond = u0 >= fraction * s
    return jnp.where(beyond, 0.0, mode_time(s, u0, fraction * s, depth))


def _logit(x: Array) -> Array:
    return jnp.log(x) - jnp.log1p(-x)


def _mode_arguments(s: Any, u0: Any, t: Any) -> tuple[Array, Array, Array]:
    s, u0, t = _broadcast(s=s, u0=u0, t=t)
    _refuse("s", s, s < 0, "a singular value must be >= 0")
    _refuse("u0", u0, u0 <= 0, "it must be > 0: a balanced mode never leaves or crosses 0")
    _refuse("t", t, t < 0, "it must be >= 0")
    return s, u0, t


def _broadcast(**arguments: Any) -> list[Array]:
    arrays = []
    for name, value in arguments.items():
        if np.ndim(value) == 0 and not hasattr(value, "dtype"):
            value = _checks.real_scalar(name, value)
        elif hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.integer):
            value = jnp.asarray(value, float)  # whole times and strengths are fine
        arrays.append(_checks.real_array(name, value))
    try:
        return list(jnp.broadcast_arrays(*arrays))
    except ValueError as error:
        shapes = ", ".join(f"{n} {a.shape}" for n, a in zip(arguments, arrays, strict=True))
        raise ArgumentError(next(iter(arguments)), shapes, "the shapes must broadcast") from error


def _refuse(name: str, value: Array, wrong: Array, remedy: str) -> None:
    if _checks.is_concrete(value) and bool(wrong.any()):
        raise ArgumentError(name, f"{np.asarray(value)[np.asarray(wrong)][0]}", remedy)


@partial(jax.jit, static_argnames="depth")
def _mode(s: Array, u0: Array, t: Array, depth: int | None) -> Array:
    if depth == 1:
        return u0 * jnp.exp(-t) - s * jnp.expm1(-t)
    positive = jnp.where(s > 0, s, 1.0)
    start = u0 / positive
    exponent = 2.0 if depth is None else 2 - 2 / depth
    time = (1 if depth is None else depth) * positive**exponent * t
    # Each branch gets an argument from its own side, so that the other's is never nan.
    rising = _invert(jnp.where(start < 1, start, 0.5), time, depth, _below, _guess_below)
    falling = _invert(jnp.where(start > 1, 1 / start, 0.5), time, depth, _above, _guess_above)
    relaxed = jnp.where(start < 1, positive * rising, jnp.where(start > 1, positive / falling, s))
    rate = 1 if depth is None else depth
    # s = 0: u̇ = −h u^{exponent + 1}.
    decayed = (exponent * rate * t + u0**-exponent) ** (-1 / exponent)
    return jnp.where(s > 0, relaxed, decayed)


def _invert(start: Array, time: Array, depth: int | None, integral: Any, guess: Any) -> Array:
    """``x`` with ``integral(x) = integral(start) + time``, both in (0, 1)."""
    theta_start = _logit(start)
    target = integral(theta_start, depth) + time

    def newton(_, theta):
        slope = jax.nn.sigmoid(theta) ** integral.power(depth)
        return jnp.maximum(theta - (integral(theta, depth) - target) / slope, theta_start)

    theta = jnp.maximum(guess(target, depth), theta_start)
    return jax.nn.sigmoid(jax.lax.fori_loop(0, _ITERATIONS, newton, theta))


def _below(theta: Array, depth: int | None) -> Array:
    """``∫ dx / (x^{2−2/h} (1−x))`` at ``x = σ(θ) < 1``; its slope in θ is ``x^{2/h−1}``."""
    x = jax.nn.sigmoid(theta)
    if depth is None:
        return theta - 1 / x
    if depth == 2:
        return theta
    b = 2 / depth
    return -(x ** (b - 1)) / (1 - b) + x**b * _lerch(b, theta)


def _above(theta: Array, depth: int | None) -> Array:
    """The same integral for x > 1, in ``z = 1/x = σ(θ)``; its slope in θ is ``z^{2−2/h}``."""
    c = 2.0 if depth is None else 2 - 2 / depth
    return jax.nn.sigmoid(theta) ** c * _lerch(c, theta)


_below.power = lambda depth: -1.0 if depth is None else 2 / depth - 1  # type: ignore[attr-defined]
_above.power = lambda depth: 2.0 if depth is None else 2 - 2 / depth  # type: ignore[attr-defined]


def _guess_below(target: Array, depth: int | None) -> Array:
    # On the plateau the first term alone; later the logarithm alone.
    a = 1.0 if depth is None else 1 - 2 / depth
    if a == 0:
        return target
    plateau = -jnp.log(jnp.maximum(-a * target, 1.0)) / a
    return jnp.where(target < 0, plateau, target)


def _guess_above(target: Array, depth: int | None) -> Array:
    c = 2.0 if depth is None else 2 - 2 / depth
    return jnp.where(c * target < 0.1, jnp.log(jnp.maximum(c * target, 1e-300)) / c, target)


def _lerch(b: float, theta: Array) -> Array:
    """``Σ_k z^k/(k+b)`` at ``z = σ(θ)``, so that 1 − z and its logarithm keep all digits."""
    k = np.arange(_TERMS)
    z, rest = jax.nn.sigmoid(theta), jax.nn.sigmoid(-theta)
    near_zero = _horner(jnp.where(z <= 0.5, z, 0.5), jnp.asarray(1 / (k + b)))
    # DLMF 15.8.10 for c = a + b, a = 1: the logarithm multiplies (1 − rest)^{−b}.
    pochhammer = np.concatenate([[1.0], np.cumprod((b + k[:-1]) / (k[:-1] + 1))])
    digammas = digamma(jnp.asarray(k + 1.0)) - digamma(jnp.asarray(k + b))
    small = jnp.where(z > 0.5, rest, 0.5)
    near_one = _horner(small, jnp.asarray(pochhammer) * digammas)
    log_small = jnp.where(z > 0.5, -jnp.logaddexp(theta, 0.0), np.log(0.5))
    near_one = near_one - log_small * _horner(small, jnp.asarray(pochhammer))
    return jnp.where(z <= 0.5, near_zero, near_one)


def _horner(x: Array, coefficients: Array) -> Array:
    return jax.lax.fori_loop(
        0,
        len(coefficients),
        lambda i, total: total * x + coefficients[len(coefficients) - 1 - i],
        jnp.zeros_like(x),
    )
