"""The loop: what is saved, how a run ends, and how it goes through JAX's transformations."""

import dataclasses
import warnings

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import (
    SAVES,
    TARGET,
    WIDTHS,
    arrays,
    explicit,
    largest_error,
    problem,
    quartic_hole,
    run,
    start,
)

FLOW = gf.GradientFlow(problem("whitened"))
METHOD = explicit(1e-8)


def simulate(t1=4.0, *, flow=FLOW, state=None, save=SAVES, method=METHOD, **options):
    state = start() if state is None else state
    return gf.simulate(flow, state, t1, save=save, method=method, **options)


def all_finite(traj):
    leaves = [x for x in jax.tree.leaves(traj) if x is not traj.seconds]
    return all(np.all(np.isfinite(np.asarray(x))) for x in leaves)


# ---------------------------------------------------------------- saved times


def test_number_of_saves_is_equally_spaced_with_exact_ends():
    traj = gf.simulate(FLOW, start(), 4.3, t0=0.1, save=SAVES, method=METHOD)
    assert traj.ts[0] == 0.1
    assert traj.ts[-1] == 4.3
    np.testing.assert_allclose(np.diff(traj.ts), 4.2 / (SAVES - 1), rtol=1e-12)


def test_log_saves_are_the_start_and_six_decades_up_to_the_exact_end():
    traj = simulate(0.7, save="log")
    assert len(traj.ts) == 200
    assert traj.ts[0] == 0
    assert traj.ts[-1] == 0.7
    assert float(traj.ts[1]) == pytest.approx(0.7e-6, rel=1e-12, abs=0)
    np.testing.assert_allclose(np.diff(np.log(traj.ts[1:])), 6 * np.log(10) / 198, rtol=1e-9)


def test_array_of_saves_is_returned_as_given():
    times = np.sort(np.random.default_rng(0).uniform(0.3, 3.0, SAVES))
    traj = simulate(save=times)
    np.testing.assert_array_equal(traj.ts, times)
    assert float(traj.final_time) == 4.0
    # Saving elsewhere must not change the solution: dense output, to interpolation accuracy.
    fine = gf.simulate(FLOW, start(), float(times[20]), save=SAVES, method=METHOD)
    assert largest_error(traj.network(20), arrays(fine.final)) < 1e-6


def test_first_row_is_the_start_and_last_row_the_final_state():
    traj = run("whitened")
    assert largest_error(traj.network(0), arrays(start())) == 0
    assert largest_error(traj.network(-1), arrays(traj.final)) < 1e-14
    assert float(traj.loss[-1]) == pytest.approx(float(traj.final_loss), rel=1e-13)
    assert float(traj.loss[0]) == pytest.approx(float(FLOW.loss(start())), rel=1e-14)


def test_horizon_of_zero_returns_the_start():
    for save in (SAVES, "log"):
        traj = simulate(0.0, save=save)
        assert traj.status is gf.Status.REACHED_END
        np.testing.assert_array_equal(traj.ts, [0.0])
        assert largest_error(traj.network(0), arrays(start())) == 0
        assert largest_error(traj.final, arrays(start())) == 0
        assert traj.stats.steps == 0


def test_start_time_only_shifts_the_clock():
    early = simulate(2.0)
    late = simulate(5.0, t0=3.0)
    np.testing.assert_allclose(late.ts, early.ts + 3, rtol=0, atol=1e-14)
    # The same steps up to round-off of t.
    np.testing.assert_allclose(late.loss, early.loss, rtol=1e-7)


def test_integrating_in_two_parts_equals_one_run():
    half = simulate(2.0)
    whole = simulate(4.0)
    joined = simulate(4.0, state=half.final, t0=2.0)
    # Twice the accumulated error of a run at rtol 1e-8.
    assert largest_error(joined.final, arrays(whole.final)) < 1e-6


# ---------------------------------------------------------------- observables


def outer_product(net):
    W = net.end_to_end()
    return W @ W.T


