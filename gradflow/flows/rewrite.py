"""The depth flow of a rewrite block: depth as continuous time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import _checks
from gradflow.delta.blocks import DeltaBlock, check_state
from gradflow.errors import ArgumentError
from gradflow.flows.base import AbstractFlow

__all__ = ["RewriteFlow"]


class RewriteFlow(AbstractFlow):
    """``Ẋ = β(X) k(X) (v(X)ᵀ − k(X)ᵀX)``, of which a stack of delta blocks is the Euler method.

    With frozen k, v and β the readout error ``kᵀX − vᵀ`` decays like ``e^{−βt}`` and never
    changes its sign, while a block with β > 1 turns it (arXiv 2601.00417). Where the parts depend
    on the state there is no function that always falls: the error may grow or oscillate.

    Args:
        block: a :class:`gradflow.delta.DeltaBlock`.

    The state is X, shape ``(d,)`` or ``(d, d_v)``.

    Raises:
        ValueError: no delta block; a state whose shape does not fit the block's parts.
    """

    block: DeltaBlock

    def __init__(self, block: DeltaBlock):
        if not isinstance(block, DeltaBlock):
            raise ArgumentError(
                "block", _checks.describe(block), "it must be a gradflow.delta.DeltaBlock"
            )
        self.block = block

    def vector_field(self, t: Any, state: Array, args: Any = None) -> Array:
        """``β k (vᵀ − kᵀX)``, of the shape of X."""
        return self.block.increment(state)

    def loss(self, state: Array) -> Float[Array, ""]:
        """``½ ‖kᵀX − vᵀ‖²`` with the parts at X, a scalar."""
        return 0.5 * jnp.sum(self.block.readout_error(state) ** 2)

    def check_state(self, state: Any) -> Array:
        X = check_state("state", state)
        self.block.parts(X)  # refuses parts that do not fit
        return X

    def observables(self) -> dict[str, Callable[[Array], Any]]:
        """``readout_error``, kᵀX − vᵀ, and ``gate``, β, with the parts at X."""
        return {
            "readout_error": self.block.readout_error,
            "gate": lambda state: self.block.parts(state)[2],
        }

    def describe(self) -> dict[str, Any]:
        return {"flow": type(self).__name__, "block": type(self.block).__name__}
