"""The stabilised explicit method: its coefficients, its stability, and stiff tails."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest

import gradflow as gf
from cases import largest_error, log_slope, references
from gradflow.solvers import GuardedSteps
from gradflow.solvers.stabilised import OrthogonalChebyshev, _advance, _table, known_stages

STAGES = known_stages()
MODES = gf.ModeFlow([2.0, 1.0], 3)
START = jnp.array([[0.3, 0.2], [0.4, 0.3], [0.2, 0.3]])


def tableau(member):
    """The method as a Butcher tableau (A, b), and with the embedded one, on one stage more."""
    table = _table()
    s = table.stages[member]
    rows = table.recurrence[table.offset[member] : table.offset[member] + s - 5, :3]
    # A stage, the start or the end as its weights on the slopes.
    reads = [np.zeros(s + 1), table.first[member] * np.eye(s + 1)[0]]
    for j, (mu, nu, kappa) in enumerate(rows, start=1):
        reads.append(mu * np.eye(s + 1)[j] + nu * reads[-1] + kappa * reads[-2])
    base = reads[-1]
    late = np.eye(s + 1)[s - 4 :]
    reads.extend(base + row @ late[:4] for row in table.finish[member])
    A = np.array(reads)
    return A[:s, :s], A[s, :s], A, A[s] + table.error[member] @ late


def residuals(A, b):
    """Of the eight order conditions, in the order of the trees' sizes."""
    c = A.sum(axis=1)
    return np.array(
        [
            b.sum() - 1,
            b @ c - 1 / 2,
            b @ c**2 - 1 / 3,
            b @ A @ c - 1 / 6,
            b @ c**3 - 1 / 4,
            b @ (c * (A @ c)) - 1 / 8,
            b @ A @ c**2 - 1 / 12,
            b @ A @ A @ c - 1 / 24,
        ]
    )


@pytest.mark.parametrize("member", range(len(STAGES)))
def test_every_member_meets_the_order_conditions_and_its_error_estimate_those_to_order_3(member):
    A, b, longer, embedded = tableau(member)
    np.testing.assert_allclose(residuals(A, b), 0, atol=2e-14)
    # Stage times: the recurrence's, then the last stages'.
    table, c = _table(), A.sum(axis=1)
    first = table.offset[member]
    np.testing.assert_allclose(table.recurrence[first : first + len(b) - 5, 3], c[1:-4], atol=1e-14)
    np.testing.assert_allclose(table.nodes[member], c[-4:], atol=1e-14)
    defects = residuals(longer, embedded)
    np.testing.assert_allclose(defects[:4], 0, atol=2e-14)
    assert np.abs(defects[4:]).max() > 1e-3
    assert np.abs(table.finish[member]).max() < 1.5


@jax.jit
def stability(member, z):
    """``R_s(z)``, from a step of the code for ``ẏ = z y``."""
    return _advance(lambda t, y: z * y, 0.0, 1.0, 1.0, jnp.ones_like(z), z, member)[0]


@pytest.mark.parametrize("member", range(len(STAGES)))
def test_stability_polynomials_stay_below_damping_on_the_whole_interval(member):
    s, reach = STAGES[member], _table().reach[member]
    assert reach > (0.34 if s > 16 else 0.29 if s > 5 else 0.23) * s**2
    z = -reach * (1 - np.cos(np.linspace(0, np.pi, 2000))) / 2
    R = np.asarray(stability(member, z))
    assert np.abs(R[z < -0.06]).max() < 0.951
    # No stability is given away: a little further on it is lost.
    beyond, near = np.asarray(stability(member, -1.05 * reach + 0 * z)), 0.1 * z / reach
    assert np.abs(beyond).max() > 1
    # e^z to order 4, also for a growing mode.
    for small in (near, -near):
        error = np.abs(stability(member, small) - np.exp(small))
        assert np.all(error <= np.abs(small) ** 5 / 120 + 1e-14)


@eqx.filter_jit
def _solve(vector_field, y0, t1, rtol, solver):
    """The end, the number of evaluations, and diffrax's statistics; ``rtol`` is an array."""
    inner = diffrax.PIDController(rtol=rtol, atol=1e-2 * rtol)
    controller = GuardedSteps(
        controller=inner, rtol=rtol, atol=1e-2 * rtol, norm=optimistix.rms_norm, size=None
    )
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field),
        solver,
        0.0,
        t1,
        None,
        y0,
        stepsize_controller=controller,
        saveat=diffrax.SaveAt(t1=True, controller_state=True),
        max_steps=100_000,
    )
    final = jax.tree.map(lambda x: x[0], solution.ys)
    # The count comes first where others are kept with it.
    return final, jnp.ravel(solution.controller_state[-1])[0], solution.stats


FIELD = MODES.vector_field
COSTED = OrthogonalChebyshev(tolerance=1e-6, costed=True)