def pair(net):
    return [net.weights[0].sum(), net.weights[1]]


def named(net):
    return {"first": net.weights[0][0], "nested": {"deep": jnp.trace(net.weights[2][:, :3])}}


CUSTOM = {"outer": outer_product, "pair": pair, "named": named}


# With weight decay, so that what is recorded depends on the time as well as the state.
DECAYING = gf.GradientFlow(problem("whitened"), weight_decay=0.1)


@pytest.fixture(scope="module")
def observed():
    return simulate(flow=DECAYING, observe=CUSTOM)


def test_custom_observables_are_recorded_as_arrays_lists_and_dicts(observed):
    for i in (0, SAVES // 2, SAVES - 1):
        net = observed.network(i)
        np.testing.assert_allclose(observed["outer"][i], outer_product(net), rtol=0, atol=1e-14)
        np.testing.assert_allclose(observed["pair"][0][i], pair(net)[0], rtol=0, atol=1e-14)
        np.testing.assert_array_equal(observed["pair"][1][i], pair(net)[1])
        np.testing.assert_array_equal(observed["named"]["first"][i], net.weights[0][0])
        np.testing.assert_allclose(
            observed["named"]["nested"]["deep"][i], named(net)["nested"]["deep"], atol=1e-14
        )


def test_observables_without_stored_states_equal_those_with(observed):
    bare = simulate(flow=DECAYING, observe=CUSTOM, save_states=False)
    assert bare.states is None
    with_states, without = observed.recorded, bare.recorded
    assert jax.tree.structure(with_states) == jax.tree.structure(without)
    # The same steps; only the order of evaluation differs. Drift is round-off of itself.
    for name in with_states:
        for a, b in zip(
            jax.tree.leaves(with_states[name]), jax.tree.leaves(without[name]), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    assert largest_error(bare.final, arrays(observed.final)) < 1e-12


def test_recorded_observables_are_those_of_the_states():
    traj = run("coloured")
    built = problem("coloured")
    for i in (0, 7, SAVES - 1):
        net = traj.network(i)
        W = net.end_to_end()
        seen = np.asarray(built.whitened(W))
        assert float(traj.loss[i]) == pytest.approx(float(built.loss(W)), rel=1e-12)
        np.testing.assert_allclose(
            traj.singular_values[i], np.linalg.svd(W, compute_uv=False), rtol=1e-11
        )
        left, right = built.singular_bases()
        np.testing.assert_allclose(
            traj["modes"][i], np.diag(np.asarray(left.T) @ seen @ np.asarray(right)), atol=1e-12
        )
        assert float(traj["balancedness"][i]) == pytest.approx(
            float(gf.observables.balancedness(net)), rel=1e-12
        )


@pytest.mark.parametrize(
    "name", ["imbalance", "layer_singular_values", "effective_rank", "nonnormality"]
)
def test_observables_can_be_had_from_stored_states(name):
    traj = run("whitened")
    measured = getattr(gf.observables, name)(traj.network(5))
    for a, b in zip(jax.tree.leaves(traj[name]), jax.tree.leaves(measured), strict=True):
        np.testing.assert_allclose(a[5], b, rtol=1e-12, atol=1e-13)


def test_from_loss_problem_has_no_modes_and_no_targets():
    traj = run("from_loss")
    assert traj.targets is None
    assert "modes" not in traj.recorded
    with pytest.raises(KeyError, match="singular_values"):
        traj["modes"]


# ---------------------------------------------------------------- how runs end


@pytest.mark.parametrize("threshold", [None, 1e-6], ids=["no_rule", "rule"])
def test_run_from_the_origin_is_stationary_and_claims_no_more(threshold):
    origin = jax.tree.map(jnp.zeros_like, start())
    traj = simulate(state=origin, stop_gradient_norm=threshold)
    assert traj.status is gf.Status.STATIONARY
    assert "saddle" in traj.status.message
    assert float(traj.final_gradient_norm) == 0
    assert largest_error(traj.final, arrays(origin)) == 0
    assert float(traj.final_loss) == pytest.approx(0.5 * np.sum(TARGET**2))
    assert all_finite(traj)


def saddle():
    """A balanced rank-one saddle of the whitened loss: the first mode learnt, the others not."""
    U, s, Vt = np.linalg.svd(TARGET, full_matrices=False)
    return gf.initialize.from_product(s[0] * np.outer(U[:, 0], Vt[0]), WIDTHS)


def test_run_from_a_saddle_is_stationary_with_the_loss_of_the_other_modes():
    traj = simulate(state=saddle(), stop_gradient_norm=1e-10)
    assert traj.status is gf.Status.STATIONARY
    s = np.linalg.svd(TARGET, compute_uv=False)
    assert float(traj.final_loss) == pytest.approx(0.5 * np.sum(s[1:] ** 2), rel=1e-12)
    assert float(traj.final_time) == 0
    assert len(traj.ts) == 1


def test_stopping_rule_ends_the_run_at_its_gradient_norm():
    traj = simulate(1e3, stop_gradient_norm=1e-3)
    assert traj.status is gf.Status.STATIONARY
    assert 0 < float(traj.final_gradient_norm) <= 1e-3
    assert float(traj.final_time) < 1e3
    assert float(traj.ts[-1]) == float(traj.final_time)
    assert np.all(np.diff(traj.ts) > 0)
    assert np.all(np.asarray(traj["gradient_norm"])[:-1] > 1e-3)
    assert largest_error(traj.network(-1), arrays(traj.final)) == 0


def test_no_stopping_rule_means_reached_end_however_small_the_gradient():
    traj = simulate(30.0)
    assert traj.status is gf.Status.REACHED_END
    assert float(traj.final_gradient_norm) < 1e-4


def test_run_out_of_steps_returns_what_there_is():
    traj = simulate(1e3, method=dataclasses.replace(METHOD, max_steps=40))
    assert traj.status is gf.Status.MAX_STEPS
    assert "max_steps" in traj.status.message
    assert "implicit" in traj.status.message
    assert 0 < float(traj.final_time) < 1e3
    assert float(traj.ts[-1]) == float(traj.final_time)
    assert traj.stats.steps == 40
    assert all_finite(traj)


HOLE = gf.GradientFlow(gf.Problem.from_loss(quartic_hole, (3, 4)))


def test_finite_time_blow_up_is_reported_as_diverged_with_finite_rows():
    traj = simulate(100.0, flow=HOLE)
    assert traj.status is gf.Status.DIVERGED
    assert "bounded below" in traj.status.message
    assert "smaller start" in traj.status.message
    assert 0 < float(traj.final_time) < 100
    assert all_finite(traj)
    assert len(traj.ts) >= 1
    # It gave up by itself, long before the bound on the steps.
    assert traj.stats.steps < 100_000


def test_blow_up_time_of_a_scalar_flow_is_found():
    # One layer, loss -W⁴: dW/dt = 4W³ blows up at t = 1/(8 W_0²).
    flow = gf.GradientFlow(gf.Problem.from_loss(quartic_hole, (1, 1)))
    traj = simulate(1.0, flow=flow, state=gf.LinearNetwork([[[1.0]]]))
    assert traj.status is gf.Status.DIVERGED
    assert float(traj.final_time) == pytest.approx(1 / 8, rel=1e-6)
    assert all_finite(traj)


@pytest.mark.parametrize("kind", ["whitened", "hole"])
def test_euler_with_too_large_a_step_diverges_at_its_last_finite_state(kind):
    flow = FLOW if kind == "whitened" else HOLE
    method = gf.Method(solver=diffrax.Euler(), step_size=2.0)
    traj = simulate(200.0, flow=flow, method=method)
    assert traj.status is gf.Status.DIVERGED
    assert "step_size" in traj.status.message
    assert 0 < float(traj.final_time) < 200
    assert all_finite(traj)


def test_start_that_overflows_at_once_is_diverged_with_a_finite_final_state():
    huge = jax.tree.map(lambda w: 1e120 * jnp.ones_like(w), start())
    traj = simulate(1.0, state=huge)
    assert traj.status is gf.Status.DIVERGED
    assert float(traj.final_time) == 0
    assert all(np.all(np.isfinite(w)) for w in arrays(traj.final))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((traj.ts, traj.states)))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(traj.recorded))


