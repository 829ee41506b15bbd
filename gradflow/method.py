"""The value object that says how to integrate."""

from __future__ import annotations

import dataclasses
from typing import Any

import diffrax

from gradflow import _checks
from gradflow.errors import ArgumentError

__all__ = ["Method"]

_NAMES = ("auto", "explicit", "stabilised", "implicit", "conserving")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How to integrate.

    Args:
        solver: one of

            * ``"auto"``: explicit for easy runs; otherwise explicit until steps turn out stiff and
              then stabilised or conserving, whichever an estimate from the size of the state, its
              fastest decay rate and the horizon finds cheaper (implicit for very stiff flows that
              are no gradients). ``traj.stats`` says what was picked and why.
            * ``"explicit"``: Tsitouras 5(4).
            * ``"stabilised"``: orthogonal Runge–Kutta–Chebyshev of order 4, explicit, for moderate
              stiffness and any size.
            * ``"conserving"``: Gauss–Legendre collocation of order 12, for flows that are
              gradients. Keeps the laws to round-off at any tolerance. No square matrix of more
              than 64 rows is formed: beyond that systems are solved by conjugate gradients.
            * ``"implicit"``: Kvaerno 5(4), L-stable, with a dense Jacobian.
            * any diffrax ODE solver.
        rtol: relative tolerance per step; at least 10 times the round-off of the state's type.
        atol: absolute tolerance per step, > 0. It should lie well below the weights of a small
            start, see the warning of :func:`gradflow.simulate`.
        max_steps: bound on the number of attempted steps; a run that meets it returns with
            ``Status.MAX_STEPS``.
        step_size: a fixed step instead of adaptive ones, needed by solvers without an error
            estimate such as ``diffrax.Euler()``.

    Raises:
        ValueError: an unknown solver name, or a number out of range.
    """

    solver: str | diffrax.AbstractSolver = "auto"
    rtol: float = 1e-8
    atol: float = 1e-10
    max_steps: int = 1_000_000
    step_size: float | None = None

    def __post_init__(self):
        if not isinstance(self.solver, diffrax.AbstractSolver):
            _checks.choice("solver", self.solver, _NAMES, " or a diffrax solver")
        _checks.real_scalar("rtol", self.rtol, above=0, maximum=1)
        _checks.real_scalar("atol", self.atol, above=0)
        _checks.whole_number("max_steps", self.max_steps, 1)
        if self.step_size is not None:
            _checks.real_scalar("step_size", self.step_size, above=0)
        elif _lacks_error_estimate(self.solver):
            raise ArgumentError(
                "solver",
                f"{type(self.solver).__name__}, which has no error estimate",
                "it needs a fixed step: Method(solver=..., step_size=0.01)",
            )


def _lacks_error_estimate(solver: Any) -> bool:
    tableau = getattr(solver, "tableau", None)
    if tableau is not None:
        return getattr(tableau, "b_error", None) is None
    return isinstance(solver, (diffrax.Euler, diffrax.LeapfrogMidpoint, diffrax.SemiImplicitEuler))
