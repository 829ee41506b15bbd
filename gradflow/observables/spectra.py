"""Singular values and vectors of the end-to-end map and of the layers."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow.flows.gradient import interior_commutators
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = [
    "Alignment",
    "alignment",
    "effective_rank",
    "layer_singular_values",
    "nonnormality",
    "singular_values",
]


class Alignment(NamedTuple):
    """Overlaps of singular vectors, as absolute cosines in [0, 1].

    Attributes:
        left: ``|u_jᵀ û_k|`` between the data's and the network's left vectors, ``(r, r)``.
        right: the same for the right vectors, ``(r, r)``.
        layers: for every hidden layer i, the overlaps of the left vectors of ``W_i`` (rows)
            with the right vectors of ``W_{i+1}`` (columns).
    """

    left: Float[Array, "r r"]
    right: Float[Array, "r r"]
    layers: tuple[Array, ...]


def singular_values(net: LinearNetwork) -> Float[Array, " r"]:
    """Singular values of the end-to-end map, descending, ``r = min(d_0, d_h)``."""
    return jnp.linalg.svd(net.end_to_end(), compute_uv=False)


def layer_singular_values(net: LinearNetwork) -> list[Array]:
    """Singular values of each layer, descending, ``min(d_{i-1}, d_i)`` for layer i."""
    return [jnp.linalg.svd(w, compute_uv=False) for w in net.weights]


def effective_rank(net: LinearNetwork) -> Float[Array, ""]:
    """``exp(−Σ p_j ln p_j)`` with ``p = σ/Σσ`` over the end-to-end map's singular values.

    A real number between 1 and ``min(d_0, d_h)``, 0 for the zero map (Roy & Vetterli 2007).
    """
    values = singular_values(net)
    total = values.sum()
    p = values / jnp.where(total > 0, total, 1.0)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)))
    return jnp.where(total > 0, jnp.exp(entropy), 0.0)


def alignment(net: LinearNetwork, problem: Problem) -> Alignment:
    """Singular-vector overlaps with the data, and between neighbouring layers.

    The network's vectors are those of ``W_{1:h} C_x^{1/2}``, the data's those of
    ``C_yx (C_x^+)^{1/2}``: both in the whitened frame. Identity matrices mean a decoupled network.

    Raises:
        ValueError: the problem has no target, or another shape than the network's map.
    """
    problem.check_widths(net.widths)
    left, right = problem.singular_bases()
    U, _, Vt = jnp.linalg.svd(problem.whitened(net.end_to_end()), full_matrices=False)
    factors = [jnp.linalg.svd(w, full_matrices=False) for w in net.weights]
    layers = tuple(
        jnp.abs(before[0].T @ after[2].T) for before, after in itertools.pairwise(factors)
    )
    return Alignment(jnp.abs(left.T @ U), jnp.abs(right.T @ Vt.T), layers)


def nonnormality(net: LinearNetwork) -> Float[Array, ""]:
    """``‖AAᵀ − AᵀA‖_F`` of the adjacency matrix, from its diagonal blocks.

    The interior blocks are ``−C_i`` (conserved), the first is ``−W_1ᵀW_1`` and the last
    ``W_hW_hᵀ`` (not conserved).
    """
    first, last = net.weights[0], net.weights[-1]
    blocks = [first.T @ first, last @ last.T, *interior_commutators(net.weights)]
    return jnp.sqrt(sum(jnp.sum(block**2) for block in blocks))
