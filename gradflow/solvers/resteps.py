"""States inside a step, as accurate as at its end: by a shorter step from the same start."""

from __future__ import annotations

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

__all__ = ["Restep"]


class Restep(diffrax.AbstractLocalInterpolation):
    """Evaluates a step at a time inside it by stepping there.

    The polynomial of a step is of lower order than its end and keeps no laws; a step that ends at
    the wanted time is as good as any other, and the sequence of steps stays what it would be
    without saved times.
    """

    solver: Any  # with a method between(t0, t1, t, info) -> state
    t0: Any  # type: ignore[misc]
    t1: Any  # type: ignore[misc]
    y1: PyTree
    info: PyTree

    def evaluate(self, t0: Any, t1: Any | None = None, left: bool = True) -> PyTree:
        if t1 is not None:
            return jax.tree.map(jnp.subtract, self.evaluate(t1), self.evaluate(t0))
        return jax.lax.cond(
            t0 == self.t1,
            lambda: self.y1,
            lambda: self.solver.between(self.t0, self.t1, t0, self.info),
        )
