"""Targets with negative eigenvalues: residual networks stay at a saddle that delta networks leave.

From the identity every layer of a residual linear network stays a polynomial in a symmetric target,
all layers the same one. Where the target has an eigenvalue ``λ < 0`` the layers go to 0 together,
to a saddle of order h: the run is left with ``½ Σ λ²`` over the negative eigenvalues, for longer
the smaller the perturbation of its start (after Bartlett, Helmbold and Long, arXiv 1802.06093, who
show it for gradient descent). Two negative eigenvalues may be turned together, by a rotation in
their plane, which small perturbations find sooner. Delta layers ``I + β k (w − k)ᵀ``
(arXiv 2601.00417) start at the identity as well, but each has a direction of its own: one of them
turns its sign while the others stay near the identity.

Delta networks fail where they are too shallow, as h rank-one changes of the identity reach a
target T up to ``½ Σ_{r>h} σ_r(T − I)²``; where all directions start along the eigenvector that has
to turn, which is the residual network's symmetry again; and they are slow where gates start nearly
shut or the target is nearly singular.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tqdm.auto import tqdm

import gradflow as gf
from experiments._report import run_lines


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # "signs": diagonal, with the eigenvalues below; "rotation": by π in a plane, the identity
    # beside it; "symmetric": random, of spectral norm 2.
    target: str = "signs"
    # Eigenvalues of the target "signs"; their number is the width of all targets.
    eigenvalues: tuple[float, ...] = (2.0, 1.5, 1.0, -1.0)
    # Seed of the target "symmetric".
    target_seed: int = 0
    # Number of layers.
    depth: int = 6
    # Entries of residual branches at the start are N(0, size²).
    perturbations: tuple[float, ...] = (0.0, 1e-6, 1e-3, 1e-1)
    # Values of delta layers at the start are w = k + size·N(0, 1/d): 0 for the identity.
    value_scale: float = 0.1
    # Gate of every delta layer at the start.
    beta: float = 1.0
    # Logits of the highway gates at the start: below 0 they carry more than they transform.
    highway_logit: float = -1.0
    # Size of the generators of the orthogonal layers at the start.
    generator_scale: float = 0.1
    # Number of random starts of each kind.
    seeds: int = 4
    # Depths of the delta networks whose reach is shown.
    depths: tuple[int, ...] = (1, 2, 3, 4, 6)
    # Directions of delta layers around one eigenvector: entries of what is added are N(0, size²/d).
    spreads: tuple[float, ...] = (0.0, 1e-4, 1e-2, 1e-1, 1.0)
    # Gates at the start of the runs from such directions.
    aligned_gates: tuple[float, ...] = (1.0,)
    # End of the runs.
    t1: float = 400.0
    # End of those from aligned directions.
    aligned_t1: float = 100.0
    # A target counts as learnt below this loss.
    learnt: float = 1e-3
    # How runs are integrated: "explicit" compiles sooner, "auto" is for long runs.
    solver: str = "explicit"
    # Runs end where the gradient is smaller; at the saddles it is larger up to the end.
    stop_gradient_norm: float = 1e-5
    # Relative tolerance; the absolute one is 1e-4 of it.
    rtol: float = 1e-6
    # Number of saved times.
    points: int = 121
    # Seed of the starts.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More starts, depths and spreads, and longer runs."""
        return cls(
            seeds=20,
            depths=(1, 2, 3, 4, 5, 6, 8),
            spreads=(0.0, *np.geomspace(1e-8, 1.0, 17)),
            aligned_gates=(1.0, 0.1, 0.01),
            t1=4000.0,
            aligned_t1=400.0,
            solver="auto",
            stop_gradient_norm=1e-8,
            points=241,
        )


TARGETS = ("signs", "rotation", "symmetric")


