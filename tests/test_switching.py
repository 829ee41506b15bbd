"""Explicit where easy and another solver where stiff: what each hands to the other."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from gradflow import choice
from gradflow._products import product
from gradflow.solvers import DormandPrince8, Switching

PROBLEM = gf.Problem.from_singular_values([2.0, 1.0])
FLOW = gf.GradientFlow(PROBLEM)
WIDTHS = (2, 3, 3, 2)
START = gf.initialize.gaussian(0, WIDTHS, 0.2)
END = 300.0


def switching(kind, price=3.0):
    stiff = choice._conserving(FLOW, START) if kind == "conserving" else choice._stabilised(1e-8)
    return Switching(stiff, FLOW.vector_field, np.asarray(END), np.asarray(price))


def run(solver, save=25, rtol=1e-9, state=START, t1=END, **options):
    method = gf.Method(solver=solver, rtol=rtol, atol=1e-3 * rtol)
    return gf.simulate(FLOW, state, t1, save=save, method=method, **options)


@pytest.fixture(scope="module")
def reference():
    method = gf.Method(solver=diffrax.Dopri8(), rtol=1e-13, atol=1e-15)
    return gf.simulate(FLOW, START, END, save=25, method=method)


@pytest.mark.parametrize("kind", ["conserving", "stabilised"])
def test_a_run_with_a_stiff_tail_starts_explicit_and_ends_with_the_other_solver(kind, reference):
    traj = run(switching(kind))
    stats = traj.stats
    assert stats.solver.startswith("Switching(")
    assert 0 < stats.stiff_steps < stats.steps
    # The sharpness is 3·2^{4/3} = 7.6: held to its stability interval the explicit method would
    # take 7.6·300/4 steps and 13 evaluations for each.
    assert stats.steps < 450
    np.testing.assert_allclose(traj["modes"], reference["modes"], rtol=0, atol=2e-8)


def test_states_between_steps_are_as_accurate_as_those_at_steps():
    # The steps do not depend on the saved times, so that all of these are inside steps.
    solver = switching("conserving")
    times = np.concatenate([[0.0], np.geomspace(3.0, END, 40)])
    many, few = run(solver, times), run(solver, [0.0, END])
    assert many.stats.steps == few.stats.steps
    tight = run(diffrax.Dopri8(), times, rtol=1e-13)
    error = np.abs(many["modes"] - tight["modes"]).max(axis=1)
    assert error.max() < 5e-8
    conserving = run("conserving", times)
    gf.testing.assert_conserved(conserving, atol=1e-13)


def test_a_run_that_is_never_stiff_stays_explicit():
    traj = run(switching("conserving"), t1=2.0)
    assert traj.stats.stiff_steps == 0
    assert traj.stats.rhs_evaluations <= 13 * traj.stats.steps


def test_explicit_steps_come_back_when_the_flow_is_easy_again():
    # Fast decay to the start of a plateau: stiff at first, then nothing moves for long.
    def field(t, y, args=None):
        return -jnp.where(t < 1.0, 4000.0, 0.01) * (y - 1.0)

    class Fading(gf.AbstractFlow):
        def vector_field(self, t, state, args=None):
            return field(t, state)

        def loss(self, state):
            return 0.5 * jnp.sum((state - 1.0) ** 2)

        def check_state(self, state):
            return jnp.asarray(state)

    flow = Fading()
    solver = Switching(
        choice._stabilised(1e-8), flow.vector_field, np.asarray(60.0), np.asarray(2.0)
    )
    method = gf.Method(solver=solver, rtol=1e-8)
    traj = gf.simulate(flow, np.zeros(3), 60.0, save=10, method=method)
    assert 0 < traj.stats.stiff_steps < traj.stats.steps
    assert float(traj.final_loss) < 1e-15


def test_dormand_prince_takes_the_steps_of_diffrax():
    method = gf.Method(solver=DormandPrince8(), step_size=0.05)
    other = gf.Method(solver=diffrax.Dopri8(), step_size=0.05)
    a, b = (gf.simulate(FLOW, START, 2.0, save=7, method=m) for m in (method, other))
    for x, y in zip(jax.tree.leaves(a.states), jax.tree.leaves(b.states), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shapes", [((3, 4), (4, 2)), ((1, 1), (1, 5)), ((7, 8), (8, 8))])
def test_products_of_small_matrices_are_products(shapes):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(s)) for s in shapes)
    np.testing.assert_allclose(jax.jit(product)(a, b), a @ b, rtol=1e-14, atol=1e-15)
    lanes = jax.vmap(product, in_axes=(0, None))(jnp.stack([a, 2 * a]), b)
    np.testing.assert_allclose(lanes[1], 2 * (a @ b), rtol=1e-14, atol=1e-15)
    gradient = jax.grad(lambda a: jnp.sum(jax.jit(product)(a, b) ** 2))(a)
    np.testing.assert_allclose(gradient, 2 * (a @ b) @ b.T, rtol=1e-13, atol=1e-14)


# ---------------------------------------------------------------- dull cases, every solver

SOLVERS = ("auto", "stabilised", "conserving")


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_start_exactly_at_a_saddle_stays_there(solver):
    saddle = gf.initialize.decoupled(PROBLEM, WIDTHS, [2 ** (1 / 3), 0.0])
    traj = gf.simulate(FLOW, saddle, 1e3, save=5, method=gf.Method(solver=solver))
    assert traj.status in (gf.Status.REACHED_END, gf.Status.STATIONARY)
    assert np.isfinite(traj.loss).all()
    np.testing.assert_allclose(traj.loss, 0.5, rtol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_horizon_of_zero_returns_the_start(solver):
    traj = gf.simulate(FLOW, START, 0.0, save=5, method=gf.Method(solver=solver))
    assert traj.status is gf.Status.REACHED_END
    assert (len(traj.ts), traj.stats.steps) == (1, 0)
    np.testing.assert_array_equal(traj.final.weights[0], START.weights[0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_target_of_zeros_decays_and_a_zero_start_is_stationary(solver):
    flow = gf.GradientFlow(gf.Problem(np.zeros((2, 2))))
    traj = gf.simulate(flow, START, 1e4, save=5, method=gf.Method(solver=solver))
    assert traj.status is gf.Status.REACHED_END
    assert np.isfinite(traj.loss).all()
    assert traj.loss[-1] < traj.loss[0]
    still = gf.simulate(
        flow, gf.initialize.gaussian(0, WIDTHS, 0.0), 1e4, save=5, method=gf.Method(solver=solver)
    )
    assert still.status is gf.Status.STATIONARY
    assert float(still.final_loss) == 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_start_whose_rate_overflows_diverges_with_finite_rows(solver):
    huge = jax.tree.map(lambda w: 1e160 * w, START)
    traj = gf.simulate(FLOW, huge, 1.0, save=5, method=gf.Method(solver=solver))
    assert traj.status is gf.Status.DIVERGED
    assert all(np.isfinite(w).all() for w in traj.final.weights)
    assert np.isfinite(traj["loss"]).all()


def test_stages_without_a_solution_end_the_run_by_name():
    # Newton's iteration cannot succeed on a loss whose gradient is not a number nearby.
    def cliff(W):
        return jnp.where(W[0, 0] > 0.5, jnp.nan, 1.0) * jnp.sum((W - 1.0) ** 2)

    flow = gf.GradientFlow(gf.Problem.from_loss(cliff, (1, 1)))
    begin = gf.LinearNetwork([[[0.3]], [[0.3]]])
    method = gf.Method(solver="conserving", max_steps=400)
    traj = gf.simulate(flow, begin, 50.0, save=5, method=method)
    assert traj.status in (gf.Status.DIVERGED, gf.Status.MAX_STEPS)
    assert np.isfinite(traj.loss).all()
    # No step starts beyond the cliff, and the one that leads there is short.
    assert float(traj.final.end_to_end()[0, 0]) <= 0.501


def test_max_steps_are_met_by_name():
    method = gf.Method(solver="conserving", max_steps=3)
    traj = gf.simulate(FLOW, START, 1e4, save=5, method=method)
    assert traj.status is gf.Status.MAX_STEPS
    assert np.isfinite(traj.loss).all()


# ---------------------------------------------------------------- one program for all numbers

traces = []


class Counted(gf.GradientFlow):
    def vector_field(self, t, state, args=None):
        traces.append(1)
        return super().vector_field(t, state, args)


@pytest.mark.parametrize("solver", ["auto", "conserving"])
def test_nothing_is_traced_again_for_other_numbers(solver):
    def go(seed, t1, rtol, target):
        flow = Counted(gf.Problem.from_singular_values(target))
        net = gf.initialize.gaussian(seed, WIDTHS, 0.3)
        gf.simulate(flow, net, t1, save=5, method=gf.Method(solver=solver, rtol=rtol))
        return len(traces)

    first = go(0, 2e4, 1e-6, [2.0, 1.0])
    assert go(1, 3e4, 1e-7, [2.5, 1.5]) == first


@pytest.mark.slow
def test_works_in_a_batch():
    solver = switching("stabilised")
    lanes = jax.vmap(lambda key: gf.initialize.gaussian(key, WIDTHS, 0.4))(
        jax.random.split(jax.random.key(1), 3)
    )
    batch = jax.vmap(lambda net: run(solver, 4, 1e-7, net))(lanes)
    single = run(solver, 4, 1e-7, jax.tree.map(lambda w: w[1], lanes))
    np.testing.assert_allclose(batch.lane(1)["modes"], single["modes"], atol=1e-7)
