"""The rewrite block and its neighbours, all of one interface, and stacks of them by scan."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.delta.operators import GUARD, check_gates, gate, guarded, rotation, unit
from gradflow.errors import ArgumentError, ShapeError

__all__ = [
    "AbstractBlock",
    "Affine",
    "Contraction",
    "DeltaBlock",
    "HighwayBlock",
    "InvertibleBlock",
    "OrthogonalBlock",
    "ResidualBlock",
    "Stack",
    "rewrite",
    "stack",
    "unroll",
]


def rewrite(X: ArrayLike, k: ArrayLike, v: ArrayLike, beta: Any) -> Float[Array, "..."]:
    """``X + β k (vᵀ − kᵀX)``: erase what X holds along k and write v there.

    For a unit vector k this is ``Δ X + β k vᵀ``, and the readout error shrinks to ``kᵀX⁺ − vᵀ =
    (1 − β)(kᵀX − vᵀ)``; k is taken as it is. Costs O(d) per column (arXiv 2601.00417).

    Args:
        X: the state, shape ``(d,)`` or ``(d, d_v)``.
        k: the direction, shape ``(d,)``.
        v: the value, a scalar for a vector state, shape ``(d_v,)`` for a matrix.
        beta: the gate, in [0, 2].

    Raises:
        ValueError: shapes that do not fit, or a gate outside [0, 2].
    """
    X = check_state("X", X)
    k, v = jnp.asarray(k), jnp.asarray(v)
    _fits(X, k, v, "k", "v")
    beta = _checks.real_scalar("beta", beta, minimum=0, maximum=2)
    return X + _increment(X, k, v, beta)


def _increment(X: Array, k: Array, v: Array, beta: Any) -> Array:
    return beta * jnp.tensordot(k, v - k @ X, 0)


def check_state(name: str, value: Any) -> Array:
    """``value`` as a state: a vector ``(d,)`` or a matrix ``(d, d_v)`` of finite real floats."""
    X = _checks.real_array(name, value)
    if X.ndim not in (1, 2):
        raise ShapeError(name, f"shape {X.shape}", "it must be a vector (d,) or a matrix (d, d_v)")
    return X


def _fits(X: Array, k: Array, v: Array, name_k: str, name_v: str) -> None:
    if k.shape != X.shape[:1]:
        raise ShapeError(
            name_k, f"shape {k.shape}", f"a state of shape {X.shape} needs {X.shape[:1]}"
        )
    if v.shape != X.shape[1:]:
        raise ShapeError(
            name_v, f"shape {v.shape}", f"a state of shape {X.shape} needs {X.shape[1:]}"
        )


class AbstractBlock(eqx.Module):
    """A layer ``X ↦ X⁺`` on states of one shape, ``(d,)`` or ``(d, d_v)``."""

    @abc.abstractmethod
    def increment(self, X: Array) -> Array:
        """``X⁺ − X``, of the shape of X: the right-hand side of the block's depth flow."""

    def __call__(self, X: Array) -> Array:
        """``X⁺``."""
        return X + self.increment(X)

    def jacobian(self, X: Array) -> Float[Array, "n n"]:
        """``∂X⁺/∂X`` of the flattened state, shape ``(n, n)`` with ``n = d`` or ``d·d_v``."""
        X = jnp.asarray(X)
        return jax.jacfwd(lambda x: self(x.reshape(X.shape)).ravel())(X.ravel())


