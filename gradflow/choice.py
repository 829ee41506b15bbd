"""Which solver runs: what the names mean, and what ``"auto"`` picks."""

from __future__ import annotations

import dataclasses
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.flows.base import AbstractFlow
from gradflow.method import Method
from gradflow.solvers import (
    DormandPrince8,
    Eigenbasis,
    GaussLegendre,
    Krylov,
    OrthogonalChebyshev,
    StiffSubspace,
    Switching,
    kvaerno5,
)
from gradflow.solvers.explicit import REACH, STAGES
from gradflow.solvers.linearisation import AbstractLinearisation

__all__ = ["Chosen", "choose", "working_type"]

# Implicit steps make no square matrix of more rows than this: conjugate gradients are faster.
MAX_DENSE = 64
COLLOCATION_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A solver, its name, why it was picked, and whether its steps must land on saved times."""

    solver: diffrax.AbstractSolver
    name: str
    reason: str
    land_on_saves: bool
    evaluations_per_step: int | None


def choose(
    method: Method, flow: AbstractFlow, state: Any, t1: Any, horizon: float | None
) -> Chosen:
    """The diffrax solver that ``method`` means for this flow, start and horizon."""
    if isinstance(method.solver, diffrax.AbstractSolver):
        solver, reason = method.solver, "given"
    elif method.solver == "auto" and method.step_size is not None:
        solver, reason = diffrax.Tsit5(), "auto: explicit, because the step is fixed"
    elif method.solver == "auto":
        solver, reason = _cheapest(flow, state, t1, horizon, method.rtol)
    elif method.solver == "conserving":
        solver, reason = _conserving(flow, state), "solver='conserving'"
    else:
        reason = f"solver={method.solver!r}"
        if method.solver == "explicit":
            solver = diffrax.Tsit5()
        elif method.solver == "stabilised":
            solver = _stabilised(method.rtol)
        else:
            solver = _implicit(flow, state)
    return Chosen(
        solver,
        _name(solver),
        reason,
        method.step_size is None and _interpolates_poorly(solver),
        _evaluations_per_step(solver),
    )


# Of explicit steps held up by stability: below this many a run is easy.
_EASY_STEPS = 100
# Tighter than this, order 8 is worth its 13 evaluations.
_TIGHT = 3e-8


def _cheapest(
    flow: AbstractFlow, state: Any, t1: Any, horizon: float | None, rtol: float
) -> tuple[diffrax.AbstractSolver, str]:
    """The solver for which the run should take the least time, and why."""
    size = sum(leaf.size for leaf in jax.tree.leaves(state))
    if horizon is None or not _checks.is_concrete(flow, state):
        return diffrax.Tsit5(), "auto: explicit, because the numbers are traced"
    rate = flow.fastest_rate(state)
    if rate is None:
        reason = "auto: explicit, stabilised where steps turn out stiff (no bound on rates known)"
        return _switching(flow, _stabilised(rtol), t1, size, None), reason
    measured = f"fastest rate about {rate:.3g} for a time of {horizon:.3g}, {size} unknowns"
    if rate * horizon / REACH <= _EASY_STEPS:
        easy = DormandPrince8() if rtol <= _TIGHT else diffrax.Tsit5()
        return easy, f"auto: explicit ({measured})"
    costs = {"stabilised": _stabilised_cost(rate * horizon, rtol, size)}
    if flow.symmetric_jacobian:
        count, _ = _stiff_dimension(flow, state)
        step = _collocation_step(size, count)
        costs["conserving"] = _COLLOCATION_STEPS * step
    else:
        costs["implicit"] = _IMPLICIT_STEPS * (1e-3 + 7 * (1e-10 * size**3 + 1e-8 * size**2))
    name = min(costs, key=costs.__getitem__)
    if name == "implicit":
        return _implicit(flow, state), f"auto: implicit ({measured})"
    reason = f"auto: explicit, {name} where steps turn out stiff ({measured})"
    if name == "stabilised":
        return _switching(flow, _stabilised(rtol), t1, size, None), reason
    return _switching(flow, _conserving(flow, state), t1, size, step), reason


# The rest are seconds on one core and numbers of steps as measured; only ratios matter, and only
# to a factor of about two.
_COLLOCATION_STEPS = 60
_IMPLICIT_STEPS = 600


def _evaluation(size: int) -> float:
    return 1.5e-6 + 1e-8 * size


def _stabilised_cost(stiffness: float, rtol: float, size: int) -> float:
    # Accuracy asks for some hundred steps of some eight stages; stability for more stages, up to
    # a number above which round-off is enlarged beyond the tolerance.
    steps = 300 * (1e-8 / rtol) ** 0.2
    most = 19 * (rtol / 1e-8) ** 0.1
    return steps * 1.5e-5 + max(8 * steps, stiffness / (0.35 * most)) * _evaluation(size)


def _collocation_step(size: int, count: int) -> float:
    if count > MAX_DENSE:
        return 400 * _evaluation(size)  # mostly products with the Jacobian
    # The Jacobian on the stiff directions, its eigenvalues, and rounds of Newton's iteration.
    return 2e-4 + 5e-10 * size * count**1.5 + 6e-10 * count**3 + 2e-7 * size


def _switching(flow: AbstractFlow, stiff: Any, t1: Any, size: int, step: float | None) -> Switching:
    explicit = (STAGES - 1) * _evaluation(size)
    # A stabilised step is about as dear as the explicit steps that it replaces at the change.
    price = 2.0 if step is None else step / explicit
    return Switching(stiff, flow.vector_field, np.asarray(t1), np.asarray(price))


def _stabilised(rtol: Any) -> OrthogonalChebyshev:
    return OrthogonalChebyshev(tolerance=rtol, costed=True)


def _name(solver: diffrax.AbstractSolver) -> str:
    if isinstance(solver, Switching):
        return f"Switching({type(solver.stiff).__name__})"
    return type(solver).__name__


def _implicit(flow: AbstractFlow, state: Any) -> diffrax.AbstractSolver:
    return kvaerno5(floor=64 * _roundoff(flow, state))


def _conserving(flow: AbstractFlow, state: Any) -> GaussLegendre:
    if not flow.symmetric_jacobian:
        raise ArgumentError(
            "solver",
            f"'conserving' for {type(flow).__name__}",
            "it is for flows with a symmetric Jacobian, like GradientFlow: take 'implicit'",
        )
    return GaussLegendre(
        stages=COLLOCATION_STAGES,
        floor=_roundoff(flow, state),
        linearisation=_linearisation(flow, state),
        field=flow.vector_field,
        costed=True,
    )


def _stiff_dimension(flow: AbstractFlow, state: Any) -> tuple[int, bool]:
    """The size of the dense form of the Jacobian, and whether it is one on a subspace."""
    size = sum(leaf.size for leaf in jax.tree.leaves(state))
    count = flow.stiff_count()
    return (count, True) if count is not None and 2 * count < size else (size, False)


def _linearisation(flow: AbstractFlow, state: Any) -> AbstractLinearisation:
    """The Jacobian in as small a dense form as there is, or in none."""
    count, on_subspace = _stiff_dimension(flow, state)
    if count > MAX_DENSE:
        return Krylov()
    if not on_subspace:
        return Eigenbasis()
    _, unravel = ravel_pytree(state)
    return StiffSubspace(flow.stiff_directions, count, unravel, flow.background_rate())


def _roundoff(flow: AbstractFlow, state: Any) -> Any:
    """Round-off of the largest entries that a state will have on its way, roughly."""
    strengths = flow.target_strengths()
    sizes = [*jax.tree.leaves(state), *([] if strengths is None else [strengths])]
    # On the host, where it takes no dispatch, unless numbers are traced.
    xp = np if _checks.is_concrete(sizes) else jnp
    largest = xp.max(xp.stack([xp.max(xp.abs(xp.asarray(leaf)), initial=0.0) for leaf in sizes]))
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
    if isinstance(solver, DormandPrince8):
        return STAGES - 1
    if not isinstance(solver, diffrax.AbstractERK):
        return None
    tableau: Any = solver.tableau
    return int(tableau.num_stages) - int(bool(tableau.fsal))


def working_type(flow: AbstractFlow, state: Any) -> Any:
    """The floating point type that holds both the flow's numbers and the state."""
    leaves = [x for x in jax.tree.leaves((flow, state)) if hasattr(x, "dtype")]
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.result_type(*floats)