def target(config: Config) -> np.ndarray:
    """The target of a configuration, a symmetric ``(d, d)`` matrix."""
    d = len(config.eigenvalues)
    if config.target == "signs":
        return np.diag(config.eigenvalues)
    if config.target == "rotation":
        if d < 2:
            raise ValueError("target: a rotation needs 2 eigenvalues or more, to give the width")
        return np.diag([-1.0, -1.0, *np.ones(d - 2)])
    if config.target == "symmetric":
        G = np.random.default_rng(config.target_seed).standard_normal((d, d))
        return (G + G.T) / np.linalg.norm(G + G.T, 2) * 2
    raise ValueError(f"target: {config.target!r}, must be one of {', '.join(TARGETS)}")


def saddle(T: np.ndarray) -> float:
    """``½ Σ λ²`` over the negative eigenvalues: what is left where these directions are at 0."""
    return 0.5 * float(np.sum(np.minimum(np.linalg.eigvalsh(T), 0.0) ** 2))


def reach(T: np.ndarray, depth: int) -> float:
    """``½ Σ_{r>h} σ_r(T − I)²``: no product of h rank-one changes of the identity has less."""
    return 0.5 * float(np.sum(np.linalg.svd(T - np.eye(len(T)))[1][depth:] ** 2))


def compute(config: Config) -> xr.Dataset:
    """Losses of all kinds, gates and signs of delta layers, and where delta networks fail."""
    T = target(config)
    problem = gf.Problem(T)
    d, h = len(T), config.depth
    eye, zero = [np.eye(d)] * h, [np.zeros((d, d))] * h
    method = gf.Method(solver=config.solver, rtol=config.rtol, atol=1e-4 * config.rtol)
    times = np.concatenate([[0.0], np.geomspace(1e-2, config.t1, config.points - 1)])
    seeds = range(config.seeds)

    def run(flow: Any, starts: list[Any], t1: float = config.t1, **options: Any) -> gf.Trajectory:
        # Batches of one size, so that every kind of network is compiled once.
        return gf.ensemble(
            flow,
            starts,
            t1,
            save=times * (t1 / config.t1),
            method=method,
            stop_gradient_norm=config.stop_gradient_norm,
            save_states=False,
            lanes_per_batch=config.seeds,
            **options,
        )

    def normal(seed: int, *shape: int) -> np.ndarray:
        return np.random.default_rng((config.seed, seed)).standard_normal(shape)

    bar = tqdm(total=5 + len(config.depths), desc="kinds", leave=False, disable=None)
    runs, ends = {}, {}
    branches = [
        gf.LinearNetwork(list(size * normal(seed, h, d, d)))
        for size in config.perturbations
        for seed in seeds
    ]
    residual = run(gf.ResidualFlow(problem, eye), branches)
    for i, size in enumerate(config.perturbations):
        lanes = range(i * config.seeds, (i + 1) * config.seeds)
        runs[f"residual, {size:g}"] = [residual.lane(j) for j in lanes]
    bar.update()
    # Deepest of all: what is left out of a shallower network is layers with a gate of exactly 0,
    # which neither act nor learn, so that one program serves all depths.
    most = max(h, *config.depths)
    delta_flow = gf.DeltaNetworkFlow(problem)
    told = {"determinants": _determinants}

    def delta(depth: int) -> gf.Trajectory:
        starts = [
            _delta_start(normal(seed, 2, most, d), config.value_scale, config.beta, depth)
            for seed in seeds
        ]
        return run(delta_flow, starts, observe=told)

    gated = delta(h)
    runs["delta"] = [gated.lane(i) for i in seeds]
    bar.update()
    rest: dict[str, tuple[Any, list[Any]]] = {
        # Without a shortcut: entries N(0, 1/d), which keep the size of a signal.
        "plain": (
            gf.ResidualFlow(problem, zero),
            [gf.LinearNetwork(list(normal(s, h, d, d) / np.sqrt(d))) for s in seeds],
        ),
        "highway": (
            gf.ParameterFlow(problem),
            [
                gf.delta.HighwayNetwork(
                    normal(s, h, d, d) / np.sqrt(d), np.full(h, config.highway_logit)
                )
                for s in seeds
            ],
        ),
        "orthogonal": (
            gf.ParameterFlow(problem),
            [
                gf.delta.OrthogonalNetwork(config.generator_scale * normal(s, h, d, d))
                for s in seeds
            ],
        ),
    }
    for kind, (flow, starts) in rest.items():
        found = run(flow, starts)
        runs[kind] = [found.lane(i) for i in seeds]
        bar.update()
    for depth in config.depths:
        found = delta(depth)
        ends[depth] = np.array(found.final_loss)
        bar.update()
    aligned = _aligned(
        config, T, most, lambda starts: run(delta_flow, starts, config.aligned_t1, observe=told)
    )
    bar.close()
    return xr.Dataset(
        {
            "loss": (
                ("kind", "seed", "time"),
                np.array(
                    [[_padded(one.loss, len(times)) for one in kind] for kind in runs.values()]
                ),
            ),
            "gate": (("seed", "time", "layer"), np.array(gated["gates"])[..., :h]),
            "determinant": (("seed", "time", "layer"), np.array(gated["determinants"])[..., :h]),
            "reached": (("depth", "seed"), np.array([ends[depth] for depth in config.depths])),
            "reach": ("depth", [reach(T, depth) for depth in config.depths]),
            "aligned": (("start", "spread", "seed"), aligned),
        },
        coords={
            "kind": list(runs),
            "t": ("time", times),
            "layer": np.arange(1, h + 1),
            "depth": list(config.depths),
            "start": list(config.aligned_gates),
            "spread": list(config.spreads),
            "eigenvalue": np.linalg.eigvalsh(T)[::-1],
        },
        attrs={
            "runs": run_lines(runs),
            "saddle": saddle(T),
            "learnt": config.learnt,
            "aligned_t1": config.aligned_t1,
            "target": config.target,
            "residual": [f"residual, {size:g}" for size in config.perturbations],
        },
    )


