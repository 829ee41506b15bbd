"""The flow of the end-to-end map alone, closed under 0-balance."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import _checks
from gradflow._products import spectral_norm
from gradflow.errors import ArgumentError, BalanceWarning, ShapeError
from gradflow.flows.base import AbstractFlow
from gradflow.flows.gradient import largest_imbalance, problem_observables
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["EndToEndFlow"]


class EndToEndFlow(AbstractFlow):
    """``Ẇ = Σ_j (WWᵀ)^{(h−j)/h} R (WᵀW)^{(j−1)/h}``: what depth does to gradient descent on W.

    The end-to-end map of a 0-balanced network of depth h obeys this equation for any loss
    (Arora, Cohen & Hazan 2018, arXiv 1802.06509), provided no hidden layer is narrower than
    ``min(d_0, d_h)``. Its singular values move at ``σ̇_r = h σ_r^{2−2/h} ⟨R, u_r v_rᵀ⟩``. From an
    unbalanced network the true map does something else; giving one as the start warns.

    Args:
        problem: the loss of the end-to-end map.
        depth: h ≥ 1.

    The state is ``W``, shape ``(d_h, d_0)``; a :class:`gradflow.LinearNetwork` of that depth is
    accepted as a start and replaced by its map.

    Raises:
        ValueError: no problem, or a depth below 1.
    """

    problem: Problem
    depth: int = eqx.field(static=True)

    def __init__(self, problem: Problem, depth: int):
        if not isinstance(problem, Problem):
            raise ArgumentError(
                "problem", _checks.describe(problem), "it must be a gradflow.Problem"
            )
        self.problem = problem
        self.depth = _checks.whole_number("depth", depth, 1)

    def vector_field(self, t: Any, state: Array, args: Any = None) -> Array:
        """``Σ_j (WWᵀ)^{(h−j)/h} R (WᵀW)^{(j−1)/h}``, shape ``(d_h, d_0)``."""
        return _power_sum(state, self.problem.residual(state), self.depth)

    def loss(self, state: Array) -> Float[Array, ""]:
        """``ℓ(W)``, a scalar."""
        return self.problem.loss(state)

    def check_state(self, state: Any) -> Array:
        if isinstance(state, LinearNetwork):
            self.problem.check_widths(state.widths)
            if state.depth != self.depth:
                raise ArgumentError(
                    "state",
                    f"a network of depth {state.depth}",
                    f"this flow has depth {self.depth}",
                )
            self._warn_if_unbalanced(state)
            return state.end_to_end()
        W = _checks.real_array("state", state, ndim=2)
        if W.shape != self.problem.shape:
            raise ShapeError(
                "state", f"shape {W.shape}", f"this problem needs shape {self.problem.shape}"
            )
        return W

    def _warn_if_unbalanced(self, net: LinearNetwork) -> None:
        if not _checks.is_concrete(net):
            return
        imbalance = float(largest_imbalance(net.weights))
        size = max(float(jnp.sum(w**2)) for w in net.weights)
        if imbalance > 1e-10 * size:
            warnings.warn(
                f"state: max_i ‖C_i‖_F = {imbalance:.3g} against ‖W_i‖² up to {size:.3g}; the "
                "end-to-end flow is that of a 0-balanced network and will differ from this "
                "network's GradientFlow (initialize.from_product makes a balanced one)",
                BalanceWarning,
                stacklevel=4,
            )

    def observables(self) -> dict[str, Callable[[Array], Any]]:
        """``singular_values`` of W and, where the problem has a target, its ``modes``."""
        return problem_observables(self.problem, lambda state: state)

    def target_strengths(self) -> Float[Array, " modes"] | None:
        return None if self.problem.target is None else self.problem.singular_values

    def fastest_rate(self, state: Array) -> float | None:
        """``h σ^{2−2/h} λ_max(C_x)`` at the larger of the start's and the optimum's top σ."""
        problem = self.problem
        if problem.optimum is None or not _checks.is_concrete(state, problem):
            return None
        top = max(spectral_norm(np.asarray(m)) for m in (state, problem.optimum))
        return problem.largest_curvature() * self.depth * top ** (2 - 2 / self.depth)

    def describe(self) -> dict[str, Any]:
        return {
            "flow": type(self).__name__,
            "depth": self.depth,
            "problem": repr(self.problem),
        }


def _sum_of_powers(W: Array, R: Array, depth: int) -> Array:
    """``Σ_j (WWᵀ)^{(h−j)/h} R (WᵀW)^{(j−1)/h}`` through one SVD of W.

    In singular bases the sum multiplies entry (i, k) of R by ``Σ_j σ_i^{2(h−j)/h}
    σ_k^{2(j−1)/h}``, which has no singularity where singular values coincide or vanish.
    """
    U, x, y, Vt = _full_svd(W)
    weights = sum(
        (x ** ((depth - j) / depth))[:, None] * (y ** ((j - 1) / depth))[None, :]
        for j in range(1, depth + 1)
    )
    return U @ (weights * (U.T @ R @ Vt.T)) @ Vt


_power_sum = jax.custom_jvp(_sum_of_powers, nondiff_argnums=(2,))


@_power_sum.defjvp
def _power_sum_jvp(depth, primals, tangents):
    # The derivative of an SVD blows up where singular values coincide, that of the powers does
    # not: Daleckii-Krein's divided differences give it directly.
    W, R = primals
    dW, dR = tangents
    U, x, y, Vt = _full_svd(W)
    S = jnp.zeros_like(W).at[jnp.diag_indices(min(W.shape))].set(jnp.sqrt(x[: min(W.shape)]))
    M, E = U.T @ R @ Vt.T, U.T @ dW @ Vt.T
    left, right = E @ S.T + S @ E.T, E.T @ S + S.T @ E
    change = jnp.zeros_like(W)
    for j in range(1, depth + 1):
        p, q = (depth - j) / depth, (j - 1) / depth
        d_left = _divided_differences(x, p) * left
        d_right = _divided_differences(y, q) * right
        change = change + d_left @ (M * (y**q)[None, :]) + ((x**p)[:, None] * M) @ d_right
    return _power_sum(W, R, depth), _power_sum(W, dR, depth) + U @ change @ Vt


def _full_svd(W: Array) -> tuple[Array, Array, Array, Array]:
    """U, the eigenvalues of WWᵀ and of WᵀW in its order and Vᵀ's, and Vᵀ."""
    U, sigma, Vt = jnp.linalg.svd(W, full_matrices=True)
    squares = sigma**2
    x, y = (jnp.zeros(n, W.dtype).at[: len(sigma)].set(squares) for n in W.shape)
    return U, x, y, Vt


def _divided_differences(x: Array, power: float) -> Array:
    """``(x_a^p − x_b^p)/(x_a − x_b)`` for x ≥ 0 and 0 ≤ p < 1, ``p x^{p−1}`` where they coincide.

    At a pair of zeros the derivative is infinite for 0 < p; it is taken at round-off instead.
    """
    if power == 0:
        return jnp.zeros((len(x), len(x)), x.dtype)
    tiny = jnp.finfo(x.dtype).tiny ** 0.5
    floor = jnp.maximum(jnp.max(x) * jnp.finfo(x.dtype).eps ** 2, tiny)
    high = jnp.maximum(jnp.maximum(x[:, None], x[None, :]), floor)
    low = jnp.minimum(x[:, None], x[None, :])
    log_ratio = jnp.log(jnp.maximum(low / high, tiny))
    close = log_ratio > -1e-12
    ratio = jnp.expm1(power * log_ratio) / jnp.expm1(jnp.where(close, -1.0, log_ratio))
    return high ** (power - 1) * jnp.where(close, power, ratio)
