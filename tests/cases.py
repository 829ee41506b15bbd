"""Test problems, starts and reference solutions, shared by all test modules.

Few shapes and one number of saved times, because a program is compiled for each.
"""

import functools
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import gradflow as gf

ORACLES = Path(__file__).parent / "oracles"
EPS = float(np.finfo(float).eps)
SAVES = 41

# A narrow and a wide hidden layer, and a rectangular map, so that no transpose goes unnoticed.
WIDTHS = (4, 3, 5, 3)
TARGET = np.array([[1.5, -0.4, 0.3, 0.1], [0.2, 0.9, -0.6, 0.5], [-0.3, 0.1, 1.1, 0.7]])
COVARIANCE = np.array(
    [[1.2, 0.3, 0.0, 0.1], [0.3, 0.8, 0.2, 0.0], [0.0, 0.2, 1.0, -0.1], [0.1, 0.0, -0.1, 0.6]]
)


def log_cosh(W):
    """A smooth convex loss that is not quadratic; its infimum, at the target, is 0."""
    return jnp.sum(jnp.log(jnp.cosh(W - jnp.asarray(TARGET, W.dtype))))


def quartic_hole(W):
    """Unbounded below: the flow blows up in finite time."""
    return -jnp.sum(W**4)


@functools.cache
def problem(kind: str) -> gf.Problem:
    return {
        "whitened": lambda: gf.Problem(TARGET),
        "coloured": lambda: gf.Problem(TARGET, COVARIANCE),
        "from_loss": lambda: gf.Problem.from_loss(log_cosh, TARGET.shape),
    }[kind]()


PROBLEMS = ("whitened", "coloured", "from_loss")


@functools.cache
def start(widths: tuple[int, ...] = WIDTHS, scale: float = 0.8, seed: int = 0):
    return gf.initialize.gaussian(seed, widths, scale)


def explicit(rtol: float = 1e-10, atol: float | None = None, **options) -> gf.Method:
    return gf.Method(solver="explicit", rtol=rtol, atol=atol or rtol * 1e-2, **options)


@functools.cache
def run(kind: str) -> gf.Trajectory:
    """One trajectory of each problem, at the same tolerance."""
    flow = gf.GradientFlow(problem(kind))
    return gf.simulate(flow, start(), 4.0, save=SAVES, method=explicit())


class Reference(NamedTuple):
    name: str
    problem: gf.Problem
    flow: gf.AbstractFlow
    start: gf.LinearNetwork
    times: np.ndarray
    solution: list[list[np.ndarray]]  # per time and layer


@functools.cache
def references() -> dict[str, Reference]:
    """The reference trajectories, of plain gradient flow or delta-modulated where they say so."""
    found = {}
    for case in json.loads((ORACLES / "trajectories.json").read_text()):
        target = np.array(case["target"], dtype=float)
        covariance = case.get("input_covariance")
        loss = gf.Problem(target, None if covariance is None else np.array(covariance, dtype=float))
        flow: gf.AbstractFlow = gf.GradientFlow(loss)
        if "gates" in case:
            directions = [np.array(k, dtype=float) for k in case["directions"]]
            flow = gf.DeltaModulatedFlow(loss, case["gates"], directions)
        found[case["name"]] = Reference(
            case["name"],
            loss,
            flow,
            gf.LinearNetwork([np.array(w, dtype=float) for w in case["weights"]]),
            np.array(case["times"], dtype=float),
            [
                [np.array(w, dtype=float) for w in case["solution"][str(float(t))]]
                for t in case["times"]
            ],
        )
    return found


def random_network(rng: np.random.Generator, widths, scale: float = 1.0) -> gf.LinearNetwork:
    return gf.LinearNetwork(
        [
            scale * rng.standard_normal((d_out, d_in)) / np.sqrt(d_in)
            for d_in, d_out in itertools.pairwise(widths)
        ]
    )


def arrays(net: gf.LinearNetwork) -> list[np.ndarray]:
    return [np.asarray(w) for w in net.weights]


def dense(net: gf.LinearNetwork) -> np.ndarray:
    """The adjacency matrix, put together here and not by the library."""
    weights = arrays(net)
    widths = [weights[0].shape[1], *(w.shape[0] for w in weights)]
    ends = np.cumsum([0, *widths])
    A = np.zeros((ends[-1], ends[-1]))
    for i, w in enumerate(weights):
        A[ends[i + 1] : ends[i + 2], ends[i] : ends[i + 1]] = w
    return A


def node_block(matrix: np.ndarray, widths, i: int) -> np.ndarray:
    """Diagonal block of node ``i``."""
    ends = np.cumsum([0, *widths])
    return matrix[ends[i] : ends[i + 1], ends[i] : ends[i + 1]]


def log_slope(x, y) -> float:
    """Least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(np.asarray(x)), np.log(np.asarray(y)), 1)[0])


def largest_error(net: gf.LinearNetwork, expected) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(arrays(net), expected, strict=True))
