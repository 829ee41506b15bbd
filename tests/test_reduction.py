"""Exact width reduction: the small flow, lifted, is the full flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import (
    COVARIANCE,
    EPS,
    PROBLEMS,
    SAVES,
    TARGET,
    arrays,
    explicit,
    largest_error,
    problem,
    random_network,
)
from gradflow.reduction import compress

WHITENED = gf.Problem(TARGET)
INIT = gf.initialize
# Start and the hidden widths it needs, known from the structure of the start.
STARTS = {
    "two_layers": (lambda: INIT.gaussian(0, (4, 30, 3), 0.5), (7,)),
    "two_layers_wide": (lambda: INIT.gaussian(0, (4, 3000, 3), 0.5), (7,)),
    "two_layers_off_balance": (lambda: INIT.delta_balanced(0, (4, 30, 3), 0.5, 0.3), (7,)),
    "orthogonal": (lambda: INIT.orthogonal(0, (4, 16, 16, 3), 0.7), (7, 7)),
    "balanced": (lambda: INIT.balanced(0, (4, 12, 16, 3), 0.7), (3, 3)),
    "lambda_balanced": (lambda: INIT.lambda_balanced(0, (4, 12, 16, 3), 0.7, 0.0), (3, 3)),
    "from_product": (
        lambda: INIT.from_product(TARGET * np.array([[1], [1e-4], [1e-8]]), (4, 12, 16, 3), key=1),
        (3, 3),
    ),
    "identity": (lambda: INIT.identity((4, 16, 16, 3)), (4, 4)),
    "decoupled": (lambda: INIT.decoupled(WHITENED, (4, 16, 16, 3), [0.1, 0.2]), (2, 2)),
}
starts = pytest.mark.parametrize("name", STARTS)


def tolerance(net, count=20):
    """Round-off of the largest layer's norm."""
    return count * EPS * max(np.linalg.norm(w) for w in arrays(net))


def assert_lifts_back(net, small, lift, share=20 * EPS):
    for lifted, w in zip(arrays(lift(small)), arrays(net), strict=True):
        assert np.linalg.norm(lifted - w) <= share * np.linalg.norm(w)


@starts
def test_hidden_widths_shrink_to_what_the_start_spans_and_lift_back_to_it(name):
    make, hidden = STARTS[name]
    net = make()
    small, lift = compress(net)
    assert small.widths == lift.small_widths == (4, *hidden, 3)
    assert lift.widths == net.widths
    assert lift.reduced
    assert_lifts_back(net, small, lift)
    np.testing.assert_allclose(
        small.end_to_end(), net.end_to_end(), rtol=0, atol=tolerance(net, 20)
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", ["two_layers", "orthogonal", "from_product"])
def test_the_lift_carries_the_small_vector_field_to_the_full_one(name, kind, weight_decay):
    flow = gf.GradientFlow(problem(kind), weight_decay=weight_decay)
    _, lift = compress(STARTS[name][0]())
    # Any state of the small network, not only its start, and any age of the frozen part.
    small = random_network(np.random.default_rng(1), lift.small_widths)
    speed = flow.vector_field(0.0, small)
    full, lifted = jax.jvp(
        lambda state, age: lift(state, decayed=age), (small, 0.2), (speed, weight_decay)
    )
    expected = arrays(flow.vector_field(0.0, full))
    assert largest_error(lifted, expected) <= tolerance(full)


def graded_isometry(rng, rows, columns, values):
    """A random matrix whose singular values are taken from ``values`` in turn."""
    rank = min(rows, columns)
    left = np.linalg.qr(rng.standard_normal((rows, rank)))[0]
    right = np.linalg.qr(rng.standard_normal((columns, rank)))[0]
    return (left * np.resize(values, rank)) @ right.T


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.5], [1.0, 0.6, 0.3]])
def test_three_layers_need_the_krylov_spaces_of_the_middle_layer(values):
    rng = np.random.default_rng(len(values))
    first, last = rng.standard_normal((24, 2)), rng.standard_normal((1, 20))
    middle = graded_isometry(rng, 20, 24, values)
    gram = middle.T @ middle
    words = [np.hstack([first, middle.T @ last.T])]
    other = [np.hstack([last.T, middle @ first])]
    for _ in values:
        words.append(gram @ words[-1])
        other.append(middle @ middle.T @ other[-1])
    ranks = tuple(int(np.linalg.matrix_rank(np.hstack(w), tol=1e-8)) for w in (words, other))
    net = gf.LinearNetwork([first, middle, last])
    # Round-off grows with every word of the Krylov spaces.
    small, lift = compress(net, tol=1e-12 if len(values) > 2 else None)
    assert_lifts_back(net, small, lift, 1e-12 if len(values) > 2 else 20 * EPS)
    assert lift.small_widths == (2, *ranks, 1)
    assert ranks[1] == 3 * len(values)


