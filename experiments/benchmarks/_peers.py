"""Solvers under comparison behind one interface: gradflow's, SciPy's and diffrax's.

The peers integrate right-hand sides as their users write them: layer products with ``@``, each
product once, in NumPy for SciPy and in ``jax.numpy`` for diffrax. No Jacobian is given.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import solve_ivp

import gradflow as gf
from experiments.benchmarks._problems import Case

__all__ = [
    "OURS",
    "PEERS",
    "Measured",
    "Run",
    "Solver",
    "TooSlow",
    "approach",
    "jax_field",
    "measure",
    "numpy_field",
]

OURS = tuple(
    f"gradflow {name}" for name in ("auto", "explicit", "stabilised", "conserving", "implicit")
)
PEERS = (
    *(f"SciPy {name}" for name in ("LSODA", "BDF", "Radau", "DOP853")),
    *(f"diffrax {name}" for name in ("Tsit5", "Dopri8", "Kvaerno5")),
)
# These hold square matrices with a row per unknown.
_DENSE = ("LSODA", "BDF", "Radau", "Kvaerno5", "implicit")
MAX_DENSE = 1500
MAX_STEPS = 10**6


class TooSlow(Exception):
    """A run that does not end within its budget."""


class Run(NamedTuple):
    """States at all saved times, one array ``(times, d_i, d_{i−1})`` per layer, and the cost."""

    states: list[np.ndarray]
    steps: int
    seconds: float
    solver: str


class Measured(NamedTuple):
    """A run and the shortest time of its repeats."""

    run: Run
    seconds: float


def numpy_field(problem: gf.Problem, widths: tuple[int, ...]) -> Callable[[Any, Any], np.ndarray]:
    """``f(t, y)`` of gradient flow for SciPy; ``y`` holds the weights, layer after layer."""
    target = np.asarray(problem.target)
    given = problem.input_covariance
    covariance = None if given is None else np.asarray(given)
    shapes = list(zip(widths[1:], widths[:-1], strict=True))
    ends = np.cumsum([a * b for a, b in shapes])
    begins = ends - [a * b for a, b in shapes]

    def field(t, y):
        W = [y[i:j].reshape(shape) for i, j, shape in zip(begins, ends, shapes, strict=True)]
        before = [W[0]]
        for w in W[1:]:
            before.append(w @ before[-1])
        product = before[-1]
        carried = target - (product if covariance is None else product @ covariance)
        rate = np.empty_like(y)
        for layer in range(len(W) - 1, 0, -1):
            rate[begins[layer] : ends[layer]] = (carried @ before[layer - 1].T).ravel()
            carried = W[layer].T @ carried
        rate[: ends[0]] = carried.ravel()
        return rate

    return field


def jax_field(t: Any, weights: tuple[Any, ...], problem: gf.Problem) -> tuple[Any, ...]:
    """``f(t, y, args)`` of gradient flow for diffrax; ``y`` is the tuple of weights."""
    before = [weights[0]]
    for w in weights[1:]:
        before.append(w @ before[-1])
    product, covariance = before[-1], problem.input_covariance
    carried = problem.target - (product if covariance is None else product @ covariance)
    rates = []
    for layer in range(len(weights) - 1, 0, -1):
        rates.append(carried @ before[layer - 1].T)
        carried = weights[layer].T @ carried
    return (carried, *reversed(rates))


class Solver:
    """One solver on one case: ``solver(rtol, t1)`` integrates to ``t1``.

    Args:
        name: one of :data:`OURS` and :data:`PEERS`.
        case: the problem, start and absolute tolerance; saved times scale with ``t1``.

    Raises:
        TooSlow: the case has too many unknowns for a solver that stores square matrices.
    """

    def __init__(self, name: str, case: Case):
        self.name, self.case = name, case
        self.make, self.kind = name.split()
        if self.kind in _DENSE and case.unknowns > MAX_DENSE:
            raise TooSlow(f"needs square matrices of {case.unknowns} rows")
        self.problem, self.net = case.problem(), case.start()
        begin = {"gradflow": self._ours, "SciPy": self._scipy, "diffrax": self._diffrax}
        self._integrate = begin[self.make]()

    def __call__(
        self, rtol: float, t1: float, budget: float = math.inf, max_steps: int = MAX_STEPS
    ) -> Run:
        """Integrate to ``t1``.

        Args:
            rtol: relative tolerance; the absolute one is the case's.
            t1: the end.
            budget: seconds after which SciPy gives up.
            max_steps: after which the others do; compiled in.

        Raises:
            TooSlow: budget or steps are spent.
        """
        return self._integrate(rtol, self.case.times(t1), self.net.weights, budget, max_steps)

    def landing(self, rtol: float, budget: float = math.inf) -> list[np.ndarray]:
        """States at the case's saved times, each the end of a step: without interpolation.

        The peers' dense output is less accurate than their steps. Every saved time starts a new
        call.
        """
        times = self.case.times()
        states = [[np.asarray(w) for w in self.net.weights]]
        begun = time.perf_counter()
        for ts in itertools.pairwise(times):
            left = budget - (time.perf_counter() - begun)
            run = self._integrate(rtol, np.array(ts), tuple(states[-1]), left, MAX_STEPS)
            states.append([w[-1] for w in run.states])
        return [np.stack(layer) for layer in zip(*states, strict=True)]

    def _ours(self):
        flow = gf.GradientFlow(self.problem)

        def integrate(rtol, ts, weights, budget, max_steps):
            net = gf.LinearNetwork(weights)
            method = gf.Method(
                solver=self.kind, rtol=rtol, atol=self.case.atol(rtol), max_steps=max_steps
            )
            begun = time.perf_counter()
            traj = gf.simulate(flow, net, ts[-1], t0=ts[0], save=ts, method=method)
            seconds = time.perf_counter() - begun
            if traj.status is gf.Status.MAX_STEPS:
                raise TooSlow(f"more than {max_steps} steps")
            if traj.status is gf.Status.DIVERGED or float(traj.final_time) < ts[-1]:
                raise RuntimeError(f"{traj.status.name} at t = {float(traj.final_time):.3g}")
            states = [np.asarray(w) for w in traj.states.weights]
            return Run(states, int(traj.stats.steps), seconds, traj.stats.solver)

        return integrate

    def _scipy(self):
        field = numpy_field(self.problem, self.case.widths)
        shapes = [w.shape for w in self.net.weights]

        def integrate(rtol, ts, weights, budget, max_steps):
            start = np.concatenate([np.asarray(w).ravel() for w in weights])
            begun = time.perf_counter()
            calls = 0

            def watched(t, y):
                nonlocal calls
                calls += 1
                if calls % 256 == 0 and time.perf_counter() - begun > budget:
                    raise TooSlow(f"more than {budget:g} s")
                return field(t, y)

            # Steps that are too long overflow before they are rejected.
            with np.errstate(all="ignore"):
                solution = solve_ivp(
                    watched,
                    (ts[0], ts[-1]),
                    start,
                    method=self.kind,
                    t_eval=ts,
                    rtol=rtol,
                    atol=self.case.atol(rtol),
                )
            seconds = time.perf_counter() - begun
            if solution.status != 0:
                raise RuntimeError(solution.message)
            parts = np.split(solution.y, np.cumsum([a * b for a, b in shapes])[:-1])
            states = [part.T.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
            # SciPy does not count its steps, only evaluations.
            return Run(states, int(solution.nfev), seconds, self.kind)

        return integrate

    def _diffrax(self):
        def integrate(rtol, ts, weights, budget, max_steps):
            begun = time.perf_counter()
            ys, steps, result, met = jax.block_until_ready(
                _diffeqsolve(
                    tuple(map(jnp.asarray, weights)),
                    self.problem,
                    jnp.asarray(ts),
                    rtol,
                    self.case.atol(rtol),
                    kind=self.kind,
                    max_steps=max_steps,
                )
            )
            seconds = time.perf_counter() - begun
            if met:
                raise TooSlow(f"more than {max_steps} steps")
            if result != diffrax.RESULTS.successful:
                raise RuntimeError(f"diffrax gave up: {result}")
            return Run([np.asarray(w) for w in ys], int(steps), seconds, self.kind)

        return integrate


# Here and not inside the class: cases of equal shapes share the program.
@functools.partial(jax.jit, static_argnames=("kind", "max_steps"))
def _diffeqsolve(weights, problem, ts, rtol, atol, *, kind, max_steps):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(jax_field),
        getattr(diffrax, kind)(),
        ts[0],
        ts[-1],
        None,
        weights,
        args=problem,
        saveat=diffrax.SaveAt(ts=ts),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=atol),
        max_steps=max_steps,
        throw=False,
    )
    met = solution.result == diffrax.RESULTS.max_steps_reached
    return solution.ys, solution.stats["num_steps"], solution.result, met


def approach(solver: Solver, rtol: float, budget: float) -> None:
    """Compile, and raise :class:`TooSlow` if the whole run would take longer than its budget.

    A run of compiled code cannot be interrupted, so shorter ones come first, each time ten times
    longer, and the cost of the next is extrapolated from those before. ``auto`` looks at the
    horizon to choose a solver and is taken at its word.
    """
    horizon = solver.case.t1
    if solver.make == "SciPy" or solver.kind == "auto":
        return
    solver(rtol, 1e-6 * horizon)
    before, total = np.nan, 0.0
    for share in (1e-4, 1e-3, 1e-2, 1e-1):
        seconds = solver(rtol, share * horizon).seconds
        spent, total = max(seconds - total, 1e-9), seconds
        # Each tenfold horizon adds as much as the last, or up to ten times as much.
        growth = 3.0 if np.isnan(before) else float(np.clip(spent / before, 1.0, 10.0))
        before = spent
        if total + growth * spent > budget:
            raise TooSlow(
                f"{total + growth * spent:.2g} s expected for {10 * share:g} of the horizon"
            )


def measure(solver: Solver, rtol: float, budget: float, repeats: int) -> Measured:
    """The shortest of some repeats of the whole run; no more of them once 3 s are spent.

    Raises:
        TooSlow: the first run takes longer than the budget.
    """
    if solver.kind == "auto":
        # What it picks, and has to compile, may differ from one tolerance to the next.
        solver(rtol, solver.case.t1)
    runs = [solver(rtol, solver.case.t1, budget)]
    while len(runs) < repeats and sum(run.seconds for run in runs) < 3:
        runs.append(solver(rtol, solver.case.t1, budget))
    best = min(runs, key=lambda run: run.seconds)
    return Measured(best, best.seconds)
