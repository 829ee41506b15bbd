"""Implicit solvers for stiff phases."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import optimistix
from optimistix import RESULTS

__all__ = ["StageChord", "kvaerno5"]


class StageChord(optimistix.Chord):
    """Newton's method with one Jacobian per stage, stopped by the size of its increments.

    The unknowns of a stage are the increments ``h f``, which vanish as a run converges, while the
    round-off in them is that of the state. So the tolerance is not taken below ``floor``, and the
    residual, in which stiffness multiplies round-off, is not asked to be small: otherwise a long
    tail at a tight tolerance rejects every step.
    """

    # Absolute; some round-off of the largest entries that the state will have.
    floor: Any = 0.0
    cauchy_termination: bool = eqx.field(default=False, static=True)

    def step(self, fn, y, args, options, state, tags):
        effective = eqx.tree_at(lambda s: s.atol, self, jnp.maximum(self.atol, self.floor))
        return super(StageChord, effective).step(fn, y, args, options, state, tags)

    def terminate(self, fn, y, args, options, state, tags):
        # An increment of a tenth of the tolerance: the next one would be smaller still.
        converged = state.diffsize < 0.1
        growing = (state.step >= 2) & (state.diffsize > 2 * state.diffsize_prev)
        failed = ~jnp.isfinite(state.diffsize) | growing
        failed = failed & (state.step >= 1)
        singular = state.result != RESULTS.successful
        result = RESULTS.where(
            failed & ~converged, RESULTS.nonlinear_divergence, RESULTS.successful
        )
        result = RESULTS.where(singular, state.result, result)
        return converged | failed | singular, result


def kvaerno5(floor: Any = 0.0) -> diffrax.Kvaerno5:
    """Kvaerno's L-stable 5/4 method with :class:`StageChord` at the step's tolerances.

    diffrax's default root finder keeps one Jacobian for the whole step, and at tight tolerances
    rejects about half of the steps of a plateau; one Jacobian per stage takes a quarter of the
    steps and a third of the time on widths 5,5,5,5.
    """
    root_finder = diffrax.with_stepsize_controller_tols(StageChord)(floor=floor)
    return diffrax.Kvaerno5(root_finder=root_finder)
