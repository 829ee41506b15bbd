"""Targets with negative eigenvalues: residual networks stay at a saddle that delta networks leave.

From the identity every layer of a residual linear network stays a polynomial in a symmetric target,
all layers the same one. Where the target has an eigenvalue ``λ < 0`` the layers go to 0 together,
to a saddle of order h: the run is left with ``½ Σ λ²`` over the negative eigenvalues, for longer
the smaller the perturbation of its start (after Bartlett, Helmbold and Long, arXiv 1802.06093, who
show it for gradient descent). With an odd number of them the determinant has to pass 0, and until
then the loss is ``½ min σ²`` at least: where a mode is weaker than the negative one, small
perturbations lead to that lower saddle. Two negative eigenvalues may be turned together, by a
rotation in their plane, which small perturbations find sooner. Delta layers ``I + β k (w − k)ᵀ``
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


def barrier(T: np.ndarray) -> float:
    """``½ min σ²`` where ``det T < 0``, else 0: the least loss of maps with ``det W ≥ 0``."""
    return 0.5 * float(np.linalg.norm(T, -2)) ** 2 if np.linalg.det(T) < 0 else 0.0


def reach(T: np.ndarray, depth: int) -> float:
    """``½ Σ_{r>h} σ_r(T − I)²``: no product of h rank-one changes of the identity has less."""
    return 0.5 * float(np.sum(np.linalg.svd(T - np.eye(len(T)))[1][depth:] ** 2))


def compute(config: Config) -> xr.Dataset:
    """Losses of all kinds, gates and signs of delta layers, and where delta networks fail."""
    T, h = target(config), config.depth
    times = np.concatenate([[0.0], np.geomspace(1e-2, config.t1, config.points - 1)])
    problem = gf.Problem(T)
    batches = _other_kinds(config, problem)
    runs, loss = {}, {}
    bar = tqdm(total=len(batches) + 2, desc="kinds of layers", leave=False, disable=None)
    for names, flow, starts in batches:
        found = _run(config, flow, starts, times)
        for i, name in enumerate(names):
            lanes = slice(i * config.seeds, (i + 1) * config.seeds)
            runs[name] = [found.lane(j) for j in range(lanes.start, lanes.stop)]
            loss[name] = np.asarray(found.loss)[lanes]
        bar.update()
    # One program for networks of all depths, as those of fewer layers have layers left that are
    # the identity for ever.
    depths = sorted({*config.depths, h})
    most, flow = depths[-1], gf.DeltaNetworkFlow(problem)
    starts = [
        _delta_start(_normal(config, seed, 2, most, len(T)), config.value_scale, config.beta, depth)
        for depth in depths
        for seed in range(config.seeds)
    ]
    found = _run(config, flow, starts, times)
    first = depths.index(h) * config.seeds
    lanes = slice(first, first + config.seeds)
    runs["delta"] = [found.lane(j) for j in range(lanes.start, lanes.stop)]
    loss["delta"] = np.asarray(found.loss)[lanes]
    last = np.asarray(found.final_loss).reshape((len(depths), config.seeds))
    bar.update()
    spread = _aligned_starts(config, T, most)
    aligned = _run(config, flow, spread, times * (config.aligned_t1 / config.t1)).final_loss
    bar.update()
    bar.close()
    return xr.Dataset(
        {
            "loss": (("kind", "seed", "time"), np.array(list(loss.values()))),
            "gate": (("seed", "time", "layer"), np.asarray(found["gates"])[lanes, :, :h]),
            "determinant": (
                ("seed", "time", "layer"),
                np.asarray(found["determinants"])[lanes, :, :h],
            ),
            "reached": (("depth", "seed"), last[[depths.index(n) for n in config.depths]]),
            "reach": ("depth", [reach(T, depth) for depth in config.depths]),
            "aligned": (
                ("start", "spread", "seed"),
                np.reshape(
                    np.asarray(aligned), (len(config.aligned_gates), len(config.spreads), -1)
                ),
            ),
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
            "barrier": barrier(T),
            "learnt": config.learnt,
            "aligned_t1": config.aligned_t1,
            "target": config.target,
            "residual": list(batches[0][0]),
        },
    )


def _normal(config: Config, seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng((config.seed, seed)).standard_normal(shape)


def _run(config: Config, flow: Any, starts: list[Any], times: np.ndarray) -> gf.Trajectory:
    """All starts, in batches of one size, so that every kind of network is compiled once."""
    delta = isinstance(flow, gf.DeltaNetworkFlow)
    return gf.ensemble(
        flow,
        starts,
        times[-1],
        save=times,
        observe={"determinants": _determinants} if delta else None,
        method=gf.Method(solver=config.solver, rtol=config.rtol, atol=1e-4 * config.rtol),
        stop_gradient_norm=config.stop_gradient_norm,
        save_states=False,
        lanes_per_batch=config.seeds,
    )


def _other_kinds(config: Config, problem: gf.Problem) -> list[tuple[list[str], Any, list[Any]]]:
    """All but delta networks: names, flow, and as many starts as seeds for every name."""
    d, h = problem.shape[0], config.depth
    draws = [_normal(config, seed, h, d, d) for seed in range(config.seeds)]
    # Entries N(0, 1/d), which keep the size of a signal.
    unit = [G / np.sqrt(d) for G in draws]
    logits = np.full(h, config.highway_logit)
    layers = gf.ParameterFlow(problem)
    return [
        (
            [f"residual, {size:g}" for size in config.perturbations],
            gf.ResidualFlow(problem, [np.eye(d)] * h),
            [gf.LinearNetwork(list(size * G)) for size in config.perturbations for G in draws],
        ),
        # The plain flow, with shortcuts of 0: the program of the line above.
        (
            ["plain"],
            gf.ResidualFlow(problem, [np.zeros((d, d))] * h),
            [gf.LinearNetwork(list(G)) for G in unit],
        ),
        (["highway"], layers, [gf.delta.HighwayNetwork(G, logits) for G in unit]),
        (
            ["orthogonal"],
            layers,
            [gf.delta.OrthogonalNetwork(config.generator_scale * G) for G in draws],
        ),
    ]


def _determinants(net: gf.delta.DeltaNetwork) -> jax.Array:
    """``det M = 1 + β (kᵀw − 1)`` of every layer."""
    k = net.unit_directions
    return 1 + net.gates * (jnp.sum(k * net.values, axis=-1) - 1)


def _delta_start(
    draws: np.ndarray, scale: float, beta: float, depth: int, directions: np.ndarray | None = None
) -> gf.delta.DeltaNetwork:
    """Layers with a gate β, as many as asked for, and then layers with a gate of exactly 0.

    These are the identity and do not learn: the derivative of ``2σ`` is 0 there as well.
    """
    noise, d = draws[1] / np.sqrt(draws.shape[-1]), draws.shape[-1]
    k = draws[0] / np.sqrt(d) if directions is None else directions
    w = k / np.linalg.norm(k, axis=1, keepdims=True) + scale * noise
    logit = np.log(beta) - np.log(2 - beta)
    return gf.delta.DeltaNetwork(k, w, np.where(np.arange(len(k)) < depth, logit, -800.0))


def _aligned_starts(config: Config, T: np.ndarray, most: int) -> list[gf.delta.DeltaNetwork]:
    """By gate, spread and seed: directions around the eigenvector of the lowest eigenvalue."""
    d = len(T)
    vector = np.linalg.eigh(T)[1][:, 0]
    draws = [_normal(config, seed, 2, most, d) for seed in range(config.seeds)]
    return [
        _delta_start(noise, spread, beta, config.depth, vector + spread / np.sqrt(d) * noise[0])
        for beta in config.aligned_gates
        for spread in config.spreads
        for noise in draws
    ]


def negative_layers(data: xr.Dataset) -> xr.DataArray:
    """Number of delta layers whose determinant is negative at the end, per seed."""
    return (data["determinant"].isel(time=-1) < 0).sum("layer")


def summary(data: xr.Dataset) -> str:
    """Last losses by kind, which gates opened and layers turned, and where delta fails."""
    bound, seeds = data.attrs["learnt"], data.sizes["seed"]
    lines = [
        f"target {data.attrs['target']!r} with eigenvalues "
        f"{', '.join(f'{x:.3g}' for x in data['eigenvalue'].values)}; "
        f"saddle value {data.attrs['saddle']:.4g}, least loss without turning a sign "
        f"{data.attrs['barrier']:.4g}"
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
    low = data.attrs["barrier"]
    if 0 < low < 0.99 * data.attrs["saddle"]:
        ax.axhline(low, color="0.35", lw=0.9, ls="--")
        ax.annotate(
            f"det W ≥ 0: no less than ½ min σ² = {low:.3g}",
            (t[1], low),
            xytext=(3, -24),
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
