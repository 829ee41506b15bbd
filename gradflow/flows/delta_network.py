"""Gradient flow of a linear delta network: directions, values and gate logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from gradflow import _checks
from gradflow.delta.networks import DeltaNetwork
from gradflow.errors import ArgumentError, ShapeError
from gradflow.flows.parameters import ParameterFlow
from gradflow.problem import Problem

__all__ = ["DeltaNetworkFlow"]


class DeltaNetworkFlow(ParameterFlow):
    """Gradient flow of a :class:`gradflow.delta.DeltaNetwork` in (k̃, w, g).

    Each layer is ``M = I + β k (w − k)ᵀ`` with ``k = k̃/‖k̃‖`` and ``β = 2σ(g)``. The loss does not
    depend on the length of ``k̃``, so that ``k̃ ⟂ ∂L/∂k̃`` and ``‖k̃‖`` is conserved, layer by layer
    (as long as no ``‖k̃‖`` is below the guard).

    Args:
        problem: the loss of the end-to-end map, of a square shape ``(d, d)``.

    Raises:
        ValueError: ``problem`` is no :class:`gradflow.Problem`, or not square: delta layers keep
            the width.
    """

    def __init__(self, problem: Problem):
        super().__init__(problem)
        if problem.shape[0] != problem.shape[1]:
            raise ShapeError(
                "problem",
                f"a target of shape {problem.shape}",
                "it must be square: a delta network keeps the width of its input",
            )

    def conserved(self, state: DeltaNetwork) -> list[Array]:
        """``‖k̃_l‖`` of every layer, scalars."""
        return list(jnp.linalg.norm(state.directions, axis=-1))

    def check_state(self, state: Any) -> DeltaNetwork:
        if not isinstance(state, DeltaNetwork):
            raise ArgumentError(
                "state", _checks.describe(state), "it must be a gradflow.delta.DeltaNetwork"
            )
        if state.directions.ndim != 2:
            raise ArgumentError(
                "state", f"a batch {state!r}", "it must be one network: use jax.vmap over a batch"
            )
        return super().check_state(state)

    def observables(self) -> dict[str, Callable[[DeltaNetwork], Any]]:
        """Beside ``singular_values`` and ``modes``: ``gates``, the β of every layer."""
        return {**super().observables(), "gates": lambda state: state.gates}