def test_every_status_carries_a_message():
    for status in gf.Status:
        assert len(status.message) > 10


# ---------------------------------------------------------------- solvers


def test_auto_says_which_solver_it_chose_and_why():
    traj = simulate(method=gf.Method())
    assert traj.stats.solver == "DormandPrince8"
    assert traj.stats.reason.startswith("auto: ")
    assert "fastest rate" in traj.stats.reason


def test_auto_picks_by_stiffness_and_by_whether_the_flow_is_a_gradient():
    from gradflow.choice import choose

    def name(flow, state, t1, **options):
        return choose(gf.Method(**options), flow, state, t1, t1).name

    problem = gf.Problem(np.diag([300.0, 0.01]))
    net = gf.initialize.gaussian(0, (2, 2, 2), 0.5)
    flow, reduced = gf.GradientFlow(problem), gf.EndToEndFlow(problem, 2)
    assert name(flow, net, 1e5) == "Switching(GaussLegendre)"
    assert name(flow, net, 3.0) == "Switching(OrthogonalChebyshev)"
    assert name(reduced, net.end_to_end(), 1e6) == "Kvaerno5"
    assert name(reduced, net.end_to_end(), 10.0) == "Switching(OrthogonalChebyshev)"
    assert name(FLOW, start(), 1.0) == "DormandPrince8"
    assert name(FLOW, start(), 1.0, rtol=1e-4) == "Tsit5"
    # Nothing is known of the rates of a general loss: it is measured on the way.
    unknown = gf.GradientFlow(gf.Problem.from_loss(lambda W: (W**4).sum(), (2, 2)))
    assert name(unknown, net, 1.0) == "Switching(OrthogonalChebyshev)"
    # Far too many unknowns for dense matrices.
    wide = gf.initialize.identity((60, 60, 60))
    assert name(gf.GradientFlow(gf.Problem(np.eye(60))), wide, 1e4).endswith("Chebyshev)")


