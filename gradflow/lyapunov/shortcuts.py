"""Shortcuts around the layers of any ensemble: the identity, and delta operators."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.lyapunov.ensembles import (
    AbstractEnsemble,
    check_ensemble,
    for_all_chains,
    on_sphere,
    rewritten,
    square_shape,
    unit_directions,
)
from gradflow.lyapunov.layers import Layers

__all__ = ["Shortcut", "delta", "residual"]


class Shortcut(AbstractEnsemble):
    """``I − β k kᵀ + J``, J of another ensemble; see :func:`residual` and :func:`delta`."""

    ensemble: AbstractEnsemble
    beta: Array | None
    fixed: Array | None

    # Overrides the class variable: a wrapped ensemble is as independent as what it wraps.
    @property
    def independent(self) -> bool:  # type: ignore[override]
        return self.ensemble.independent

    @property
    def dimension(self) -> int:
        return self.ensemble.dimension

    @property
    def dtype(self) -> Any:
        return self.ensemble.dtype

    def draw(self, key: Array, chains: int, last: bool) -> Array:
        eye = for_all_chains(jnp.eye(self.dimension, dtype=self.dtype), last)
        if self.beta is None:
            return eye + self.ensemble.draw(key, chains, last)
        first, second = jax.random.split(key)
        k = self._direction(second, chains, last)
        eye = jnp.broadcast_to(eye, square_shape(self.dimension, chains, last))
        return rewritten(eye, self.beta, k, last) + self.ensemble.draw(first, chains, last)

    def start(self, chains: int, last: bool) -> PyTree:
        return self.ensemble.start(chains, last)

    def advance(self, key: Array, memory: PyTree, frames: Array, last: bool) -> tuple[Array, Any]:
        if self.beta is None:
            images, memory = self.ensemble.advance(key, memory, frames, last)
            return frames + images, memory
        first, second = jax.random.split(key)
        images, memory = self.ensemble.advance(first, memory, frames, last)
        k = self._direction(second, frames.shape[-1 if last else 0], last)
        return rewritten(frames, self.beta, k, last) + images, memory

    def _direction(self, key: Array, chains: int, last: bool) -> Array:
        if self.fixed is None:
            return on_sphere(key, self.dimension, chains, last)
        k = self.fixed[:, None] if last else self.fixed[None]
        return jnp.broadcast_to(k, (self.dimension, chains) if last else (chains, self.dimension))


def residual(ensemble: AbstractEnsemble) -> AbstractEnsemble:
    """With the identity as shortcut: ``J ↦ I + J``.

    Of :class:`Layers`, the layers become ``x + f(β, x)``: the orbit is that of the residual layers,
    not the old one.

    Args:
        ensemble: any.

    Raises:
        ValueError: it is none.
    """
    check_ensemble("ensemble", ensemble)
    if isinstance(ensemble, Layers):
        return _layers_with(ensemble, jnp.zeros((), ensemble.dtype), None)
    return Shortcut(ensemble, None, None)


def delta(
    ensemble: AbstractEnsemble, beta: Any, *, direction: ArrayLike | None = None
) -> AbstractEnsemble:
    """With a delta operator as shortcut: ``J ↦ (I − β k kᵀ) + J``.

    β = 0 is :func:`residual`, β = 1 forgets what is along k, β = 2 reflects it (Zhang, Liu, Wang &
    Gu, arXiv 2601.00417). Of :class:`Layers`, the layers become ``(I − β k kᵀ) x + f(β, x)``.

    Args:
        ensemble: any.
        beta: a number.
        direction: k, a vector of length d, normalised; drawn at each step, uniform on the sphere,
            if left out.

    Raises:
        ValueError: no ensemble, a direction of another length or of zero norm.
    """
    check_ensemble("ensemble", ensemble)
    real = jnp.finfo(ensemble.dtype).dtype
    beta = jnp.asarray(_checks.real_scalar("beta", beta), real)
    k = None
    if direction is not None:
        k = _checks.real_array("direction", direction, ndim=1)
        if k.shape != (ensemble.dimension,):
            raise ShapeError(
                "direction", f"length {k.shape[0]}", f"it must have {ensemble.dimension} entries"
            )
        k = unit_directions("direction", k).astype(real)
    if isinstance(ensemble, Layers):
        return _layers_with(ensemble, beta, k)
    return Shortcut(ensemble, beta, k)


def _layers_with(ensemble: Layers, beta: Array, direction: Array | None) -> Layers:
    if ensemble.beta is not None:
        raise ArgumentError("ensemble", "layers with a shortcut", "it must not have one already")
    if direction is None and _checks.is_concrete(beta) and float(beta) == 0:
        # Any direction will do where nothing is taken away, and none need be drawn.
        direction = jnp.zeros_like(ensemble.x0).at[0].set(1.0)
    return eqx.tree_at(
        lambda e: (e.beta, e.direction),
        ensemble,
        (beta, direction),
        is_leaf=lambda leaf: leaf is None,
    )
