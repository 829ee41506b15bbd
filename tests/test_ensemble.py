"""Ensembles: as single runs, lane by lane, in one program."""

import functools
import importlib
import time

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from tqdm import tqdm

import gradflow as gf
from cases import SAVES, TARGET, WIDTHS, arrays, problem, quartic_hole, random_network
from gradflow.ensemble import ensemble
from gradflow.solvers import stabilised
from gradflow.solvers.stabilised import known_stages

# By its full name: the package gives the short one to the function.
module = importlib.import_module("gradflow.ensemble")
LANES = 4
COUNT = 6
T1 = 200.0
METHOD = gf.Method(rtol=1e-8, atol=1e-10)

traces = []


class CountedFlow(gf.GradientFlow):
    """Notes every trace of its right-hand side."""

    def vector_field(self, t, state, args=None):
        traces.append("field")
        return super().vector_field(t, state, args)


def starts(count=COUNT, seed=0):
    rng = np.random.default_rng(seed)
    return [random_network(rng, WIDTHS, 0.3) for _ in range(count)]


def stacked(nets):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *nets)


def run(nets=None, *, flow=None, t1=T1, method=METHOD, **options):
    options = {"lanes_per_batch": LANES, "workers": 2, "save": SAVES, **options}
    flow = flow or gf.GradientFlow(problem("whitened"))
    return ensemble(flow, starts() if nets is None else nets, t1, method=method, **options)


@functools.cache
def whole():
    return run()


def single(net, *, t1=T1, rtol=1e-11, **options):
    method = gf.Method(solver="explicit", rtol=rtol, atol=1e-2 * rtol)
    flow = gf.GradientFlow(problem("whitened"))
    return gf.simulate(flow, net, t1, save=SAVES, method=method, **options)


@functools.cache
def exact(i):
    return single(starts()[i])