def test_users_diffrax_solver_agrees_with_the_default():
    other = simulate(method=dataclasses.replace(METHOD, solver=diffrax.Dopri5()))
    assert other.stats.solver == "Dopri5"
    assert largest_error(other.final, arrays(simulate().final)) < 1e-6


def test_fixed_euler_steps_are_gradient_descent():
    method = gf.Method(solver=diffrax.Euler(), step_size=0.01)
    traj = simulate(0.4, method=method)
    descent = gf.descend(FLOW, start(), 0.01, 40)
    assert largest_error(traj.final, arrays(descent.final)) < 1e-13
    assert traj.stats.accepted == 40
    assert traj.stats.rhs_evaluations == 40


@pytest.fixture(scope="module")
def implicit():
    return simulate(method=gf.Method(solver="implicit", rtol=1e-8, atol=1e-10))


def test_implicit_solver_agrees_with_the_explicit_one_at_every_saved_time(implicit):
    assert implicit.stats.solver == "Kvaerno5"
    assert implicit.stats.rhs_evaluations is None
    for i in range(SAVES):
        # A few times rtol at every saved time: the cubic dense output of this solver would be
        # forty times worse, so its steps must land on the saved times.
        assert largest_error(implicit.network(i), arrays(run("whitened").network(i))) < 5e-8