def _padded(values: Any, length: int) -> np.ndarray:
    values = np.asarray(values)
    return np.pad(values, (0, length - len(values)), mode="edge")


def _determinants(net: gf.delta.DeltaNetwork) -> jax.Array:
    """``det M = 1 + β (kᵀw − 1)`` of every layer."""
    k = net.unit_directions
    return 1 + net.gates * (jnp.sum(k * net.values, axis=-1) - 1)


def _delta_start(
    draws: np.ndarray, scale: float, beta: float, depth: int, directions: np.ndarray | None = None
) -> gf.delta.DeltaNetwork:
    """Layers with a gate β, as many as asked for, and layers that are the identity for ever."""
    noise, d = draws[1] / np.sqrt(draws.shape[-1]), draws.shape[-1]
    k = draws[0] / np.sqrt(d) if directions is None else directions
    w = k / np.linalg.norm(k, axis=1, keepdims=True) + scale * noise
    logit = np.log(beta) - np.log(2 - beta)
    return gf.delta.DeltaNetwork(k, w, np.where(np.arange(len(k)) < depth, logit, -800.0))


def _aligned(config: Config, T: np.ndarray, most: int, run: Any) -> np.ndarray:
    """Last losses from directions around the eigenvector of the lowest eigenvalue."""
    d = len(T)
    vector = np.linalg.eigh(T)[1][:, 0]
    starts = []
    for beta in config.aligned_gates:
        for spread in config.spreads:
            for seed in range(config.seeds):
                draws = np.random.default_rng((config.seed, seed)).standard_normal((2, most, d))
                k = vector + spread / np.sqrt(d) * draws[0]
                starts.append(_delta_start(draws, spread, beta, config.depth, k))
    last = np.array(run(starts).final_loss)
    return last.reshape(len(config.aligned_gates), len(config.spreads), config.seeds)


def negative_layers(data: xr.Dataset) -> xr.DataArray:
    """Number of delta layers whose determinant is negative at the end, per seed."""
    return (data["determinant"].isel(time=-1) < 0).sum("layer")


