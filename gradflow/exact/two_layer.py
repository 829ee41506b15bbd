"""Two layers from a λ-balanced start: the matrix Riccati equation, solved for any time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ArgumentError, BalanceError
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["TwoLayer", "two_layer"]


class TwoLayer(NamedTuple):
    """The solution at the times asked for, with their shape as leading axes.

    Attributes:
        W: the end-to-end map ``W_2W_1``, ``(d_2, d_0)``.
        W1tW1: ``W_1ᵀW_1``, ``(d_0, d_0)``.
        W2W2t: ``W_2W_2ᵀ``, ``(d_2, d_2)``.
    """

    W: Float[Array, "..."]
    W1tW1: Float[Array, "..."]
    W2W2t: Float[Array, "..."]


def two_layer(
    problem: Problem, net: LinearNetwork, t: ArrayLike, *, tolerance: float = 1e-10
) -> TwoLayer:
    """The gradient flow of a two-layer network from a λ-balanced start, in closed form.

    With ``Q = [W_1ᵀ; W_2]`` and ``F = [[−λ/2 I, Σᵀ], [Σ, λ/2 I]]`` the flow is the Riccati equation
    ``d(QQᵀ)/dt = F QQᵀ + QQᵀ F − (QQᵀ)²``, solved by

    .. math:: QQ^\\top(t) = e^{Ft} Q_0 \\Bigl[I + Q_0^\\top \\int_0^t e^{2Fs} ds\\, Q_0\\Bigr]^{-1}
       Q_0^\\top e^{Ft}

    (Fukumizu 1998; Braun et al. 2022; Dominé et al. 2025, arXiv 2409.14623). Any widths, λ of
    any sign, targets of any rank, any t: the exponentials are never formed beyond what round-off
    can see. A hidden layer of width 1 is λ-balanced from every start.

    Args:
        problem: whitened, with target Σ of shape ``(d_2, d_0)``.
        net: two layers with ``W_2ᵀW_2 − W_1W_1ᵀ = λI``.
        t: times ≥ 0, any shape.
        tolerance: how far from ``λI`` the start may be, relative to ``‖W_1‖² + ‖W_2‖²``.

    Raises:
        BalanceError: the start is not λ-balanced; the message says by how much.
        ValueError: inputs that are not whitened, another number of layers, widths that do not
            fit, or a negative time.
    """
    if problem.target is None or problem.input_covariance is not None:
        raise ArgumentError("problem", repr(problem), "it must be quadratic with whitened inputs")
    if net.depth != 2:
        raise ArgumentError("net", f"{net.depth} layers", "it must have 2")
    problem.check_widths(net.widths)
    W1, W2 = net.weights
    lam = _balance(W1, W2, tolerance)
    times = _checks.real_array("t", np.asarray(t, float) if _checks.is_concrete(t) else t)
    if _checks.is_concrete(times) and bool((times < 0).any()):
        raise ArgumentError("t", f"{float(times.min())}", "it must be >= 0")
    return _solve(problem.target, W1, W2, lam, times)


def _balance(W1: Array, W2: Array, tolerance: float) -> Array:
    imbalance = W2.T @ W2 - W1 @ W1.T
    hidden = imbalance.shape[0]
    lam = jnp.trace(imbalance) / hidden
    excess = jnp.linalg.norm(imbalance - lam * jnp.eye(hidden))
    size = jnp.sum(W1**2) + jnp.sum(W2**2)
    if _checks.is_concrete(excess) and float(excess) > tolerance * float(size):
        raise BalanceError(
            "net",
            f"‖C_1 − λI‖ = {float(excess):.3g} with the nearest λ = {float(lam):.3g}",
            f"a λ-balanced start is needed, to {tolerance:g} of ‖W_1‖² + ‖W_2‖² = "
            f"{float(size):.3g}: see initialize.lambda_balanced",
        )
    return lam


@jax.jit
def _solve(target: Array, W1: Array, W2: Array, lam: Array, times: Array) -> TwoLayer:
    rates, vectors = _eigensystem(target, lam)
    start = vectors.T @ jnp.concatenate([W1.T, W2])
    if start.shape[1] > start.shape[0]:
        # Only QQᵀ matters: a wide hidden layer is turned into one of n units.
        start = jnp.linalg.qr(start.T, mode="r").T
    d_in = W1.shape[1]

    def at(time):
        factor = vectors @ _factor(rates, start, time)
        square = factor @ factor.T
        return TwoLayer(square[d_in:, :d_in], square[:d_in, :d_in], square[d_in:, d_in:])

    solved = jax.lax.map(at, times.ravel())
    return jax.tree.map(lambda x: x.reshape(times.shape + x.shape[1:]), solved)


def _eigensystem(target: Array, lam: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of F from the singular vectors of the target.

    The pairs ``±√(λ²/4 + σ²)`` and the rest ``∓λ/2`` come out exact, so that zero stays zero over
    the longest time.
    """
    d_out, d_in = target.shape
    rank = min(d_out, d_in)
    U, sigma, Vt = jnp.linalg.svd(target, full_matrices=True)
    noise = sigma[0] * max(d_out, d_in) * jnp.finfo(target.dtype).eps
    sigma = jnp.where(sigma > noise, sigma, 0.0)
    half = jnp.full_like(sigma, -0.5 * lam)
    angle = 0.5 * jnp.arctan2(sigma, half)
    cos, sin = jnp.cos(angle)[None, :], jnp.sin(angle)[None, :]
    V, U_pair, V_pair = Vt.T, U[:, :rank], Vt.T[:, :rank]
    rate = jnp.hypot(half, sigma)
    blocks = [
        jnp.concatenate([V_pair * cos, U_pair * sin]),
        jnp.concatenate([-V_pair * sin, U_pair * cos]),
        jnp.concatenate([V[:, rank:], jnp.zeros((d_out, d_in - rank))]),
        jnp.concatenate([jnp.zeros((d_in, d_out - rank)), U[:, rank:]]),
    ]
    rates = [
        rate,
        -rate,
        jnp.full(d_in - rank, -0.5 * lam),
        jnp.full(d_out - rank, 0.5 * lam),
    ]
    return jnp.concatenate(rates), jnp.concatenate(blocks, axis=1)


