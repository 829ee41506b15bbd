"""The laws of gradient flow: how many there are, and that trajectories keep them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import (
    PROBLEMS,
    SAVES,
    WIDTHS,
    arrays,
    dense,
    explicit,
    log_slope,
    node_block,
    problem,
    random_network,
    run,
    start,
)

# Counted by Marcotte, Gribonval & Peyré (2023): D − dim Lie(V)(θ) at a generic point.
COUNTS = [
    ((2, 2, 2, 2), 6),
    ((1, 2, 2, 1), 6),
    ((1, 3, 3, 1), 12),
    ((1, 1, 1, 1), 2),
    ((2, 5, 5, 2), 30),
    ((3, 6, 1, 2), 19),
    ((3, 2), 0),
]


@pytest.mark.parametrize(("widths", "laws"), COUNTS, ids=lambda x: str(x).replace(" ", ""))
def test_number_of_independent_laws(widths, laws):
    net = random_network(np.random.default_rng(0), widths)
    assert gf.observables.independent_laws(net) == laws


@pytest.mark.parametrize("widths", [(2, 1, 2), (2, 3, 2), (2, 4, 2), (2, 6, 2), (1, 5, 2)], ids=str)
def test_number_of_two_layer_laws_follows_the_formula(widths):
    d0, r, d2 = widths
    m = d0 + d2
    expected = r * (r + 1) // 2 if r <= m else m * r - m * (m - 1) // 2
    net = random_network(np.random.default_rng(1), widths)
    assert gf.observables.independent_laws(net) == expected


def test_number_of_laws_does_not_depend_on_the_scale_of_the_weights():
    # Widths with dependent laws (22 entries, 19 laws), whose zeros are round-off of the scale.
    for scale in (1e-12, 1e12):
        net = random_network(np.random.default_rng(0), (3, 6, 1, 2), scale)
        assert gf.observables.independent_laws(net) == 19


def commutators(traj):
    for i in range(len(traj.ts)):
        A = dense(traj.network(i))
        yield A @ A.T - A.T @ A


# Global error after the few hundred steps of a run, each held to rtol, on laws of the size of
# squared weights (about 4): 1e3·rtol is what may add up.
DRIFT = 1e3 * 1e-10


@pytest.mark.parametrize("kind", PROBLEMS)
def test_interior_commutator_blocks_are_conserved(kind):
    first, *later = commutators(run(kind))
    for matrix in later:
        for node in range(1, len(WIDTHS) - 1):
            change = node_block(matrix - first, WIDTHS, node)
            assert np.abs(change).max() < DRIFT


@pytest.mark.parametrize("kind", PROBLEMS)
def test_first_and_last_commutator_blocks_are_not_conserved(kind):
    first, *_, last = commutators(run(kind))
    for node in (0, len(WIDTHS) - 1):
        assert np.abs(node_block(last - first, WIDTHS, node)).max() > 0.1


@pytest.mark.parametrize("kind", PROBLEMS)
def test_recorded_drift_is_the_largest_change_of_any_law(kind):
    traj = run(kind)
    blocks = [gf.observables.imbalance(traj.network(i)) for i in range(len(traj.ts))]
    by_hand = [
        max(np.abs(c - c0).max() for c, c0 in zip(b, blocks[0], strict=True)) for b in blocks
    ]
    drift = gf.observables.conservation_drift(traj)
    np.testing.assert_allclose(drift, by_hand, rtol=0, atol=1e-14)
    assert drift[0] == 0
    assert 0 < drift.max() < DRIFT
    assert traj["law_drift"].shape == (SAVES, len(WIDTHS) - 2)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_adjacency_stays_nilpotent_with_its_block_pattern_exactly(kind):
    traj = run(kind)
    for i in range(len(traj.ts)):
        A = np.asarray(traj.network(i).adjacency())
        assert not np.linalg.matrix_power(A, len(WIDTHS)).any()
        gf.LinearNetwork.from_adjacency(A, WIDTHS)  # refuses any entry off the pattern
        np.testing.assert_array_equal(A, dense(traj.network(i)))


def test_drift_of_an_explicit_solver_is_proportional_to_its_tolerance():
    flow = gf.GradientFlow(problem("whitened"))
    tolerances = 10.0 ** np.arange(-4, -11, -1)
    drifts = [
        float(gf.simulate(flow, start(), 4.0, save=SAVES, method=explicit(rtol))["drift"].max())
        for rtol in tolerances
    ]
    # Slope 1 up to the 1/5 that the number of steps of an order 5 method takes away.
    assert 0.8 < log_slope(tolerances, drifts) < 1.2


def test_weight_decay_lets_the_laws_decay_at_twice_its_rate():
    decay, begin = 0.15, 0.5
    flow = gf.GradientFlow(problem("whitened"), weight_decay=decay)
    traj = gf.simulate(flow, start(), 4.5, t0=begin, save=SAVES, method=explicit())
    C0 = gf.observables.imbalance(start())
    for i in (SAVES // 2, SAVES - 1):
        factor = np.exp(-2 * decay * (float(traj.ts[i]) - begin))
        for C, law in zip(gf.observables.imbalance(traj.network(i)), C0, strict=True):
            np.testing.assert_allclose(C, factor * law, rtol=0, atol=DRIFT)
    assert float(traj["drift"].max()) < DRIFT
    assert np.abs(np.asarray(C0[0])).max() > 0.1


def test_balanced_starts_stay_balanced():
    flow = gf.GradientFlow(problem("whitened"))
    traj = gf.simulate(
        flow, gf.initialize.balanced(0, WIDTHS, 0.3), 4.0, save=SAVES, method=explicit()
    )
    assert float(traj["balancedness"].max()) < DRIFT


def test_loss_falls_at_the_rate_of_the_squared_gradient_norm():
    flow = gf.GradientFlow(problem("whitened"))
    for net in (start(), start(seed=3)):
        rate = flow.vector_field(0.0, net)
        _, slope = jax.jvp(
            lambda w, n=net: flow.loss(n.with_weights(w)), (net.weights,), (rate.weights,)
        )
        assert float(slope) == pytest.approx(-sum(np.sum(w**2) for w in arrays(rate)), rel=1e-12)
    recorded = run("whitened")["gradient_norm"]
    rate = flow.vector_field(0.0, run("whitened").network(0))
    assert float(recorded[0]) == pytest.approx(
        float(jnp.sqrt(sum(jnp.sum(w**2) for w in rate.weights))), rel=1e-13
    )
