"""Jacobians along orbits of layers, transformations of JAX, and what is assumed of an ensemble."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from gradflow import _checks
from lyapunov_cases import DRIFT, MEMORY, ly, optimised, slow_layers, within

pytestmark = pytest.mark.usefixtures("optimised")
assert optimised


def tanh_layer(W, x):
    return jnp.tanh(W @ x)


def test_exponents_at_a_fixed_point_are_the_log_moduli_of_the_eigenvalues_there():
    W = np.array([[1.6, 0.4, 0.1], [0.2, 0.9, 0.3], [0.0, 0.1, 0.7]])
    x = np.ones(3)
    for _ in range(2000):
        x = np.tanh(W @ x)
    J = (1 - x**2)[:, None] * W
    assert np.abs(np.tanh(W @ x) - x).max() < 1e-14
    expected = np.sort(np.log(np.abs(np.linalg.eigvals(J))))[::-1]
    sample = functools.partial(lambda W, key: W, W)
    for layers in (
        ly.Layers(tanh_layer, sample, x),
        ly.Layers(tanh_layer, sample, np.ones(3), limit=x),
    ):
        run = ly.exponents(0, layers, 500, chains=8, burn_in=1000)
        np.testing.assert_allclose(run.exponents, expected, atol=1e-10)


@pytest.mark.slow
def test_layers_that_are_linear_have_the_exponents_of_their_weights():
    layers = ly.Layers(lambda W, x: W @ x, lambda key: 0.5 * jax.random.normal(key, (2, 2)), [1, 0])
    expected = ly.closed_form(ly.Gaussian(2, 0.5))
    run = ly.exponents(0, layers, 1000)
    assert within(run, expected)
    residual = ly.exponents(0, ly.residual(layers), 1000)
    assert within(residual, ly.closed_form(ly.residual(ly.Gaussian(2, 0.5))))


def test_memory_of_an_orbit_reaches_its_exponents():
    run = ly.exponents(0, slow_layers(), 2000, burn_in=200)
    assert within(run, [DRIFT, np.log(MEMORY)])


def test_an_argument_named_x_may_come_first():
    W = jnp.array([[0.5, 0.2], [0.0, 0.3]])

    def swapped(x, W):
        return W @ x

    run = ly.exponents(0, ly.Layers(swapped, lambda key: W, [0.0, 0.0]), 100, burn_in=200)
    np.testing.assert_allclose(run.exponents, np.log([0.5, 0.3]), atol=1e-12)
    # The Jacobian is W, not its transpose: e_1 is kept, and grows at log 0.5.
    first = ly.exponents(0, ly.Layers(swapped, lambda key: W, [0.0, 0.0]), 10, start=[1.0, 0.0])
    np.testing.assert_allclose(first.exponents, np.log(0.5), atol=1e-12)


def test_shortcuts_of_layers_change_the_orbit():
    sample = lambda key: jnp.array([[2.0]])  # noqa: E731
    layers = ly.Layers(tanh_layer, sample, [0.3])
    plain, residual = layers.orbit(0, 3), ly.residual(layers).orbit(0, 3)
    expected = [0.3]
    for _ in range(3):
        expected.append(expected[-1] + np.tanh(2 * expected[-1]))
    np.testing.assert_allclose(residual[:, 0], expected)
    assert abs(plain[-1, 0]) <= 1
    forgets = ly.delta(layers, 1.0).orbit(0, 3)
    np.testing.assert_allclose(forgets, plain)  # in one dimension β = 1 leaves nothing of x


def test_layers_of_a_network_and_of_a_run():
    net = gf.initialize.gaussian(0, (3, 3, 3, 3), 1.0)
    random = ly.network_layers(net)
    assert isinstance(random, ly.Finite)
    np.testing.assert_array_equal(random.matrices, np.stack(net.weights))
    cyclic = ly.network_layers(net, order="cyclic")
    np.testing.assert_allclose(
        ly.closed_form(cyclic),
        np.sort(np.log(np.abs(np.linalg.eigvals(net.end_to_end()))))[::-1] / 3,
    )
    flow = gf.GradientFlow(gf.Problem.from_singular_values([2.0, 1.0, 0.5]))
    traj = gf.descend(flow, net, 0.05, 40, save_every=10)
    np.testing.assert_array_equal(
        ly.network_layers(traj).matrices, np.stack(traj.network(4).weights)
    )
    np.testing.assert_allclose(ly.network_layers(traj, at=0).matrices, random.matrices)


# Transformations -------------------------------------------------------------------------------

traces = []


def counted_layer(W, x):
    traces.append(1)
    return W @ x


def test_other_numbers_use_the_same_program():
    def layers(scale):
        return ly.Layers(counted_layer, lambda_sample, scale * np.ones(2))

    def new(ensemble, *arguments, **options):
        before = len(traces)
        ly.exponents(*arguments[:1], ensemble, *arguments[1:], chains=8, **options)
        return len(traces) - before

    first, second = layers(1.0), layers(2.0)
    assert new(first, 0, 100) > 0
    assert new(first, 1, 333) == 0
    assert new(second, 1, 100, burn_in=7) == 0
    assert new(first, 0, 200, error=1e-2) > 0
    assert new(second, 1, 300, error=1e-3) == 0


def lambda_sample(key):
    return 0.5 * jax.random.normal(key, (2, 2))


def test_runs_map_over_parameters_of_the_ensemble():
    def top(sigma):
        return ly.exponents(0, ly.Gaussian(2, sigma), 200, 1, chains=8).exponents[0]

    sigmas = jnp.array([0.5, 1.0, 2.0])
    found = jax.vmap(top)(sigmas)
    np.testing.assert_allclose(jnp.diff(found), np.log(2.0), atol=1e-10)


@pytest.mark.slow
def test_exponents_differentiate_with_respect_to_parameters():
    def top(sigma):
        return ly.exponents(0, ly.Gaussian(2, sigma), 200, 1, chains=8).exponents[0]

    # Of σG the exponents are those of G plus log σ.
    np.testing.assert_allclose(jax.jacfwd(top)(2.0), 0.5, atol=1e-10)


def scaled(scale, key):
    return scale * jax.random.normal(key, (2, 2))


def test_exponents_of_layers_differentiate_by_numbers_in_the_law_of_their_parameters():
    def top(scale):
        layers = ly.Layers(tanh_layer, jax.tree_util.Partial(scaled, scale), np.zeros(2))
        return ly.exponents(0, layers, 20, 1, chains=8, burn_in=0).exponents[0]

    # At x = 0 the Jacobians are the weights, and γ_1 is log σ plus a number.
    np.testing.assert_allclose(jax.jacfwd(top)(0.5), 2.0, atol=1e-8)
    found = jax.vmap(top)(jnp.array([0.5, 1.0]))
    np.testing.assert_allclose(jnp.diff(found), np.log(2.0), atol=1e-10)


def test_a_plain_function_that_draws_parameters_is_part_of_the_program():
    before = len(traces)
    for sample in (lambda key: 0.5 * jnp.eye(2), lambda key: 0.25 * jnp.eye(2)):
        layers = ly.Layers(counted_layer, sample, np.ones(2))
        assert layers.sample_parameters is sample
        run = ly.exponents(0, layers, 20, 1, chains=8)
        np.testing.assert_allclose(run.exponents, np.log(sample(0)[0, 0]), atol=1e-10)
    assert len(traces) - before > 2


@pytest.mark.parametrize("d", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_single_precision(d):
    with _checks.precision(False):
        ensemble = ly.Gaussian(d, 0.5)
        run = ly.exponents(0, ensemble, 400, chains=32)
        assert run.exponents.dtype == jnp.float32
        assert within(run, ly.closed_form(ensemble))


# Assumptions -----------------------------------------------------------------------------------


def heavy(key):
    growth = jnp.exp(jnp.minimum(jax.random.pareto(key, 0.7), 700.0))
    return jnp.where(jnp.eye(2) > 0, growth, 0.0)


@pytest.mark.slow
def test_integrability_is_told_from_the_tail():
    good = ly.assumptions(ly.Gaussian(2, 1.0), 0)
    assert good.integrable
    assert good.orbit is None
    assert good.log_plus > 0
    bad = ly.assumptions(ly.Sampled(heavy, 2), 0)
    assert not bad.integrable
    assert bad.tail_index < 1.3
    bounded = ly.assumptions(ly.Haar(2, 3.0), 0)
    assert bounded.log_plus == pytest.approx(np.log(3.0))
    assert bounded.integrable


def test_orbits_converge_stay_bounded_or_diverge():
    def layers(scale, **options):
        sample = functools.partial(lambda scale, key: scale * jnp.eye(2), scale)
        return ly.Layers(tanh_layer, sample, [1.0, 0.5], **options)

    falls = ly.assumptions(layers(0.5, limit=[0.0, 0.0]), 0, samples=400)
    assert falls.orbit == "converges"
    assert falls.limit_distance < 1e-8
    assert ly.assumptions(ly.residual(layers(0.5)), 0, samples=400).orbit == "diverges"
    noisy = ly.Layers(tanh_layer, lambda key: 3 * jax.random.normal(key, (2, 2)), [1.0, 0.5])
    found = ly.assumptions(noisy, 0, samples=400)
    assert found.orbit == "bounded"
    assert "bounded" in repr(found)
