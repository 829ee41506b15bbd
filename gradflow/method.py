"""The value object that says how to integrate, and the choice behind ``"auto"``."""

from __future__ import annotations

import dataclasses
from typing import Any

import diffrax
import jax
import jax.numpy as jnp

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.flows.base import AbstractFlow
from gradflow.solvers import GaussLegendre, kvaerno5

__all__ = ["Method"]

_NAMES = ("auto", "explicit", "implicit", "conserving")

# A dense eigenbasis of this many unknowns takes 32 MB and about two seconds to make.
MAX_DENSE = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How to integrate.

    Args:
        solver: ``"explicit"`` (Tsitouras 5/4), ``"implicit"`` (Kvaerno 5/4, L-stable),
            ``"conserving"`` (Gauss–Legendre collocation of order 8, which keeps the laws to
            round-off at any tolerance; for flows that are gradients, up to 2000 unknowns),
            ``"auto"`` (explicit or, where that is cheaper by an estimate from the size of the
            state, the fastest decay rate and the horizon, conserving; implicit where the flow is
            no gradient), or any diffrax ODE solver.
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


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A solver, its name, why it was picked, and whether its steps must land on saved times."""

    solver: diffrax.AbstractSolver
    name: str
    reason: str
    land_on_saves: bool
    evaluations_per_step: int | None


def choose(method: Method, flow: AbstractFlow, state: Any, horizon: float | None) -> Chosen:
    """The diffrax solver that ``method`` means for this flow, start and horizon."""
    if isinstance(method.solver, diffrax.AbstractSolver):
        solver, reason = method.solver, "given"
    elif method.solver == "auto":
        solver, reason = _cheaper(flow, state, horizon)
    elif method.solver == "conserving":
        solver, reason = _conserving(flow, state), "solver='conserving'"
    else:
        solver = diffrax.Tsit5() if method.solver == "explicit" else _implicit(flow, state)
        reason = f"solver={method.solver!r}"
    return Chosen(
        solver,
        type(solver).__name__,
        reason,
        method.step_size is None and _interpolates_poorly(solver),
        _evaluations_per_step(solver),
    )


# Seconds as measured on one core: a right-hand side costs 4 µs and 6 ns per unknown; a step of
# collocation 0.12 ms, its changes of basis 10 ns per entry of an n × n matrix, and its share of an
# eigendecomposition 0.01 ns per n³; a step of Kvaerno 1 ms and seven Jacobians, each made at 10 ns
# per entry and factored in n³/3 multiply-adds of 0.2 ns. Only the ratios matter, and only to a
# factor of about two.
def _cheaper(
    flow: AbstractFlow, state: Any, horizon: float | None
) -> tuple[diffrax.AbstractSolver, str]:
    rate = flow.fastest_rate(state)
    if rate is None or horizon is None:
        return diffrax.Tsit5(), "auto: explicit, because no bound on the fastest rate is known"
    size = sum(leaf.size for leaf in jax.tree.leaves(state))
    # 3.3 is the length of Tsit5's real stability interval; accuracy asks for some hundred steps
    # of either kind at the default tolerances.
    stiff_steps = rate * horizon / 3.3
    explicit = max(stiff_steps, 300) * 6 * (4e-6 + 6e-9 * size)
    conserves = flow.symmetric_jacobian and size <= MAX_DENSE
    if conserves:
        stiff = 600 * (1.2e-4 + 1e-8 * size**2 + 1e-11 * size**3)
    else:
        stiff = 600 * (1e-3 + 7 * (2e-10 * size**3 / 3 + 1e-8 * size**2))
    measured = (
        f"fastest rate about {rate:.3g}, so about {stiff_steps:.2g} explicit steps for stability, "
        f"and {size} unknowns"
    )
    if explicit <= stiff:
        return diffrax.Tsit5(), f"auto: explicit ({measured})"
    if conserves:
        return _conserving(flow, state), f"auto: conserving ({measured})"
    return _implicit(flow, state), f"auto: implicit ({measured})"


def _implicit(flow: AbstractFlow, state: Any) -> diffrax.AbstractSolver:
    return kvaerno5(floor=64 * _roundoff(flow, state))


def _conserving(flow: AbstractFlow, state: Any) -> diffrax.AbstractSolver:
    if not flow.symmetric_jacobian:
        raise ArgumentError(
            "solver",
            f"'conserving' for {type(flow).__name__}",
            "it is for flows with a symmetric Jacobian (GradientFlow, ModeFlow): take 'implicit'",
        )
    size = sum(leaf.size for leaf in jax.tree.leaves(state))
    if size > MAX_DENSE:
        raise ArgumentError(
            "solver",
            f"'conserving' for {size} unknowns",
            f"it works with dense matrices, up to {MAX_DENSE} unknowns: take 'explicit'",
        )
    return GaussLegendre(floor=_roundoff(flow, state))


def _roundoff(flow: AbstractFlow, state: Any) -> Any:
    """Round-off of the largest entries that a state will have on its way, roughly."""
    strengths = flow.target_strengths()
    sizes = [*jax.tree.leaves(state), *([] if strengths is None else [strengths])]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0) for leaf in sizes]))
    return jnp.finfo(largest.dtype).eps * largest


def _interpolates_poorly(solver: diffrax.AbstractSolver) -> bool:
    """Whether dense output is less accurate than the steps, so that steps must land on saves."""
    if getattr(solver, "lands_on_saves", False):
        return True
    cubic = getattr(type(solver), "interpolation_cls", None)
    name = getattr(getattr(cubic, "func", cubic), "__qualname__", "")
    order = getattr(solver, "order", lambda _: None)(None)
    return "ThirdOrderHermite" in name and (order is None or order > 4)


def _evaluations_per_step(solver: diffrax.AbstractSolver) -> int | None:
    """Right-hand sides per attempted step of an explicit Runge–Kutta method; else unknown."""
    if isinstance(solver, diffrax.Euler):
        return 1
    if not isinstance(solver, diffrax.AbstractERK):
        return None
    tableau: Any = solver.tableau
    return int(tableau.num_stages) - int(bool(tableau.fsal))


def working_type(flow: AbstractFlow, state: Any) -> Any:
    """The floating point type that holds both the flow's numbers and the state."""
    leaves = [x for x in jax.tree.leaves((flow, state)) if hasattr(x, "dtype")]
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.result_type(*floats)
