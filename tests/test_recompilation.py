"""A program is traced once for its shapes; other numbers of the same shapes reuse it."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import gradflow as gf
from cases import COVARIANCE, SAVES, TARGET, explicit, start

traces = []


class CountedFlow(gf.GradientFlow):
    """Notes every trace of its right-hand side, and every call outside a trace."""

    def vector_field(self, t, state, args=None):
        traces.append("field")
        return super().vector_field(t, state, args)


def counted(net):
    traces.append("observable")
    return net.weights[0].sum()


def new_traces(call):
    before = len(traces)
    call()
    return len(traces) - before


def simulate(t1=1.0, *, flow=None, seed=0, save=SAVES, rtol=1e-6, atol=1e-8, **options):
    return gf.simulate(
        flow or CountedFlow(gf.Problem(TARGET)),
        start(seed=seed),
        t1,
        save=save,
        method=explicit(rtol, atol),
        observe={"counted": counted},
        **options,
    )


@pytest.fixture(scope="module")
def compiled():
    return new_traces(simulate)


SAME_PROGRAM = {
    "again": lambda: simulate(),
    "rtol": lambda: simulate(rtol=1e-7),
    "atol": lambda: simulate(atol=1e-9),
    "end": lambda: simulate(2.0),
    "start_time": lambda: simulate(t0=0.3),
    "start": lambda: simulate(seed=1),
    "data": lambda: simulate(flow=CountedFlow(gf.Problem(2 * TARGET))),
    "weight_decay": lambda: simulate(flow=CountedFlow(gf.Problem(TARGET), weight_decay=0.1)),
    "saved_times": lambda: simulate(save=np.linspace(0.1, 0.9, SAVES)),
}


@pytest.mark.parametrize("what", SAME_PROGRAM)
def test_simulate_does_not_trace_again_for_another(what, compiled):
    assert compiled > 0
    assert new_traces(SAME_PROGRAM[what]) == 0


def test_simulate_traces_again_for_another_number_of_saves(compiled):
    # The counter must be able to count.
    assert new_traces(lambda: simulate(save=SAVES + 1)) == compiled


def test_simulate_does_not_trace_again_for_other_coloured_data_of_the_same_kind():
    def coloured(scale):
        return CountedFlow(gf.Problem(TARGET, scale * COVARIANCE))

    assert new_traces(lambda: simulate(flow=coloured(1.0))) > 0
    assert new_traces(lambda: simulate(flow=coloured(1.5))) == 0


def test_stopping_rule_does_not_trace_again_for_another_threshold():
    assert new_traces(lambda: simulate(stop_gradient_norm=1e-3)) > 0
    assert new_traces(lambda: simulate(stop_gradient_norm=1e-2)) == 0


def descend(learning_rate=0.01, *, momentum=0.0, seed=0, target=TARGET):
    flow = CountedFlow(gf.Problem(target))
    return gf.descend(
        flow, start(seed=seed), learning_rate, 20, momentum=momentum, observe={"counted": counted}
    )


def test_descend_does_not_trace_again_for_other_numbers():
    assert new_traces(descend) > 0
    assert new_traces(lambda: descend(0.02)) == 0
    assert new_traces(lambda: descend(momentum=0.5)) == 0
    assert new_traces(lambda: descend(seed=1)) == 0
    assert new_traces(lambda: descend(target=2 * TARGET)) == 0


def test_flow_through_jit_is_traced_once_for_all_starts():
    flow = CountedFlow(gf.Problem(TARGET))
    field = jax.jit(lambda net: flow.vector_field(0.0, net))
    assert new_traces(lambda: field(start())) == 1
    assert new_traces(lambda: field(start(seed=2))) == 0


def counted_layer(W, x):
    traces.append("layer")
    return jax.numpy.tanh(W @ x)


class Weights(eqx.Module):
    """A law of parameters that holds numbers."""

    scale: float
    shift: Any
    width: int = eqx.field(static=True)

    def __call__(self, key):
        return self.scale * jax.random.normal(key, (self.width, self.width)) + self.shift


def scaled(scale, key):
    return scale * jax.random.normal(key, (2, 2))


def test_layers_with_other_numbers_in_the_law_of_their_parameters_use_the_same_program():
    def exponent(sample):
        layers = gf.lyapunov.Layers(counted_layer, sample, np.ones(2))
        return float(gf.lyapunov.exponents(0, layers, 40, 1, chains=8, burn_in=100).exponents[0])

    found = []
    first = new_traces(lambda: found.append(exponent(Weights(0.3, np.zeros((2, 2)), 2))))
    assert first > 0
    assert new_traces(lambda: found.append(exponent(Weights(0.6, np.zeros((2, 2)), 2)))) == 0
    # Where orbits vanish the exponent is that of the weights: the new number has arrived.
    assert found[1] - found[0] == pytest.approx(np.log(2), abs=1e-6)
    # As data of a partial function too.
    partial = [jax.tree_util.Partial(scaled, s) for s in (0.3, 0.6)]
    assert new_traces(lambda: exponent(partial[0])) > 0
    assert new_traces(lambda: exponent(partial[1])) == 0