def test_directions_that_are_almost_missing_are_kept_and_round_off_is_not():
    rng = np.random.default_rng(0)
    first = graded_isometry(rng, 40, 4, [1.0, 1e-6, 1e-12, 0.0])
    last = np.zeros((3, 40))
    net = gf.LinearNetwork([first, last])
    small, lift = compress(net)
    assert lift.small_widths == (4, 3, 3)
    assert_lifts_back(net, small, lift)
    assert compress(net, tol=1e-9)[1].small_widths == (4, 2, 3)
    # The share counts, not the size: the same layer, tiny or beside a large one.
    for scale in (1e-200, 1e-3, 1e200):
        assert compress(gf.LinearNetwork([scale * first, last]))[1].small_widths == (4, 3, 3)
    assert compress(gf.LinearNetwork([1e-9 * first, last + 1.0]))[1].small_widths == (4, 4, 3)


@pytest.mark.parametrize("weak_in", ["difference", "first"])
def test_directions_weak_at_one_end_are_not_found_twice(weak_in):
    rng = np.random.default_rng(0)
    frame = np.linalg.qr(rng.standard_normal((20, 4)))[0]
    if weak_in == "difference":
        first, last = frame[:, :2], frame[:, :2] + 1e-11 * frame[:, 2:]
    else:
        first = graded_isometry(rng, 4, 4, [1.0])
        first = (frame * np.array([[1, 1, 1e-11, 1e-11]])) @ first
        # Spread over many outputs, so that the first layer has the strongest column.
        last = frame[:, 2:] @ graded_isometry(rng, 2, 8, [1.0])
    net = gf.LinearNetwork([first, np.eye(20), last.T])
    small, lift = compress(net)
    assert lift.small_widths == (first.shape[1], 4, 4, last.shape[1])
    for Q in map(np.asarray, lift.frames[1:-1]):
        np.testing.assert_allclose(Q.T @ Q, np.eye(4), atol=20 * EPS)
        # A weak direction is known to round-off over its share only.
        np.testing.assert_allclose(Q @ Q.T @ frame, frame, atol=1e-3)
    assert_lifts_back(net, small, lift)


@pytest.mark.parametrize("widths", [(4, 400, 3), (4, 16, 16, 3)], ids=["two_layers", "orthogonal"])
def test_the_lifted_small_run_is_the_full_run(widths):
    flow = gf.GradientFlow(problem("coloured"))
    net = INIT.orthogonal(3, widths, 0.5) if len(widths) > 3 else INIT.gaussian(3, widths, 0.1)
    small, lift = compress(net)
    full = gf.simulate(flow, net, 4.0, save=SAVES, method=explicit())
    run = gf.simulate(flow, small, 4.0, save=SAVES, method=explicit())
    assert run.loss[-1] < 0.5 * run.loss[0]
    np.testing.assert_allclose(run.loss, full.loss, rtol=0, atol=1e-9)
    np.testing.assert_allclose(run.states.end_to_end(), full.states.end_to_end(), rtol=0, atol=1e-9)
    assert largest_error(lift(run.states), arrays(full.states)) < 1e-9
    # The laws of the lifted states are those of the full start.
    kept = gf.observables.imbalance(net)
    for now, then in zip(gf.observables.imbalance(lift(run.final)), kept, strict=True):
        np.testing.assert_allclose(now, then, rtol=0, atol=1e-9)


