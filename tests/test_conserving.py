"""Gauss–Legendre collocation: its order, the laws it keeps, and stiff tails."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from gradflow.solvers import GaussLegendre
from gradflow.solvers.collocation import _tableau

PROBLEM = gf.Problem.from_singular_values([2.0, 1.0])
FLOW = gf.GradientFlow(PROBLEM)
WIDTHS = (2, 3, 3, 2)


def _start(scale, seed=0):
    return gf.initialize.gaussian(seed, WIDTHS, scale)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_tableau_meets_the_order_conditions_of_gauss(stages):
    table = _tableau(stages)
    b = table.end @ table.A
    for k in range(1, 2 * stages + 1):
        np.testing.assert_allclose(b @ table.c ** (k - 1), 1 / k, rtol=1e-12)
    # The condition under which quadratic invariants are kept: b_i a_ij + b_j a_ji = b_i b_j.
    M = b[:, None] * table.A + (b[:, None] * table.A).T - np.outer(b, b)
    np.testing.assert_allclose(M, 0, atol=1e-14)


@pytest.mark.parametrize(("stages", "steps"), [(2, (8, 16, 32)), (3, (8, 16)), (4, (4, 8))])
def test_observed_order_is_twice_the_number_of_stages(stages, steps):
    flow, start = gf.ModeFlow([1.0], 3), np.array([[0.9], [0.5], [1.2]])
    tight = gf.Method(solver="explicit", rtol=1e-14, atol=1e-15)
    reference = gf.simulate(flow, start, 2.0, save=2, method=tight).final
    errors = []
    for count in steps:
        method = gf.Method(solver=GaussLegendre(stages), step_size=2.0 / count)
        final = gf.simulate(flow, start, 2.0, save=2, method=method).final
        errors.append(float(jnp.abs(final - reference).max()))
    orders = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert orders[-1] == pytest.approx(2 * stages, abs=0.15)


@pytest.mark.parametrize("rtol", [1e-4, 1e-6, 1e-10])
@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_laws_are_kept_to_round_off_at_any_tolerance(rtol, scale):
    start = _start(scale)
    method = gf.Method(solver="conserving", rtol=rtol, atol=rtol * 1e-2)
    traj = gf.simulate(FLOW, start, 400.0, save="log", method=method)
    assert traj.status is gf.Status.REACHED_END
    size = max(float(jnp.sum(w**2)) for w in traj.final.weights)
    gf.testing.assert_conserved(traj, atol=1e-12 * size)
    gf.testing.assert_nilpotent(traj)
    assert float(traj.final_loss) < 1e-12


def test_agrees_with_the_explicit_solver_at_every_saved_time():
    tight = gf.Method(solver="explicit", rtol=1e-11, atol=1e-13)
    explicit = gf.simulate(FLOW, _start(0.3), 20.0, save=40, method=tight)
    method = gf.Method(solver="conserving", rtol=1e-8)
    conserving = gf.simulate(FLOW, _start(0.3), 20.0, save=40, method=method)
    # Of order 8 with an estimate of order 4: well below the tolerance.
    np.testing.assert_allclose(conserving["modes"], explicit["modes"], rtol=0, atol=1e-8)


def test_a_plateau_and_a_stiff_tail_take_few_steps():
    flow = gf.ModeFlow([2.0, 1.0], 3)
    start = np.full((3, 2), 1e-3)
    end = 3 * float(gf.exact.escape_time(1.0, 1e-9, 3))
    # An explicit method needs at least its stability limit: the sharpness is 3·2^{4/3} = 7.6.
    assert 7.6 * end / 3.3 > 5000
    method = gf.Method(solver="conserving", rtol=1e-8, atol=1e-11)
    traj = gf.simulate(flow, start, end, save=10, method=method)
    assert traj.stats.steps < 500
    exact = gf.exact.mode(np.array([[2.0, 1.0]]), 1e-9, np.asarray(traj.ts)[:, None], 3)
    np.testing.assert_allclose(traj["modes"], exact, rtol=0, atol=1e-6)


def test_works_on_other_losses_with_weight_decay_and_from_the_origin():
    loss = gf.losses.Huber(np.diag([2.0, 1.0]))
    problem = gf.Problem.from_loss(loss, (2, 2))
    method = gf.Method(solver="conserving")
    traj = gf.simulate(gf.GradientFlow(problem), _start(0.4), 30.0, save=20, method=method)
    gf.testing.assert_conserved(traj, atol=1e-11)
    decaying = gf.GradientFlow(PROBLEM, weight_decay=0.1)
    traj = gf.simulate(decaying, _start(0.4), 10.0, save=20, method=method)
    # Decay is no quadratic invariant: C_i shrinks to the accuracy of the step.
    gf.testing.assert_conserved(traj, atol=1e-7)
    origin = gf.simulate(FLOW, _start(0.0), 10.0, save=20, method=method)
    assert origin.status is gf.Status.STATIONARY
    assert float(jnp.abs(origin["modes"]).max()) == 0


def test_works_under_vmap_with_a_stopping_rule():
    method = gf.Method(solver="conserving", rtol=1e-7)
    starts = jax.vmap(lambda key: gf.initialize.gaussian(key, WIDTHS, 0.4))(
        jax.random.split(jax.random.key(3), 5)
    )

    def run(start):
        return gf.simulate(FLOW, start, 200.0, save=20, method=method, stop_gradient_norm=1e-7)

    batch = jax.vmap(run)(starts)
    assert (batch.status == gf.Status.STATIONARY).all()
    single = run(jax.tree.map(lambda w: w[2], starts))
    # Lanes choose their own steps; both are far below the tolerance.
    np.testing.assert_allclose(batch.lane(2)["modes"][:-1], single["modes"][:-1], atol=1e-8)


def test_auto_conserves_where_stability_would_cost_more_than_eigenbases():
    start = gf.initialize.balanced(0, WIDTHS, 0.02)
    short, long = (gf.simulate(FLOW, start, t1, save="log") for t1 in (10.0, 1e6))
    assert short.stats.solver == "Tsit5"
    assert long.stats.solver == "GaussLegendre"
    assert "conserving" in long.stats.reason
    # No gradient in the metric of W: left to Kvaerno.
    reduced = gf.simulate(gf.EndToEndFlow(PROBLEM, 3), 1e-3 * np.eye(2), 1e7, save="log")
    assert reduced.stats.solver == "Kvaerno5"
    np.testing.assert_allclose(reduced["modes"][-1], [2.0, 1.0], rtol=1e-6)


def test_dense_output_is_exact_at_the_ends_of_a_step():
    term, solver = diffrax.ODETerm(FLOW.vector_field), GaussLegendre(3)
    y0 = _start(0.8)
    state = solver.init(term, 0.0, 0.1, y0, None)
    y1, _, dense, _, _ = solver.step(term, 0.0, 0.1, y0, None, state, False)
    path = solver.interpolation_cls(t0=0.0, t1=0.1, **dense)
    for at, expected in ((0.0, y0), (0.1, y1)):
        for a, b in zip(jax.tree.leaves(path.evaluate(at)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)


def test_flows_that_are_no_gradients_and_large_ones_are_refused():
    method = gf.Method(solver="conserving")
    with pytest.raises(ValueError, match=r"^solver: .*EndToEndFlow.* take 'implicit'"):
        gf.simulate(gf.EndToEndFlow(PROBLEM, 2), np.eye(2), 1.0, method=method)
    big = gf.Problem(np.eye(40))
    with pytest.raises(ValueError, match=r"^solver: .*3200 unknowns.* take 'explicit'"):
        gf.simulate(gf.GradientFlow(big), gf.initialize.identity((40, 40, 40)), 1.0, method=method)