def distance(lane, single):
    pairs = zip(lane.states.weights, single.states.weights, strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize("i", [0, COUNT - 1])
def test_a_lane_is_the_single_run_to_tolerance(i):
    lane = whole().lane(i)
    np.testing.assert_array_equal(lane.ts, exact(i).ts)
    assert distance(lane, exact(i)) < 1e-6
    for name in ("loss", "singular_values", "modes", "balancedness", "gradient_norm"):
        np.testing.assert_allclose(lane[name], exact(i)[name], atol=1e-6)
    assert lane.status is gf.Status.REACHED_END
    assert lane.recorded["law_drift"].shape == (SAVES, 2)
    assert 0 < float(jnp.max(lane["drift"])) < 1e-6


def test_a_batch_has_the_runs_as_first_axis_of_every_array():
    batch = whole()
    assert all(leaf.shape[0] == COUNT for leaf in jax.tree.leaves(batch))
    assert batch.ts.shape == (COUNT, SAVES)
    assert [w.shape for w in batch.final.weights] == [
        (COUNT, *w.shape) for w in arrays(starts()[0])
    ]
    np.testing.assert_array_equal(batch.states.weights[0][:, -1], batch.final.weights[0])
    np.testing.assert_array_equal(batch.final_time, T1)
    assert batch.stats.seconds > 0
    assert batch.stats.steps.shape == (COUNT,)
    # The structure is that of simulate under vmap.
    flow = gf.GradientFlow(problem("whitened"))
    mapped = jax.eval_shape(
        jax.vmap(lambda net: gf.simulate(flow, net, T1, save=SAVES)), stacked(starts())
    )
    assert jax.tree.map(jnp.shape, mapped.recorded) == jax.tree.map(jnp.shape, batch.recorded)
    assert mapped.targets.shape == batch.targets.shape


def test_both_kinds_of_steps_are_taken_and_told():
    batch, explicit = whole().stats, run(method=gf.Method(solver="explicit")).stats
    assert np.all(batch.stiff_steps > 0)
    assert np.all(batch.stiff_steps < 0.8 * batch.steps)
    assert "stabilised" in batch.reason
    assert (batch.solver, explicit.solver) == ("Tsit5/OrthogonalChebyshev", "Tsit5")
    np.testing.assert_array_equal(explicit.stiff_steps, 0)
    np.testing.assert_array_equal(explicit.rhs_evaluations, 6 * explicit.steps)
    # The end of the runs is stiff: stability would hold up explicit steps.
    assert np.all(batch.rhs_evaluations < 0.7 * explicit.rhs_evaluations)


def largest_error(method):
    times = np.linspace(0, 5.0, SAVES)  # before stability limits the steps
    batch = run(t1=times[-1], save=times, method=method)
    return distance(batch.lane(0), single(starts()[0], t1=times[-1]))


@pytest.mark.parametrize("solver", ["explicit", pytest.param("stabilised", marks=pytest.mark.slow)])
def test_errors_of_all_kinds_of_steps_follow_the_tolerance(solver):
    rtols = [1e-5, 1e-7, 1e-9]
    errors = [
        largest_error(gf.Method(solver=solver, rtol=rtol, atol=1e-2 * rtol)) for rtol in rtols
    ]
    assert errors[0] < 1e-3
    assert errors[2] < 1e-7
    assert errors[2] < 0.05 * errors[1] < 0.05**2 * 10 * errors[0]


def lanes_of_steps(kind, h):
    """One step of four lanes, and the fields and starts that it is of."""
    flow = gf.GradientFlow(problem("whitened"))
    nets = [random_network(np.random.default_rng(seed), WIDTHS, 0.7) for seed in range(LANES)]
    flat = jnp.stack([ravel_pytree(net)[0] for net in nets], axis=1)
    rate = module._lanes_field(flow, nets[0])

    @jax.jit
    def made():
        zero = jnp.zeros(LANES)
        # This estimate of the spectral radius takes more than the least number of stages.
        now = module._March(
            zero, flat, rate(zero, flat), zero + h, None, zero + 9.0 / h, flat, None, None, None,
            None, jnp.ones(LANES, bool), None, None,
        )  # fmt: skip
        if kind == "explicit":
            return module._explicit_step(rate, now)
        return module._stabilised_step(rate, now, jnp.asarray(1e-8))

    return made(), flow, nets


def test_explicit_steps_are_those_of_tsitouras():
    h = 0.2
    found, flow, nets = lanes_of_steps("explicit", h)
    solver, terms = diffrax.Tsit5(), diffrax.ODETerm(flow.vector_field)

    @jax.jit
    def step(net):
        state = solver.init(terms, 0.0, h, net, None)
        return solver.step(terms, 0.0, h, net, None, state, False)[:2]

    for i, net in enumerate(nets):
        end, error = step(net)
        np.testing.assert_allclose(found.end[:, i], ravel_pytree(end)[0], atol=1e-14)
        np.testing.assert_allclose(abs(found.error[:, i]), abs(ravel_pytree(error)[0]), atol=1e-15)
        slope = ravel_pytree(flow.vector_field(0.0, end))[0]
        np.testing.assert_allclose(found.slope[:, i], slope, atol=1e-13)
    assert (int(found.evaluations), float(found.order)) == (6, 5)


def test_stabilised_steps_are_those_of_a_member_of_the_family():
    h = 0.2
    found, flow, nets = lanes_of_steps("stabilised", h)
    member = known_stages().index(7)
    rate = lambda t, net: flow.vector_field(t, net)  # noqa: E731
    step = jax.jit(
        lambda net: stabilised._advance(rate, 0.0, h, h, net, rate(0.0, net), member)[:3]
    )
    for i, net in enumerate(nets):
        for one, other in zip((found.end, found.slope, found.error), step(net), strict=True):
            np.testing.assert_allclose(one[:, i], ravel_pytree(other)[0], atol=1e-13)
    # One more for the spectral radius.
    assert (int(found.evaluations), float(found.order)) == (7 + 1, 4)


def test_the_spectral_radius_is_found_and_no_step_leaves_its_reach():
    solution = gf.initialize.from_product(TARGET, WIDTHS)
    flow = gf.GradientFlow(problem("whitened"))
    flat, unravel = ravel_pytree(solution)
    jacobian = jax.jit(jax.jacfwd(lambda y: ravel_pytree(flow.vector_field(0.0, unravel(y)))[0]))
    top = float(np.abs(np.linalg.eigvalsh(jacobian(flat))).max())
    rate = module._lanes_field(flow, solution)

    @jax.jit
    def made(radius, leading):
        zero = jnp.zeros(1)
        now = module._March(
            zero, flat[:, None], rate(zero, flat[:, None]), zero + 1e3, None, radius, leading,
            None, None, None, None, jnp.ones(1, bool), None, None,
        )  # fmt: skip
        return module._stabilised_step(rate, now, jnp.asarray(1e-8))

    direction = np.random.default_rng(0).standard_normal((len(flat), 1))
    step = made(jnp.zeros(1), module._unit(jnp.asarray(direction), flat))
    assert float(step.radius[0]) < top
    for _ in range(20):
        step = made(step.radius, step.leading)
    assert float(step.radius[0]) == pytest.approx(top, rel=0.02)
    # 19 stages at this tolerance.
    assert int(step.evaluations) == 20
    assert float(step.t[0]) * top == pytest.approx(0.353 * 19**2, rel=0.15)


@pytest.mark.parametrize(
    ("widths", "decay", "quadratic"),
    [((3, 5, 4, 2), 0.3, True), ((2, 4, 6), 0.0, True), (WIDTHS, 0.1, False)],
)
def test_written_out_products_are_the_vector_field(widths, decay, quadratic):
    rng = np.random.default_rng(5)
    target, X = rng.standard_normal((widths[-1], widths[0])), rng.standard_normal((9, widths[0]))
    if quadratic:
        data = gf.Problem(target, X.T @ X / 9)
    else:
        data = gf.Problem.from_loss(lambda W: jnp.sum(jnp.cosh(W)), target.shape)
    flow = gf.GradientFlow(data, weight_decay=decay)
    nets = [random_network(rng, widths) for _ in range(3)]
    flat = jnp.stack([ravel_pytree(net)[0] for net in nets], axis=1)
    found = jax.jit(module._lanes_field(flow, nets[0]))(jnp.zeros(3), flat)
    field = jax.jit(lambda net: ravel_pytree(flow.vector_field(0.0, net))[0])
    for net, column in zip(nets, found.T, strict=True):
        np.testing.assert_allclose(column, field(net), atol=1e-13)


def test_results_do_not_depend_on_how_starts_are_grouped():
    nets = starts()
    other = run(stacked(nets[::-1]), workers=1)
    for i in (0, COUNT - 1):
        assert distance(other.lane(COUNT - 1 - i), whole().lane(i)) < 1e-6
    # The same batches in the same or another number of threads are the same numbers.
    again = run(stacked(nets), workers=1)
    for a, b in zip(jax.tree.leaves(again.states), jax.tree.leaves(whole().states), strict=True):
        np.testing.assert_array_equal(a, b)


def test_lanes_that_fail_do_not_disturb_the_others():
    nets = stacked(starts())
    first = nets.weights[0].at[1, 0, 0].set(jnp.nan).at[2].set(1e200)
    with_failures = run(nets.with_weights((first, *nets.weights[1:])))
    assert list(with_failures.status[[1, 2]]) == [gf.Status.DIVERGED] * 2
    for i in (0, 3, 5):
        assert with_failures.status[i] is gf.Status.REACHED_END
        assert distance(with_failures.lane(i), exact(i) if i in (0, 5) else whole().lane(i)) < 1e-6
    failed = with_failures.lane(2)
    assert np.isfinite(failed.loss).all()


def test_a_lane_that_blows_up_ends_there_and_the_others_go_on():
    flow = gf.GradientFlow(gf.Problem.from_loss(quartic_hole, TARGET.shape))
    small, large = random_network(np.random.default_rng(1), WIDTHS, 1e-3), starts()[0]
    large = large.with_weights(tuple(6 * w for w in large.weights))
    batch = run([small, large, small], flow=flow, t1=1.0)
    assert [s.name for s in batch.status] == ["REACHED_END", "DIVERGED", "REACHED_END"]
    one = batch.lane(1)
    assert 0 < float(one.final_time) < 1
    assert len(one.ts) < SAVES
    assert one.ts[-1] == one.final_time
    assert np.isfinite(one.loss).all()
    np.testing.assert_array_equal(batch.lane(0).loss, batch.lane(2).loss)


def trace_of_first(net):
    return jnp.trace(net.weights[0][:3, :3])


# Together, so that both are one program.
OBSERVED = {"save_states": False, "observe": {"trace": trace_of_first}}


def test_every_lane_stops_at_its_own_stationary_point():
    nets = [*starts(3), gf.initialize.from_product(TARGET, WIDTHS)]
    batch = run(nets, stop_gradient_norm=1e-5, **OBSERVED)
    assert all(s is gf.Status.STATIONARY for s in batch.status)
    assert float(batch.final_time[3]) == 0
    assert len(batch.lane(3).ts) == 1
    assert np.all(batch.final_gradient_norm <= 1e-5)
    for i in (0, 1, 2):
        lane, full = batch.lane(i), exact(i)
        assert lane.ts[-1] == lane.final_time
        above = np.asarray(full["gradient_norm"]) > 1e-5
        # The run ends between the saved times between which the norm falls below.
        crossed = np.flatnonzero(~above)[0]
        assert full.ts[crossed - 1] < lane.final_time <= full.ts[crossed]
        assert len(lane.ts) in (crossed + 1, crossed)


def test_max_steps_holds_for_every_lane():
    batch = run(method=gf.Method(max_steps=50))
    assert all(s is gf.Status.MAX_STEPS for s in batch.status)
    np.testing.assert_array_equal(batch.stats.steps, 50)
    assert np.all(batch.final_time < T1)


def test_states_are_left_out_on_request_and_observables_kept():
    batch = run(stop_gradient_norm=0.0, **OBSERVED)
    assert batch.states is None
    np.testing.assert_allclose(batch.loss, whole().loss, atol=1e-12)
    expected = jax.vmap(jax.vmap(trace_of_first))(whole().states)
    np.testing.assert_allclose(batch["trace"], expected, atol=1e-12)


def test_saved_times_may_begin_late_and_end_early():
    times = np.linspace(1.0, 30.0, SAVES)
    batch = run(save=times, t0=0.5)
    np.testing.assert_array_equal(batch.ts, np.tile(times, (COUNT, 1)))
    np.testing.assert_array_equal(batch.final_time, T1)
    # The flow is autonomous.
    shifted = run(save=times - 0.5, t1=T1 - 0.5)
    np.testing.assert_allclose(batch.loss, shifted.loss, atol=1e-7)
    assert float(jnp.abs(batch.loss[:, 0] - whole().loss[:, 0]).min()) > 0.01


def test_other_numbers_of_the_same_shapes_do_not_trace_again():
    def call(seed=0, t1=2.0, count=COUNT, target=TARGET, **options):
        before = len(traces)
        method = gf.Method(
            rtol=options.pop("rtol", 1e-6), atol=1e-8, max_steps=options.pop("m", 99)
        )
        run(
            starts(count, seed),
            flow=CountedFlow(gf.Problem(target)),
            t1=t1,
            method=method,
            **options,
        )
        return len(traces) - before

    assert call() > 0
    assert call(seed=1, t1=3.0, rtol=1e-7, m=98) == 0
    assert call(count=3) == 0
    assert call(count=9, workers=1) == 0
    assert call(target=2 * TARGET) == 0


def test_any_other_solver_runs_under_vmap():
    method = gf.Method(solver=diffrax.Euler(), step_size=1 / 128)
    batch = run(starts(2), t1=1.0, save=2, lanes_per_batch=2, method=method)
    assert "vmap" in batch.stats.reason
    assert batch.stats.solver == "Euler"
    flow = gf.GradientFlow(problem("whitened"))

    @jax.jit
    def descended(net):
        step = lambda _, x: jax.tree.map(lambda a, b: a + b / 128, x, flow.vector_field(0.0, x))  # noqa: E731
        return jax.lax.fori_loop(0, 128, step, net)

    for i in (0, 1):
        for found, expected in zip(
            batch.final.weights, descended(starts()[i]).weights, strict=True
        ):
            np.testing.assert_allclose(found[i], expected, atol=1e-12)


def test_modes_follow_the_closed_form():
    a = np.random.default_rng(0).uniform(0.2, 0.5, (5, 1, 2)) * np.ones((1, 3, 1))
    batch = run(a, flow=gf.ModeFlow([2.0, 1.0], 3), t1=10.0)
    expected = gf.exact.mode(
        np.array([2.0, 1.0])[None, None], a[:, :1] ** 3, np.asarray(batch.ts)[:, :, None], 3
    )
    np.testing.assert_allclose(batch["modes"], expected, atol=1e-6)


def test_a_progress_bar_counts_the_starts(capsys):
    run(progress=True)
    assert f"{COUNT}/{COUNT}" in capsys.readouterr().err


BAD = {
    "empty list": (lambda: run([]), "states"),
    "empty array": (lambda: run(jax.tree.map(lambda w: w[:0], stacked(starts()))), "states"),
    "single start": (lambda: run(starts()[0]), "states"),
    "unequal shapes": (
        lambda: run([starts()[0], random_network(np.random.default_rng(0), (4, 3, 3, 3))]),
        r"states\[1\]",
    ),
    "unequal stacks": (
        lambda: run(
            stacked(starts()).with_weights(
                tuple(w[: 3 + i] for i, w in enumerate(stacked(starts()).weights))
            )
        ),
        "states",
    ),
    "wrong widths": (
        lambda: run([random_network(np.random.default_rng(0), (2, 2))]),
        r"states\[0\]",
    ),
    "no network": (lambda: run([np.zeros(3)]), r"states\[0\]"),
    "no lanes": (lambda: run(lanes_per_batch=0), "lanes_per_batch"),
    "half a lane": (lambda: run(lanes_per_batch=2.5), "lanes_per_batch"),
    "no workers": (lambda: run(workers=0), "workers"),
    "backwards": (lambda: run(t1=-1.0), "t1"),
    "no flow": (lambda: run(flow=problem("whitened")), "flow"),
    "no method": (lambda: run(method="auto"), "method"),
    "tolerance": (lambda: run(method=gf.Method(rtol=1e-16)), "rtol"),
    "stopping rule": (lambda: run(stop_gradient_norm=-1.0), "stop_gradient_norm"),
    "observe": (lambda: run(observe={"loss": jnp.sum}), "observe"),
    "save": (lambda: run(save=1), "save"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_by_name(what):
    call, name = BAD[what]
    with pytest.raises(ValueError, match=rf"^{name}: "):
        call()


def test_a_coarse_tolerance_for_the_smallest_start_is_warned_of():
    nets = starts(2)
    nets[1] = nets[1].with_weights(tuple(1e-9 * w for w in nets[1].weights))
    with pytest.warns(gf.errors.PrecisionWarning, match="coarse"):
        run(nets, t1=1e-3)


def test_default_batches_fill_all_workers_and_fit_the_memory():
    def lanes(count, workers, size, saves=10):
        return module._default_lanes(np.zeros((count, size)), count, workers, saves)

    assert lanes(1000, 2, 75) == 64
    assert lanes(20, 2, 75) == 16
    assert lanes(21, 1, 75) == 32
    assert lanes(1, 8, 75) == 1
    assert lanes(1000, 2, 10**6) == 1
    assert lanes(1000, 2, 75, saves=10**5) == 4


def test_no_lapack_runs_beside_another_batch():
    # Batched LAPACK waits for XLA's threads, of which another program may hold the others.
    net = starts()[0]
    assert not module._calls_lapack(gf.GradientFlow(problem("coloured")), net)
    assert not module._calls_lapack(gf.ModeFlow([2.0, 1.0], 3), jnp.ones((3, 2)))
    end_to_end = gf.EndToEndFlow(problem("whitened"), 3)
    assert module._calls_lapack(end_to_end, net.end_to_end())
    traced = jax.make_jaxpr(
        lambda flow, nets: module._march.__wrapped__(
            flow,
            nets,
            jnp.linspace(0, 1, 3),
            0.0,
            1.0,
            1e-6,
            1e-8,
            -1.0,
            99.0,
            kind="auto",
            stops=True,
        )
    )(gf.GradientFlow(problem("coloured")), stacked(starts(2)))
    assert module._LAPACK.search(str(traced)) is None
    at_once, most, alone = [0], [0], []

    def integrate(batch):
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        time.sleep(0.05)
        at_once[0] -= 1
        return batch

    def finish(batch, result):
        alone.append(at_once[0] == 0)
        return {"x": result}

    x = np.arange(11.0)
    with tqdm(total=11, disable=True) as bar:
        found = module._in_batches(integrate, finish, x, 11, 2, 2, 3, bar)
    np.testing.assert_array_equal(found["x"], x)
    assert most == [2]
    assert alone == [True] * 6