class WithoutLaws(gf.GradientFlow):
    """Records no (d_1, d_1) matrices."""

    def conserved(self, state):
        return []

    def observables(self):
        return {}


@pytest.mark.slow
def test_ten_thousand_hidden_units_are_exactly_twenty():
    rng = np.random.default_rng(0)
    flow = WithoutLaws(gf.Problem.from_singular_values(np.linspace(1, 3, 10)))
    net = gf.LinearNetwork([w / 100 for w in arrays(random_network(rng, (10, 10_000, 10), 10.0))])
    small, lift = compress(net)
    assert small.widths == (10, 20, 10)
    full = gf.simulate(flow, net, 4.0, save=5, method=explicit())
    run = gf.simulate(flow, small, 4.0, save=5, method=explicit())
    np.testing.assert_allclose(run.loss, full.loss, rtol=0, atol=1e-9)
    np.testing.assert_allclose(run.states.end_to_end(), full.states.end_to_end(), rtol=0, atol=1e-9)
    assert largest_error(lift(run.states), arrays(full.states)) < 1e-9


def test_laws_of_the_lift_are_the_lifted_laws():
    net = STARTS["two_layers"][0]()
    small, lift = compress(net)
    Q = np.asarray(lift.frames[1])
    (large,), (core,) = gf.observables.imbalance(net), gf.observables.imbalance(small)
    np.testing.assert_allclose(Q @ np.asarray(core) @ Q.T, large, atol=tolerance(net))
    np.testing.assert_allclose(Q.T @ Q, np.eye(7), atol=20 * EPS)


def test_finite_steps_with_momentum_stay_in_the_same_subspace():
    flow = gf.GradientFlow(problem("coloured"))
    net = STARTS["orthogonal"][0]()
    small, lift = compress(net)
    options = {"learning_rate": 0.05, "steps": 100, "momentum": 0.5, "save_every": 50}
    full, run = gf.descend(flow, net, **options), gf.descend(flow, small, **options)
    assert run.loss[-1] < 0.9 * run.loss[0]
    assert largest_error(lift(run.final), arrays(full.final)) < 1e-12


def test_generic_deep_starts_come_back_as_they_are_and_say_why():
    net = INIT.gaussian(0, (4, 16, 18, 3), 0.5)
    small, lift = compress(net)
    assert small is net
    assert compress(net, tol=0.0)[0] is net
    assert not lift.reduced
    assert lift.small_widths == net.widths
    assert "hidden layer 2 needs all its 18 directions, 11 beyond" in lift.reason
    assert lift.reason in repr(lift)
    assert largest_error(lift(net), arrays(net)) == 0


def test_a_wide_layer_between_generic_narrow_ones_still_reduces():
    net = INIT.gaussian(0, (4, 5, 40, 6, 3), 0.5)
    small, lift = compress(net)
    assert lift.small_widths == (4, 5, 11, 6, 3)
    assert_lifts_back(net, small, lift)
    # Untouched layers keep their numbers, bit for bit.
    assert np.array_equal(small.weights[0], net.weights[0])
    assert np.array_equal(small.weights[-1], net.weights[-1])


@pytest.mark.parametrize(
    ("widths", "words"), [((4, 3), "single layer"), ((4, 3, 5, 3), "d_0 + d_h = 7")]
)
def test_networks_with_nothing_to_reduce_say_so(widths, words):
    net = INIT.gaussian(0, widths, 0.5)
    small, lift = compress(net)
    assert small is net
    assert words in lift.reason