def test_statistics_add_up():
    stats = simulate().stats
    assert stats.steps == stats.accepted + stats.rejected
    assert stats.rhs_evaluations == 6 * stats.steps  # Tsit5: seven stages, first same as last
    assert stats.seconds > 0
    assert simulate(method=explicit(1e-10)).stats.steps > stats.steps


def test_trajectory_prints_itself_in_a_few_lines():
    text = repr(simulate())
    assert 5 <= len(text.splitlines()) <= 6
    for part in ("GradientFlow", "REACHED_END", "Tsit5", "loss", "drift"):
        assert part in text


# ---------------------------------------------------------------- transformations


def starts(scales):
    return jax.vmap(lambda s: jax.tree.map(lambda w: s * w, start()))(jnp.asarray(scales))


@pytest.fixture(scope="module")
def batch():
    """Lanes that end differently: reaching a critical point early, late, and not at all."""
    states = starts([1.0, 0.0, 0.5])
    return jax.vmap(
        lambda state: simulate(20.0, state=state, stop_gradient_norm=1e-2, method=METHOD)
    )(states)


def test_vmap_over_starts_equals_single_runs(batch):
    for i, scale in enumerate([1.0, 0.0, 0.5]):
        single = simulate(
            20.0, state=jax.tree.map(lambda w, s=scale: s * w, start()), stop_gradient_norm=1e-2
        )
        lane = batch.lane(i)
        assert lane.status is single.status
        assert len(lane.ts) == len(single.ts)
        # The same steps: only the order of sums within a step may differ.
        np.testing.assert_allclose(lane.ts, single.ts, rtol=1e-9)
        np.testing.assert_allclose(lane.loss, single.loss, rtol=1e-9, atol=1e-10)
        assert largest_error(lane.final, arrays(single.final)) < 1e-9


def test_lanes_that_stop_early_hold_finite_values_and_are_trimmed(batch):
    assert batch.ts.shape == (3, SAVES)
    leaves = [batch.ts, batch.states, batch.recorded, batch.final]
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(leaves))
    assert [len(batch.lane(i).ts) for i in range(3)] == list(np.asarray(batch.rows))
    assert len(batch.lane(1).ts) == 1
    assert 1 < len(batch.lane(0).ts) < SAVES
    assert list(batch.status) == [gf.Status.STATIONARY] * 3
    assert "batch of (3,) runs (3 STATIONARY)" in repr(batch)
    np.testing.assert_array_equal(batch.lane(-1).ts, batch.lane(2).ts)


def test_batch_statistics_and_observables_have_one_entry_per_lane(batch):
    assert batch.stats.steps.shape == (3,)
    assert batch["drift"].shape == (3, SAVES)
    assert batch["effective_rank"].shape == (3, SAVES)


def test_gradient_through_a_run_equals_finite_differences():
    method = explicit(1e-10, max_steps=1024)

    def final_loss(scale):
        state = jax.tree.map(lambda w: scale * w, start())
        return simulate(1.0, state=state, save=2, method=method, save_states=False).final_loss

    value = eqx.filter_jit(jax.grad(final_loss))(1.0)
    step = 1e-4
    difference = (final_loss(1.0 + step) - final_loss(1.0 - step)) / (2 * step)
    # Central difference: error step² from truncation, rtol/step from the solver.
    assert float(value) == pytest.approx(float(difference), rel=1e-5)
    assert abs(float(value)) > 1e-3


# ---------------------------------------------------------------- warnings


def test_tiny_start_warns_that_atol_is_coarse_and_names_a_better_one():
    tiny = gf.initialize.balanced(0, WIDTHS, 1e-9)
    with pytest.warns(gf.errors.PrecisionWarning, match=r"atol.*Method\(atol="):
        simulate(0.1, state=tiny, method=gf.Method(solver="explicit"))


def test_ordinary_start_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(0.1, method=gf.Method(solver="explicit"))


def test_progress_bar_is_shown_on_request(capfd):
    simulate(0.1, progress=True)
    jax.effects_barrier()
    assert "%" in capfd.readouterr().err
