"""Hessian products in closed form against automatic differentiation, with ratios.

Autodiff is ``jax.jvp`` of ``jax.grad`` of the loss of the network, compiled: of gradflow's own
loss, whose products of small matrices are written out, and in the column "with @" of the same loss
in plain products, as one writes it without gradflow. "one" is
``gf.landscape.hessian_product``, all of it at every call; "many" is a prepared
``gf.landscape.HessianOperator``, which multiplies out what depends on the network alone once, as a
solver of eigenvalues uses it. "eager" is autodiff as written, not compiled. Times are medians of
interleaved calls from Python, which cost some tens of microseconds each by themselves; "in a loop"
is the time per product of a compiled loop of products, without calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from tqdm import tqdm

import gradflow as gf

Widths = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this benchmark."""

    # Widths of the networks.
    widths: tuple[Widths, ...] = ((5, 5, 5, 5), (32, 32, 32, 32), (64, 32, 10))
    # Interleaved calls of every way.
    rounds: int = 41
    # Products in a compiled loop.
    length: int = 100

    @classmethod
    def full(cls) -> Config:
        """Up to 100,467 parameters."""
        return cls(
            widths=(
                (5, 5, 5, 5),
                (10, 10, 10, 10),
                (32, 32, 32),
                (32, 32, 32, 32),
                (32,) * 9,
                (100, 100, 100, 100),
                (10, 200, 200, 5),
                (100, 50, 50, 10),
                (64, 32, 10),
                (784, 100, 10),
                (183, 183, 183, 183),
            ),
            rounds=101,
        )


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


def plain(target, covariance, weights, V):
    def loss(layers):
        product = layers[0]
        for w in layers[1:]:
            product = w @ product
        error = product - target
        return 0.5 * jnp.sum((error @ covariance) * error)

    return jax.jvp(jax.grad(loss), (weights,), (V,))[1]


def looped(product: Callable, length: int) -> Callable:
    """``length`` products in one program, each of what the last one gave."""

    @jax.jit
    def run(*arguments):
        *given, V = arguments

        def again(_, v):
            # Next to nothing of the product is added, so that none can be left out.
            return jax.tree.map(lambda a, b: a + 1e-30 * b, v, product(*given, v))

        return jax.lax.fori_loop(0, length, again, V)

    return run


def compute(config: Config) -> xr.Dataset:
    """Median microseconds of each way, and the largest difference between the results."""
    rows = [_measure(config, widths) for widths in tqdm(config.widths, leave=False)]
    return xr.Dataset(
        {name: ("network", [row[name] for row in rows]) for name in rows[0]},
        coords={"network": [_label(widths) for widths in config.widths]},
        attrs={"runs": f"{len(rows)} networks, {config.rounds} rounds each"},
    )


def _measure(config: Config, widths: Widths) -> dict[str, float]:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2 * widths[0], widths[0]))
    target, covariance = rng.standard_normal((widths[-1], widths[0])), X.T @ X / len(X)
    problem = gf.Problem(target, covariance)
    net, V = (gf.initialize.gaussian(seed, widths, 1.0) for seed in (1, 2))
    operator = gf.landscape.HessianOperator(problem, net)
    loops = {
        "one_loop": (looped(gf.landscape.hessian_product, config.length), (problem, net, V)),
        "many_loop": (looped(lambda op, v: op(v), config.length), (operator, V)),
        "autodiff_loop": (looped(written, config.length), (problem, net, V)),
        "plain_loop": (
            looped(plain, config.length),
            (jnp.asarray(target), jnp.asarray(covariance), net.weights, V.weights),
        ),
    }
    ways: dict[str, Callable[[], Any]] = {
        "one": lambda: one(problem, net, V),
        "many": lambda: many(operator, V),
        "autodiff": lambda: autodiff(problem, net, V),
        "eager": lambda: written(problem, net, V),
    }
    for name, (run, arguments) in loops.items():
        ways[name] = lambda run=run, arguments=arguments: run(*arguments)  # type: ignore[misc]
    results = {name: jax.block_until_ready(way()) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(config.rounds):
        for name, way in ways.items():
            if (name == "eager" and i > 4) or (name in loops and i > 10):
                continue
            began = time.perf_counter()
            jax.block_until_ready(way())
            spent = 1e6 * (time.perf_counter() - began)
            times[name].append(spent / config.length if name in loops else spent)
    found = {name: statistics.median(values) for name, values in times.items()}
    found["difference"] = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(results["many"].weights, results["autodiff"].weights, strict=True)
    )
    found["parameters"] = sum(a * b for a, b in itertools.pairwise(widths))
    return found


def _label(widths: Widths) -> str:
    if len(set(widths)) == 1:
        return f"{widths[0]}, {len(widths) - 1} layers"
    return ", ".join(map(str, widths))


def summary(data: xr.Dataset) -> str:
    """Two tables: calls from Python, and products in a compiled loop."""
    lines = [
        "microseconds; ratios are autodiff / closed form",
        f"{'':<18}{'':>10}{'calls':^46}{'in a loop':^59}",
        f"{'widths':<18}{'parameters':>10}{'one':>7}{'many':>7}{'autodiff':>9}{'eager':>9}"
        f"{'/one':>7}{'/many':>7}{'one':>8}{'many':>7}{'autodiff':>9}{'with @':>8}{'/one':>7}"
        f"{'/many':>7}{'@/one':>8}{'difference':>12}",
    ]
    for network in data["network"].values:
        row = {name: float(data[name].sel(network=network)) for name in data}
        auto, inside = row["autodiff"], row["autodiff_loop"]
        lines.append(
            f"{network:<18}{row['parameters']:>10.0f}{row['one']:>7.0f}{row['many']:>7.0f}"
            f"{auto:>9.0f}{row['eager']:>9.0f}{auto / row['one']:>7.2f}{auto / row['many']:>7.2f}"
            f"{row['one_loop']:>8.1f}{row['many_loop']:>7.1f}{inside:>9.1f}"
            f"{row['plain_loop']:>8.1f}{inside / row['one_loop']:>7.2f}"
            f"{inside / row['many_loop']:>7.2f}{row['plain_loop'] / row['one_loop']:>8.2f}"
            f"{row['difference']:>12.1e}"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Ratios of autodiff to the closed form for every network, in a loop."""
    fig, ax = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    places = np.arange(data.sizes["network"])
    pairs = (
        ("one", "autodiff", "one product"),
        ("many", "autodiff", "prepared operator"),
        ("one", "plain", "one product, against autodiff with @"),
    )
    for (name, peer, text), colour, marker in zip(pairs, gf.plot.palette(3), "os^", strict=True):
        ratio = data[f"{peer}_loop"] / data[f"{name}_loop"]
        ax.plot(ratio, places, marker, color=colour, mfc="none", label=text)
    ax.axvline(1.0, color="black", lw=1)
    ax.set_yticks(places, data["network"].values)
    ax.set_ylim(len(places) - 0.5, -0.5)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("time of compiled autodiff / time of the closed form")
    ax.set_ylabel("widths")
    ax.set_title("Hessian products: right of the line the closed form is faster")
    fig.legend(loc="outside lower center", ncols=3)
    return fig
