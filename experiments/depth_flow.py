"""Delta blocks are Euler steps of a flow over depth, which a gate above 1 lets them overshoot.

The depth flow ``Ẋ = β(X)k(X)(v(X)ᵀ − k(X)ᵀX)`` is what a stack of n blocks with step ``t/n`` comes
to, with an error of order 1/n. With frozen direction, value and gate its readout error
``kᵀX − vᵀ`` decays like ``e^{−βt}`` and keeps its sign; a block with step h multiplies it by
``1 − hβ``, so that the blocks jump across their target, back and forth, where ``hβ > 1``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Length of the state.
    dimension: int = 4
    # Depth, in blocks of full step, at which blocks and flow are compared.
    compared_at: float = 1.0
    # Fewest blocks up to there.
    fewest: int = 16
    # How often their number is doubled.
    doublings: int = 5
    # Gates with frozen direction and value whose blocks are drawn beside the flow.
    gates: tuple[float, ...] = (0.5, 1.0, 1.5, 1.9)
    # Depth up to which they are drawn.
    depth: int = 10
    # Blocks per unit of depth for the largest gate.
    finer: tuple[int, ...] = (1, 2, 4)
    # Relative tolerance of the flow.
    rtol: float = 1e-12
    # Number of saved depths of the flow.
    points: int = 201
    # Seed of the state and the blocks.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """Longer states, more and finer blocks."""
        return cls(dimension=64, doublings=10, depth=20, finer=(1, 2, 4, 8), points=801)


def compute(config: Config) -> xr.Dataset:
    """Euler errors by number of blocks, and readout errors of flow and blocks by depth."""
    rng = np.random.default_rng(config.seed)
    d = config.dimension
    X0, k = rng.standard_normal(d), rng.standard_normal(d)
    k /= np.linalg.norm(k)
    v = k @ X0 - 1.0  # the first readout error is 1
    A, w, g = rng.standard_normal((d, d)), rng.standard_normal(d), rng.standard_normal(d)
    dependent = _block((A, np.zeros(d)), (w / np.sqrt(d), 0.0), (g / np.sqrt(d), 0.0))
    nothing = np.zeros(d)
    frozen = [
        _block((0 * A, k), (nothing, v), (nothing, gf.delta.gate_logit(beta)))
        for beta in config.gates
    ]
    method = gf.Method(solver="explicit", rtol=config.rtol, atol=config.rtol * 0.1)
    depths = np.linspace(0, config.depth, config.points)

    def flow(block, t1):
        return gf.delta.rewrite_flow(block, X0, t1, save=config.points, method=method)

    compared = {
        "direction, value and gate depend on the state": dependent,
        f"frozen, β = {config.gates[0]:g}": frozen[0],
        f"frozen, β = {config.gates[-1]:g}": frozen[-1],
    }
    counts = config.fewest * 2 ** np.arange(config.doublings + 1)
    ends = {name: flow(block, config.compared_at) for name, block in compared.items()}
    errors = [
        [_distance(block, X0, int(n), config.compared_at, ends[name].final) for n in counts]
        for name, block in compared.items()
    ]
    smooth = [flow(block, float(config.depth)) for block in frozen]
    # Direction and value are the same for all gates, so that one program reads all states.
    paths = [gf.delta.unroll(block, X0, config.depth) for block in frozen]
    paths += [gf.delta.unroll(frozen[-1], X0, config.depth * n, 1.0 / n) for n in config.finer]
    lengths = [len(path) for path in paths]
    read = np.asarray(jax.vmap(frozen[0].readout_error)(jnp.concatenate(paths)))
    full_steps, finest = np.split(read, [len(frozen) * (config.depth + 1)])
    finer = np.full((len(config.finer), max(lengths)), np.nan)
    pieces = np.split(finest, np.cumsum(lengths[len(frozen) : -1]))
    for row, piece in zip(finer, pieces, strict=True):
        row[: len(piece)] = piece
    return xr.Dataset(
        {
            "euler_error": (("block", "count"), np.array(errors)),
            "flow_error": (("gate", "t"), np.array([traj["readout_error"] for traj in smooth])),
            "block_error": (("gate", "layer"), full_steps.reshape(len(frozen), -1)),
            "finer_error": (("per_unit", "step"), finer),
        },
        coords={
            "block": list(compared),
            "count": counts,
            "gate": list(config.gates),
            "t": depths,
            "layer": np.arange(config.depth + 1),
            "per_unit": list(config.finer),
        },
        attrs={"runs": _runs([*ends.values(), *smooth]), "depth": config.depth},
    )


def _block(direction, value, gate) -> gf.delta.DeltaBlock:
    """A block whose parts are affine in the state, from (weight, bias) of each.

    With zero weights its parts are frozen; one program serves such blocks and others.
    """
    return gf.delta.DeltaBlock(*(gf.delta.Affine(*part) for part in (direction, value, gate)))


def _runs(runs: list[gf.Trajectory]) -> str:
    status = sorted({run.status.name for run in runs})
    steps = sum(int(run.stats.accepted) for run in runs)
    return f"{len(runs)} depth flows: {', '.join(status)}, {steps} steps, {runs[0].solver}"


def _distance(block, X0: np.ndarray, count: int, t1: float, end) -> float:
    states = np.asarray(gf.delta.unroll(block, X0, count, t1 / count))
    return float(np.linalg.norm(states[-1] - np.asarray(end)))


def slopes(data: xr.Dataset) -> np.ndarray:
    """d ln(error) / d ln(number of blocks) over the finest half of the numbers, per block."""
    half = data.isel(count=slice(data.sizes["count"] // 2, None))
    return np.polyfit(np.log(half["count"]), np.log(half["euler_error"].values.T), 1)[0]


def crossings(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """How often the readout error changes its sign, per gate: in the flow, and in the blocks."""

    def count(error: xr.DataArray) -> np.ndarray:
        signs = np.sign(np.where(abs(error) < 1e-12, 0, error))
        return np.sum(signs[:, 1:] * signs[:, :-1] < 0, axis=1)

    return count(data["flow_error"]), count(data["block_error"])


def summary(data: xr.Dataset) -> str:
    """Slopes of the Euler error, deviations from the closed forms, and crossings of the target."""
    gate = data["gate"]
    flow_off = abs(data["flow_error"] / data["flow_error"][:, 0] - np.exp(-gate * data["t"])).max()
    block_off = abs(data["block_error"] / data["block_error"][:, 0] - (1 - gate) ** data["layer"])
    lines = [
        f"Euler error falls like n^{slope:.3f}: {name}"
        for name, slope in zip(data["block"].values, slopes(data), strict=True)
    ]
    lines.append(
        f"readout errors within {float(flow_off):.1e} of exp(−βt) in the flow, within "
        f"{float(block_off.max()):.1e} of (1 − β)^l in the blocks"
    )
    for beta, smooth, jumps in zip(gate.values, *crossings(data), strict=True):
        lines.append(
            f"β = {beta:g}: the flow crosses its target {smooth} times, the blocks {jumps}"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Euler error against the number of blocks; readout errors of flow and blocks over depth."""
    fig, (order, errors, finer) = plt.subplots(1, 3, figsize=(13.5, 4.7), layout="constrained")
    count = data["count"].values
    for name, marker, colour, slope in zip(
        data["block"].values, "os^", gf.plot.palette(3), slopes(data), strict=True
    ):
        label = f"{name}: slope {slope:.2f}".replace("-", "−").replace("state: ", "state:\n")
        order.plot(
            count,
            data["euler_error"].sel(block=name),
            marker=marker,
            ms=5,
            color=colour,
            label=label,
        )
    last = data["euler_error"].isel(count=-1).min().item()
    order.plot(
        count, 0.4 * last * count[-1] / count, color="black", ls="--", lw=1.2, label="slope −1"
    )
    order.set_xscale("log")
    order.set_yscale("log")
    order.xaxis.set_major_locator(LogLocator(base=4))
    order.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    order.xaxis.set_minor_formatter(NullFormatter())
    order.set_xlabel("number of blocks n up to one depth")
    order.set_ylabel(r"$\|X_n - X(t)\|$")
    order.set_title("blocks come to the flow like 1/n")
    order.set_ylim(top=30 * float(data["euler_error"].max()))
    order.legend(loc="upper right", fontsize=8.5)
    colours = gf.plot.palette(data.sizes["gate"])
    for gate, colour in zip(data["gate"].values, colours, strict=True):
        one = data.sel(gate=gate)
        errors.plot(data["t"], one["flow_error"], color=colour, label=f"β = {gate:g}")
        errors.plot(
            data["layer"], one["block_error"], "o:", ms=5, lw=0.8, mfc="white", color=colour
        )
    handles, _ = errors.get_legend_handles_labels()
    handles += [
        Line2D([], [], color="black", label="flow"),
        Line2D(
            [], [], color="black", marker="o", ls=":", lw=0.8, mfc="white", ms=5, label="blocks"
        ),
    ]
    errors.legend(handles=handles, loc="lower right", ncols=2)
    errors.set_title("the flow keeps its side, blocks with β > 1 do not")
    largest = float(data["gate"].max())
    finer.plot(data["t"], data["flow_error"].sel(gate=largest), color="black", label="flow")
    markers = "os^Dv"
    for i, n in enumerate(data["per_unit"].values):
        row = data["finer_error"].sel(per_unit=n).dropna("step").values
        label = f"{n} per unit of depth, factor {1 - largest / n:.2f}".replace("-", "−")
        finer.plot(
            np.arange(len(row)) / n,
            row,
            markers[i % 5] + ":",
            ms=4.5,
            lw=0.8,
            mfc="white",
            color=gf.plot.palette(data.sizes["per_unit"])[i],
            label=label,
        )
    finer.legend(loc="lower right", title="blocks")
    finer.set_title(f"β = {largest:g}: smaller steps stop the oscillation")
    for ax in (errors, finer):
        ax.axhline(0, color="0.7", lw=0.8, zorder=0)
        ax.set_ylim(-1.6, 1.1)
        ax.set_xlabel("depth t (blocks of full step)")
        ax.set_ylabel(r"readout error $k^\top X - v$")
    fig.suptitle(
        "Delta blocks are Euler steps of a flow; with a gate above 1 they cross their target, "
        "which the flow cannot"
    )
    return fig
