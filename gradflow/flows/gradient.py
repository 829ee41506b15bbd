"""Gradient flow of the weights of a deep linear network."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import _checks
from gradflow._products import product, spectral_norm
from gradflow.errors import ArgumentError
from gradflow.flows.base import AbstractFlow
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = [
    "GradientFlow",
    "interior_commutators",
    "largest_imbalance",
    "layer_gradients",
    "problem_observables",
]


def layer_gradients(
    weights: tuple[Array, ...], residual: Callable[[Array], Array]
) -> tuple[Array, ...]:
    """``W_{j+1:h}ᵀ R W_{1:j-1}ᵀ`` for every layer, where ``R = residual(W_{1:h})``.

    3(h−1) matrix products in all, none twice, and every intermediate has the smaller of
    ``d_0`` and ``d_h`` as one of its sides.
    """
    if weights[-1].shape[0] < weights[0].shape[1]:
        # The transposed network has the narrow end at its input.
        mirrored = layer_gradients(tuple(w.T for w in reversed(weights)), lambda W: residual(W.T).T)
        return tuple(g.T for g in reversed(mirrored))
    # h−1 products: the prefixes W_{1:1}, …, W_{1:h}.
    prefixes = [weights[0]]
    for w in weights[1:]:
        prefixes.append(product(w, prefixes[-1]))
    # carried = W_{j+1:h}ᵀ R: one product to use it and one to move it back, except at j = 1,
    # where the prefix is empty: 2(h−1) products.
    carried = residual(prefixes[-1])
    gradients = []
    for w, prefix in zip(reversed(weights[1:]), reversed(prefixes[:-1]), strict=True):
        gradients.append(product(carried, prefix.T))
        carried = product(w.T, carried)
    gradients.append(carried)
    return tuple(reversed(gradients))


def interior_commutators(weights: tuple[Array, ...]) -> list[Array]:
    """``C_i = W_{i+1}ᵀ W_{i+1} − W_i W_iᵀ``, ``i = 1 … h−1``, each ``(d_i, d_i)``."""
    return [b.T @ b - a @ a.T for a, b in itertools.pairwise(weights)]


def largest_imbalance(weights: tuple[Array, ...]) -> Float[Array, ""]:
    """``max_i ‖C_i‖_F``, 0 for a single layer."""
    norms = [jnp.linalg.norm(c) for c in interior_commutators(weights)]
    return jnp.max(jnp.stack(norms)) if norms else jnp.zeros((), weights[0].dtype)


def problem_observables(
    problem: Problem, end_to_end: Callable[[Any], Array]
) -> dict[str, Callable[[Any], Array]]:
    """``singular_values`` of the map and, where there is a target, its ``modes``."""

    def singular_values(state):
        return jnp.linalg.svd(end_to_end(state), compute_uv=False)

    if problem.target is None:
        return {"singular_values": singular_values}
    left, right = problem.singular_bases()

    def modes(state):
        return jnp.sum(left * (problem.whitened(end_to_end(state)) @ right), axis=0)

    return {"singular_values": singular_values, "modes": modes}


class GradientFlow(AbstractFlow):
    """``Ẇ_j = W_{j+1:h}ᵀ R W_{1:j-1}ᵀ − λ W_j``, the gradient flow of all layers.

    With ``R = −∇ℓ(W_{1:h})`` of the problem's loss ``ℓ``; the layer form of ``Ȧ = f(A)``
    (Wendin & Altafini, arXiv 2511.10362), see :func:`gradflow.adjacency_flow`.

    Args:
        problem: the loss of the end-to-end map.
        weight_decay: λ ≥ 0, so that the flow descends ``ℓ(W_{1:h}) + (λ/2) Σ_i ‖W_i‖_F²``.

    Raises:
        ValueError: ``problem`` is no :class:`gradflow.Problem`, or λ < 0.
    """

    problem: Problem
    weight_decay: Array
    symmetric_jacobian: ClassVar[bool] = True

    def __init__(self, problem: Problem, weight_decay: float = 0.0):
        if not isinstance(problem, Problem):
            raise ArgumentError(
                "problem", _checks.describe(problem), "it must be a gradflow.Problem"
            )
        self.problem = problem
        self.weight_decay = jnp.asarray(
            _checks.real_scalar("weight_decay", weight_decay, minimum=0),
            problem.irreducible_loss.dtype,
        )

    def vector_field(self, t: Any, state: LinearNetwork, args: Any = None) -> LinearNetwork:
        """``−∂L/∂W_i`` for every layer, as a network of the same widths."""
        descent = layer_gradients(state.weights, self.problem.residual)
        rates = tuple(
            g - self.weight_decay * w for g, w in zip(descent, state.weights, strict=True)
        )
        return state.with_weights(rates)

    def loss(self, state: LinearNetwork) -> Float[Array, ""]:
        """``ℓ(W_{1:h}) + (λ/2) Σ_i ‖W_i‖_F²``, a scalar."""
        norms = sum(jnp.sum(w**2) for w in state.weights)
        return self.problem.loss(state.end_to_end()) + 0.5 * self.weight_decay * norms

    def conserved(self, state: LinearNetwork) -> list[Array]:
        """``[C_1, …, C_{h-1}]``, constant without weight decay, ``∝ e^{−2λt}`` with it."""
        return interior_commutators(state.weights)

    def law_at(self, initial: list[Array], elapsed: Any) -> list[Array]:
        factor = jnp.exp(-2 * self.weight_decay * elapsed)
        return [factor * c for c in initial]

    def check_state(self, state: Any) -> LinearNetwork:
        if not isinstance(state, LinearNetwork):
            raise ArgumentError(
                "state", _checks.describe(state), "it must be a gradflow.LinearNetwork"
            )
        if state.weights[0].ndim != 2:
            raise ArgumentError(
                "state", f"a batch {state!r}", "it must be one network: use jax.vmap over a batch"
            )
        self.problem.check_widths(state.widths)
        return state

    def observables(self) -> dict[str, Callable[[LinearNetwork], Any]]:
        """``singular_values`` of the end-to-end map; ``balancedness``, the largest ``‖C_i‖_F``;
        and, where the problem has a target, ``modes``: the map's strengths ``u_jᵀ W C_x^{1/2} v_j``
        along the target's singular vectors in the whitened frame.
        """
        return {
            **problem_observables(self.problem, LinearNetwork.end_to_end),
            "balancedness": lambda state: largest_imbalance(state.weights),
        }

    def target_strengths(self) -> Float[Array, " modes"] | None:
        return None if self.problem.target is None else self.problem.singular_values

    def fastest_rate(self, state: LinearNetwork) -> float | None:
        """The larger of the Hessian's bound at ``state`` and its top at a balanced minimum.

        ``λ_max(C_x) Σ_l ‖W_{l+1:h}‖² ‖W_{1:l-1}‖²`` bounds the Gauss–Newton part at the state;
        ``λ_max(C_x) h s_1^{2−2/h}`` is the sharpness of a balanced minimum with top singular
        value ``s_1``. None for a general loss, traced numbers, or a start at which it overflows.
        """
        problem = self.problem
        if problem.optimum is None or not _checks.is_concrete(state, problem):
            return None
        weights, depth = tuple(np.asarray(w) for w in state.weights), state.depth
        here = 0.0
        for layer in range(depth):
            sides = [side for side in (weights[layer + 1 :], weights[:layer]) if side]
            with np.errstate(all="ignore"):
                products = [reduce(lambda total, w: w @ total, side) for side in sides]
            if not all(np.isfinite(product).all() for product in products):
                return None
            norms = [spectral_norm(product) for product in products]
            here += float(np.prod(norms)) ** 2
        strongest = spectral_norm(np.asarray(problem.optimum))
        there = depth * strongest ** (2 - 2 / depth)
        return problem.largest_curvature() * max(here, there) + float(self.weight_decay)

    def stiff_directions(self, state: LinearNetwork) -> LinearNetwork:
        """The gradients of all entries of ``W_{1:h}``, stacked: the range of ``(∂W/∂θ)ᵀ``.

        The entry ``(a, b)`` has the gradient ``(W_{l+1:h})_{ai} (W_{1:l-1})_{jb}`` in ``W_l``.
        """
        weights, depth = state.weights, state.depth
        (d_out, d_in), dtype = self.problem.shape, weights[0].dtype
        after, before = [jnp.eye(d_out, dtype=dtype)], [jnp.eye(d_in, dtype=dtype)]
        for layer in range(1, depth):
            after.append(product(after[-1], weights[depth - layer]))
            before.append(product(weights[layer - 1], before[-1]))
        return state.with_weights(
            tuple(
                jnp.einsum("ai,jb->abij", left, right).reshape(d_out * d_in, *w.shape)
                for left, right, w in zip(reversed(after), before, weights, strict=True)
            )
        )

    def stiff_count(self) -> int:
        d_out, d_in = self.problem.shape
        return d_out * d_in

    def background_rate(self) -> Array:
        return -self.weight_decay

    def describe(self) -> dict[str, Any]:
        decay = float(self.weight_decay) if _checks.is_concrete(self.weight_decay) else "traced"
        return {
            "flow": type(self).__name__,
            "weight_decay": decay,
            "problem": repr(self.problem),
        }