class Affine(eqx.Module):
    """``X ↦ φ(W X + b)``: the plainest branch, value or gate.

    Args:
        weight: W, shape ``(m, d)``, or ``(d,)`` for the row that takes a vector to a number.
        bias: b, of the shape of ``W X``; none if left out.
        activation: φ, entry by entry; none if left out.
    """

    weight: Float[Array, "..."]
    bias: Float[Array, "..."] | None
    activation: Callable[[Array], Array] | None

    def __init__(
        self,
        weight: ArrayLike | Sequence,
        bias: ArrayLike | Sequence | None = None,
        *,
        activation: Callable[[Array], Array] | None = None,
    ):
        self.weight = _checks.real_array("weight", weight)
        self.bias = None if bias is None else _checks.real_array("bias", bias)
        if activation is not None and not callable(activation):
            raise ArgumentError(
                "activation", _checks.describe(activation), "it must be a function or None"
            )
        self.activation = activation

    def __call__(self, X: Array) -> Array:
        y = self.weight @ X
        y = y if self.bias is None else y + self.bias
        return y if self.activation is None else self.activation(y)


class Contraction(eqx.Module):
    """``X ↦ φ(Ŵ X + b)`` with ``‖Ŵ‖₂ ≤ c < 1``: W scaled down where it is larger.

    Args:
        weight: W, shape ``(d, d)``.
        bias: b, of the state's shape; none if left out.
        activation: φ with slopes in [−1, 1], entry by entry.
        lipschitz: c in (0, 1).

    Raises:
        ValueError: a weight that is not square, or c out of range.
    """

    weight: Float[Array, "d d"]
    bias: Float[Array, "..."] | None
    activation: Callable[[Array], Array]
    lipschitz: float = eqx.field(static=True)

    def __init__(
        self,
        weight: ArrayLike | Sequence,
        bias: ArrayLike | Sequence | None = None,
        *,
        activation: Callable[[Array], Array] = jnp.tanh,
        lipschitz: float = 0.9,
    ):
        self.weight = _square("weight", weight)
        self.bias = None if bias is None else _checks.real_array("bias", bias)
        self.activation = activation
        self.lipschitz = float(_checks.real_scalar("lipschitz", lipschitz, above=0, below=1))

    def __call__(self, X: Array) -> Array:
        norm = jnp.linalg.norm(self.weight, 2)
        tiny = jnp.finfo(norm.dtype).tiny
        scale = jnp.minimum(1.0, self.lipschitz / jnp.maximum(norm, tiny))
        y = scale * (self.weight @ X)
        return self.activation(y if self.bias is None else y + self.bias)


def _square(name: str, value: Any) -> Array:
    matrix = _checks.real_array(name, value, ndim=2)
    if matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(name, f"shape {matrix.shape}", "it must be square")
    return matrix


def _function_or(name: str, value: Any, constant: Callable[[Any], Array]) -> Any:
    return value if callable(value) else constant(value)


def _at(part: Any, X: Array) -> Array:
    return jnp.asarray(part(X)) if callable(part) else part


