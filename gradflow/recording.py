"""What is written down at every saved time, shared by continuous and discrete training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.flows.base import AbstractFlow

__all__ = ["Recorder", "check_observe", "rate_norm", "tree_norm"]

Observe = Mapping[str, Callable[[PyTree], PyTree]]
_ALWAYS = ("loss", "gradient_norm", "law_drift", "drift", "time")


def check_observe(observe: Observe | None, flow: AbstractFlow) -> dict[str, Callable]:
    """The user's observables as a dict; refuses names that are taken and what is no function."""
    if observe is None:
        return {}
    if not isinstance(observe, Mapping):
        raise ArgumentError(
            "observe", _checks.describe(observe), "it must be a dict {name: function of the state}"
        )
    taken = {*_ALWAYS, *flow.observables(), *flow.timed_observables()}
    for name, function in observe.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError("observe", f"the name {name!r}", "names must be identifiers")
        if name in taken:
            raise ArgumentError(
                "observe", f"the name {name!r}", "it is recorded already: choose another name"
            )
        if not callable(function):
            raise ArgumentError(
                f"observe[{name!r}]",
                _checks.describe(function),
                "it must be a function of the state",
            )
    return dict(observe)


def rate_norm(flow: AbstractFlow, t: Any, state: PyTree) -> Float[Array, ""]:
    """``‖f(t, x)‖``, the Euclidean norm over all entries: the norm of the gradient."""
    return tree_norm(flow.vector_field(t, state))


def tree_norm(tree: PyTree) -> Float[Array, ""]:
    """The Euclidean norm over all entries of all arrays."""
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


class Recorder:
    """Evaluates loss, gradient norm, drift of the laws and observables at one time."""

    def __init__(self, flow: AbstractFlow, observe: Observe, start: PyTree, t0: Any):
        self._flow = flow
        self._functions = {**flow.observables(), **observe}
        self._laws = flow.conserved(start)
        self._t0 = t0

    def __call__(self, t: Any, state: PyTree) -> dict[str, PyTree]:
        flow = self._flow
        expected = flow.law_at(self._laws, t - self._t0)
        drifts = [
            jnp.max(jnp.abs(now - then))
            for now, then in zip(flow.conserved(state), expected, strict=True)
        ]
        return {
            "loss": flow.loss(state),
            "gradient_norm": rate_norm(flow, t, state),
            "law_drift": jnp.stack(drifts) if drifts else jnp.zeros(0),
            **{name: function(t, state) for name, function in flow.timed_observables().items()},
            **{name: function(state) for name, function in self._functions.items()},
        }