@functools.cache
def reference():
    return _solve(FIELD, START, jnp.array(2.0), jnp.array(1e-13), diffrax.Tsit5())[0]


def observed_order(term, stages, y0, t1, counts, exact):
    """From the errors of fixed steps, of the last two numbers of steps."""
    solver = OrthogonalChebyshev(stages)

    @jax.jit
    def end(count):
        def step(i, carry):
            y, state = carry
            start, stop = t1 * i / count, t1 * (i + 1) / count
            y, _, _, state, _ = solver.step(term, start, stop, y, None, state, False)
            return y, state

        return jax.lax.fori_loop(0, count, step, (y0, solver.init(term, 0.0, t1, y0, None)))[0]

    exact = end(1000) if exact is None else exact
    errors = [float(jnp.abs(end(count) - exact).max()) for count in counts]
    return np.log2(errors[0] / errors[1])


@pytest.mark.parametrize("stages", [5, 13])
def test_observed_order_is_4(stages):
    term = diffrax.ODETerm(MODES.vector_field)
    order = observed_order(term, stages, START, 2.0, (64, 128), reference())
    assert order == pytest.approx(4, abs=0.15)


@pytest.mark.parametrize("stages", [5, 13])
def test_explicit_time_is_integrated_to_order_4(stages):
    term = diffrax.ODETerm(lambda t, y, args: jnp.cos(3 * t) * y - t * y**2)
    order = observed_order(term, stages, jnp.ones(1), 1.0, (40, 80), None)
    assert order == pytest.approx(4, abs=0.15)


def test_error_is_proportional_to_the_tolerance():
    end, tolerances = jnp.array(2.0), np.array([1e-4, 1e-6, 1e-8])
    errors = [
        float(jnp.abs(_solve(FIELD, START, end, jnp.array(rtol), COSTED)[0] - reference()).max())
        for rtol in tolerances
    ]
    assert log_slope(tolerances, errors) == pytest.approx(1, abs=0.25)
    assert np.all(errors < 30 * tolerances)


def test_a_plateau_and_a_stiff_tail_take_few_evaluations():
    start, t1, rtol = jnp.full((3, 2), 3e-2), jnp.array(5000.0), jnp.array(1e-6)
    final, evaluations, _ = _solve(FIELD, start, t1, rtol, COSTED)
    other, _, stats = _solve(FIELD, start, t1, rtol, diffrax.Tsit5())
    assert float(evaluations) < 6 * int(stats["num_steps"]) / 5
    for end in (final, other):
        np.testing.assert_allclose(jnp.prod(end, axis=0), [2.0, 1.0], rtol=1e-5)


def test_trajectories_of_networks_agree_with_the_reference():
    case = references()["three_layer_coloured_inputs"]
    method = gf.Method(solver=OrthogonalChebyshev(tolerance=1e-9), rtol=1e-9, atol=1e-11)
    times = np.unique(np.concatenate([[0.0], case.times]))
    flow = gf.GradientFlow(case.problem)
    traj = gf.simulate(flow, case.start, times[-1], save=times, method=method)
    for time, expected in zip(case.times, case.solution, strict=True):
        at = int(np.searchsorted(times, time))
        assert largest_error(traj.network(at), expected) < 1e-7


def test_the_end_to_end_flow_whose_jacobian_is_not_symmetric_agrees_with_the_closed_form():
    flow = gf.EndToEndFlow(gf.Problem.from_singular_values([2.0, 1.0]), 3)
    method = gf.Method(solver=OrthogonalChebyshev(), rtol=1e-8, atol=1e-10)
    traj = gf.simulate(flow, np.diag([0.2, 0.3]), 20.0, save=21, method=method)
    for mode, (strength, begin) in enumerate([(2.0, 0.2), (1.0, 0.3)]):
        expected = gf.exact.mode(strength, begin, traj.ts, 3)
        np.testing.assert_allclose(traj["modes"][:, mode], expected, rtol=0, atol=1e-6)


# Of a symmetric Jacobian with eigenvalues down to −1000, turned out of the coordinate axes.
_LAMBDA = np.array([-1000.0, -990.0, -300.0, -10.0, -1.0, 0.5])
_Q = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
_J = jnp.asarray(_Q @ np.diag(_LAMBDA) @ _Q.T)
LINEAR = diffrax.ODETerm(lambda t, y, args: _J @ y)
Y0 = jnp.asarray(_Q @ np.array([1e-6, 1e-6, 0.0, 0.0, 1.0, 0.5]))


@jax.jit
def linear_step(h, state):
    return COSTED.step(LINEAR, 0.0, h, Y0, None, state, False)


def linear_start(**changes):
    state = COSTED.init(LINEAR, 0.0, 1.0, Y0, None)
    return state._replace(**changes)


def exact(h):
    return _Q @ (np.exp(h * _LAMBDA) * (_Q.T @ np.asarray(Y0)))