def _factor(rates: Array, start: Array, time: Array) -> Array:
    """``Y`` with ``YYᵀ = e^{Λt} P [I + Pᵀ M P]^{-1} Pᵀ e^{Λt}``, ``M = ∫_0^t e^{2Λs} ds``."""
    hidden = start.shape[1]
    zero = rates == 0
    safe = jnp.where(zero, 1.0, rates)
    # M = growth · lag, with growth = e^{2Λt} for rising modes and 1 for the others.
    lag = jnp.where(zero, time, -jnp.expm1(-2 * jnp.abs(safe) * time) / (2 * jnp.abs(safe)))
    log_growth = jnp.maximum(rates, 0.0) * time
    log_size = log_growth + 0.5 * jnp.log(jnp.where(lag > 0, lag, 1e-300))

    # While nothing has grown far, the bracket is well conditioned.
    def near():
        grown = jnp.exp(rates * time)[:, None] * start
        sized = jnp.exp(log_size)[:, None] * start
        bracket = jnp.eye(hidden) + sized.T @ sized
        root = jnp.linalg.cholesky(bracket)
        return jax.scipy.linalg.solve_triangular(root, grown.T, lower=True).T

    # Later YYᵀ = N (Q_1Q_1ᵀ) N with [M^{1/2}P; I] = QR and N = e^{Λt} M^{-1/2}, bounded. What has
    # grown by more than e^{100} beyond the hidden layer's capacity wins outright, and by how
    # much more cannot be seen in floating point: it is clipped.
    def far():
        order = jnp.argsort(-log_size)
        sizes, rows = log_size[order], start[order]
        capacity = sizes[hidden - 1] if hidden <= len(rates) else jnp.zeros(())
        reference = jnp.maximum(capacity - 100.0, 0.0)
        relative = jnp.clip(sizes - reference, -700.0, 300.0)
        stacked = jnp.concatenate(
            [jnp.exp(relative)[:, None] * rows, jnp.exp(-reference) * jnp.eye(hidden)]
        )
        orthonormal, _, _ = jax.scipy.linalg.qr(stacked, mode="economic", pivoting=True)
        top = jnp.zeros_like(rows).at[order].set(orthonormal[: len(rates)])
        normal = jnp.exp(jnp.minimum(rates, 0.0) * time) / jnp.sqrt(jnp.where(lag > 0, lag, 1.0))
        return normal[:, None] * top

    moderate = jnp.max(log_size) + jnp.log(jnp.linalg.norm(start) + 1e-300) < 3.0
    return jax.lax.cond(moderate, near, far)
