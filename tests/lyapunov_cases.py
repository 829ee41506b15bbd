"""Reference values and ensembles of the tests of Lyapunov exponents."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import ORACLES

ly = gf.lyapunov


@functools.cache
def oracles() -> dict:
    return json.loads((ORACLES / "lyapunov.json").read_text())


@pytest.fixture(scope="module")
def optimised():
    """Long loops of small programs: here compiling them well pays."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def rank_one():
    case = oracles()["rank_one_mixture"][0]
    return ly.RankOneMixture(case["p"], *(np.array(case[x], float) for x in ("u", "v", "B")))


def positive_pair():
    case = oracles()["determinant"][0]
    return ly.Finite(case["matrices"], [0.5, 0.5])


def two_point(mean, spread=0.3):
    """A 1×1 law with E log a = mean."""
    return ly.Finite([[[np.exp(mean + spread)]], [[np.exp(mean - spread)]]])


def block_triangular():
    case = oracles()["block_triangular"]
    return ly.BlockTriangular(
        [two_point(float(case["start_e1"])), two_point(float(case["generic"]))], 1.0
    )


def sampled_cases():
    """name: (ensemble, exponents known of the leading ones)."""
    found = {}
    for case in oracles()["gaussian"]:
        name = f"gaussian_{case['d']}"
        found[name] = ly.Gaussian(case["d"], case["sigma"]), case["exponents"]
    for case in oracles()["residual_gaussian_top"]:
        name = f"residual_gaussian_{case['d']}_{case['epsilon']}"
        ensemble = ly.residual(ly.Gaussian(case["d"], case["epsilon"]))
        found[name] = ensemble, [case["exponent"]]
    for case in oracles()["delta_uniform_top"]:
        d, beta = case["d"], float(case["beta"])
        found[f"delta_{d}_{beta}"] = ly.DeltaProduct(d, beta), [case["exponent"]]
    found["rank_one"] = rank_one(), [oracles()["rank_one_mixture"][0]["exponent"]]
    haar = ly.Haar(3, special=True)
    found["haar"] = haar, [oracles()["haar_so3"]["plain"]] * 3
    found["residual_haar"] = ly.residual(haar), [oracles()["haar_so3"]["residual"]]
    found["positive_pair"] = positive_pair(), [oracles()["determinant"][0]["exponent"][:18]]
    case = oracles()["block_triangular"]
    found["block_triangular"] = block_triangular(), [case["generic"], case["start_e1"]]
    return {name: (e, np.array(values, float)) for name, (e, values) in found.items()}


def rotation(angle, scale=1.0):
    c, s = np.cos(angle), np.sin(angle)
    return scale * np.array([[c, -s], [s, c]])


# A slowly varying first coordinate steers the growth along the second one.
MEMORY, DRIFT = 0.95, 0.3


def slow_layer(noise, x):
    return jnp.stack([MEMORY * x[0] + noise, x[1] * jnp.exp(0.2 * x[0] + DRIFT)])


def slow_layers():
    """Exponents DRIFT and log MEMORY; increments stay alike for some twenty steps."""
    return ly.Layers(slow_layer, jax.random.normal, np.zeros(2))


def within(run, expected, errors=4.0):
    expected = np.asarray(expected, float)
    bound = errors * np.asarray(run.standard_error)[: len(expected)] + 1e-12
    return np.all(np.abs(np.asarray(run.exponents)[: len(expected)] - expected) <= bound)