@pytest.mark.parametrize("widths", [(4, 6, 3), (4, 1, 5, 3), (4, 6, 5, 7, 3)])
def test_layers_without_any_signal_keep_one_dead_unit(widths):
    weights = arrays(INIT.gaussian(0, widths, 0.5))
    weights[0], weights[-1] = 0 * weights[0], 0 * weights[-1]
    net = gf.LinearNetwork(weights)
    small, lift = compress(net)
    assert lift.small_widths == (4, *(1 for _ in widths[1:-1]), 3)
    assert largest_error(lift(small), weights) == 0
    still = gf.GradientFlow(problem("coloured")).vector_field(0.0, small)
    assert largest_error(still, [0 * w for w in arrays(small)]) == 0


def test_frozen_parts_decay_with_weight_decay():
    net = STARTS["identity"][0]()
    small, lift = compress(net)
    assert [rest is None for rest in lift.frozen] == [True, False, True]
    aged = lift(small, decayed=0.7)
    shrunk = np.asarray(aged.weights[1])[4:, 4:]
    np.testing.assert_allclose(shrunk, np.exp(-0.7) * np.eye(12), atol=EPS)
    np.testing.assert_allclose(np.asarray(aged.weights[1])[:4, :4], np.eye(4), atol=10 * EPS)


def test_stacked_states_lift_like_single_ones():
    _, lift = compress(STARTS["orthogonal"][0]())
    rng = np.random.default_rng(2)
    single = [random_network(rng, lift.small_widths) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *single)
    ages = jnp.array([0.0, 0.5, 1.0])
    together = lift(stacked, decayed=ages)
    mapped = jax.jit(jax.vmap(lambda state, age: lift(state, decayed=age)))(stacked, ages)
    assert together.weights[1].shape == (3, 16, 16)
    for i, (state, age) in enumerate(zip(single, ages, strict=True)):
        expected = arrays(lift(state, decayed=age))
        for many in (together, mapped):
            assert largest_error(jax.tree.map(lambda x, i=i: x[i], many), expected) < 20 * EPS


def test_single_precision_networks_stay_single_and_keep_its_round_off():
    net = jax.tree.map(lambda w: w.astype(jnp.float32), STARTS["balanced"][0]())
    small, lift = compress(net)
    assert lift.small_widths == (4, 3, 3, 3)
    assert small.weights[0].dtype == lift(small).weights[0].dtype == jnp.float32
    assert largest_error(lift(small), arrays(net)) < 10 * np.finfo(np.float32).eps


def test_what_cannot_be_compressed_or_lifted_is_refused():
    net = STARTS["two_layers"][0]()
    small, lift = compress(net)
    with pytest.raises(gf.errors.ArgumentError, match="net: got a traced network"):
        jax.jit(lambda state: compress(state)[0])(net)
    batch = jax.tree.map(lambda w: jnp.stack([w, w]), net)
    with pytest.raises(gf.errors.ArgumentError, match="net: got a batch"):
        compress(batch)
    with pytest.raises(gf.errors.ArgumentError, match="net: got"):
        compress(COVARIANCE)
    with pytest.raises(gf.errors.ArgumentError, match=r"net.weights\[0\]: got nan"):
        compress(jax.tree.map(lambda w: w.at[0, 0].set(jnp.nan), net))
    for tol in (-1e-3, 1.0):
        with pytest.raises(gf.errors.ArgumentError, match="tol: got"):
            compress(net, tol=tol)
    with pytest.raises(gf.errors.ShapeError, match=r"state: got widths \(4, 30, 3\)"):
        lift(net)
    with pytest.raises(gf.errors.ArgumentError, match="state: got"):
        lift(arrays(small))
    with pytest.raises(gf.errors.ShapeError, match="decayed: got shape"):
        lift(small, decayed=np.zeros(2))
