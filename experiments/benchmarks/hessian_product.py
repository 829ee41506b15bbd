"""Hessian products in closed form against autodiff, with ratios.

Run as ``python experiments/benchmarks/hessian_product.py [FIGURE]``; prints a table of median times
in microseconds and the ratios autodiff / closed form, and draws them to FIGURE if given. Autodiff
is ``jax.jvp`` of ``jax.grad`` of the loss of the network, compiled. "one" is
``gf.landscape.hessian_product``, all of it at every call; "many" is a prepared
``gf.landscape.HessianOperator``, which multiplies out what depends on the network alone once, as a
solver of eigenvalues uses it. "eager" is autodiff as written, not compiled.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import gradflow as gf  # noqa: E402

WIDTHS = [
    (5, 5, 5, 5),
    (32, 32, 32),
    (32, 32, 32, 32),
    (32,) * 9,
    (100, 100, 100, 100),
    (10, 200, 200, 5),
    (100, 50, 50, 10),
    (183, 183, 183, 183),
]
ROUNDS = 41


@jax.jit
def one(problem, net, V):
    return gf.landscape.hessian_product(problem, net, V)


@jax.jit
def many(operator, V):
    return operator(V)


def written(problem, net, V):
    gradient = jax.grad(lambda state: problem.loss(state.end_to_end()))
    return jax.jvp(gradient, (net,), (V,))[1]


autodiff = jax.jit(written)


def measure(widths: tuple[int, ...]) -> dict[str, float]:
    """Median microseconds of each way, interleaved, and the largest difference."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2 * widths[0], widths[0]))
    problem = gf.Problem(rng.standard_normal((widths[-1], widths[0])), X.T @ X / len(X))
    net, V = (gf.initialize.gaussian(seed, widths, 1.0) for seed in (1, 2))
    operator = gf.landscape.HessianOperator(problem, net)
    ways: dict[str, Callable[[], Any]] = {
        "one": lambda: one(problem, net, V),
        "many": lambda: many(operator, V),
        "autodiff": lambda: autodiff(problem, net, V),
        "eager": lambda: written(problem, net, V),
    }
    results = {name: jax.block_until_ready(way()) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(ROUNDS):
        for name, way in ways.items():
            if name == "eager" and i > 4:
                continue
            began = time.perf_counter()
            jax.block_until_ready(way())
            times[name].append(1e6 * (time.perf_counter() - began))
    found = {name: statistics.median(values) for name, values in times.items()}
    found["difference"] = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(results["many"].weights, results["autodiff"].weights, strict=True)
    )
    return found


def main(figure: str | None = None) -> None:
    rows = [measure(widths) for widths in WIDTHS]
    print(
        f"{'widths':<22} {'parameters':>10} {'one':>8} {'many':>8} {'autodiff':>9} {'eager':>8} "
        f"{'/one':>6} {'/many':>6} {'difference':>10}"
    )
    for widths, row in zip(WIDTHS, rows, strict=True):
        print(
            f"{label(widths):<22} {parameters(widths):>10} {row['one']:>8.0f} {row['many']:>8.0f} "
            f"{row['autodiff']:>9.0f} {row['eager']:>8.0f} {row['autodiff'] / row['one']:>6.2f} "
            f"{row['autodiff'] / row['many']:>6.2f} {row['difference']:>10.1e}"
        )
    if figure is not None:
        draw(rows, figure)


def parameters(widths: tuple[int, ...]) -> int:
    return sum(a * b for a, b in itertools.pairwise(widths))


def label(widths: tuple[int, ...]) -> str:
    if len(set(widths)) == 1:
        return f"{widths[0]}, {len(widths) - 1} layers"
    return ", ".join(map(str, widths))


def draw(rows: list[dict[str, float]], path: str) -> None:
    import matplotlib.pyplot as plt

    with gf.plot.style():
        fig, ax = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
        places = np.arange(len(rows))
        for name, text, colour, marker in zip(
            ("one", "many"),
            ("one product", "prepared operator"),
            gf.plot.palette(2),
            "os",
            strict=True,
        ):
            ratio = [row["autodiff"] / row[name] for row in rows]
            ax.plot(ratio, places, marker, color=colour, label=text)
        ax.axvline(1.0, color="black", lw=1)
        ax.set_yticks(places, [label(widths) for widths in WIDTHS])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(left=0)
        ax.set_xlabel("time of compiled autodiff / time of the closed form")
        ax.set_ylabel("widths")
        ax.set_title("Hessian products: right of the line the closed form is faster")
        ax.legend(loc="lower left")
        fig.savefig(path, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
