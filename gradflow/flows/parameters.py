"""Gradient flow of the parameters of any layers, by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float, PyTree

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.flows.base import AbstractFlow
from gradflow.flows.gradient import problem_observables
from gradflow.problem import Problem

__all__ = ["ParameterFlow"]


class ParameterFlow(AbstractFlow):
    """``θ̇ = −∂L/∂θ``, ``L(θ) = ℓ(W(θ))``, for any parametrisation W(θ) of the end-to-end map.

    The state is any pytree with a method ``end_to_end()``, such as the networks of
    :mod:`gradflow.delta`. For :class:`gradflow.LinearNetwork` take :class:`gradflow.GradientFlow`,
    which knows its laws and costs fewer products.

    Args:
        problem: the loss of the end-to-end map.

    Raises:
        ValueError: ``problem`` is no :class:`gradflow.Problem`.
    """

    problem: Problem
    symmetric_jacobian: ClassVar[bool] = True

    def __init__(self, problem: Problem):
        if not isinstance(problem, Problem):
            raise ArgumentError(
                "problem", _checks.describe(problem), "it must be a gradflow.Problem"
            )
        self.problem = problem

    def vector_field(self, t: Any, state: PyTree, args: Any = None) -> PyTree:
        """``−∂L/∂θ``, of the structure of the state."""
        # Through the residual, so that the quadratic loss needs no square root of C_x.
        W, pull = jax.vjp(lambda s: s.end_to_end(), state)
        return pull(self.problem.residual(W))[0]

    def loss(self, state: PyTree) -> Float[Array, ""]:
        """``ℓ(W(θ))``, a scalar."""
        return self.problem.loss(state.end_to_end())

    def check_state(self, state: Any) -> PyTree:
        if not callable(getattr(state, "end_to_end", None)):
            raise ArgumentError(
                "state", _checks.describe(state), "it must have a method end_to_end()"
            )
        for leaf in jax.tree.leaves(state):
            _checks.real_array("state", leaf)
        shape = jax.eval_shape(lambda s: s.end_to_end(), state).shape
        if shape != self.problem.shape:
            raise ShapeError(
                "state",
                f"{state!r} with an end-to-end map of shape {shape}",
                f"this problem needs shape {self.problem.shape}",
            )
        return state

    def observables(self) -> dict[str, Callable[[PyTree], Any]]:
        """``singular_values`` of the map and, where the problem has a target, its ``modes``."""
        return problem_observables(self.problem, lambda state: state.end_to_end())

    def target_strengths(self) -> Float[Array, " modes"] | None:
        return None if self.problem.target is None else self.problem.singular_values

    def stiff_directions(self, state: PyTree) -> PyTree:
        """The gradients of all entries of ``W(θ)``, stacked: the range of ``(∂W/∂θ)ᵀ``."""
        jacobian = jax.jacrev(lambda s: s.end_to_end())(state)
        return jax.tree.map(lambda j: j.reshape(-1, *j.shape[2:]), jacobian)

    def describe(self) -> dict[str, Any]:
        return {"flow": type(self).__name__, "problem": repr(self.problem)}
