"""The delta operator, the rewrite block and its neighbours, memories, delta networks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import gradflow as gf
from cases import EPS, log_slope

D = gf.delta
SPECIAL = (0.0, 1.0, 2.0)
GATES = (*SPECIAL, *np.random.default_rng(0).uniform(0, 2, 3))
REGIMES = {0: "identity", 0.3: "contraction", 1: "projection", 1.7: "over-relaxed", 2: "reflection"}


def direction(seed=1, d=5):
    return np.random.default_rng(seed).standard_normal(d) * 3


def dense(beta, k):
    return np.eye(len(k)) - beta * np.outer(k, k) / (k @ k)


# The operator ------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", GATES)
def test_operator_is_applied_and_written_out_as_the_identity_minus_a_rank_one_matrix(beta):
    k = direction()
    op, M = D.operator(beta, k), dense(beta, k)
    X = np.random.default_rng(2).standard_normal((5, 3))
    np.testing.assert_allclose(op @ X, M @ X, rtol=0, atol=1e-14)
    np.testing.assert_allclose(op @ X[:, 0], M @ X[:, 0], rtol=0, atol=1e-14)
    for seen in (op, op.matrix(), op.T, jnp.asarray(op), np.asarray(op)):
        np.testing.assert_allclose(seen, M, rtol=0, atol=1e-15)
    assert (op.shape, op.ndim, op.dtype) == ((5, 5), 2, np.float64)


@pytest.mark.parametrize("beta", GATES)
def test_spectrum_and_determinant_are_those_of_the_dense_matrix(beta):
    k = direction()
    M = dense(beta, k)
    for found in (D.spectrum(beta, 5), D.operator(beta, k).spectrum()):
        np.testing.assert_allclose(found, np.linalg.eigvalsh(M)[::-1], rtol=0, atol=2e-15)
    for m in (1, 2, 3):
        lifted = np.linalg.det(np.kron(np.eye(m), M))
        for found in (D.determinant(beta, m), D.operator(beta, k).determinant(m)):
            assert float(found) == pytest.approx(lifted, rel=1e-12, abs=1e-14)
    if beta in SPECIAL:
        assert float(D.determinant(beta, 3)) == (1 - beta) ** 3
        assert np.asarray(D.spectrum(beta, 3)).tolist() == [1, 1, 1 - beta]


@pytest.mark.parametrize("beta", [b for b in GATES if b != 1])
def test_inverse_undoes_the_operator(beta):
    k = direction()
    X = np.random.default_rng(3).standard_normal((5, 2))
    back = D.inverse(beta, k)
    np.testing.assert_allclose(back @ (D.operator(beta, k) @ X), X, rtol=0, atol=1e-12)
    np.testing.assert_allclose(back, np.linalg.inv(dense(beta, k)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", GATES)
def test_operator_is_orthogonal_iff_the_gate_is_0_or_2(beta):
    op = D.operator(beta, direction())
    defect = np.abs(np.asarray(op @ (op @ np.eye(5))) - np.eye(5)).max()
    assert (defect < 1e-14) == (beta in (0, 2))


def test_gate_1_projects_exactly_and_gate_0_does_nothing_exactly():
    k = np.array([0.0, 3.0, 0.0])
    np.testing.assert_array_equal(D.operator(1.0, k), np.diag([1.0, 0.0, 1.0]))
    np.testing.assert_array_equal(D.operator(2.0, k), np.diag([1.0, -1.0, 1.0]))
    np.testing.assert_array_equal(D.operator(0.0, direction()), np.eye(5))


@pytest.mark.parametrize("beta", REGIMES)
def test_regime_is_named_after_what_happens_along_the_direction(beta):
    assert D.regime(beta) == REGIMES[beta]
    assert D.regime(jnp.asarray(float(beta))) == REGIMES[beta]


def test_operator_in_one_dimension_is_the_number_1_minus_beta():
    assert float(D.operator(0.3, [-4.0]).matrix()[0, 0]) == pytest.approx(0.7, rel=1e-15)
    np.testing.assert_allclose(D.spectrum(0.3, 1), [0.7], rtol=1e-15)


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e200])
def test_a_given_direction_of_any_length_gives_the_same_operator(size):
    k = direction()
    np.testing.assert_allclose(D.operator(1.4, size * k), dense(1.4, k), rtol=0, atol=1e-14)


def test_operator_goes_through_jit_vmap_and_grad():
    k = direction()
    batch = jax.jit(jax.vmap(lambda b: D.operator(b, k) @ jnp.ones(5)))(jnp.linspace(0, 2, 7))
    for beta, row in zip(np.linspace(0, 2, 7), batch, strict=True):
        np.testing.assert_allclose(row, dense(beta, k) @ np.ones(5), rtol=0, atol=1e-14)
    slope = jax.grad(lambda b: D.operator(b, k).determinant(3))(0.4)
    assert float(slope) == pytest.approx(-3 * 0.6**2, rel=1e-14)


def test_gate_and_logit_are_inverse_and_reach_the_ends():
    betas = np.array([1e-6, 0.3, 1.0, 1.9])
    np.testing.assert_allclose(D.gate(D.gate_logit(betas)), betas, rtol=1e-14)
    assert np.asarray(D.gate(D.gate_logit(np.array([0.0, 2.0])))).tolist() == [0, 2]
    assert float(D.gate(0.0)) == 1


# The rewrite and its block -----------------------------------------------------------------------


@pytest.mark.parametrize("beta", GATES)
@pytest.mark.parametrize("columns", [None, 3], ids=["vector", "matrix"])
def test_rewrite_erases_and_writes_along_k_and_scales_the_readout_error(beta, columns):
    rng = np.random.default_rng(4)
    k = direction() / np.linalg.norm(direction())
    X, v = (rng.standard_normal(5), 0.4) if columns is None else rng.standard_normal((2, 5, 3))
    v = v if columns is None else v[0]
    new = np.asarray(D.rewrite(X, k, v, beta))
    np.testing.assert_allclose(
        new, dense(beta, k) @ X + beta * np.multiply.outer(k, v), rtol=0, atol=1e-14
    )
    np.testing.assert_allclose(k @ new - v, (1 - beta) * (k @ X - v), rtol=0, atol=1e-14)


def linear_parts(d=4, columns=None, seed=0):
    """Data-dependent direction, value and gate, made of arrays only."""
    rng = np.random.default_rng(seed)
    A, w, g = rng.standard_normal((d, d)), rng.standard_normal(d), rng.standard_normal(d)
    if columns is None:
        return D.Affine(A), D.Affine(w), D.Affine(0.3 * g)
    pooled = eqx.nn.Lambda(lambda X: jnp.asarray(A) @ X.mean(axis=1))
    return pooled, D.Affine(w), eqx.nn.Lambda(lambda X: 0.3 * jnp.asarray(g) @ X.mean(axis=1))


@pytest.mark.parametrize("columns", [None, 3], ids=["vector", "matrix"])
def test_block_rewrites_with_the_parts_at_its_state(columns):
    parts = linear_parts(columns=columns)
    block = D.DeltaBlock(*parts)
    X = np.random.default_rng(5).standard_normal((4,) if columns is None else (4, columns))
    k, v, g = (np.asarray(part(X)) for part in parts)
    k = k / np.linalg.norm(k)
    beta = 2 / (1 + np.exp(-g))
    expected = X + beta * np.multiply.outer(k, v - k @ X)
    np.testing.assert_allclose(block(X), expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(block.readout_error(X), k @ X - v, rtol=0, atol=1e-14)
    assert 0 < float(block.parts(X)[2]) < 2


@pytest.mark.parametrize(
    "columns", [None, pytest.param(3, marks=pytest.mark.slow)], ids=["vector", "matrix"]
)
def test_jacobian_of_a_block_is_that_of_finite_differences(columns):
    block = D.DeltaBlock(*linear_parts(columns=columns))
    X = np.random.default_rng(6).standard_normal((4,) if columns is None else (4, columns))
    J, h = np.asarray(block.jacobian(X)), 1e-6
    for j in range(X.size):
        step = np.zeros(X.size)
        step[j] = h
        step = step.reshape(X.shape)
        slope = (np.asarray(block(X + step)) - np.asarray(block(X - step))).ravel() / (2 * h)
        np.testing.assert_allclose(J[:, j], slope, rtol=0, atol=1e-8)


@pytest.mark.parametrize("beta", SPECIAL)
def test_jacobian_of_a_block_with_frozen_parts_is_the_lifted_operator(beta):
    k = direction(d=3)
    block = D.DeltaBlock(k, np.ones(2), beta, squash=False)
    J = np.asarray(block.jacobian(np.ones((3, 2))))
    np.testing.assert_allclose(J, np.kron(dense(beta, k), np.eye(2)), rtol=0, atol=1e-15)
    assert np.linalg.det(J) == pytest.approx((1 - beta) ** 2, abs=1e-14)


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-30, 1e-12, 1e-11, 1.0])
def test_guard_keeps_value_and_gradient_finite_where_the_direction_vanishes(size):
    def output(scale, X):
        block = D.DeltaBlock(lambda X: scale * X, lambda X: X[0], lambda X: X[1])
        return jnp.sum(block(X) ** 2)

    X = jnp.asarray([1.0, -0.4, 0.3])
    value, slopes = jax.value_and_grad(output, argnums=(0, 1))(jnp.asarray(size), X)
    assert np.isfinite(value)
    assert all(np.isfinite(s).all() for s in slopes)
    k = D.guarded(size * X)
    length = size * np.linalg.norm(X)
    assert np.linalg.norm(k) == pytest.approx(min(1.0, length / D.GUARD), rel=1e-14)


def test_guard_works_in_float32_where_squares_underflow():
    k = jnp.asarray([1e-30, 0.0], jnp.float32)
    assert np.isfinite(jax.jacrev(D.guarded)(k)).all()
    np.testing.assert_allclose(D.operator(1.0, k), np.diag([0.0, 1.0]), atol=1e-6)


# Neighbours and stacks ---------------------------------------------------------------------------


def block_of(kind, rng, d=4):
    A, B = rng.standard_normal((2, d, d)) / np.sqrt(d)
    branch = D.Affine(A, 0.1 * rng.standard_normal(d), activation=jnp.tanh)
    return {
        "delta": lambda: D.DeltaBlock(D.Affine(A), D.Affine(B[0]), D.Affine(B[1])),
        "residual": lambda: D.ResidualBlock(branch),
        "highway": lambda: D.HighwayBlock(branch, D.Affine(B)),
        "invertible": lambda: D.InvertibleBlock(D.Contraction(A, B[0])),
        "orthogonal": lambda: D.OrthogonalBlock(A),
    }[kind]()


KINDS = (
    *("delta", "residual", "highway", "invertible"),
    pytest.param("orthogonal", marks=pytest.mark.slow),  # the exponential compiles for long
)


@pytest.mark.parametrize("kind", KINDS)
def test_stack_is_the_composition_of_its_layers(kind):
    rng = np.random.default_rng(7)
    blocks = [block_of(kind, rng) for _ in range(3)]
    tower = D.stack(blocks)
    X = rng.standard_normal(4)
    states, J = [X], np.eye(4)
    for block in blocks:
        J = np.asarray(block.jacobian(states[-1])) @ J
        states.append(np.asarray(block(states[-1])))
    assert tower.depth == 3
    np.testing.assert_allclose(tower(X), states[-1], rtol=0, atol=1e-14)
    np.testing.assert_allclose(tower.states(X), states, rtol=0, atol=1e-14)
    np.testing.assert_allclose(tower.jacobian(X), J, rtol=0, atol=1e-13)
    np.testing.assert_allclose(tower.layer(1)(X), blocks[1](X), rtol=0, atol=1e-15)
    product = np.linalg.multi_dot(np.asarray(tower.jacobians(X))[::-1])
    np.testing.assert_allclose(product, J, rtol=0, atol=1e-13)
    g = rng.standard_normal(4)
    gradients = np.asarray(tower.gradients(X, g))
    np.testing.assert_array_equal(gradients[-1], g)
    np.testing.assert_allclose(gradients[0], J.T @ g, rtol=0, atol=1e-13)


def test_stack_of_a_batched_block_is_that_of_its_lanes():
    def make(weight):
        return D.ResidualBlock(D.Affine(weight))

    weights = np.random.default_rng(8).standard_normal((5, 3, 3)) / 3
    batched = D.Stack(eqx.filter_vmap(make)(jnp.asarray(weights)))
    one_by_one = D.stack([make(w) for w in weights])
    np.testing.assert_array_equal(batched(jnp.ones(3)), one_by_one(jnp.ones(3)))


def test_depth_of_a_stack_costs_no_more_tracing():
    calls = []

    def branch(X):
        calls.append(1)
        return 0.1 * X

    blocks = [D.HighwayBlock(branch, float(g)) for g in range(50)]
    calls.clear()
    D.stack(blocks)(jnp.ones(3))
    assert len(calls) < 5


def test_invertible_block_is_undone_by_its_fixed_point():
    rng = np.random.default_rng(9)
    block = D.InvertibleBlock(D.Contraction(3 * rng.standard_normal((5, 5)), lipschitz=0.95))
    X = rng.standard_normal((5, 2))
    np.testing.assert_allclose(block.inverse(block(X)), X, rtol=0, atol=1e-13)
    back = jax.jit(lambda Y: block.inverse(Y))(block(X))
    np.testing.assert_allclose(back, X, rtol=0, atol=1e-13)


def test_contraction_is_one_and_leaves_a_small_weight_alone():
    W = np.random.default_rng(10).standard_normal((4, 4))
    large = D.Contraction(W, activation=lambda x: x, lipschitz=0.5)
    assert np.linalg.norm(large(np.eye(4)), 2) == pytest.approx(0.5, rel=1e-12)
    small = 0.1 * W / np.linalg.norm(W, 2)
    np.testing.assert_array_equal(D.Contraction(small, activation=lambda x: x)(np.eye(4)), small)
    np.testing.assert_array_equal(D.Contraction(np.zeros((2, 2)))(np.ones(2)), [0, 0])


def test_orthogonal_block_keeps_lengths_and_orientation():
    block = D.OrthogonalBlock(np.random.default_rng(11).standard_normal((4, 4)))
    Q = np.asarray(block.jacobian(np.ones(4)))
    np.testing.assert_allclose(Q.T @ Q, np.eye(4), rtol=0, atol=1e-14)
    assert np.linalg.det(Q) == pytest.approx(1, rel=1e-13)


def test_highway_block_carries_where_its_gate_is_shut_and_transforms_where_it_is_open():
    branch = D.Affine(np.diag([3.0, -1.0]))
    X = np.array([1.0, 2.0])
    np.testing.assert_allclose(D.HighwayBlock(branch, -800.0)(X), X, rtol=1e-15)
    np.testing.assert_allclose(D.HighwayBlock(branch, 800.0)(X), branch(X), rtol=1e-15)


# Memories ----------------------------------------------------------------------------------------


def writes(T=12, d_k=5, d_v=3, seed=12):
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((T, d_k))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return keys, rng.standard_normal((T, d_v)), rng.uniform(0, 2, T)


def test_delta_rule_over_time_equals_the_stack_over_depth():
    keys, values, gates = writes()
    initial = np.random.default_rng(13).standard_normal((3, 5))
    over_time = np.asarray(D.memory(keys, values, gates, initial))
    over_depth = np.asarray(D.depth_stack(keys, values, gates).states(initial.T))
    # The same twelve rank-one updates in the transposed order of products.
    np.testing.assert_allclose(over_time.swapaxes(1, 2), over_depth, rtol=0, atol=100 * EPS)
    S = initial
    for k, v, beta in zip(keys, values, gates, strict=True):
        S = S + beta * np.outer(v - S @ k, k)
    np.testing.assert_allclose(over_time[-1], S, rtol=0, atol=100 * EPS)


def test_delta_rule_with_gate_1_recalls_the_last_write_exactly_and_replaces_a_key():
    keys, values, _ = writes()
    keys[-1] = keys[2]
    S = np.asarray(D.memory(keys, values, np.ones(12)))
    for t in range(12):
        np.testing.assert_allclose(S[t + 1] @ keys[t], values[t], rtol=0, atol=1e-14)


def test_additive_rule_recalls_each_value_plus_the_crosstalk_of_the_others():
    keys, values, gates = writes()
    S = np.asarray(D.hebbian_memory(keys, values, gates))[-1]
    extra = np.asarray(D.crosstalk(keys, values, gates))
    np.testing.assert_allclose(keys @ S.T, gates[:, None] * values + extra, rtol=0, atol=1e-14)
    assert np.abs(extra).max() > 0.1
    orthogonal = np.eye(5)[:3]
    np.testing.assert_array_equal(D.crosstalk(orthogonal, values[:3], gates[:3]), np.zeros((3, 3)))


def test_additive_rule_keeps_both_writes_where_the_delta_rule_replaces():
    key, values = np.eye(4)[[0, 0]], np.array([[1.0], [5.0]])
    ones = np.ones(2)
    assert float(D.memory(key, values, ones)[-1, 0] @ key[0]) == 5
    assert float(D.hebbian_memory(key, values, ones)[-1, 0] @ key[0]) == 6


# The depth flow ----------------------------------------------------------------------------------

TIGHT = gf.Method(solver="explicit", rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "columns", [pytest.param(None, marks=pytest.mark.slow), 2], ids=["vector", "matrix"]
)
def test_a_stack_of_blocks_is_the_euler_method_of_the_depth_flow(columns):
    block = D.DeltaBlock(*linear_parts(columns=columns))
    X0 = np.random.default_rng(14).standard_normal((4,) if columns is None else (4, columns))
    flow = D.rewrite_flow(block, X0, 2.0, save=2, method=TIGHT)
    counts = 2 ** np.arange(7, 11)
    errors = [
        float(jnp.abs(D.unroll(block, X0, n, 2.0 / n)[-1] - flow.final).max()) for n in counts
    ]
    assert log_slope(counts, errors) == pytest.approx(-1, abs=0.05)
    np.testing.assert_array_equal(D.unroll(block, X0, 1)[1], block(X0))


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
def test_readout_error_decays_in_the_flow_and_jumps_across_in_the_blocks(beta):
    k, v = direction(d=3), np.array([0.7, -0.2])
    block = D.DeltaBlock(k, v, beta, squash=False)
    X0 = np.random.default_rng(15).standard_normal((3, 2))
    flow = D.rewrite_flow(block, X0, 4.0, save=9, method=TIGHT)
    e0 = k @ X0 / np.linalg.norm(k) - v
    decay = np.exp(-beta * np.asarray(flow.ts))[:, None]
    np.testing.assert_allclose(flow["readout_error"], decay * e0, rtol=0, atol=1e-11)
    np.testing.assert_allclose(flow["gate"], beta)
    assert (np.sign(flow["readout_error"]) == np.sign(e0)).all()
    discrete = jax.vmap(block.readout_error)(D.unroll(block, X0, 8))
    factors = (1 - beta) ** np.arange(9)[:, None]
    np.testing.assert_allclose(discrete, factors * e0, rtol=0, atol=1e-13)
    assert (beta > 1) == bool((np.sign(discrete[1]) == -np.sign(e0)).all())


@pytest.mark.parametrize(("beta", "t1"), [(0.0, 3.0), pytest.param(1, 0, marks=pytest.mark.slow)])
def test_depth_flow_of_a_closed_gate_and_of_no_depth_stays_where_it_is(beta, t1):
    X0 = np.arange(6.0).reshape(3, 2)
    block = D.DeltaBlock(direction(d=3), np.ones(2), float(beta), squash=False)
    traj = D.rewrite_flow(block, X0, t1, save=9, method=TIGHT)
    np.testing.assert_array_equal(traj.final, X0)


# Networks ----------------------------------------------------------------------------------------


def test_delta_network_is_the_product_of_its_layers():
    net = D.DeltaNetwork.random(0, 5, 4, scale=0.7, beta=0.6)
    product = np.eye(4)
    for k, w, g in zip(net.directions, net.values, net.gate_logits, strict=True):
        k, w = np.asarray(k) / np.linalg.norm(k), np.asarray(w)
        product = (np.eye(4) + 2 / (1 + np.exp(-g)) * np.outer(k, w - k)) @ product
    np.testing.assert_allclose(net.end_to_end(), product, rtol=0, atol=1e-13)
    np.testing.assert_allclose(
        np.linalg.multi_dot(np.asarray(net.matrices())[::-1]), product, rtol=0, atol=1e-13
    )
    x = np.arange(4.0)
    np.testing.assert_allclose(net(x), product @ x, rtol=0, atol=1e-13)
    np.testing.assert_allclose(net.gates, 0.6, rtol=1e-14)
    assert (net.depth, net.widths) == (5, (4,) * 6)
    identity = D.DeltaNetwork.random(0, 5, 4, scale=0.0)
    np.testing.assert_allclose(identity.end_to_end(), np.eye(4), rtol=0, atol=1e-14)


def test_delta_network_layer_is_the_block_with_a_linear_value():
    net = D.DeltaNetwork.random(1, 1, 3)
    block = D.DeltaBlock(net.directions[0], D.Affine(net.values[0]), net.gate_logits[0])
    x = np.array([0.3, -1.0, 2.0])
    np.testing.assert_allclose(net(x), block(x), rtol=0, atol=1e-14)


def test_other_layers_are_what_their_names_say():
    rng = np.random.default_rng(16)
    W, g, k = rng.standard_normal((2, 3, 3)), rng.standard_normal(2), rng.standard_normal((2, 3))
    T = 1 / (1 + np.exp(-g))
    highway = D.HighwayNetwork(W, g).matrices()
    shortcut = D.DeltaShortcutNetwork(k, g, W).matrices()
    for i in range(2):
        np.testing.assert_allclose(highway[i], (1 - T[i]) * np.eye(3) + T[i] * W[i], atol=1e-14)
        np.testing.assert_allclose(shortcut[i], dense(2 * T[i], k[i]) + W[i], atol=1e-14)
    assert np.linalg.det(D.OrthogonalNetwork(W).end_to_end()) == pytest.approx(1, rel=1e-13)


def test_delta_network_with_a_tiny_direction_has_finite_map_and_gradient():
    net = D.DeltaNetwork([[1e-30, 0.0], [1.0, 1.0]], np.ones((2, 2)), np.zeros(2))
    rate = gf.DeltaNetworkFlow(gf.Problem(np.eye(2))).vector_field(0.0, net)
    for leaf in jax.tree.leaves((net.end_to_end(), rate)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("size", [0.0, 1e-8, 0.3, 4.0, 1e3])
def test_rotations_are_matrix_exponentials(size):
    S = size * np.random.default_rng(17).standard_normal((5, 5))
    turned = D.OrthogonalBlock(S)(np.eye(5))
    tolerance = 1e-15 * (1 + 20 * size)
    np.testing.assert_allclose(turned, scipy.linalg.expm(S - S.T), rtol=0, atol=tolerance)
    np.testing.assert_allclose(turned @ turned.T, np.eye(5), rtol=0, atol=tolerance)


def test_rotations_beyond_the_reach_of_squaring_are_not_numbers():
    S = 1e6 * np.random.default_rng(17).standard_normal((5, 5))
    assert bool(jnp.isnan(D.OrthogonalBlock(S)(np.eye(5))).all())


def test_gradient_of_a_rotation_is_that_of_the_exponential():
    S, G = np.random.default_rng(18).standard_normal((2, 4, 4))

    def by_series(S):
        return jnp.sum(G * D.OrthogonalBlock(S)(jnp.eye(4)))

    def by_pade(S):
        return jnp.sum(G * jax.scipy.linalg.expm(S - S.T))

    ours, theirs = jax.jit(jax.grad(by_series))(S), jax.jit(jax.grad(by_pade))(S)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    assert bool(jnp.isfinite(jax.jit(jax.grad(by_series))(jnp.zeros((4, 4)))).all())
