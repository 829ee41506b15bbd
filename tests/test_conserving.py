"""Gauss–Legendre collocation: its order, the laws it keeps, and stiff tails."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import gradflow as gf
from gradflow.choice import MAX_DENSE, choose
from gradflow.solvers import Eigenbasis, GaussLegendre, Krylov, StiffSubspace
from gradflow.solvers.tableau import gauss

PROBLEM = gf.Problem.from_singular_values([2.0, 1.0])
FLOW = gf.GradientFlow(PROBLEM)
WIDTHS = (2, 3, 3, 2)


def _start(scale, seed=0):
    return gf.initialize.gaussian(seed, WIDTHS, scale)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_tableau_meets_the_order_conditions_of_gauss(stages):
    table = gauss(stages)
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


def test_dense_output_is_exact_at_the_ends_of_a_step():
    term, solver = diffrax.ODETerm(FLOW.vector_field), GaussLegendre(3)
    y0 = _start(0.8)
    state = solver.init(term, 0.0, 0.1, y0, None)
    y1, _, dense, _, _ = solver.step(term, 0.0, 0.1, y0, None, state, False)
    path = solver.interpolation_cls(t0=0.0, t1=0.1, **dense)
    for at, expected in ((0.0, y0), (0.1, y1)):
        for a, b in zip(jax.tree.leaves(path.evaluate(at)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)


def test_flows_that_are_no_gradients_are_refused():
    method = gf.Method(solver="conserving")
    with pytest.raises(ValueError, match=r"^solver: .*EndToEndFlow.* take 'implicit'"):
        gf.simulate(gf.EndToEndFlow(PROBLEM, 2), np.eye(2), 1.0, method=method)


# ---------------------------------------------------------------- the Jacobian, in three forms


def _forms(flow, state):
    _, unravel = ravel_pytree(state)
    stacked = jax.eval_shape(flow.stiff_directions, state)
    assert jax.tree.leaves(stacked)[0].shape[0] == flow.stiff_count()
    count = jax.tree.leaves(stacked)[0].shape[0]
    return {
        "eigenbasis": Eigenbasis(),
        "subspace": StiffSubspace(flow.stiff_directions, count, unravel, flow.background_rate()),
        "krylov": Krylov(),
    }


@pytest.mark.parametrize("form", ["eigenbasis", "subspace", "krylov"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_every_form_of_the_jacobian_leads_to_the_same_run(form, decay):
    flow, start = gf.GradientFlow(PROBLEM, weight_decay=decay), _start(0.4)
    solver = GaussLegendre(4, linearisation=_forms(flow, start)[form], costed=True)
    method = gf.Method(solver=solver, rtol=1e-9, atol=1e-11)
    traj = gf.simulate(flow, start, 60.0, save=6, method=method)
    tight = gf.Method(solver=diffrax.Dopri8(), rtol=1e-12, atol=1e-14)
    expected = gf.simulate(flow, start, 60.0, save=6, method=tight)
    np.testing.assert_allclose(traj["modes"], expected["modes"], rtol=0, atol=1e-8)
    if decay == 0:
        gf.testing.assert_conserved(traj, atol=1e-13)
    assert traj.stats.rhs_evaluations > 4 * traj.stats.steps


def test_stiff_directions_hold_the_range_of_the_gauss_newton_part():
    start = _start(0.7)
    flat, unravel = ravel_pytree(start)
    G = jax.jacfwd(lambda y: unravel(y).end_to_end().ravel())(flat)
    stacked = jax.vmap(lambda d: ravel_pytree(d)[0])(FLOW.stiff_directions(start))
    np.testing.assert_allclose(stacked, G, rtol=0, atol=1e-15)


def test_conjugate_gradients_solve_shifted_systems_of_a_symmetric_matrix():
    S = np.diag([-40.0, -3.0, -0.5, 0.1])
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))
    J = turn @ S @ turn.T
    table, r = gauss(3), np.random.default_rng(1).standard_normal((3, 4))
    x, _ = Krylov().solver((jnp.zeros(4), 0.0), lambda t, y: J @ y, 0.0, 0.5, table)(jnp.asarray(r))
    exact = np.linalg.solve(np.eye(12) - 0.5 * np.kron(table.A, J), r.ravel()).reshape(3, 4)
    # To the fixed tolerance of the inner iteration.
    assert np.linalg.norm(x - exact) < 0.1 * np.linalg.norm(exact)


def _shapes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                if hasattr(inner, "jaxpr"):
                    inner = inner.jaxpr
                if hasattr(inner, "eqns"):
                    yield from _shapes(inner)


@pytest.mark.parametrize(
    ("widths", "largest"), [((20, 20, 20, 20), None), ((40, 40, 40), None), ((7, 7, 7, 7), 49)]
)
def test_conserving_steps_form_no_square_matrix_above_the_documented_size(widths, largest):
    flow = gf.GradientFlow(gf.Problem(np.eye(widths[0])))
    state = gf.initialize.identity(widths)
    flat, unravel = ravel_pytree(state)
    solver = choose(gf.Method(solver="conserving"), flow, state, 1.0, 1.0).solver

    def step(y):
        net = unravel(y)
        term = diffrax.ODETerm(flow.vector_field)
        memory = solver.init(term, 0.0, 0.1, net, None)
        return solver.step(term, 0.0, 0.1, net, None, memory, False)[0]

    sides = [min(s[-2:]) for s in _shapes(jax.make_jaxpr(step)(flat).jaxpr) if len(s) >= 2]
    assert flat.size > 2 * MAX_DENSE
    # No form of the Jacobian on all unknowns; on the stiff directions up to MAX_DENSE of them.
    assert max(sides) == (largest or max(widths))
    assert max(sides) <= MAX_DENSE