class DeltaBlock(AbstractBlock):
    """``X ↦ X + β(X) k(X) (v(X)ᵀ − k(X)ᵀX)``, the rewrite with data-dependent parts.

    ``k(X) = k̃(X) / max(‖k̃(X)‖, guard)`` and ``β(X) = 2σ(g(X))``, so that the shortcut is ``Δ =
    I − β k kᵀ`` (arXiv 2601.00417). Value and gradient stay finite where ``k̃`` vanishes.

    Args:
        direction: ``k̃``, a function of the state with values of shape ``(d,)``, or such a vector.
        value: v, a function of the state or constant: a scalar for vector states, shape
            ``(d_v,)`` for states ``(d, d_v)``.
        gate: g, a function of the state or constant, scalar.
        squash: whether ``gate`` is the logit g; otherwise it is β itself, in [0, 2].
        guard: norm below which ``k̃`` is no longer brought to length 1.

    Functions that are Equinox modules are part of the block's parameters.

    Raises:
        ValueError: a constant direction that is zero, a constant gate outside [0, 2], a guard that
            is not positive; on a call, parts whose shapes do not fit the state.
    """

    direction: Any
    value: Any
    gate: Any
    squash: bool = eqx.field(static=True)
    guard: float = eqx.field(static=True)

    def __init__(
        self, direction: Any, value: Any, gate: Any, *, squash: bool = True, guard: float = GUARD
    ):
        def nonzero(k):
            unit("direction", k)
            return _checks.real_array("direction", k, ndim=1)

        def number(g):
            if squash:
                return _checks.real_array("gate", g, ndim=0)
            return check_gates("gate", g, ndim=0)

        self.direction = _function_or("direction", direction, nonzero)
        self.value = _function_or("value", value, lambda v: _checks.real_array("value", v))
        self.gate = _function_or("gate", gate, number)
        self.squash = bool(squash)
        self.guard = float(_checks.real_scalar("guard", guard, above=0))

    def parts(self, X: Array) -> tuple[Array, Array, Array]:
        """``(k, v, β)`` at X: k of unit length (or shorter, below the guard)."""
        X = jnp.asarray(X)
        if X.ndim not in (1, 2):
            raise ShapeError("X", f"shape {X.shape}", "it must be (d,) or (d, d_v)")
        k, v, g = (_at(part, X) for part in (self.direction, self.value, self.gate))
        _fits(X, k, v, "direction", "value")
        if g.shape != ():
            raise ShapeError("gate", f"shape {g.shape}", "it must be a scalar")
        return guarded(k, self.guard), v, gate(g) if self.squash else g

    def increment(self, X: Array) -> Array:
        """``β k (vᵀ − kᵀX)``."""
        k, v, beta = self.parts(X)
        return _increment(jnp.asarray(X), k, v, beta)

    def readout_error(self, X: Array) -> Array:
        """``kᵀX − vᵀ``, a scalar or of shape ``(d_v,)``."""
        k, v, _ = self.parts(X)
        return k @ jnp.asarray(X) - v


class ResidualBlock(AbstractBlock):
    """``X ↦ X + F(X)`` (He, Zhang, Ren & Sun 2016).

    Args:
        branch: F, a function from a state to one of the same shape.
    """

    branch: Callable[[Array], Array]

    def increment(self, X: Array) -> Array:
        return _same_shape("branch", self.branch(X), X)


class HighwayBlock(AbstractBlock):
    """``X ↦ (1 − T(X)) ⊙ X + T(X) ⊙ F(X)``, ``T = σ(g(X))`` (Srivastava, Greff & Schmidhuber 2015).

    Args:
        branch: F, a function from a state to one of the same shape.
        gate: g, a function of the state or constant; a scalar or of the state's shape.
    """

    branch: Callable[[Array], Array]
    gate: Any

    def __init__(self, branch: Callable[[Array], Array], gate: Any):
        self.branch = branch
        self.gate = _function_or("gate", gate, lambda g: _checks.real_array("gate", g))

    def increment(self, X: Array) -> Array:
        logit = _at(self.gate, X)
        if logit.shape not in ((), X.shape):
            raise ShapeError("gate", f"shape {logit.shape}", f"it must be () or {X.shape}")
        return jax.nn.sigmoid(logit) * (_same_shape("branch", self.branch(X), X) - X)


