"""The adjacency flow with delta operators on the layers' output sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import _checks
from gradflow._products import product
from gradflow.delta.operators import check_gates, unit
from gradflow.errors import ArgumentError, ShapeError
from gradflow.flows.base import AbstractFlow
from gradflow.flows.gradient import GradientFlow
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["DeltaModulatedFlow"]

# What a layer's gate is, so far as the laws depend on it.
_PLAIN, _FIXED, _FROZEN, _VARYING = "plain", "fixed", "frozen", "varying"


class _Node(NamedTuple):
    """What is conserved at a hidden node: where, and of which matrix."""

    block: Any  # projector onto the directions in which the matrix is conserved
    entry: Any  # unit vector along which its diagonal entry is conserved, or None
    matrix: Any  # C̃_i with the weights of the block
    weighted: Any  # C̃_i with the weights of the entry (and of the cross terms)


class DeltaModulatedFlow(AbstractFlow):
    """``Ẇ_i = Δ_i f_i(A)``, ``Δ_i = I − β_i k_i k_iᵀ``: along ``k_i`` at speed ``1 − β_i``.

    ``f_i`` is the plain flow of layer i, and ``Δ_i`` acts on the layer's output side. β < 1 is
    gradient flow in another metric, so that the loss falls; β = 1 freezes ``k_iᵀW_i``; β > 1
    ascends along ``k_i``, and the loss may rise: ``dL/dt = −Σ⟨G_i, Δ_i G_i⟩``, ``G_i = ∂L/∂W_i``.

    **Laws.** With ``P = Δ``, for a hidden node i between the layers i and i + 1,

    .. math:: \\tilde C_i = W_{i+1}^\\top P_{i+1}^{-1} W_{i+1}
       - P_i^{-1/2} W_i W_i^\\top P_i^{-1/2}.

    Its block orthogonal to ``k_i`` and its entry along ``k_i`` are conserved; the ``d_i − 1`` cross
    entries are not. Neither block nor entry needs a square root, so that both laws hold for β > 1
    too. Where a gate is special:

    * ``β_i = 0``: the whole ``C̃_i``.
    * ``β_i = 1``: no entry along ``k_i``; instead the frozen row ``k_iᵀW_i``.
    * ``β_i`` varying: no entry along ``k_i``, whose weight ``1/(1 − β_i)`` would change.
    * ``β_{i+1} = 1``: there is no ``P_{i+1}^{-1}``. The frozen ``a = W_{i+1}ᵀk_{i+1}`` takes its
      place, and the block orthogonal to both ``k_i`` and a is conserved.
      Where the layers i and i + 2 have fixed gates other than 1, one law more joins the ends of
      layer i + 1: ``‖W_{i+1}‖² − ‖a‖² − tr W_iᵀP_i⁻¹W_i + κᵀW_{i+2}ᵀP_{i+2}⁻¹W_{i+2}κ``, ``κ =
      k_{i+1}``.
    * ``β_{i+1}`` varying: nothing at node i.

    These are all laws at the widths and gates where the Lie algebra of the flows was computed,
    with no two gates of 1 in neighbouring layers.

    Args:
        problem: the loss of the end-to-end map.
        gates: β of every layer, in [0, 2]: one number for all layers; a sequence with a number or
            a function ``(t, state) -> ()`` for each; or one function ``(t, state) -> (h,)``.
            Functions are in JAX operations. Their values are clipped to [0, 2] on the way; values
            outside at time 0 are refused.
        directions: ``k_1, …, k_h``, ``k_i`` of shape ``(d_i,)`` and of any length but 0.

    The state is a :class:`gradflow.LinearNetwork`.

    Raises:
        ValueError: a gate outside [0, 2], a zero direction, or numbers of layers that do not
            match; for a state, widths that do not fit.
    """

    plain: GradientFlow
    numbers: Float[Array, " h"]  # the fixed gates; 0 where they vary
    schedule: Any  # the function of those that vary, or None
    directions: tuple[Array, ...]
    kinds: tuple[str, ...] = eqx.field(static=True)

    def __init__(self, problem: Problem, gates: Any, directions: Sequence[Any]):
        self.plain = GradientFlow(problem)
        if isinstance(directions, (str, bytes)) or not hasattr(directions, "__len__"):
            raise ArgumentError(
                "directions", _checks.describe(directions), "it must be a sequence [k_1, ..., k_h]"
            )
        if len(directions) == 0:
            raise ArgumentError("directions", "no directions", "there must be one for each layer")
        self.directions = tuple(
            unit(f"directions[{i}] (k_{i + 1})", k) for i, k in enumerate(directions)
        )
        depth = len(self.directions)
        self.numbers, self.kinds = jnp.zeros(depth), (_VARYING,) * depth
        self.schedule = gates if callable(gates) else None
        if self.schedule is not None:
            return
        given = gates if isinstance(gates, (list, tuple)) else None
        if given is not None and any(callable(g) for g in given):
            functions = tuple(g if callable(g) else None for g in given)
            gates = [0.0 if callable(g) else g for g in given]
            self.schedule = _Mixed(functions)
        betas = check_gates("gates", gates)
        if betas.ndim == 0:
            betas = jnp.full((depth,), betas)
        if betas.shape != (depth,):
            raise ShapeError(
                "gates", f"shape {betas.shape}", f"there are {depth} directions, one for each layer"
            )
        self.numbers = betas
        if _checks.is_concrete(betas):
            named = {0.0: _PLAIN, 1.0: _FROZEN}
            kinds = [named.get(float(b), _FIXED) for b in np.asarray(betas)]
        else:
            # Traced gates: taken as fixed numbers that are neither 0 nor 1.
            kinds = [_FIXED] * depth
        if isinstance(self.schedule, _Mixed):
            pairs = zip(kinds, self.schedule.functions, strict=True)
            kinds = [kind if function is None else _VARYING for kind, function in pairs]
        self.kinds = tuple(kinds)

    @property
    def problem(self) -> Problem:
        """The loss of the end-to-end map."""
        return self.plain.problem

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.directions)

    def gates_at(self, t: Any, state: LinearNetwork) -> Float[Array, " h"]:
        """β of every layer at time t, shape ``(h,)``."""
        if self.schedule is None:
            return self.numbers
        return jnp.clip(self._called(t, state), 0.0, 2.0)

    def _called(self, t: Any, state: LinearNetwork) -> Array:
        if self.schedule is None:
            return self.numbers
        if isinstance(self.schedule, _Mixed):
            return self.schedule(t, state, self.numbers)
        betas = jnp.asarray(self.schedule(t, state))
        if betas.shape != (self.depth,):
            raise ShapeError(
                "gates", f"values of shape {betas.shape}", f"they must have shape ({self.depth},)"
            )
        return betas

    def vector_field(self, t: Any, state: LinearNetwork, args: Any = None) -> LinearNetwork:
        """``Δ_i f_i(A)`` for every layer, in O(d_i d_{i-1}) beside the plain flow."""
        rates = self.plain.vector_field(t, state).weights
        modulated = (
            f - beta * k[:, None] * product(k[None, :], f)
            for f, k, beta in zip(rates, self.directions, self.gates_at(t, state), strict=True)
        )
        return state.with_weights(tuple(modulated))

    def loss(self, state: LinearNetwork) -> Float[Array, ""]:
        """``ℓ(W_{1:h})``, a scalar; a Lyapunov function only while all β ≤ 1."""
        return self.plain.loss(state)

    def loss_rate(self, t: Any, state: LinearNetwork) -> Float[Array, ""]:
        """``dL/dt = −Σ_i ⟨G_i, Δ_i G_i⟩``: the energy balance, negative while all β < 1."""
        total: Any = 0.0
        rates = self.plain.vector_field(t, state).weights
        for f, k, beta in zip(rates, self.directions, self.gates_at(t, state), strict=True):
            total = total - (jnp.sum(f**2) - beta * jnp.sum((k @ f) ** 2))
        return total

    def _node(self, i: int, weights: tuple[Array, ...]) -> _Node:
        """Node i, from 1."""
        own, after = self.kinds[i - 1], self.kinds[i]
        w, next_w, k, next_k = (
            weights[i - 1],
            weights[i],
            self.directions[i - 1],
            self.directions[i],
        )
        outer = next_w.T @ next_w
        row = next_k @ next_w
        if after == _FIXED:
            outer = outer + self._weight(i) * jnp.outer(row, row)
        inner = w @ w.T
        eye = jnp.eye(len(k), dtype=w.dtype)
        projector = eye if own == _PLAIN else eye - jnp.outer(k, k)
        if after == _FROZEN:
            projector = _without(projector, row)
        if after == _VARYING:
            projector = jnp.zeros_like(eye)
        entry = None
        weighted = outer - inner
        if own == _FIXED:
            scale = 1 / (1 - self.numbers[i - 1])
            # kᵀP^{-1/2} = (1 − β)^{-1/2} kᵀ, where there is a root to take.
            root = jnp.where(scale > 0, jnp.sqrt(jnp.where(scale > 0, scale, 1.0)), 1.0)
            half = eye + (root - 1) * jnp.outer(k, k)
            along = k @ inner @ k
            weighted = outer - half @ inner @ half
            weighted = weighted + (root**2 - scale) * along * jnp.outer(k, k)
            if after in (_PLAIN, _FIXED):
                entry = k
        return _Node(projector, entry, outer - inner, weighted)

    def _weight(self, i: int) -> Any:
        """``β/(1 − β)`` of layer i (from 0): what ``P⁻¹`` has along k beside the identity."""
        beta = self.numbers[i]
        return beta / (1 - beta)

    def conserved(self, state: LinearNetwork) -> list[Array]:
        """What the exact flow keeps, node by node and then layer by layer.

        For each hidden node the block of ``C̃_i`` orthogonal to ``k_i`` (``(d_i, d_i)``, zero along
        ``k_i``), then its entry along ``k_i`` (a scalar); then the frozen rows ``k_iᵀW_i``
        (``(d_{i-1},)``) of the layers with β = 1, and what they leave of the traces at their ends.
        See the class for which of these there are.
        """
        found = []
        for i in range(1, self.depth):
            node = self._node(i, state.weights)
            if self.kinds[i] != _VARYING:
                found.append(node.block @ node.matrix @ node.block)
            if node.entry is not None:
                found.append(node.entry @ node.weighted @ node.entry)
        for kind, k, w in zip(self.kinds, self.directions, state.weights, strict=True):
            if kind == _FROZEN:
                found.append(k @ w)
        for j in range(1, self.depth - 1):
            around = {self.kinds[j - 1], self.kinds[j + 1]}
            if self.kinds[j] == _FROZEN and around <= {_PLAIN, _FIXED}:
                found.append(self._trace_across(j, state.weights))
        return found

    def _trace_across(self, j: int, weights: tuple[Array, ...]) -> Array:
        """The law that a frozen layer j (from 0) leaves of the traces at both of its ends."""
        before, w, after = weights[j - 1 : j + 2]
        along = after @ self.directions[j]
        return (
            jnp.sum(w**2)
            - jnp.sum((self.directions[j] @ w) ** 2)
            - self._squares(j - 1, before)
            + self._squares(j + 1, along[:, None])
        )

    def _squares(self, i: int, matrix: Array) -> Array:
        """``tr(XᵀP⁻¹X)`` with the P of layer i (from 0)."""
        return jnp.sum(matrix**2) + self._weight(i) * jnp.sum((self.directions[i] @ matrix) ** 2)

    def broken(self, state: LinearNetwork) -> list[Array]:
        """What is left of ``C̃_i`` at each hidden node when its conserved parts are taken out.

        A symmetric matrix ``(d_i, d_i)`` for each of the h − 1 nodes: zero where ``β_i = β_{i+1} =
        0``; the cross terms of ``k_i`` for fixed gates; more where a gate is 1 or varies. Where
        ``P_i^{-1/2}`` is not real (β_i > 1) or not known, the cross terms are weighted with the
        identity in its place, ``P_{i+1}^{-1}`` likewise.
        """
        found = []
        for i in range(1, self.depth):
            node = self._node(i, state.weights)
            rest = node.weighted - node.block @ node.weighted @ node.block
            if node.entry is not None:
                k = node.entry
                rest = rest - (k @ node.weighted @ k) * jnp.outer(k, k)
            found.append(rest)
        return found

    def check_state(self, state: Any) -> LinearNetwork:
        state = self.plain.check_state(state)
        if state.depth != self.depth:
            raise ShapeError(
                "state", f"{state.depth} layers", f"there are {self.depth} gates and directions"
            )
        for i, (k, w) in enumerate(zip(self.directions, state.weights, strict=True)):
            if k.shape[0] != w.shape[0]:
                raise ShapeError(
                    f"directions[{i}] (k_{i + 1})",
                    f"shape {k.shape}",
                    f"the output of W_{i + 1} has shape ({w.shape[0]},)",
                )
        if self.schedule is not None:
            check_gates("gates", self._called(jnp.zeros(()), state), ndim=1)
        return state

    def observables(self) -> dict[str, Callable[[LinearNetwork], Any]]:
        """Those of :class:`gradflow.GradientFlow`, and ``broken``."""
        return {**self.plain.observables(), "broken": self.broken}

    def timed_observables(self) -> dict[str, Callable[[Any, LinearNetwork], Any]]:
        """``loss_rate``, the energy balance, and ``gates``, β of every layer."""
        return {"loss_rate": self.loss_rate, "gates": self.gates_at}

    def target_strengths(self) -> Float[Array, " modes"] | None:
        return self.plain.target_strengths()

    def fastest_rate(self, state: LinearNetwork) -> float | None:
        """That of the plain flow while no gate ascends (``‖Δ‖ = 1``); unknown otherwise."""
        if self.schedule is not None or not _checks.is_concrete(self.numbers):
            return None
        if float(jnp.max(self.numbers)) > 1:
            return None
        return self.plain.fastest_rate(state)

    def describe(self) -> dict[str, Any]:
        gates: Any = "traced"
        if _checks.is_concrete(self.numbers):
            pairs = zip(self.kinds, self.numbers, strict=True)
            gates = ["varying" if kind == _VARYING else float(beta) for kind, beta in pairs]
        return {"flow": type(self).__name__, "gates": gates, "problem": repr(self.problem)}


class _Mixed(eqx.Module):
    """Gates of which some are functions and the others numbers."""

    functions: tuple[Callable[[Any, LinearNetwork], Array] | None, ...]

    def __call__(self, t: Any, state: LinearNetwork, numbers: Array) -> Array:
        values = []
        for i, function in enumerate(self.functions):
            value = numbers[i] if function is None else jnp.asarray(function(t, state))
            if value.shape != ():
                raise ShapeError(
                    f"gates[{i}]", f"values of shape {value.shape}", "they must be scalars"
                )
            values.append(value.astype(numbers.dtype))
        return jnp.stack(values)


def _without(projector: Array, vector: Array) -> Array:
    """An orthogonal projector with the direction of a vector taken out of its range."""
    inside = projector @ vector
    size = jnp.linalg.norm(inside)
    # Round-off has no direction to be taken out.
    there = size > 1e-10 * jnp.linalg.norm(vector)
    inside = jnp.where(there, inside / jnp.where(there, size, 1.0), 0.0)
    return projector - jnp.outer(inside, inside)
