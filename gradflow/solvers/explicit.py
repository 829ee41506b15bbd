"""The Dormand–Prince method of order 8 on flat vectors, in one small loop."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, ClassVar, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from diffrax import RESULTS
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

__all__ = [
    "REACH",
    "STAGES",
    "DormandPrince8",
    "ExplicitStep",
    "explicit_step",
    "interpolate",
]

STAGES = 14
# The method is stable on the real axis for h|λ| below about this.
REACH = 4.0


class ExplicitStep(NamedTuple):
    """The end of a step, the error, all slopes (the last one at the end), and ``h|λ|`` seen."""

    end: Float[Array, " n"]
    error: Float[Array, " n"]
    slopes: Float[Array, "stages n"]
    stiffness: Any


@cache
def _tableau() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tableau = diffrax.Dopri8.tableau
    A = np.zeros((STAGES, STAGES))
    for i, row in enumerate(tableau.a_lower):
        A[i + 1, : len(row)] = row
    return A, np.concatenate([[0.0], tableau.c]), np.asarray(tableau.b_error)


def explicit_step(
    rate: Callable[[Any, Array], Array], t0: Any, h: Any, y0: Array, slope: Array
) -> ExplicitStep:
    """A step of size ``h`` from ``y0``, where f is ``slope``; 13 evaluations.

    ``h|λ|`` is the quotient of differences of slope and state between the last two stages, both of
    them at the end of the step (Hairer & Wanner, *Solving Ordinary Differential Equations II*,
    IV.2).
    """
    A, nodes, b_error = _tableau()
    c = jnp.asarray(nodes, y0.dtype)

    def combination(row):
        # Most coefficients are zero, and reading a slope for nothing costs as much as its stage.
        used = [j for j, a in enumerate(row) if a != 0]
        return lambda slopes: reduce(operator.add, [float(row[j]) * slopes[j] for j in used])

    combinations = [combination(row) for row in A[1:]]

    def stage(i, carry):
        slopes, y, _ = carry
        new = y0 + h * jax.lax.switch(i - 1, combinations, slopes)
        return slopes.at[i].set(rate(t0 + c[i] * h, new)), new, y

    slopes = jnp.zeros((STAGES, y0.shape[0]), y0.dtype).at[0].set(slope)
    slopes, end, before = jax.lax.fori_loop(1, STAGES, stage, (slopes, y0, y0))
    moved = jnp.sum((end - before) ** 2)
    turned = jnp.sum((slopes[-1] - slopes[-2]) ** 2)
    stiffness = jnp.where(moved > 0, h * jnp.sqrt(turned / jnp.where(moved > 0, moved, 1)), 0.0)
    return ExplicitStep(end, h * combination(b_error)(slopes), slopes, stiffness)


def interpolate(y0: Array, h: Any, slopes: Array, part: Any) -> Array:
    """The state at ``t0 + part·h``, to order 7."""
    coefficients = diffrax.Dopri8.interpolation_cls.eval_coeffs  # type: ignore[attr-defined]
    powers = part ** jnp.arange(6, 0, -1)
    weights = jnp.asarray(coefficients, y0.dtype) @ powers.astype(y0.dtype)
    return y0 + h * (weights @ slopes)


class _Path(diffrax.AbstractLocalInterpolation):
    t0: Any  # type: ignore[misc]
    t1: Any  # type: ignore[misc]
    y0: PyTree
    slopes: Float[Array, "stages n"]

    def evaluate(self, t0: Any, t1: Any | None = None, left: bool = True) -> PyTree:
        if t1 is not None:
            return jax.tree.map(jnp.subtract, self.evaluate(t1), self.evaluate(t0))
        start, unravel = ravel_pytree(self.y0)
        span = self.t1 - self.t0
        part = (t0 - self.t0) / jnp.where(span == 0, 1.0, span)
        return unravel(interpolate(start, span, self.slopes, part))


class DormandPrince8(diffrax.AbstractAdaptiveSolver):
    """``diffrax.Dopri8``, the same coefficients, with less work per step around the evaluations.

    For small states, where a right-hand side takes a microsecond.
    """

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar[Callable[..., _Path]] = _Path

    def order(self, terms: Any) -> int:
        return 8

    def init(self, terms: Any, t0: Any, t1: Any, y0: PyTree, args: Any) -> Array:
        return ravel_pytree(terms.vf(t0, y0, args))[0]

    def func(self, terms: Any, t0: Any, y0: PyTree, args: Any) -> PyTree:
        return terms.vf(t0, y0, args)

    def step(self, terms, t0, t1, y0, args, solver_state: Array, made_jump):
        del made_jump
        start, unravel = ravel_pytree(y0)

        def rate(t, flat):
            return ravel_pytree(terms.vf(t, unravel(flat), args))[0]

        made = explicit_step(rate, t0, terms.contr(t0, t1), start, solver_state)
        dense = {"y0": y0, "slopes": made.slopes}
        return unravel(made.end), unravel(made.error), dense, made.slopes[-1], RESULTS.successful