class InvertibleBlock(AbstractBlock):
    """``X ↦ X + F(X)`` with a contraction F, so that :meth:`inverse` exists (Behrmann et al. 2019).

    Args:
        branch: F, such as a :class:`Contraction`.
        lipschitz: a bound of F's Lipschitz constant, in (0, 1); the branch's own if left out.

    Raises:
        ValueError: no bound below 1.
    """

    branch: Callable[[Array], Array]
    lipschitz: float = eqx.field(static=True)

    def __init__(self, branch: Callable[[Array], Array], lipschitz: float | None = None):
        bound = getattr(branch, "lipschitz", None) if lipschitz is None else lipschitz
        self.branch = branch
        self.lipschitz = float(_checks.real_scalar("lipschitz", bound, above=0, below=1))

    def increment(self, X: Array) -> Array:
        return _same_shape("branch", self.branch(X), X)

    def inverse(self, Y: Array) -> Array:
        """``X`` with ``X + F(X) = Y``, by the fixed point iteration ``X ← Y − F(X)``.

        To round-off; the number of rounds follows from the Lipschitz bound.

        Raises:
            ValueError: the iteration does not converge: F is no contraction with that bound.
        """
        Y = jnp.asarray(Y)
        eps = float(jnp.finfo(Y.dtype).eps)
        found: Any = optimistix.fixed_point(
            lambda x, branch: Y - branch(x),
            # Increments of this size leave an error of c/(1 − c) times as much.
            optimistix.FixedPointIteration(rtol=4 * eps, atol=4 * eps),
            Y,
            args=self.branch,
            max_steps=64 + math.ceil(2 * math.log(eps) / math.log(self.lipschitz)),
            throw=False,
        )
        failed = found.result != optimistix.RESULTS.successful
        if not _checks.is_concrete(found.value, failed):
            return eqx.error_if(found.value, failed, "branch: it is no contraction with this bound")
        if bool(failed):
            raise ArgumentError(
                "branch",
                "a function whose fixed point iteration does not converge",
                f"it must be a contraction with constant {self.lipschitz:g}",
            )
        return found.value


class OrthogonalBlock(AbstractBlock):
    """``X ↦ Q X`` with ``Q = exp(S − Sᵀ)``: a rotation, of determinant 1.

    Args:
        generator: S, a matrix ``(d, d)`` or a function of the state with such values.
    """

    generator: Any

    def __init__(self, generator: Any):
        self.generator = _function_or("generator", generator, lambda s: _square("generator", s))

    def __call__(self, X: Array) -> Array:
        S = _at(self.generator, X)
        d = X.shape[0]
        if S.shape != (d, d):
            raise ShapeError("generator", f"shape {S.shape}", f"this state needs ({d}, {d})")
        return rotation(S) @ X

    def increment(self, X: Array) -> Array:
        return self(X) - X


def _same_shape(name: str, value: Array, X: Array) -> Array:
    if jnp.shape(value) != jnp.shape(X):
        raise ShapeError(
            name,
            f"values of shape {jnp.shape(value)}",
            f"a state of shape {jnp.shape(X)} needs values of its own shape",
        )
    return value


class Stack(AbstractBlock):
    """Layers of one kind one after the other, run by one ``lax.scan``.

    Args:
        blocks: a sequence of blocks that differ in their arrays only, first layer first; or one
            block whose arrays have the layers as first axis, as ``eqx.filter_vmap`` of a function
            that makes a block gives it.

    Raises:
        ValueError: no blocks, or blocks of different structure.
    """

    blocks: AbstractBlock

    def __init__(self, blocks: AbstractBlock | Sequence[AbstractBlock]):
        if isinstance(blocks, AbstractBlock):
            stacked = blocks
            depths = {np.shape(a)[:1] for a in jax.tree.leaves(eqx.filter(stacked, eqx.is_array))}
            if len(depths) != 1 or () in depths:
                raise ShapeError(
                    "blocks",
                    f"one block whose arrays start with the axes {sorted(depths)}",
                    "all must have the layers as first axis: pass a sequence of blocks",
                )
        else:
            stacked = _stacked(list(blocks))
        self.blocks = stacked

    @property
    def depth(self) -> int:
        """The number of layers."""
        return jax.tree.leaves(eqx.filter(self.blocks, eqx.is_array))[0].shape[0]

    def layer(self, i: int) -> Any:
        """Block ``i`` (from 0)."""
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda a: a[i], arrays), rest)

    def _scan(self, step: Callable[[Any, Array], tuple[Array, Any]], X: Array) -> tuple[Array, Any]:
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda x, layer: step(eqx.combine(layer, rest), x), X, arrays)

    def __call__(self, X: Array) -> Array:
        return self._scan(lambda block, x: (block(x), None), jnp.asarray(X))[0]

    def increment(self, X: Array) -> Array:
        return self(X) - X

    def states(self, X: Array) -> Float[Array, "..."]:
        """The state before every layer and after the last, shape ``(depth + 1, *X.shape)``."""
        X = jnp.asarray(X)

        def step(block, x):
            new = block(x)
            return new, new

        _, later = self._scan(step, X)
        return jnp.concatenate([X[None], later])

    def jacobians(self, X: Array) -> Float[Array, "depth n n"]:
        """The Jacobian of every layer at the state it receives, first layer first."""
        return self._scan(lambda block, x: (block(x), block.jacobian(x)), jnp.asarray(X))[1]

    def gradients(self, X: Array, cotangent: Array) -> Float[Array, "..."]:
        """A gradient at the output, backpropagated to the state before every layer.

        Args:
            X: the input.
            cotangent: the gradient with respect to the output, of the same shape.

        Returns:
            shape ``(depth + 1, *X.shape)``: first that at the input, last ``cotangent``.
        """
        before = self.states(X)[:-1]
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def back(g, layer):
            block, x = layer
            _, pull = jax.vjp(eqx.combine(block, rest), x)
            (g,) = pull(g)
            return g, g

        cotangent = jnp.asarray(cotangent)
        _, earlier = jax.lax.scan(back, cotangent, (arrays, before), reverse=True)
        return jnp.concatenate([earlier, cotangent[None]])


