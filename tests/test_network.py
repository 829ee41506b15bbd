"""The state: adjacency matrix, powers, nilpotency, and the dense form of the flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradflow as gf
from cases import EPS, TARGET, WIDTHS, arrays, dense, node_block, random_network, start

NETWORKS = {
    "single_layer": (3, 2),
    "narrow_middle": (4, 1, 3),
    "mixed": WIDTHS,
    "deep": (2, 3, 1, 4, 2, 5),
}
some_widths = st.lists(st.integers(1, 6), min_size=2, max_size=7).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(params=NETWORKS.values(), ids=NETWORKS)
def net(request):
    return random_network(np.random.default_rng(1), request.param)


def test_end_to_end_map_is_the_product_from_last_to_first_layer(net):
    product = np.linalg.multi_dot([np.eye(net.widths[-1]), *arrays(net)[::-1]])
    np.testing.assert_allclose(net.end_to_end(), product, rtol=0, atol=50 * EPS)


def test_widths_and_depth_are_read_from_the_weights(net):
    assert net.depth == len(net.weights)
    assert net.widths == tuple([net.weights[0].shape[1]] + [w.shape[0] for w in net.weights])


def test_adjacency_is_first_block_subdiagonal(net):
    np.testing.assert_array_equal(net.adjacency(), dense(net))


def test_powers_equal_dense_matrix_powers(net):
    for k in range(net.depth + 3):
        power = np.linalg.matrix_power(dense(net), k)
        np.testing.assert_allclose(net.power(k), power, rtol=0, atol=50 * EPS)


def test_power_depth_holds_end_to_end_map_in_the_corner_and_nothing_else(net):
    top = np.array(net.power(net.depth))
    corner = top[-net.widths[-1] :, : net.widths[0]]
    np.testing.assert_allclose(corner, net.end_to_end(), rtol=0, atol=50 * EPS)
    top[-net.widths[-1] :, : net.widths[0]] = 0
    assert not top.any()


def test_adjacency_is_nilpotent_exactly(net):
    assert not np.asarray(net.power(net.depth + 1)).any()
    assert not np.linalg.matrix_power(np.asarray(net.adjacency()), net.depth + 1).any()
    assert np.linalg.matrix_power(np.asarray(net.adjacency()), net.depth).any()


def test_from_adjacency_inverts_adjacency(net):
    again = gf.LinearNetwork.from_adjacency(net.adjacency(), net.widths)
    for a, b in zip(arrays(net), arrays(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nested_lists_are_read_as_floats():
    net = gf.LinearNetwork([[[1, 2], [3, 4], [5, 6]], [[1, 0, -1]]])
    assert net.widths == (2, 3, 1)
    np.testing.assert_array_equal(net.end_to_end(), [[-4.0, -4.0]])


def test_layers_are_brought_to_one_floating_point_type():
    net = gf.LinearNetwork([np.ones((2, 2), np.float32), np.ones((2, 2))])
    assert {w.dtype for w in net.weights} == {jnp.dtype(float)}


def test_network_passes_through_jit_vmap_and_grad():
    net = start()
    np.testing.assert_array_equal(jax.jit(lambda n: n)(net).weights[1], net.weights[1])
    batch = jax.vmap(lambda s: jax.tree.map(lambda w: s * w, net))(jnp.arange(3.0))
    assert batch.weights[0].shape == (3, *net.weights[0].shape)
    slope = jax.grad(lambda n: n.end_to_end().sum())(net)
    assert isinstance(slope, gf.LinearNetwork)
    assert "batch=(3,)" in repr(batch)
    assert "LinearNetwork(widths=(4, 3, 5, 3)" in repr(net)


@settings(max_examples=25, deadline=None)
@given(widths=some_widths, seed=seeds)
def test_layer_form_equals_adjacency_form(widths, seed):
    rng = np.random.default_rng(seed)
    net = random_network(rng, widths)
    target = rng.standard_normal((widths[-1], widths[0]))
    layers = gf.GradientFlow(gf.Problem(target)).vector_field(0.0, net)
    rate = np.asarray(gf.adjacency_flow(net.adjacency(), target, widths))
    # Relative to the largest product that occurs: entries may cancel.
    scale = (1 + np.abs(target).max()) * max(1.0, np.abs(rate).max())
    np.testing.assert_allclose(dense(layers), rate, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("widths", [WIDTHS, WIDTHS[::-1]], ids=["d_h<d_0", "d_h>=d_0"])
def test_adjacency_form_equals_its_formula(widths):
    rng = np.random.default_rng(0)
    net = random_network(rng, widths)
    target = rng.standard_normal((widths[-1], widths[0]))
    A, h = dense(net), len(widths) - 1
    E = np.zeros_like(A)
    E[-widths[-1] :, : widths[0]] = target
    power = np.linalg.matrix_power
    f = sum(power(A, h - j).T @ (E - power(A, h)) @ power(A, j - 1).T for j in range(1, h + 1))
    np.testing.assert_allclose(gf.adjacency_flow(A, target, widths), f, rtol=0, atol=1e-13)


def test_adjacency_form_moves_only_the_first_block_subdiagonal():
    net = start()
    rate = gf.adjacency_flow(net.adjacency(), TARGET, WIDTHS)
    gf.LinearNetwork.from_adjacency(rate, WIDTHS)  # refuses any other entry


def test_layer_form_equals_adjacency_form_for_fifty_layers():
    widths, rng = (3,) * 51, np.random.default_rng(0)
    # Near-orthogonal layers: products of 50 neither vanish nor overflow.
    net = gf.LinearNetwork(
        [np.linalg.qr(rng.standard_normal((3, 3)))[0] * rng.uniform(0.95, 1.05) for _ in range(50)]
    )
    target = rng.standard_normal((3, 3))
    layers = dense(gf.GradientFlow(gf.Problem(target)).vector_field(0.0, net))
    rate = np.asarray(gf.adjacency_flow(net.adjacency(), target, widths))
    assert np.abs(rate).max() > 0.1
    np.testing.assert_allclose(layers, rate, rtol=1e-12, atol=1e-12 * np.abs(rate).max())


def test_interior_diagonal_blocks_of_the_commutator_are_minus_the_conserved_matrices(net):
    A = dense(net)
    commutator = A @ A.T - A.T @ A
    for i, C in enumerate(gf.observables.imbalance(net), start=1):
        np.testing.assert_allclose(-node_block(commutator, net.widths, i), C, rtol=0, atol=50 * EPS)
    assert len(gf.observables.imbalance(net)) == net.depth - 1
