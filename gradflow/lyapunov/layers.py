"""Jacobians of the layers of a network: random ones along their orbit, and those that it has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.lyapunov.ensembles import (
    AbstractEnsemble,
    Cyclic,
    Finite,
)
from gradflow.network import LinearNetwork

__all__ = ["Layers", "network_layers"]


class Layers(AbstractEnsemble):
    """Jacobians of random layers along their own orbit ``x_{l+1} = f(β_l, x_l)``.

    (Borkar, arXiv 2606.17013.) Jacobians are never formed: frames are pushed forward by
    ``jax.linearize``.

    Args:
        f: ``f(parameters, x)`` in JAX operations, or ``f(x, parameters)`` if its first argument is
            named ``x``; returns an array like ``x``. Pass the same function object again to avoid
            compiling again.
        sample_parameters: ``sample_parameters(key)`` returns the parameters of one layer, any
            pytree of arrays. A function is part of the program, as f is. A callable pytree, such as
            an :class:`equinox.Module` with ``__call__`` or a :class:`jax.tree_util.Partial`, holds
            data: with other arrays and floats of the same shapes nothing is compiled again, and
            exponents can be mapped over them or differentiated by them.
        x0: start of the orbit, shape ``(d,)``.
        limit: x_∞, shape ``(d,)``: where given, all Jacobians are taken there, which is what the
            exponents are along an orbit that converges to it.

    Raises:
        ValueError: functions that are none, an ``x0`` or ``limit`` that is no vector of finite
            floats, or an ``f`` that changes the shape of x.
    """

    independent: ClassVar[bool] = False
    f: Callable = eqx.field(static=True)
    # The leaves of sample_parameters: what is data, None elsewhere; and the rest, None where data.
    sample_data: tuple[Array | None, ...]
    sample_rest: tuple[Any, ...] = eqx.field(static=True)
    sample_structure: Any = eqx.field(static=True)
    x0: Array
    limit: Array | None
    # What is added to f: nothing, x itself, or (I − β k kᵀ) x.
    beta: Array | None
    direction: Array | None
    swapped: bool = eqx.field(static=True)

    def __init__(
        self,
        f: Callable[[Any, Array], Array],
        sample_parameters: Callable[[Array], PyTree],
        x0: ArrayLike | Sequence,
        *,
        limit: ArrayLike | None = None,
    ):
        for name, function in (("f", f), ("sample_parameters", sample_parameters)):
            if not callable(function):
                raise ArgumentError(name, _checks.describe(function), "it must be a function")
        self.f = f
        self.swapped = _first_argument(f) == "x"
        dtype = jnp.zeros(()).dtype
        leaves, self.sample_structure = jax.tree.flatten(sample_parameters)
        # Never weakly typed, which would be another program.
        leaves = [jnp.asarray(x, dtype) if isinstance(x, float) else x for x in leaves]
        data = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves]
        self.sample_data = tuple(
            jnp.asarray(x) if yes else None for x, yes in zip(leaves, data, strict=True)
        )
        self.sample_rest = tuple(None if yes else x for x, yes in zip(leaves, data, strict=True))
        self.x0 = _checks.real_array("x0", x0, ndim=1).astype(dtype)
        self.limit = self.beta = self.direction = None
        if limit is not None:
            self.limit = _checks.real_array("limit", limit, ndim=1).astype(dtype)
            if self.limit.shape != self.x0.shape:
                raise ShapeError(
                    "limit", f"shape {self.limit.shape}", f"it must be like x0, {self.x0.shape}"
                )
        try:
            found = _image.eval_shape(
                (f, self.swapped, self.sample_structure, self.sample_rest),
                self.sample_data,
                self.x0,
                jax.random.key(0),
            )
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                "f", f"a function that fails at x0: {error}", "f(parameters, x) must take x0"
            ) from error
        if getattr(found, "shape", None) != self.x0.shape:
            raise ShapeError(
                "f",
                f"a function that returns {_checks.describe(found)}",
                f"it must return an array like x0, shape {self.x0.shape}: its Jacobian is square",
            )

    @property
    def sample_parameters(self) -> Callable[[Array], PyTree]:
        """The function that draws the parameters of one layer."""
        return _rejoined(self.sample_structure, self.sample_rest, self.sample_data)

    def layer(self, parameters: PyTree, k: Array | None, x: Array) -> Array:
        """One layer, with its shortcut if there is one."""
        y = _applied(self.f, self.swapped, parameters, x)
        if self.beta is None:
            return y
        assert k is not None
        return y + x - self.beta * k * jnp.dot(k, x)

    @property
    def dimension(self) -> int:
        return self.x0.shape[0]

    def start(self, chains: int, last: bool) -> PyTree:
        return jnp.tile(self.x0[:, None], (1, chains)) if last else jnp.tile(self.x0, (chains, 1))

    def advance(self, key: Array, memory: PyTree, frames: Array, last: bool) -> tuple[Array, Any]:
        axis = -1 if last else 0
        keys = jax.random.split(key, frames.shape[axis])

        def one(key, x, frame):
            first, second = jax.random.split(key)
            parameters = self.sample_parameters(first)
            k = None
            if self.beta is not None:
                g = jax.random.normal(second, x.shape, x.dtype)
                k = g / jnp.linalg.norm(g) if self.direction is None else self.direction
            at = x if self.limit is None else self.limit
            y, push = jax.linearize(lambda x: self.layer(parameters, k, x), at)
            return jax.vmap(push, in_axes=-1, out_axes=-1)(frame), y

        return jax.vmap(one, in_axes=(0, axis, axis), out_axes=axis)(keys, memory, frames)

    def orbit(self, key: Any, steps: int) -> Array:
        """``x_0, …, x_steps`` for one draw of the parameters, shape ``(steps + 1, d)``."""
        key, steps = _checks.random_key("key", key), _checks.whole_number("steps", steps, 1)
        free = eqx.tree_at(lambda e: e.limit, self, None, is_leaf=lambda leaf: leaf is None)
        return jnp.concatenate([self.x0[None], _orbit(free, key, steps)])


def _rejoined(structure: Any, rest: tuple[Any, ...], data: tuple[Array | None, ...]) -> Any:
    leaves = [r if x is None else x for x, r in zip(data, rest, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _applied(f: Callable, swapped: bool, parameters: PyTree, x: Any) -> Array:
    x = jnp.asarray(x)
    return f(x, parameters) if swapped else f(parameters, x)


# Never run: a program, so that layers which differ in numbers only are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _image(fixed: tuple, data: tuple[Array | None, ...], x0: Array, key: Array) -> Array:
    f, swapped, structure, rest = fixed
    return _applied(f, swapped, _rejoined(structure, rest, data)(key), x0)


@eqx.filter_jit
def _orbit(ensemble: Layers, key: Array, steps: int) -> Array:
    frame = jnp.zeros((1, ensemble.dimension, 1), ensemble.dtype)

    def step(memory, k):
        _, memory = ensemble.advance(k, memory, frame, False)
        return memory, memory[0]

    return jax.lax.scan(step, ensemble.start(1, False), jax.random.split(key, steps))[1]


def _first_argument(f: Callable) -> str | None:
    try:
        return next(iter(inspect.signature(f).parameters), None)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return None


def network_layers(net: Any, *, order: str = "random", at: int | None = None) -> AbstractEnsemble:
    """The layers of a network, at any time of its training, as an ensemble.

    Args:
        net: a :class:`gradflow.LinearNetwork` whose layers are square and of one size, or a run of
            one, with stored states. Layers that are not square are left out where the others agree.
        order: ``"random"``, each step an independent choice among the layers; ``"cyclic"``, the
            layers in their order, again and again.
        at: which saved time of a run; the last if left out.

    Returns:
        :class:`Finite` or :class:`Cyclic`.

    Raises:
        ValueError: no network or run of one, no square layers, or ones of several sizes.
    """
    order = _checks.choice("order", order, ("random", "cyclic"))
    weights = layer_weights(net, at)
    square = [w for w in weights if w.shape[0] == w.shape[1]]
    sizes = {w.shape[0] for w in square}
    # A network of square layers between a wider input and output counts, two sizes do not.
    if len(sizes) != 1:
        shapes = ", ".join(str(w.shape) for w in weights)
        raise ShapeError(
            "net", f"layers of shapes {shapes}", "its square layers must be of one size"
        )
    return Finite(jnp.stack(square)) if order == "random" else Cyclic(jnp.stack(square))


def layer_weights(net: Any, at: int | None = None) -> tuple[Array, ...]:
    """``W_1, …, W_h`` of a network, or of a run at a saved time."""
    states = getattr(net, "states", None)
    if isinstance(states, LinearNetwork):
        index = -1 if at is None else at
        saved = states.weights[0].shape[0]
        if not isinstance(index, (int, np.integer)) or not -saved <= index < saved:
            raise ArgumentError("at", _checks.describe(at), f"it must count {saved} saved times")
        return tuple(w[index] for w in states.weights)
    if not isinstance(net, LinearNetwork):
        raise ArgumentError(
            "net",
            _checks.describe(net),
            "it must be a gradflow.LinearNetwork or a run with stored states of one",
        )
    if at is not None:
        raise ArgumentError("at", _checks.describe(at), "it must be left out for a network")
    if net.weights[0].ndim != 2:
        raise ShapeError("net", f"a batch {net!r}", "it must be one network")
    return net.weights
