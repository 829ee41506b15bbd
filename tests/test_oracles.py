"""The solver against flows computed by Taylor series in 34-digit arithmetic."""

import numpy as np
import pytest

import gradflow as gf
from cases import largest_error, log_slope, references

NAMES = sorted(references())


def errors(name: str, solver: str, rtol: float, atol: float) -> float:
    case = references()[name]
    traj = gf.simulate(
        case.flow,
        case.start,
        float(case.times[-1]),
        save=case.times,
        method=gf.Method(solver=solver, rtol=rtol, atol=atol),
    )
    np.testing.assert_array_equal(traj.ts, case.times)
    assert traj.status is gf.Status.REACHED_END
    return max(largest_error(traj.network(i), expected) for i, expected in enumerate(case.solution))


def test_there_are_four_reference_trajectories():
    plain = ["three_layer_coloured_inputs", "three_layer_rectangular", "two_layer_square"]
    assert ["delta_modulated_three_layer", *plain] == NAMES


@pytest.mark.parametrize("atol", [1e-10, 1e-13], ids=["default_atol", "tight_atol"])
@pytest.mark.parametrize("name", NAMES)
def test_explicit_solver_reproduces_reference_trajectory(name, atol):
    # atol=1e-10 is Method's default: errors per step of 1e-10 where rtol asks for 1e-11.
    assert errors(name, "explicit", 1e-11, atol) < 1e-9


def test_implicit_solver_reproduces_reference_trajectory():
    assert errors("two_layer_square", "implicit", 1e-11, 1e-13) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_explicit_error_is_proportional_to_the_tolerance(name):
    # The controller holds the error per step at rtol: the global error follows it with slope 1
    # (a method of order 5 takes rtol^{-1/5} steps, which may cost a fifth of the slope).
    tolerances = 10.0 ** np.arange(-5, -11, -1)
    found = [errors(name, "explicit", rtol, rtol * 1e-2) for rtol in tolerances]
    assert np.all(np.diff(found) < 0)
    assert 0.8 < log_slope(tolerances, found) < 1.2


def test_implicit_error_falls_with_the_tolerance():
    tolerances = 10.0 ** np.arange(-5, -11, -1)
    found = [errors("two_layer_square", "implicit", rtol, rtol * 1e-2) for rtol in tolerances]
    assert np.all(np.diff(found) < 0)
    assert 0.7 < log_slope(tolerances, found) < 1.3
