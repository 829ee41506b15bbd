"""Signal and gradient norm through 100 layers: delta blocks beside their neighbours.

Layers with random weights of one scale. Without a shortcut signal and gradient die out; sums of
branches let both grow; rotations keep both; highway layers shrink both, by the part that each gate
takes off the shortcut while random branches give little back. A delta block changes its state along
one direction only, so that the signal keeps its size. Its gradient is another matter: with frozen
direction, value and gate it can only shrink, but where they depend on the state, as in the paper
(Zhang et al., arXiv 2601.00417), it grows through them, more than that of residual layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from tqdm import tqdm

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Length of the state.
    dimension: int = 32
    # Number of layers.
    depth: int = 100
    # Number of random stacks of each kind.
    seeds: int = 20
    # Entries of weights are N(0, scale²/d).
    scale: float = 1.0
    # Bias of the highway gates' logits: below 0 they carry more than they transform.
    highway_bias: float = -2.0
    # Lipschitz constant of the branches of invertible residual layers.
    lipschitz: float = 0.5
    # Seed of all weights and inputs.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Wider states and more stacks."""
        return cls(dimension=128, seeds=100)


def _kinds(config: Config) -> dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]]:
    """How a block of every kind is made from random weights, and the shapes of these."""
    d, D = config.dimension, gf.delta
    matrix, row = (d, d), (d,)

    def branch(W):
        return D.Affine(W, activation=jnp.tanh)

    def highway(W, T):
        return D.HighwayBlock(branch(W), D.Affine(T, jnp.full(d, config.highway_bias)))

    def delta(k, v, g):
        return D.DeltaBlock(D.Affine(k), D.Affine(v), D.Affine(g))

    def frozen(k, v, g):
        # Value and logit of the size that a typical state gives them in the block above.
        return D.DeltaBlock(k, np.sqrt(d) * v, np.sqrt(d) * g)

    def invertible(W):
        return D.InvertibleBlock(D.Contraction(W, lipschitz=config.lipschitz))

    return {
        # A highway whose gate is open transforms and carries nothing.
        "no shortcut": (lambda W: D.HighwayBlock(branch(W), 800.0), (matrix,)),
        "residual": (lambda W: D.ResidualBlock(branch(W)), (matrix,)),
        "highway": (highway, (matrix, matrix)),
        "invertible residual": (invertible, (matrix,)),
        "orthogonal": (D.OrthogonalBlock, (matrix,)),
        "delta, frozen parts": (frozen, (row, (), ())),
        "delta": (delta, (matrix, row, row)),
    }


def compute(config: Config) -> xr.Dataset:
    """Norms of state and gradient at every layer, per kind of block and random stack."""
    kinds = _kinds(config)
    norms = []
    for make, shapes in tqdm(kinds.values(), desc="kinds", leave=False, disable=None):
        rng = np.random.default_rng(config.seed)
        program = jax.jit(lambda x, g, weights, make=make: _norms(make, x, g, weights))
        found = []
        for _ in range(config.seeds):
            x, g = rng.standard_normal((2, config.dimension))
            sizes = [(config.depth, *shape) for shape in shapes]
            scale = config.scale / np.sqrt(config.dimension)
            found.append(program(x, g, [scale * rng.standard_normal(size) for size in sizes]))
        norms.append(np.array(found))
    return xr.Dataset(
        {
            "signal": (("kind", "seed", "layer"), np.stack(norms)[:, :, 0]),
            "gradient": (("kind", "seed", "layer"), np.stack(norms)[:, :, 1]),
        },
        coords={"kind": list(kinds), "layer": np.arange(config.depth + 1)},
        attrs={
            "runs": (
                f"no integration: {config.seeds} random stacks of {config.depth} layers of each of "
                f"{len(kinds)} kinds, width {config.dimension}"
            )
        },
    )


def _norms(make: Callable[..., Any], x: Any, g: Any, weights: list[Any]) -> Any:
    """``‖x_l‖/‖x_0‖`` and ``‖g_l‖/‖g_h‖`` of one stack, for one input and last gradient."""
    stack = gf.delta.Stack(eqx.filter_vmap(make)(*weights))
    states = jnp.linalg.norm(stack.states(x), axis=-1)
    gradients = jnp.linalg.norm(stack.gradients(x, g), axis=-1)
    return jnp.stack([states / states[0], gradients / gradients[-1]])


def ends(data: xr.Dataset) -> xr.Dataset:
    """Medians over the stacks of the signal after all layers, and of the gradient at the input."""
    return xr.Dataset(
        {
            "signal": data["signal"].isel(layer=-1, drop=True).median("seed"),
            "gradient": data["gradient"].isel(layer=0, drop=True).median("seed"),
        }
    )


def summary(data: xr.Dataset) -> str:
    """Median signal and gradient at the far end, per kind."""
    found = ends(data)
    depth = data.sizes["layer"] - 1
    return "\n".join(
        f"{kind}: after {depth} layers the signal has {float(one['signal']):.3g} of its norm, the "
        f"gradient at the input {float(one['gradient']):.3g}"
        for kind, one in ((k, found.sel(kind=k)) for k in data["kind"].values)
    )


_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-")


def figure(data: xr.Dataset) -> Figure:
    """Norms against the layer, medians with the middle eight tenths of the stacks."""
    fig, axes = plt.subplots(1, 2, figsize=(11.5, 4.9), layout="constrained")
    # The last colour is black: for the one that the figure is about.
    colours = gf.plot.palette(data.sizes["kind"])
    layer = data["layer"].values
    for ax, name in zip(axes, ("signal", "gradient"), strict=True):
        for kind, colour, line in zip(data["kind"].values, colours, _LINES, strict=True):
            low, middle, high = data[name].sel(kind=kind).quantile((0.1, 0.5, 0.9), "seed").values
            ax.fill_between(layer, low, high, color=colour, alpha=0.15, lw=0)
            ax.plot(layer, middle, color=colour, ls=line, label=kind)
        ax.set_yscale("log")
        ax.axhline(1, color="0.8", lw=0.8, zorder=0)
        ax.set_xlabel("layer")
    axes[0].set_ylabel(r"$\|x_l\| \,/\, \|x_0\|$")
    axes[0].set_title("signal, going forward")
    axes[1].set_ylabel(r"$\|g_l\| \,/\, \|g_h\|$")
    axes[1].set_title("gradient, going back from the last layer")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    fig.suptitle(
        f"Through {layer[-1]} random layers delta blocks keep the signal, but let the gradient grow"
    )
    return fig
