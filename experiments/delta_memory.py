"""The delta rule over time is the delta block over depth; the additive rule mixes what it stores.

DeltaNet's memory ``S ← S + β(v − Sk)kᵀ`` and a stack of delta blocks on ``X = Sᵀ`` are one map. A
write erases what the memory held at its key, so that a later value replaces an earlier one; the
additive (Hebbian) rule ``S ← S + βvkᵀ`` keeps both, and every recall adds
``Σ_{s≠t} β_s v_s⟨k_s, k_t⟩`` of the other values (Schlag et al. 2021, Yang et al. 2024).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Length d_k of the keys, and d_v of the values.
    key_dimension: int = 16
    value_dimension: int = 8
    # Number of writes of the run that is shown in time and over depth.
    steps: int = 24
    # Gate of all writes but those of the run over time and depth, which are random in (0, 2).
    gate: float = 1.0
    # Largest number of stored pairs whose recall is measured.
    pairs: int = 32
    # Number of random sets of pairs.
    seeds: int = 40
    # Steps at which one key is written, each time with another value.
    rewrites: tuple[int, ...] = (4, 12, 20)
    # Seed of all keys, values and gates.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Longer keys and values, more pairs."""
        return cls(
            key_dimension=64,
            value_dimension=32,
            steps=80,
            pairs=128,
            seeds=200,
            rewrites=(12, 40, 64),
        )


def compute(config: Config) -> xr.Dataset:
    """Both ways through the same writes, recall by number of pairs, and one key written again."""
    rng = np.random.default_rng(config.seed)
    keys, values = _pairs(config, rng, config.steps)
    gates = rng.uniform(0, 2, config.steps)
    over_time = np.asarray(gf.delta.memory(keys, values, gates))
    zero = jnp.zeros((config.key_dimension, config.value_dimension))
    over_depth = np.asarray(gf.delta.depth_stack(keys, values, gates).states(zero))
    recall, crosstalk = _recall(config, rng)
    one = _rewritten(config, rng)
    return xr.Dataset(
        {
            "over_time": (("step", "row", "column"), over_time.swapaxes(1, 2)),
            "over_depth": (("step", "row", "column"), over_depth),
            "recall": (("rule", "stored"), recall),
            "predicted": ("stored", crosstalk),
            "readout": (("rule", "step"), one[0]),
            "written": (("write",), one[1]),
        },
        coords={
            "rule": ["delta", "additive"],
            "stored": np.arange(1, config.pairs + 1),
            "write": list(config.rewrites),
        },
        attrs={
            "runs": (
                f"no integration: {config.steps} writes in time and over depth, recall of up to "
                f"{config.pairs} pairs from {config.seeds} random sets"
            ),
            "key_dimension": config.key_dimension,
        },
    )