def test_the_spectral_radius_is_estimated_from_below_and_within_its_safety_factor():
    state = linear_step(0.1, linear_start())[3]
    assert 1000 / 1.05 < float(state.estimate.radius) <= 1000 * (1 + 1e-5)


@pytest.mark.parametrize("h", [0.1, 3.0])
def test_a_step_far_beyond_the_longest_stable_one_is_made_of_stable_ones(h):
    # 3 ρ is ten times the reach of the largest number of stages at this tolerance.
    y, error, *_ = linear_step(h, linear_start())
    # The fifth order's error, and what is left of the fast components.
    np.testing.assert_allclose(y, exact(h), rtol=0, atol=1e-3 * h**5 + 2e-6)
    assert float(jnp.abs(error.error).max()) < 0.1


def test_too_small_a_radius_is_found_out_and_the_step_made_again():
    start = linear_start(age=jnp.asarray(0))
    wrong = start._replace(estimate=start.estimate._replace(radius=jnp.asarray(10.0)))
    y, _, _, state, _ = linear_step(0.1, wrong)
    np.testing.assert_allclose(y, exact(0.1), rtol=0, atol=2e-6)
    assert float(state.estimate.radius) > 950


def test_a_hopelessly_long_step_is_refused_at_no_great_cost():
    y, error, _, _, _ = linear_step(1e6, linear_start())
    assert np.all(np.isinf(error.error))
    assert np.all(np.isfinite(y))
    assert int(error.evaluations) < 30


def test_every_evaluation_is_counted():
    calls = []

    def counted(t, y, args):
        jax.debug.callback(lambda: calls.append(1))
        return _J @ y

    term = diffrax.ODETerm(counted)
    state = COSTED.init(term, 0.0, 1.0, Y0, None)
    jax.effects_barrier()
    calls.clear()
    # Several substeps with an estimate, and with one that comes after a failure.
    stale = state._replace(age=jnp.asarray(0))
    for begin in (state, stale):
        _, error, _, _, _ = COSTED.step(term, 0.0, 3.0, Y0, None, begin, False)
        jax.effects_barrier()
        assert len(calls) == int(error.evaluations) > 61
        calls.clear()


def test_the_last_derivative_serves_the_next_step():
    y, _, _, state, _ = linear_step(0.1, linear_start())
    np.testing.assert_allclose(state.rate, _J @ y, rtol=1e-12, atol=1e-12)


def test_runs_of_a_batch_are_those_of_single_starts():
    starts = jnp.stack([START, 0.1 * START, jnp.zeros_like(START)])
    end, rtol = jnp.array(2.0), jnp.array(1e-6)
    batch = jax.vmap(lambda y: _solve(FIELD, y, end, rtol, COSTED)[0])(starts)
    for lane, start in zip(batch, starts, strict=True):
        # Batched sums may round differently, and steps follow.
        single = _solve(FIELD, start, end, rtol, COSTED)[0]
        np.testing.assert_allclose(lane, single, rtol=1e-8, atol=1e-14)


def test_the_origin_is_never_left_and_a_zero_horizon_is_none():
    final, _, stats = _solve(
        FIELD, jnp.zeros_like(START), jnp.array(200.0), jnp.array(1e-6), COSTED
    )
    assert np.all(np.asarray(final) == 0)
    assert int(stats["num_steps"]) < 30
    y, error, _, state, _ = linear_step(0.0, linear_start())
    np.testing.assert_array_equal(y, Y0)
    assert np.all(np.asarray(error.error) == 0)
    assert np.all(np.isfinite(state.rate))


def test_an_overflow_is_an_infinite_error_and_leaves_a_finite_state():
    term = diffrax.ODETerm(lambda t, y, args: y**9)
    y0 = jnp.full(2, 1e30)
    state = COSTED.init(term, 0.0, 1.0, y0, None)
    y, error, *_ = COSTED.step(term, 0.0, 1.0, y0, None, state, False)
    np.testing.assert_array_equal(y, y0)
    assert np.all(np.isinf(error.error))


def test_single_precision_keeps_its_type_and_its_tolerance():
    flow = gf.ModeFlow(jnp.asarray([2.0, 1.0], jnp.float32), 3)
    method = gf.Method(solver=OrthogonalChebyshev(), rtol=1e-4, atol=1e-6)
    traj = gf.simulate(flow, START.astype(jnp.float32), 50.0, save=2, method=method)
    assert traj.final.dtype == jnp.float32
    assert traj.status is gf.Status.REACHED_END
    np.testing.assert_allclose(jnp.prod(traj.final, axis=0), [2.0, 1.0], rtol=1e-3)


def test_unknown_numbers_of_stages_are_refused():
    with pytest.raises(ValueError, match=r"^stages: got 6; .* one of \(5, 7, 9"):
        OrthogonalChebyshev(6)