def stack(blocks: Sequence[AbstractBlock]) -> Stack:
    """The :class:`Stack` of these blocks, first layer first.

    Raises:
        ValueError: no blocks, or blocks of different structure.
    """
    return Stack(blocks)


def _stacked(blocks: list[Any]) -> Any:
    if not blocks:
        raise ArgumentError("blocks", "no blocks", "it must have at least one")
    for i, block in enumerate(blocks):
        if not isinstance(block, AbstractBlock):
            raise ArgumentError(f"blocks[{i}]", _checks.describe(block), "it must be a block")
    parts = [eqx.partition(block, eqx.is_array) for block in blocks]
    first_arrays, first_rest = parts[0]
    structure: Any = jax.tree.structure(first_arrays)

    def shapes(arrays):
        return jax.tree.map(lambda a: (a.shape, a.dtype), arrays)

    for i, (arrays, rest) in enumerate(parts):
        same = jax.tree.structure(arrays) == structure
        if not same or shapes(arrays) != shapes(first_arrays) or rest != first_rest:
            raise ArgumentError(
                f"blocks[{i}]",
                "another structure than the first block's",
                "all must be of one kind and differ in their arrays only: they share one program",
            )
    arrays = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(a for a, _ in parts))
    return eqx.combine(arrays, first_rest)


def unroll(
    block: AbstractBlock, X: ArrayLike, steps: int, step_size: Any = 1.0
) -> Float[Array, "..."]:
    """One block again and again: ``X ← X + h (block(X) − X)``, all states.

    With ``step_size = t/steps`` the Euler discretisation of the depth flow to time t, for a delta
    block a stack of delta blocks with gates ``h β(X)``.

    Args:
        block: the layer.
        X: the first state, shape ``(d,)`` or ``(d, d_v)``.
        steps: number of layers, ≥ 0.
        step_size: h.

    Returns:
        shape ``(steps + 1, *X.shape)``.

    Raises:
        ValueError: no block, or numbers out of range.
    """
    if not isinstance(block, AbstractBlock):
        raise ArgumentError("block", _checks.describe(block), "it must be a block")
    X = check_state("X", X)
    steps = _checks.whole_number("steps", steps, 0)
    h = jnp.asarray(_checks.real_scalar("step_size", step_size), X.dtype)
    return _unroll(block, X, h, steps)


@eqx.filter_jit
def _unroll(block: AbstractBlock, X: Array, h: Array, steps: int) -> Array:
    def step(x, _):
        new = x + h * block.increment(x)
        return new, new

    _, later = jax.lax.scan(step, X, None, length=steps)
    return jnp.concatenate([X[None], later])
