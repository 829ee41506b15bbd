"""The delta-modulated flow: its equation, laws, counts and energy balance."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import PROBLEMS, SAVES, TARGET, WIDTHS, arrays, explicit, problem, random_network, start

traces = []


class CountedFlow(gf.DeltaModulatedFlow):
    """Notes every trace of its right-hand side, and every call outside a trace."""

    def vector_field(self, t, state, args=None):
        traces.append("field")
        return super().vector_field(t, state, args)


def directions(rng, widths):
    return [rng.standard_normal(d) for d in widths[1:]]


def operators(gates, ks):
    return [np.eye(len(k)) - b * np.outer(k, k) / (k @ k) for b, k in zip(gates, ks, strict=True)]


def simulate(flow, state, t1, rtol=1e-12):
    # One number of saved times, so that one program serves all fixed gates.
    return gf.simulate(flow, state, t1, save=SAVES, method=explicit(rtol))


@pytest.mark.parametrize("kind", PROBLEMS)
def test_modulated_field_is_the_plain_one_with_an_operator_on_each_output_side(kind):
    rng = np.random.default_rng(0)
    net, ks, gates = random_network(rng, WIDTHS), directions(rng, WIDTHS), [0.3, 1.0, 1.7]
    plain = gf.GradientFlow(problem(kind)).vector_field(0.0, net).weights
    found = CountedFlow(problem(kind), gates, ks).vector_field(0.0, net).weights
    for f, g, delta in zip(plain, found, operators(gates, ks), strict=True):
        np.testing.assert_allclose(g, delta @ np.asarray(f), rtol=0, atol=1e-13)


def test_modulated_field_is_the_dense_adjacency_flow_times_one_block_diagonal_matrix():
    rng = np.random.default_rng(1)
    net, ks, gates = random_network(rng, WIDTHS), directions(rng, WIDTHS), [0.3, 0.0, 2.0]
    ends = np.cumsum([0, *WIDTHS])
    big = np.eye(ends[-1])
    for delta, low, high in zip(operators(gates, ks), ends[1:-1], ends[2:], strict=True):
        big[low:high, low:high] = delta
    dense = big @ np.asarray(gf.adjacency_flow(net.adjacency(), TARGET, WIDTHS))
    flow = CountedFlow(problem("whitened"), gates, ks)
    found = flow.vector_field(0.0, net).adjacency()
    np.testing.assert_allclose(found, dense, rtol=0, atol=1e-13)


@pytest.mark.parametrize("gates", [[0.0, 0.0, 0.0], 0.0], ids=["each", "one_number"])
def test_gates_of_0_give_plain_gradient_flow_and_its_laws(gates):
    net = start()
    flow = CountedFlow(problem("whitened"), gates, directions(np.random.default_rng(2), WIDTHS))
    plain = gf.GradientFlow(problem("whitened"))
    for a, b in zip(
        arrays(flow.vector_field(0.0, net)), arrays(plain.vector_field(0.0, net)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(flow.conserved(net), plain.conserved(net), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)
    for rest in flow.broken(net):
        np.testing.assert_allclose(rest, 0, atol=1e-14)


def symmetric_root(matrix, power):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * values**power) @ vectors.T


def modulated_matrices(flow, net, gates, ks):
    """``C̃_i`` by dense roots and inverses, and the orthonormal basis with ``k_i`` first."""
    W, P = arrays(net), operators(gates, ks)
    for i in range(len(W) - 1):
        half = symmetric_root(P[i], -0.5)
        C = W[i + 1].T @ np.linalg.inv(P[i + 1]) @ W[i + 1] - half @ W[i] @ W[i].T @ half
        basis, _ = np.linalg.qr(np.column_stack([ks[i], np.eye(len(ks[i]))]))
        yield basis.T @ C @ basis


@pytest.mark.parametrize(
    ("kind", "count"), [("whitened", 30), pytest.param("coloured", 10, marks=pytest.mark.slow)]
)
def test_block_and_entry_of_the_weighted_imbalance_are_conserved_and_cross_terms_are_not(
    kind, count
):
    # Each problem has its own target, start, gates and directions.
    moved = []
    for seed in range(count):
        rng = np.random.default_rng(100 + seed)
        target = rng.standard_normal(TARGET.shape)
        covariance = None if kind == "whitened" else np.asarray(problem(kind).input_covariance)
        ks, gates = directions(rng, WIDTHS), rng.uniform(0.1, 0.9, 3)
        flow = CountedFlow(gf.Problem(target, covariance), gates, ks)
        traj = simulate(flow, random_network(rng, WIDTHS), 2.0)
        gf.testing.assert_conserved(traj, atol=1e-10)
        first, last = (list(modulated_matrices(flow, traj.network(i), gates, ks)) for i in (0, -1))
        for node, (before, after) in enumerate(zip(first, last, strict=True)):
            change = np.abs(after - before)
            assert change[1:, 1:].max() < 1e-10
            assert change[0, 0] < 1e-10
            moved.append(change[0, 1:].max())
            # What the library reports as broken is just these entries.
            rest = np.asarray(traj["broken"][node][-1])
            assert np.abs(rest).max() > 0
            k = ks[node] / np.linalg.norm(ks[node])
            cross = np.linalg.norm(rest @ k)
            assert cross == pytest.approx(np.linalg.norm(after[0, 1:]), rel=1e-9, abs=1e-12)
    assert np.min(moved) > 1e-4
    assert np.median(moved) > 0.01


@pytest.mark.parametrize(
    "gates",
    [
        [1.4, 0.5, 1.8],
        [0.5, 1.0, 0.4],
        pytest.param([0.0, 1.0, 0.0], marks=pytest.mark.slow),
        [1.0, 0.5, 1.0],
        pytest.param([1.0, 1.0, 1.0], marks=pytest.mark.slow),
        pytest.param([2.0, 2.0, 2.0], marks=pytest.mark.slow),
        pytest.param([0.3, 0.0, 1.0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_laws_are_kept_to_first_order_for_gates_of_all_kinds(gates):
    rng = np.random.default_rng(3)
    net, ks = random_network(rng, (3, 4, 4, 3)), directions(rng, (3, 4, 4, 3))
    flow = CountedFlow(gf.Problem(rng.standard_normal((3, 3))), gates, ks)
    _, change = jax.jvp(
        lambda w: flow.conserved(net.with_weights(w)),
        (net.weights,),
        (flow.vector_field(0.0, net).weights,),
    )
    assert change
    for rate in change:
        np.testing.assert_allclose(rate, 0, atol=1e-12)


def test_where_only_one_gate_varies_the_block_at_its_own_node_is_kept():
    rng = np.random.default_rng(4)
    ks = directions(rng, WIDTHS)

    def wave(t, state):
        return 1 + jnp.sin(3 * t) + 0 * state.weights[0][0, 0]

    flow = CountedFlow(problem("whitened"), [wave, 0.4, 0.2], ks)
    traj = simulate(flow, start(), 1.0)
    assert len(flow.conserved(start())) == 3  # a block; a block and an entry
    gf.testing.assert_conserved(traj, atol=1e-10)
    np.testing.assert_allclose(traj["gates"][:, 0], 1 + np.sin(3 * np.asarray(traj.ts)), atol=1e-14)
    np.testing.assert_allclose(traj["gates"][:, 1:], [[0.4, 0.2]] * SAVES)
    k = ks[0] / np.linalg.norm(ks[0])
    entries = [k @ np.asarray(rest) @ k for rest in traj["broken"][0]]
    assert np.ptp(entries) > 1e-3


def test_gates_may_depend_on_the_state_and_leave_no_law_then():
    rng = np.random.default_rng(5)

    def gates(t, state):
        return jnp.stack([jax.nn.sigmoid(jnp.sum(w)) for w in state.weights])

    ks, net = directions(rng, WIDTHS), start()
    flow = CountedFlow(problem("whitened"), gates, ks)
    assert flow.conserved(net) == []
    betas = [float(jax.nn.sigmoid(jnp.sum(w))) for w in net.weights]
    np.testing.assert_allclose(flow.gates_at(0.0, net), betas, rtol=1e-13)
    fixed = CountedFlow(problem("whitened"), betas, ks)
    for a, b in zip(
        arrays(flow.vector_field(0.0, net)), arrays(fixed.vector_field(0.0, net)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)


def test_values_of_a_gate_outside_its_range_are_clipped():
    flow = CountedFlow(
        problem("whitened"),
        lambda t, s: jnp.full(3, t),
        directions(np.random.default_rng(6), WIDTHS),
    )
    assert np.asarray(flow.gates_at(5.0, start())).tolist() == [2, 2, 2]
    assert np.asarray(flow.gates_at(-1.0, start())).tolist() == [0, 0, 0]


@pytest.mark.parametrize("gates", [[0.3, 0.9, 0.6], [1.5, 2.0, 0.3]], ids=str)
def test_loss_changes_at_the_rate_of_the_energy_balance(gates):
    rng = np.random.default_rng(7)
    flow = CountedFlow(problem("coloured"), gates, directions(rng, WIDTHS))
    traj = simulate(flow, start(), 1.0)
    for i in (0, -1):
        net = traj.network(i)
        _, slope = jax.jvp(flow.loss, (net,), (flow.vector_field(0.0, net),))
        G = arrays(gf.GradientFlow(problem("coloured")).vector_field(0.0, net))
        P = operators(gates, [np.asarray(k) for k in flow.directions])
        balance = -sum(np.sum(g * (p @ g)) for g, p in zip(G, P, strict=True))
        assert float(traj["loss_rate"][i]) == pytest.approx(float(slope), rel=1e-11)
        assert float(traj["loss_rate"][i]) == pytest.approx(balance, rel=1e-11)


def test_a_gate_of_1_freezes_the_layer_along_its_direction():
    rng = np.random.default_rng(8)
    ks = directions(rng, WIDTHS)
    flow = CountedFlow(problem("whitened"), [1.0, 1.0, 1.0], ks)
    traj = simulate(flow, start(), 4.0)
    moved = 0.0
    for k, before, after in zip(ks, arrays(start()), arrays(traj.final), strict=True):
        k = k / np.linalg.norm(k)
        # Round-off of some thousand steps, each of entries of order 1.
        np.testing.assert_allclose(k @ after, k @ before, rtol=0, atol=1e-13)
        moved = max(moved, np.abs(after - before).max())
    assert moved > 0.1
    gf.testing.assert_loss_decreases(traj)


@pytest.mark.parametrize("beta", [1.2, 1.6, 2.0])
def test_the_loss_rises_for_gates_above_1_from_a_start_whose_gradients_lie_along_the_directions(
    beta,
):
    # An error of rank one, −ε k aᵀ, makes every gradient rank one: G_i = −u_i z_iᵀ with u_i =
    # W_{i+1:h}ᵀk. With k_i along u_i all of the gradient is turned round.
    rng = np.random.default_rng(9)
    net = random_network(rng, WIDTHS)
    k, a = rng.standard_normal(3), rng.standard_normal(4)
    target = np.asarray(net.end_to_end()) - 0.1 * np.outer(k, a)
    ks, u = [k], k
    for W in arrays(net)[:0:-1]:
        u = W.T @ u
        ks.insert(0, u)
    flow = CountedFlow(gf.Problem(target), [beta] * 3, ks)
    traj = simulate(flow, net, 0.1)
    assert np.all(np.diff(np.asarray(traj.loss)) > 0)
    assert float(traj.loss[-1]) > 1.05 * float(traj.loss[0])
    assert np.all(np.asarray(traj["loss_rate"]) > 0)
    G = float(traj["gradient_norm"][0]) / (beta - 1)
    assert float(traj["loss_rate"][0]) == pytest.approx((beta - 1) * G**2, rel=1e-10)
    gf.testing.assert_conserved(traj, atol=1e-9)


def test_the_loss_falls_for_gates_below_1_on_fifty_random_runs():
    for seed in range(50):
        rng = np.random.default_rng(200 + seed)
        gates, ks = rng.uniform(0, 1, 3), directions(rng, WIDTHS)
        flow = CountedFlow(gf.Problem(rng.standard_normal(TARGET.shape)), gates, ks)
        traj = simulate(flow, random_network(rng, WIDTHS), 5.0, 1e-8)
        gf.testing.assert_loss_decreases(traj)
        assert float(traj.final_loss) < float(traj.loss[0])
        assert np.all(np.asarray(traj["loss_rate"]) <= 0)


def generic_widths(count):
    """Random widths whose plain laws are as many as the matrices ``C_i`` have entries."""
    rng = np.random.default_rng(10)
    found = []
    while len(found) < count:
        depth = int(rng.integers(2, 5))
        widths = tuple(int(d) for d in rng.integers(1, 5, depth + 1))
        neighbours = zip(widths, widths[1:], widths[2:], strict=False)
        if all(d <= a + b - 1 for a, d, b in neighbours) and widths not in found:
            found.append(widths)
    return found


def test_modulation_breaks_d_minus_1_laws_of_each_hidden_layer():
    for widths in generic_widths(20):
        rng = np.random.default_rng(sum(widths))
        net, ks = random_network(rng, widths), directions(rng, widths)
        gates = rng.uniform(0.1, 0.9, len(ks))
        gates[rng.random(len(ks)) < 0.3] = 0
        problem = gf.Problem(rng.standard_normal((widths[-1], widths[0])))
        laws = gf.observables.independent_laws(net, CountedFlow(problem, gates, ks))
        hidden = np.array(widths[1:-1])
        plain = int(np.sum(hidden * (hidden + 1) // 2))
        assert laws == plain - int(np.sum((hidden - 1)[gates[:-1] > 0])), widths


@pytest.mark.slow
def test_plain_flow_has_as_many_laws_as_entries_at_generic_widths():
    for widths in generic_widths(20):
        net = random_network(np.random.default_rng(sum(widths)), widths)
        hidden = np.array(widths[1:-1])
        full = int(np.sum(hidden * (hidden + 1) // 2))
        assert gf.observables.independent_laws(net) == full


def modulated_field(flat, E, shapes, deltas):
    """``Δ_i W_{i+1:h}ᵀ E W_{1:i-1}ᵀ``: what the flow of some loss does at these weights."""
    ends = np.cumsum([0, *(a * b for a, b in shapes)])
    W = [flat[low:high].reshape(s) for low, high, s in zip(ends, ends[1:], shapes, strict=False)]
    rates = []
    for i, delta in enumerate(deltas):
        g = E
        for w in W[:i:-1]:
            g = w.T @ g
        for w in W[:i]:
            g = g @ w.T
        rates.append((delta @ g).ravel())
    return jnp.concatenate(rates)


def lie_algebra_dimension(widths, gates, ks, levels=3):
    """At a random point, from left-normed brackets of the fields of random losses."""
    rng = np.random.default_rng(11)
    shapes = [(b, a) for a, b in itertools.pairwise(widths)]
    deltas = operators(gates, ks)
    point = jnp.asarray(rng.standard_normal(sum(a * b for a, b in shapes)))

    def nested(Es, x):
        def field(x):
            return modulated_field(x, Es[-1], shapes, deltas)

        if len(Es) == 1:
            return field(x)

        def inner(x):
            return nested(Es[:-1], x)

        return jax.jvp(inner, (x,), (field(x),))[1] - jax.jvp(field, (x,), (inner(x),))[1]

    rows = []
    for n in range(1, levels + 1):
        Es = jnp.asarray(rng.standard_normal((40, n, widths[-1], widths[0])))
        rows.append(np.asarray(jax.jit(jax.vmap(lambda E: nested(E, point)))(Es)))
    values = np.linalg.svd(np.concatenate(rows), compute_uv=False)
    return len(point), int((values > values[0] * 1e-9).sum())


@pytest.mark.parametrize(
    ("widths", "gates"),
    [
        ((2, 2, 2, 2), (0.3, 0.8, 0.6)),
        ((2, 3, 2), (0.4, 0.7)),
        pytest.param((2, 2, 2, 2), (0.0, 0.8, 0.0), marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 2), (1.5, 0.8, 2.0), marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 2), (1.0, 0.8, 0.4), marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 2), (0.5, 1.0, 0.4), marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 2), (0.0, 1.0, 0.0), marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 2), (0.5, 0.2, 1.0), marks=pytest.mark.slow),
        pytest.param((2, 3, 2), (1.0, 0.7), marks=pytest.mark.slow),
        pytest.param((2, 3, 2), (0.4, 1.0), marks=pytest.mark.slow),
        pytest.param((2, 3, 3, 2), (0.4, 1.0, 0.6), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_there_are_as_many_laws_as_the_lie_algebra_of_the_flows_leaves_room_for(widths, gates):
    rng = np.random.default_rng(12)
    ks = directions(rng, widths)
    parameters, dimension = lie_algebra_dimension(widths, gates, ks)
    problem = gf.Problem(rng.standard_normal((widths[-1], widths[0])))
    flow = CountedFlow(problem, gates, ks)
    laws = gf.observables.independent_laws(random_network(rng, widths), flow)
    assert laws == parameters - dimension


def test_other_gates_directions_and_starts_do_not_compile_again():
    def run(seed, gates):
        ks = directions(np.random.default_rng(seed), WIDTHS)
        flow = CountedFlow(problem("whitened"), gates, ks)
        before = len(traces)
        simulate(flow, start(seed=seed), 1.0, 1e-6)
        return len(traces) - before

    run(0, [0.3, 0.4, 1.5])
    assert traces
    assert run(1, [0.9, 1.7, 0.2]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["auto", "stabilised", "implicit"])
def test_solvers_agree(solver):
    ks = directions(np.random.default_rng(20), WIDTHS)
    flow = gf.DeltaModulatedFlow(problem("whitened"), [0.3, 0.9, 1.0], ks)
    reference = simulate(flow, start(), 20.0)
    method = gf.Method(solver=solver, rtol=1e-9, atol=1e-11)
    traj = gf.simulate(flow, start(), 20.0, save=SAVES, method=method)
    assert traj.status is gf.Status.REACHED_END
    np.testing.assert_allclose(traj["modes"], reference["modes"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_lanes_of_an_ensemble_and_of_a_batch_of_gates_are_single_runs():
    ks = directions(np.random.default_rng(21), WIDTHS)
    nets = [start(seed=seed) for seed in range(3)]
    flow = gf.DeltaModulatedFlow(problem("whitened"), [0.3, 0.9, 0.5], ks)
    batch = gf.ensemble(flow, nets, 2.0, save=SAVES, method=explicit(1e-9))
    for i, net in enumerate(nets):
        single = simulate(flow, net, 2.0, 1e-9)
        np.testing.assert_allclose(batch.lane(i)["modes"], single["modes"], rtol=0, atol=1e-7)

    def run(gates):
        flow = gf.DeltaModulatedFlow(problem("whitened"), gates, ks)
        return simulate(flow, start(), 2.0, 1e-9)

    gates = jnp.asarray([[0.2, 0.4, 0.6], [0.3, 0.9, 0.5]])
    lanes = jax.vmap(run)(gates)
    np.testing.assert_allclose(lanes["modes"][1], batch.lane(0)["modes"], rtol=0, atol=1e-7)
    assert float(lanes["drift"].max()) < 1e-6