def summary(data: xr.Dataset) -> str:
    """Last losses by kind, which gates opened and layers turned, and where delta fails."""
    bound, seeds = data.attrs["learnt"], data.sizes["seed"]
    lines = [
        f"target {data.attrs['target']!r} with eigenvalues "
        f"{', '.join(f'{x:.3g}' for x in data['eigenvalue'].values)}; "
        f"saddle value {data.attrs['saddle']:.4g}"
    ]
    last = data["loss"].isel(time=-1)
    for kind in data["kind"].values:
        found = np.sort(last.sel(kind=kind).values)
        lines.append(
            f"{kind}: loss at t = {float(data['t'][-1]):g} from {found[0]:.3g} to {found[-1]:.3g}, "
            f"{int(np.sum(found < bound))} of {seeds} learnt"
        )
    gates, turned = data["gate"].isel(time=-1).values, negative_layers(data).values
    lines.append(
        f"delta gates end between {gates.min():.3g} and {gates.max():.3g}; layers of negative "
        f"determinant by seed: {', '.join(map(str, turned))}"
    )
    for depth in data["depth"].values:
        one = data["reached"].sel(depth=depth).values
        lines.append(
            f"delta, {depth} layers: loss {np.median(one):.3g} (median), at best possible "
            f"{float(data['reach'].sel(depth=depth)):.3g}"
        )
    for start in data["start"].values:
        share = (data["aligned"].sel(start=start) < bound).sum("seed").values
        lines.append(
            f"delta, gates {start:g} at the start, directions around one eigenvector: "
            + ", ".join(
                f"{n} of {seeds} at spread {s:.0e}"
                for n, s in zip(share, data["spread"].values, strict=True)
            )
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Loss against time by kind; delta gates; and the two ways in which delta networks fail."""
    fig, grid = plt.subplots(2, 2, figsize=(10.6, 7.8), layout="constrained")
    _losses(data, grid[0, 0])
    _gates(data, grid[0, 1])
    _depths(data, grid[1, 0])
    _spreads(data, grid[1, 1])
    values = ", ".join(f"{x:.2g}" for x in data["eigenvalue"].values).replace("-", "−")
    fig.suptitle(
        f"A target with eigenvalues {values}: which networks get past the saddle, "
        "and where delta layers fail"
    )
    return fig


_FLOOR = 1e-7


def _losses(data: xr.Dataset, ax: Axes) -> None:
    blue, orange, green, pink, *_ = gf.plot.palette(7)
    residual = list(data.attrs["residual"])
    styles = ["-", "--", "-.", ":"]
    looks = {kind: (blue, styles[i % 4], 1.6) for i, kind in enumerate(residual)}
    looks |= {
        "delta": ("black", "-", 2.0),
        "plain": (orange, "-", 1.6),
        "highway": (green, "--", 1.6),
        "orthogonal": (pink, "-.", 1.6),
    }
    t = data["t"].values
    for kind, (colour, line, width) in looks.items():
        rows = np.maximum(data["loss"].sel(kind=kind).values, _FLOOR)
        label = kind.replace("residual, ", "residual, perturbed by ")
        ax.plot(t, np.median(rows, axis=0), color=colour, ls=line, lw=width, label=label)
        ax.fill_between(t, rows.min(axis=0), rows.max(axis=0), color=colour, alpha=0.12, lw=0)
    ax.axhline(data.attrs["saddle"], color="0.35", lw=0.9, ls=(0, (1, 2)))
    ax.annotate(
        f"saddle, ½Σλ² = {data.attrs['saddle']:.3g}",
        (t[1], data.attrs["saddle"]),
        xytext=(3, -12),
        textcoords="offset points",
        fontsize="small",
        color="0.25",
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(0.3 * _FLOOR, 10 * float(data["loss"].max()))
    ax.set_xlabel(gf.plot.TIME_LABEL)
    ax.set_ylabel("loss, median and range of starts")
    ax.set_title("loss by kind of network")
    ax.legend(loc="lower left", fontsize="small")


def _gates(data: xr.Dataset, ax: Axes) -> None:
    t, layers = data["t"].values[1:], data["layer"].values
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(layers)))
    one = data.isel(seed=0, time=slice(1, None))
    for layer, colour in zip(layers, colours, strict=True):
        gate = one["gate"].sel(layer=layer).values
        turned = one["determinant"].sel(layer=layer).values < 0
        ax.plot(t, gate, color=colour, lw=1.4)
        ax.plot(t, np.where(turned, gate, np.nan), color=colour, lw=4)
    ax.axhline(1, color="0.8", lw=0.8, zorder=0)
    ax.set_xscale("log")
    low, high = float(one["gate"].min()), float(one["gate"].max())
    # Room for the legend below the curves.
    ax.set_ylim(max(0, low - 0.6 * (high - low) - 0.02), min(2, high + 0.05 * (high - low) + 0.01))
    ax.set_xlabel(gf.plot.TIME_LABEL)
    ax.set_ylabel(r"gate $\beta_l$")
    ax.set_title("gates of the layers of one delta network")
    handles = [
        Line2D([], [], color=colour, label=f"layer {layer}")
        for layer, colour in zip(layers, colours, strict=True)
    ]
    handles.append(Line2D([], [], color="0.3", lw=4, label="determinant < 0"))
    ax.legend(handles=handles, loc="lower left", ncols=2, fontsize="small")


def _depths(data: xr.Dataset, ax: Axes) -> None:
    blue, *_ = gf.plot.palette(7)
    depths = data["depth"].values
    reached = np.maximum(data["reached"].values, _FLOOR)
    ax.plot(
        depths,
        np.maximum(data["reach"], _FLOOR),
        color="black",
        marker="_",
        ms=16,
        ls="--",
        lw=1,
        label=r"best possible, $\frac{1}{2}\sum_{r>h}\sigma_r(T-I)^2$",
    )
    for i, row in enumerate(reached.T):
        ax.plot(
            depths,
            row,
            "o",
            color=blue,
            mfc="none",
            label="runs, one for each start" if i == 0 else None,
        )
    ax.set_yscale("log")
    ax.set_ylim(0.3 * _FLOOR, 30 * float(np.max(reached)))
    ax.set_xticks(depths)
    ax.set_xlabel("number of delta layers h")
    ax.set_ylabel(f"loss at the end (drawn at {_FLOOR:.0e} if below)")
    ax.set_title("delta networks of few layers cannot reach the target")
    ax.legend(loc="upper right")


def _spreads(data: xr.Dataset, ax: Axes) -> None:
    colours = gf.plot.palette(7)
    spread = data["spread"].values
    positive = spread[spread > 0]
    # Zero has a place of its own, left of the smallest.
    x = np.where(spread > 0, spread, positive.min() / 30)
    for start, colour, marker in zip(data["start"].values, colours, "os^Dv", strict=False):
        rows = np.maximum(data["aligned"].sel(start=start).values, _FLOOR)
        ax.plot(x, np.median(rows, axis=1), color=colour, lw=1.2)
        for i, row in enumerate(rows.T):
            label = f"gates {start:g} at the start" if i == 0 else None
            ax.plot(x, row, marker, ms=5, color=colour, mfc="none", label=label)
    ax.axhline(data.attrs["saddle"], color="0.35", lw=0.9, ls=(0, (1, 2)), label="saddle")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(0.3 * _FLOOR, 30 * float(data["aligned"].max()))
    ticks = [x[0], *positive[:: max(1, len(positive) // 5)]] if (spread == 0).any() else positive
    ax.set_xticks(ticks, ["0" if s < positive.min() else f"{s:.0e}" for s in ticks])
    ax.minorticks_off()
    ax.set_xlabel("spread of the directions around the eigenvector to be turned")
    ax.set_ylabel(f"loss at t = {data.attrs['aligned_t1']:g} (drawn at {_FLOOR:.0e} if below)")
    ax.set_title("delta layers that start along one eigenvector")
    ax.legend(loc="center left")