def _pairs(config: Config, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random keys and values of length 1."""
    keys = rng.standard_normal((count, config.key_dimension))
    values = rng.standard_normal((count, config.value_dimension))
    return (
        keys / np.linalg.norm(keys, axis=1, keepdims=True),
        values / np.linalg.norm(values, axis=1, keepdims=True),
    )


def _recall(config: Config, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Root mean square recall errors by rule and number of pairs, and the additive one predicted.

    The prediction takes the exact crosstalk and, of the value itself, what the gate leaves out.
    """
    sets = [_pairs(config, rng, config.pairs) for _ in range(config.seeds)]
    keys, values = (np.stack(parts) for parts in zip(*sets, strict=True))
    gates = np.full(config.pairs, config.gate)
    stored = np.tril(np.ones((config.pairs, config.pairs)))
    found = []
    for rule in (gf.delta.memory, gf.delta.hebbian_memory):
        S = np.asarray(jax.vmap(lambda k, v, rule=rule: rule(k, v, gates))(keys, values))[:, 1:]
        off = S @ keys[:, None].swapaxes(-1, -2) - values[:, None].swapaxes(-1, -2)
        squares = np.sum(off**2, axis=2)  # (set, memory after so many writes, pair)
        found.append(np.sqrt((squares * stored).sum(axis=(0, 2)) / (config.seeds * stored.sum(1))))
    # Gates of 0 write nothing: one program for all numbers of pairs.
    masked = gates * np.tril(np.ones((config.pairs, config.pairs)))
    over_counts = jax.vmap(gf.delta.crosstalk, (None, None, 0))
    extra = np.asarray(jax.vmap(over_counts, (0, 0, None))(keys, values, masked))
    off = np.sum((extra + (config.gate - 1) * values[:, None]) ** 2, axis=-1)
    expected = np.sqrt((off * stored).sum(axis=(0, 2)) / (config.seeds * stored.sum(1)))
    return np.array(found), expected


def _rewritten(config: Config, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What both memories read at one key that is written again and again among others."""
    keys, values = _pairs(config, rng, config.steps)
    at = [step - 1 for step in config.rewrites]
    keys[at] = keys[at[0]]
    levels = np.resize([1.0, -0.5, 0.5], len(at))
    axis = values[at[0]]
    values[at] = levels[:, None] * axis
    gates = np.full(config.steps, config.gate)
    rules = (gf.delta.memory, gf.delta.hebbian_memory)
    read = [np.asarray(rule(keys, values, gates)) @ keys[at[0]] @ axis for rule in rules]
    return np.array(read), levels


def difference(data: xr.Dataset) -> float:
    """Largest entry of the difference between the memory in time and the states over depth."""
    return float(abs(data["over_time"] - data["over_depth"]).max())


def summary(data: xr.Dataset) -> str:
    """Equality in time and over depth, recall at d_k pairs, and the key that is written again."""
    d = data.attrs["key_dimension"]
    at = min(d, data.sizes["stored"])
    one = data.sel(stored=at)
    delta, additive = (float(one["recall"].sel(rule=rule)) for rule in ("delta", "additive"))
    last = data["write"].values[-1]
    read = data["readout"].isel(step=int(last))
    off = float(abs(data["recall"].sel(rule="additive") - data["predicted"]).max())
    return (
        f"{data.sizes['step'] - 1} writes in time and over depth differ by {difference(data):.1e}\n"
        f"recall error of {at} pairs with keys of length {d}: {delta:.3f} by the delta rule, "
        f"{additive:.3f} by the additive rule (crosstalk predicted within {off:.1e})\n"
        f"after the last write of {float(data['written'][-1]):g} at the key it reads "
        f"{float(read.sel(rule='delta')):.4f} by the delta rule, "
        f"{float(read.sel(rule='additive')):.4f} by the additive rule"
    )


def figure(data: xr.Dataset) -> Figure:
    """Entries in time and over depth; one key written again; recall against the number of pairs."""
    fig, (same, again, recall) = plt.subplots(1, 3, figsize=(13.0, 4.6), layout="constrained")
    _side_by_side(data, same)
    blue, orange = gf.plot.palette(2)
    steps = np.arange(data.sizes["step"])
    colours = {"delta": blue, "additive": orange}
    writes, levels = data["write"].values, data["written"].values
    for rule, colour in colours.items():
        again.step(
            steps,
            data["readout"].sel(rule=rule),
            where="post",
            color=colour,
            ls="-" if rule == "delta" else "--",
            label=f"{rule} rule",
        )
        recall.plot(
            data["stored"],
            data["recall"].sel(rule=rule),
            color=colour,
            ls="-" if rule == "delta" else "--",
            label=f"{rule} rule",
        )
    again.plot(writes, levels, "D", color="black", ms=6, mfc="white", label="value written there")
    again.axhline(0, color="0.8", lw=0.8, zorder=0)
    again.set_xlabel("step (number of writes)")
    again.set_ylabel("readout at one key")
    again.set_title("one key written again, others between")
    again.legend(loc="best")
    some = slice(None, None, max(1, data.sizes["stored"] // 16))
    recall.plot(
        data["stored"][some],
        data["predicted"][some],
        "o",
        ms=5,
        mfc="white",
        color=orange,
        label="additive, crosstalk of the others",
    )
    recall.axvline(data.attrs["key_dimension"], color="0.6", ls=":", lw=1.2)
    recall.annotate(
        "as many as dimensions",
        (data.attrs["key_dimension"], 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=9,
        color="0.35",
    )
    recall.set_ylim(0, 1.25 * float(data["recall"].max()))
    recall.set_xlabel("number of stored pairs")
    recall.set_ylabel("recall error, root mean square (value has length 1)")
    recall.set_title("recall of all stored values")
    recall.legend(loc="upper left")
    fig.suptitle("The delta rule over time is the block over depth: it replaces, and mixes less")
    return fig


def _side_by_side(data: xr.Dataset, ax: Axes) -> None:
    steps = np.arange(data.sizes["step"])
    colours = gf.plot.palette(4)
    some = slice(None, None, max(1, len(steps) // 24))
    for i, colour in zip(
        range(min(4, data.sizes["row"], data.sizes["column"])), colours, strict=False
    ):
        ax.plot(steps, data["over_time"][:, i, i], color=colour)
        ax.plot(
            steps[some],
            data["over_depth"][some, i, i],
            "o",
            ms=5,
            mfc="white",
            color=colour,
        )
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    ax.set_xlabel("step in time, or layer")
    ax.set_ylabel("four entries of the memory")
    ax.set_title(f"one map: they differ by {difference(data):.0e}")
    handles = [
        Line2D([], [], color="black", label="DeltaNet over time, $S_t$"),
        Line2D([], [], color="black", ls="", marker="o", mfc="white", ms=5, label="blocks, $X_l$"),
    ]
    ax.legend(handles=handles, loc="best")
