"""Quotient, fibres and rank patterns; arcs, heteroclinic runs and the saddles along a run."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import TARGET, arrays, random_network
from gradflow import landscape
from gradflow.connections import heteroclinic
from gradflow.errors import ArgumentError

PROBLEM = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
WIDTHS = (3, 3, 3, 3)


def of_intervals(rng, counts):
    """A network that is the sum of ``counts[i, j]`` chains on nodes i…j, in random bases."""
    h = len(counts) - 1
    pairs = [(i, j) for i in range(h + 1) for j in range(i, h + 1) for _ in range(counts[i, j])]
    nodes = [[c for c, (i, j) in enumerate(pairs) if i <= node <= j] for node in range(h + 1)]
    turns = [np.linalg.qr(rng.standard_normal((len(n), len(n))))[0] for n in nodes]
    layers = []
    for low, high in itertools.pairwise(range(h + 1)):
        step = np.array([[float(a == b) for b in nodes[low]] for a in nodes[high]])
        layers.append(turns[high] @ step @ turns[low].T)
    return gf.LinearNetwork(layers)


def random_counts(rng, depth):
    while True:
        counts = np.triu(rng.integers(0, 2, (depth + 1, depth + 1)))
        covered = [counts[: n + 1, n:].sum() for n in range(depth + 1)]
        if min(covered) > 0:
            return counts


def test_multiplicities_rank_pattern_and_fibre_dimension_of_50_random_patterns():
    rng = np.random.default_rng(0)
    for _ in range(50):
        depth = int(rng.integers(1, 5))
        counts = random_counts(rng, depth)
        net = of_intervals(rng, counts)
        pattern = landscape.rank_pattern(net)
        np.testing.assert_array_equal(landscape.multiplicities(pattern), counts)
        # Chains through both nodes make up the rank between them.
        for i, j in itertools.combinations(range(depth + 1), 2):
            assert pattern[i, j] == counts[: i + 1, j:].sum()
        parameters = sum(w.size for w in arrays(net))
        by_pattern = parameters - landscape.map_rank_from_pattern(pattern)
        assert landscape.fiber_dimension(net) == by_pattern
        assert landscape.stratum_dimension(net) <= by_pattern


def orbit_tangent_rank(net):
    """Dimension of the orbit of changes of basis of all nodes, by rank."""
    weights, columns = arrays(net), []
    for node, d in enumerate(net.widths):
        for unit in np.eye(d * d).reshape(-1, d, d):
            moved = [np.zeros_like(w) for w in weights]
            if node > 0:
                moved[node - 1] = unit @ weights[node - 1]
            if node < len(weights):
                moved[node] = moved[node] - weights[node] @ unit
            columns.append(np.concatenate([m.ravel() for m in moved]))
    return int(np.linalg.matrix_rank(np.array(columns), rtol=1e-10))


def test_orbit_codimension_equals_the_rank_of_its_tangent_space():
    rng = np.random.default_rng(1)
    for _ in range(20):
        net = of_intervals(rng, random_counts(rng, int(rng.integers(1, 5))))
        parameters = sum(w.size for w in arrays(net))
        assert landscape.orbit_codimension(net) == parameters - orbit_tangent_rank(net)


def test_zero_product_of_two_by_two_layers_has_components_of_codimension_4_4_3():
    zero, one, first = np.zeros((2, 2)), np.eye(2), np.diag([1.0, 0.0])
    nets = [(zero, one), (one, zero), (first, np.diag([0.0, 1.0]))]
    found = [landscape.orbit_codimension(gf.LinearNetwork(weights)) for weights in nets]
    assert found == [4, 4, 3]
    assert landscape.stratum_dimension(gf.LinearNetwork(nets[2])) == 5


def test_move_in_fibre_keeps_map_pattern_loss_and_inertia():
    net = landscape.critical_point(PROBLEM, WIDTHS, (1,), tightened=False)
    moved = landscape.move_in_fiber(0, net)
    assert landscape.same_fiber(net, moved)
    np.testing.assert_array_equal(landscape.rank_pattern(moved), landscape.rank_pattern(net))
    assert landscape.inertia(PROBLEM, moved) == landscape.inertia(PROBLEM, net)
    spectra = [np.asarray(landscape.spectrum(PROBLEM, n)) for n in (net, moved)]
    assert abs(spectra[0] - spectra[1]).max() > 0.1  # only its signs are kept
    near = landscape.move_in_fiber(0, net, strength=1e-3)
    assert max(np.abs(a - b).max() for a, b in zip(arrays(near), arrays(net), strict=True)) < 0.02


def test_terms_that_vanish_in_the_product_keep_the_map_and_change_the_pattern():
    net = landscape.critical_point(PROBLEM, WIDTHS, (1,))
    moved = landscape.move_in_fiber(3, net, vanishing=0.5)
    assert landscape.same_fiber(net, moved)
    assert (landscape.rank_pattern(moved) >= landscape.rank_pattern(net)).all()
    assert landscape.rank_pattern(moved).sum() > landscape.rank_pattern(net).sum()


def test_other_map_is_another_fibre():
    rng = np.random.default_rng(0)
    net = random_network(rng, (3, 4, 2))
    assert not landscape.same_fiber(net, random_network(rng, (3, 4, 2)))
    assert landscape.same_fiber(net, gf.initialize.from_product(net.end_to_end(), (3, 2, 5, 2)))
    with pytest.raises(ArgumentError, match="net2: got widths"):
        landscape.same_fiber(net, random_network(rng, (4, 4, 2)))


def test_no_network_has_an_impossible_rank_pattern():
    with pytest.raises(ArgumentError, match="pattern: got multiplicity -1"):
        landscape.orbit_codimension(np.array([[1, 2], [0, 2]]))


def test_loss_falls_along_every_arc_of_a_five_value_problem():
    s = np.array([5.0, 4.0, 3.0, 2.0, 1.0])
    problem, widths = gf.Problem.from_singular_values(s), (5, 6, 5)
    taus = jnp.linspace(0, 1, 21)
    subsets = [c for r in range(6) for c in itertools.combinations(range(1, 6), r)]
    losses = jax.jit(jax.vmap(problem.loss))
    arcs = 0
    for S1, S2 in itertools.product(subsets, subsets):
        if not set(S1) < set(S2):
            continue
        at = landscape.arc(problem, widths, S1, S2)
        W1, W2 = (np.stack(w) for w in zip(*(arrays(at(tau)) for tau in taus[::10]), strict=True))
        strength = np.asarray(taus)[:, None] ** 2 * s
        kept = np.isin(np.arange(1, 6), S1)
        grown = np.isin(np.arange(1, 6), S2) & ~kept
        modes = np.where(kept, s, np.where(grown, strength, 0.0))
        np.testing.assert_allclose(W2 @ W1, [np.diag(m) for m in modes[::10]], atol=1e-12)
        values = np.asarray(losses(jax.vmap(jnp.diag)(jnp.asarray(modes))))
        assert (np.diff(values) < 0).all()
        arcs += 1
    assert arcs == 3**5 - 2**5


def test_arc_goes_through_jit_and_ends_in_critical_points():
    problem = gf.Problem(TARGET, np.diag([1.0, 2.0, 0.5, 1.5]))
    at = landscape.arc(problem, (4, 3, 5, 3), (2,), (1, 2), key=1)
    losses = jax.jit(jax.vmap(lambda tau: problem.loss(at(tau).end_to_end())))(
        jnp.linspace(0, 1, 9)
    )
    assert (np.diff(losses) < 0).all()
    for tau, signature in ((0.0, (2,)), (1.0, (1, 2))):
        found = landscape.classify(problem, at(tau))
        assert found.signature == signature
        assert found.gradient_norm < 1e-12
    with pytest.raises(ArgumentError, match="S2: got"):
        landscape.arc(problem, (4, 3, 5, 3), (2,), (1, 3))


def test_lattice_is_that_of_subsets_with_the_critical_values():
    pytest.importorskip("networkx")
    graph = landscape.lattice(PROBLEM, (3, 2, 3))
    assert set(graph.nodes) == {S for S, _ in landscape.critical_values(PROBLEM, (3, 2, 3))}
    assert graph.number_of_edges() == 3 + 6
    for upper, lower, edge in graph.edges(data=True):
        assert set(lower) - set(upper) == {edge["mode"]}
        drop = 0.5 * (4.0 - edge["mode"]) ** 2
        np.testing.assert_allclose(edge["drop"], drop)
        np.testing.assert_allclose(graph.nodes[upper]["value"] - graph.nodes[lower]["value"], drop)
    assert [S for S, d in graph.nodes(data=True) if d["global_minimum"]] == [(1, 2)]


@pytest.mark.parametrize(("S1", "S2"), [((), (1,)), ((1,), (1, 2)), ((3,), (1, 3)),
                                        ((1, 2), (1, 2, 3))])  # fmt: skip
def test_heteroclinic_run_starts_and_ends_where_it_claims(S1, S2):
    run = heteroclinic(PROBLEM, WIDTHS, S1, S2, save=41)
    assert run.reached
    assert run.start.signature == S1
    assert run.end.signature == S2
    assert run.start.agree
    assert run.end.agree
    assert run.trajectory.status is gf.Status.STATIONARY
    assert 0 < run.start_distance < 0.01
    assert run.end_distance < 1e-7
    assert run.end.gradient_norm <= 1.1e-8
    gf.testing.assert_loss_decreases(run.trajectory)
    kinds = {(1,): "nonstrict_saddle", (1, 2): "nonstrict_saddle", (1, 3): "strict_saddle"}
    assert run.end.kind == kinds.get(S2, "global_minimum")


def small_start(order):
    """An aligned start whose modes leave the origin one after another."""
    return gf.initialize.decoupled(PROBLEM, WIDTHS, np.array(order))


def test_saddle_passages_are_the_best_approximations_in_order():
    traj = gf.simulate(gf.GradientFlow(PROBLEM), small_start([0.02, 0.02, 0.02]), 120.0, save=601)
    found = landscape.saddle_passages(traj, PROBLEM)
    assert [p.signature for p in found] == [(), (1,), (1, 2)]
    values = [7.0, 2.5, 0.5]
    np.testing.assert_allclose([p.value for p in found], values)
    for passage in found:
        # Only the modes still to learn are away from the saddle, and they are small.
        assert passage.distance < 0.05
        assert abs(passage.loss - passage.value) < 0.1
        assert passage.start <= passage.time <= passage.end
        assert passage.duration == passage.end - passage.start > 1.0
        assert passage.smallest_gradient <= passage.gradient_norm < 0.2
        assert sum(passage.inertia) == 27
        assert traj.ts[passage.saved_index] == passage.time
        bound = 0.2 * [3.0, 2.0, 1.0][len(passage.signature)]
        inside = (traj.ts >= passage.start) & (traj.ts <= passage.end)
        ends = np.flatnonzero(inside)[[0, -1]]
        for i in ends:
            signature, distance = landscape.nearest_signature(PROBLEM, traj.network(int(i)))
            assert signature == passage.signature
            assert distance <= bound
        if passage.signature:
            for i in (ends[0] - 1, ends[1] + 1):
                _, distance = landscape.nearest_signature(PROBLEM, traj.network(int(i)))
                assert distance > bound
    # Between two passages a mode is learnt.
    times = gf.observables.learning_times(traj).times
    for before, after, learnt in zip(found, found[1:], np.asarray(times)[:2], strict=False):
        assert before.end < learnt < after.start


def test_run_without_saddles_on_its_way_passes_none():
    minimum = landscape.critical_point(PROBLEM, WIDTHS, (1, 2, 3))
    scales = jnp.linspace(1.2, 1.0, 5)
    states = jax.vmap(lambda a: minimum.with_weights(tuple(a * w for w in minimum.weights)))(scales)
    traj = types.SimpleNamespace(ts=jnp.arange(5.0), states=states)
    assert landscape.saddle_passages(traj, PROBLEM) == []


def test_passages_need_stored_states():
    with pytest.raises(ArgumentError, match="traj: got None; it needs stored states"):
        landscape.saddle_passages(types.SimpleNamespace(ts=jnp.arange(3.0), states=None), PROBLEM)
