"""The small interface that every right-hand side offers."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float, PyTree

__all__ = ["AbstractFlow"]


class AbstractFlow(eqx.Module):
    """A gradient flow ``ẋ = f(t, x)`` on some state space, with what is known about it.

    A new flow defines :meth:`vector_field`, :meth:`loss` and :meth:`check_state`; the rest has
    defaults. States are pytrees of real arrays.
    """

    # Whether ∂f/∂x is symmetric: f is minus a gradient in the Euclidean metric of the state.
    symmetric_jacobian: ClassVar[bool] = False

    @abc.abstractmethod
    def vector_field(self, t: Any, state: PyTree, args: Any = None) -> PyTree:
        """``f(t, x)``, of the same structure as ``state`` (the signature of diffrax)."""

    @abc.abstractmethod
    def loss(self, state: PyTree) -> Float[Array, ""]:
        """The function that the flow descends, a scalar."""

    @abc.abstractmethod
    def check_state(self, state: Any) -> PyTree:
        """``state``, brought to the form the flow works on; ``ValueError`` if it does not fit."""

    def conserved(self, state: PyTree) -> list[Array]:
        """Arrays that the exact flow keeps (or lets decay in the known way, see :meth:`law_at`)."""
        return []

    def law_at(self, initial: list[Array], elapsed: Any) -> list[Array]:
        """What :meth:`conserved` must be ``elapsed`` after it was ``initial``."""
        return initial

    def observables(self) -> dict[str, Callable[[PyTree], PyTree]]:
        """What is recorded by default beside the loss, as functions of the state."""
        return {}

    def timed_observables(self) -> dict[str, Callable[[Any, PyTree], PyTree]]:
        """As :meth:`observables`, for functions ``(t, state)`` of the time too."""
        return {}

    def target_strengths(self) -> Float[Array, " modes"] | None:
        """The strengths at which the observable ``modes`` ends when all is learnt, if known."""
        return None

    def fastest_rate(self, state: PyTree) -> float | None:
        """An estimate of the largest decay rate met on the way from ``state``, if known."""
        return None

    def stiff_directions(self, state: PyTree) -> PyTree | None:
        """Directions that span all fast decay at ``state``, stacked along the first axis.

        None if no such set, small beside the state, is known.
        """
        return None

    def stiff_count(self) -> int | None:
        """How many :meth:`stiff_directions` there are."""
        return None

    def background_rate(self) -> Any:
        """``∂f/∂x`` off the stiff directions, roughly: a number ≤ 0."""
        return 0.0

    def describe(self) -> dict[str, Any]:
        """The flow's name and numbers for the record of a run (plain JSON values)."""
        return {"flow": type(self).__name__}
