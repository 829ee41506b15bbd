"""Right-hand sides against automatic differentiation of their loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import PROBLEMS, TARGET, WIDTHS, arrays, problem, random_network

# Hidden widths do not matter to the branch d_h < d_0; the transposed problem takes the other.
SHAPES = {"one_layer": (4, 3), "mixed": WIDTHS, "narrow": (4, 1, 3), "deep": (4, 3, 2, 5, 2, 3)}


@pytest.mark.parametrize("decay", [0.0, 0.3], ids=["no_decay", "decay"])
@pytest.mark.parametrize("widths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", PROBLEMS)
def test_vector_field_is_minus_the_gradient_of_the_loss(kind, widths, decay):
    flow = gf.GradientFlow(problem(kind), weight_decay=decay)
    net = random_network(np.random.default_rng(2), widths)
    slope = jax.jit(jax.grad(flow.loss))(net)
    for f, g in zip(flow.vector_field(0.0, net).weights, slope.weights, strict=True):
        np.testing.assert_allclose(f, -g, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("widths", [(3, 5, 3, 4), (3, 4)], ids=["mixed", "one_layer"])
def test_vector_field_is_minus_the_gradient_where_the_output_is_wider(widths):
    flow = gf.GradientFlow(gf.Problem(TARGET.T.copy()))
    net = random_network(np.random.default_rng(3), widths)
    slope = jax.jit(jax.grad(flow.loss))(net)
    for f, g in zip(flow.vector_field(0.0, net).weights, slope.weights, strict=True):
        np.testing.assert_allclose(f, -g, rtol=1e-12, atol=1e-13)


def test_flow_loss_is_the_problem_loss_plus_half_the_decay_times_squared_weights():
    net = random_network(np.random.default_rng(4), WIDTHS)
    flow = gf.GradientFlow(problem("whitened"), weight_decay=0.5)
    W = np.linalg.multi_dot(arrays(net)[::-1])
    expected = 0.5 * np.sum((TARGET - W) ** 2) + 0.25 * sum(np.sum(w**2) for w in arrays(net))
    assert float(flow.loss(net)) == pytest.approx(expected, rel=1e-14)


def test_flow_has_unit_speed():
    # One layer: dW/dt = target - W, no factor of 2 or 1/2.
    net = gf.LinearNetwork([np.zeros((3, 4))])
    rate = gf.GradientFlow(problem("whitened")).vector_field(0.0, net)
    np.testing.assert_array_equal(rate.weights[0], TARGET)


def test_vector_field_ignores_time_and_keeps_the_structure_of_the_state():
    flow, net = (
        gf.GradientFlow(problem("coloured")),
        random_network(np.random.default_rng(5), WIDTHS),
    )
    early, late = flow.vector_field(0.0, net), flow.vector_field(7.0, net, None)
    assert jax.tree.structure(early) == jax.tree.structure(net)
    np.testing.assert_array_equal(early.weights[0], late.weights[0])


def test_conserved_arrays_are_the_imbalances():
    net = random_network(np.random.default_rng(6), WIDTHS)
    laws = gf.GradientFlow(problem("whitened")).conserved(net)
    W = arrays(net)
    for i, C in enumerate(laws):
        np.testing.assert_allclose(C, W[i + 1].T @ W[i + 1] - W[i] @ W[i].T, rtol=0, atol=1e-14)
    assert len(laws) == len(W) - 1


@pytest.mark.parametrize("kind", PROBLEMS)
def test_conserved_arrays_have_zero_derivative_along_the_flow(kind):
    flow, net = gf.GradientFlow(problem(kind)), random_network(np.random.default_rng(7), WIDTHS)
    _, change = jax.jvp(
        lambda w: flow.conserved(net.with_weights(w)),
        (net.weights,),
        (flow.vector_field(0.0, net).weights,),
    )
    for dC in change:
        np.testing.assert_allclose(dC, 0, atol=1e-13)


def test_fastest_rate_bounds_the_gauss_newton_part_of_the_hessian():
    net = gf.initialize.from_product(TARGET, WIDTHS)  # a minimum: the Hessian is Gauss-Newton
    flow = gf.GradientFlow(problem("whitened"))
    flat, rebuild = jax.flatten_util.ravel_pytree(net)
    hessian = jax.jit(jax.hessian(lambda x: flow.loss(rebuild(x))))(flat)
    top = float(jnp.linalg.eigvalsh(hessian)[-1])
    s1 = np.linalg.norm(TARGET, 2)
    # Balanced minimum of depth 3: sharpness 3 s_1^{4/3}, and the bound is met there.
    assert top == pytest.approx(3 * s1 ** (4 / 3), rel=1e-9)
    assert flow.fastest_rate(net) == pytest.approx(top, rel=1e-9)
