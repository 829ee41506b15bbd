"""Gradient flow of the branches beside frozen shortcuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import _checks
from gradflow.delta.operators import DeltaOperator
from gradflow.errors import ArgumentError, ShapeError
from gradflow.flows.base import AbstractFlow
from gradflow.flows.gradient import GradientFlow
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["ResidualFlow"]


class ResidualFlow(AbstractFlow):
    """``Ẇ_i = f_i(A(M))`` for layers ``M_i = D_i + W_i`` with frozen shortcuts ``D_i``.

    The shortcuts do not move, so that ``Ṁ_i = Ẇ_i`` is the plain flow at M: a residual linear
    network is a plain one started near its shortcuts. Its laws are ``C_i(M) = M_{i+1}ᵀM_{i+1} −
    M_iM_iᵀ``.

    Args:
        problem: the loss of the end-to-end map ``M_h ⋯ M_1``.
        shortcuts: ``D_1, …, D_h``: matrices of the layers' shapes, delta operators
            (:func:`gradflow.delta.operator`), or None for a layer with the identity (1 on the
            main diagonal where it is not square). Identities throughout if left out.

    The state is a :class:`gradflow.LinearNetwork` of the branches ``W_i``.

    Raises:
        ValueError: no problem, or a shortcut that is no matrix of finite real floats; for a state,
            shapes that do not fit the shortcuts.
    """

    plain: GradientFlow
    shortcuts: tuple[Array | None, ...] | None
    symmetric_jacobian: ClassVar[bool] = True

    def __init__(
        self,
        problem: Problem,
        shortcuts: Sequence[Any] | LinearNetwork | None = None,
    ):
        self.plain = GradientFlow(problem)
        if isinstance(shortcuts, LinearNetwork):
            shortcuts = shortcuts.weights
        if shortcuts is not None and (
            isinstance(shortcuts, (str, bytes, DeltaOperator)) or not hasattr(shortcuts, "__len__")
        ):
            raise ArgumentError(
                "shortcuts", _checks.describe(shortcuts), "it must be a sequence [D_1, ..., D_h]"
            )
        self.shortcuts = (
            None if shortcuts is None else tuple(_matrix(i, D) for i, D in enumerate(shortcuts))
        )

    @property
    def problem(self) -> Problem:
        """The loss of the end-to-end map."""
        return self.plain.problem

    def effective(self, state: LinearNetwork) -> LinearNetwork:
        """The network of the layers ``M_i = D_i + W_i``."""
        shortcuts = (None,) * state.depth if self.shortcuts is None else self.shortcuts
        return state.with_weights(
            tuple(
                w + (jnp.eye(w.shape[0], w.shape[1], dtype=w.dtype) if D is None else D)
                for D, w in zip(shortcuts, state.weights, strict=True)
            )
        )

    def vector_field(self, t: Any, state: LinearNetwork, args: Any = None) -> LinearNetwork:
        """``−∂L/∂W_i = −∂L/∂M_i`` for every layer."""
        return self.plain.vector_field(t, self.effective(state))

    def loss(self, state: LinearNetwork) -> Float[Array, ""]:
        """``ℓ(M_h ⋯ M_1)``, a scalar."""
        return self.plain.loss(self.effective(state))

    def conserved(self, state: LinearNetwork) -> list[Array]:
        """``[C_1(M), …, C_{h-1}(M)]``."""
        return self.plain.conserved(self.effective(state))

    def check_state(self, state: Any) -> LinearNetwork:
        state = self.plain.check_state(state)
        if self.shortcuts is None:
            return state
        if len(self.shortcuts) != state.depth:
            raise ShapeError(
                "state",
                f"{state.depth} branches",
                f"there are {len(self.shortcuts)} shortcuts, one for each layer",
            )
        for i, (D, w) in enumerate(zip(self.shortcuts, state.weights, strict=True)):
            if D is not None and D.shape != w.shape:
                raise ShapeError(
                    f"state.weights[{i}] (W_{i + 1})",
                    f"shape {w.shape}",
                    f"its shortcut D_{i + 1} has shape {D.shape}",
                )
        return state

    def observables(self) -> dict[str, Callable[[LinearNetwork], Any]]:
        """Those of :class:`gradflow.GradientFlow` at the layers ``M_i``."""

        def at_layers(function):
            return lambda state: function(self.effective(state))

        return {name: at_layers(function) for name, function in self.plain.observables().items()}

    def target_strengths(self) -> Float[Array, " modes"] | None:
        return self.plain.target_strengths()

    def fastest_rate(self, state: LinearNetwork) -> float | None:
        return self.plain.fastest_rate(self.effective(state))

    def stiff_directions(self, state: LinearNetwork) -> LinearNetwork:
        return self.plain.stiff_directions(self.effective(state))

    def describe(self) -> dict[str, Any]:
        return {
            "flow": type(self).__name__,
            "shortcuts": "identity" if self.shortcuts is None else "given",
            "problem": repr(self.problem),
        }


def _matrix(i: int, D: Any) -> Array | None:
    if D is None:
        return None
    if isinstance(D, DeltaOperator):
        D = D.matrix()
    elif isinstance(D, np.generic) or np.ndim(D) == 0:
        raise ArgumentError(
            f"shortcuts[{i}] (D_{i + 1})",
            _checks.describe(D),
            "it must be a matrix, a delta operator or None",
        )
    return _checks.real_array(f"shortcuts[{i}] (D_{i + 1})", D, ndim=2)
