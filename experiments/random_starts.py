"""Every random start ends in a global minimum; how late is set by the closest saddle it passed.

Gaussian starts of all sizes run until the gradient vanishes. The closest approach of the
end-to-end map to the map of any saddle, distance δ, says when learning is done: after about the
time in which a mode of that strength grows to ``s``, ``ln(s/δ)/(2s)`` for two layers and
``δ^{−(1−2/h)}/((h−2)s)`` for h > 2. A search over random critical points finds a way down from all
that are no global minima, and a way up from all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the data, strongest first.
    singular_values: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Inputs; there are as many outputs as singular values.
    inputs: int = 4
    # Width of every hidden layer.
    hidden_width: int = 4
    # Numbers of layers.
    depths: tuple[int, ...] = (2, 3)
    # Random starts of every depth.
    starts: int = 300
    # Scales of the Gaussian starts, a^h between these, at random evenly in the logarithm.
    smallest: float = 1e-6
    largest: float = 1.0
    # Learnt is a loss of this fraction of the origin's above the global minimum.
    learnt: float = 1e-3
    # Gradient norm that ends a run.
    stop: float = 1e-7
    # Relative tolerance of the solver; the absolute one is a hundredth.
    rtol: float = 1e-8
    # Number of saved times of every run, geometrically spaced.
    points: int = 400
    # Random critical points of every depth, and random directions at each, of the search.
    critical_points: int = 100
    directions: int = 200
    # Seed of everything.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """2,000 starts and critical points of every depth, more modes, one more depth."""
        return cls(
            singular_values=(4.0, 3.0, 2.0, 1.0),
            inputs=6,
            hidden_width=6,
            depths=(2, 3, 4),
            starts=2000,
            critical_points=2000,
            points=1000,
        )


def compute(config: Config) -> xr.Dataset:
    """Learning time, nearest saddle and end of every start, and the search at critical points."""
    s = np.array(config.singular_values)
    problem = gf.Problem.from_singular_values(s, (len(s), config.inputs))
    lines, ended, searched = [], [], []
    for depth in config.depths:
        widths = (config.inputs, *(config.hidden_width,) * (depth - 1), len(s))
        runs, distances = _runs(config, problem, widths)
        lines.append(f"{depth} layers: {_how(runs)}")
        kinds = [gf.landscape.classify(problem, net).kind for net in _one_by_one(runs.final)]
        ended.append(
            xr.Dataset(
                {
                    "time": ("start", _learning_times(runs, config.learnt)),
                    "distance": (("start", "saddle"), distances.min(axis=1)),
                    "final_loss": ("start", np.asarray(runs.final_loss)),
                    "final_gradient": ("start", np.asarray(runs.final_gradient_norm)),
                    "kind": ("start", kinds),
                },
                coords={"saddle": [_name(S) for S in _saddles(problem, widths)]},
            )
        )
        searched.append(_search(config, problem, widths))
    depths = xr.DataArray(list(config.depths), dims="depth", name="depth")
    data = xr.merge([xr.concat(ended, depths), xr.concat(searched, depths)])
    return data.assign_attrs(
        runs="\n".join(lines),
        weakest=s.min(),
        # Of the weakest mode, when the loss is what counts as learnt.
        fraction=1 - np.sqrt(config.learnt * np.sum(s**2)) / s.min(),
        learnt=config.learnt,
        directions=config.directions,
    )


def _saddles(problem: gf.Problem, widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All signatures but that of the global minimum, from the origin down."""
    return [S for S, _ in gf.landscape.critical_values(problem, widths)][:0:-1]


def _name(signature: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, signature)) + "}"


def _runs(
    config: Config, problem: gf.Problem, widths: tuple[int, ...]
) -> tuple[gf.Trajectory, np.ndarray]:
    """All runs of one depth, and their distances to all saddles at all saved times."""
    depth, last = len(widths) - 1, min(config.singular_values)
    maps = jnp.stack(
        [
            gf.landscape.critical_point(problem, widths, S).end_to_end()
            for S in _saddles(problem, widths)
        ]
    )

    def distances(net):
        return jnp.sqrt(jnp.sum((net.end_to_end()[None] - maps) ** 2, axis=(1, 2)))

    size_key, start_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), depth))
    low, high = np.log(config.smallest) / depth, np.log(config.largest) / depth
    scales = jnp.exp(jax.random.uniform(size_key, (config.starts,), minval=low, maxval=high))
    keys = jax.random.split(start_key, config.starts)

    @jax.jit
    @jax.vmap
    def starts(key, scale):
        return gf.initialize.gaussian(key, widths, scale)

    # Long enough for a start ten thousand times weaker in the last mode, and for its tail.
    escape = float(gf.exact.escape_time(last, 1e-4 * config.smallest, depth))
    t1 = escape + 60 / (depth * last ** (2 - 2 / depth))
    runs = gf.ensemble(
        gf.GradientFlow(problem),
        starts(keys, scales),
        t1,
        save=np.concatenate([[0.0], np.geomspace(1e-2, t1, config.points - 1)]),
        observe={"distances": distances},
        method=gf.Method(rtol=config.rtol, atol=1e-2 * config.rtol),
        stop_gradient_norm=config.stop,
        save_states=False,
    )
    return runs, np.asarray(runs["distances"])


def _how(runs: gf.Trajectory) -> str:
    counts = Counter(status.name for status in runs.status)
    ends = ", ".join(f"{count} {name}" for name, count in counts.items())
    steps = np.asarray(runs.stats.accepted)
    return (
        f"{ends}, {runs.solver}, {np.median(steps):.0f} steps in the median and {steps.max()} at "
        f"most, largest final loss {float(np.max(runs.final_loss)):.1e}, largest drift "
        f"{float(np.max(runs['law_drift'])):.1e}"
    )


def _one_by_one(nets: gf.LinearNetwork) -> list[gf.LinearNetwork]:
    layers = [np.asarray(w) for w in nets.weights]
    return [gf.LinearNetwork(each) for each in zip(*layers, strict=True)]


def _learning_times(runs: gf.Trajectory, learnt: float) -> np.ndarray:
    """When the loss is this fraction of the origin's, between saved times in its logarithm."""
    loss, ts = np.asarray(runs.loss), np.asarray(runs.ts)
    bound = learnt * 0.5 * float(np.sum(np.asarray(runs.targets)[0] ** 2))
    below = loss <= bound
    at = np.argmax(below, axis=1)
    lanes, before = np.arange(len(at)), np.maximum(at - 1, 0)
    logs = [np.log(loss[lanes, i]) for i in (before, at)]
    share = (logs[0] - np.log(bound)) / np.where(at > 0, logs[0] - logs[1], 1.0)
    times = ts[lanes, before] + share * (ts[lanes, at] - ts[lanes, before])
    return np.where(below.any(axis=1), np.where(at > 0, times, 0.0), np.inf)


def _search(config: Config, problem: gf.Problem, widths: tuple[int, ...]) -> xr.Dataset:
    """Kind, and steepest known change of the loss down and up, at random critical points."""
    depth = len(widths) - 1
    rng = np.random.default_rng([config.seed, depth])
    values = gf.landscape.critical_values(problem, widths)
    least, signatures = values[0][1], [S for S, _ in values]
    taus = np.array([3e-3, 3e-2])

    @jax.jit
    def changes(net, directions):
        return jax.vmap(lambda V: gf.landscape.loss_change(problem, net, V, taus))(directions)

    rows = []
    for _ in range(config.critical_points):
        S = signatures[rng.integers(len(signatures))]
        # At a minimum nothing is left to escape to.
        tightened = bool(rng.integers(2)) or signatures[0] == S
        net = gf.landscape.critical_point(
            problem, widths, S, key=int(rng.integers(2**31)), tightened=tightened
        )
        verdict = gf.landscape.classify(problem, net)
        found = np.asarray(changes(net, _directions(rng, net, config.directions)))
        down = found.min()
        if verdict.value > least + 1e-9 * values[-1][1]:
            way, _ = gf.landscape.escape_direction(problem, net)
            down = min(down, float(gf.landscape.loss_change(problem, net, way, taus).min()))
        rows.append((verdict.kind, verdict.value - least, down, found.min(), found.max()))
    kinds, excess, down, random_down, up = zip(*rows, strict=True)
    return xr.Dataset(
        {
            "point_kind": ("point", list(kinds)),
            "excess": ("point", np.array(excess)),
            "down": ("point", np.array(down)),
            "random_down": ("point", np.array(random_down)),
            "up": ("point", np.array(up)),
        }
    )


def _directions(rng: np.random.Generator, net: gf.LinearNetwork, count: int) -> gf.LinearNetwork:
    """Random directions of unit norm, stacked along the first axis."""
    layers = [rng.standard_normal((count, *w.shape)) for w in net.weights]
    sizes = np.sqrt(sum(np.sum(layer**2, axis=(1, 2)) for layer in layers))
    return net.with_weights(tuple(jnp.asarray(w / sizes[:, None, None]) for w in layers))


# Changes of the loss below this fraction of the loss at the origin are round-off.
ROUND_OFF = 1e-15


def tally(data: xr.Dataset) -> dict[str, int]:
    """Tried and found, over all depths: ends of the runs, spurious minima, maxima."""
    noise = ROUND_OFF * float(data["excess"].max())
    above = data["excess"] > 1e-9 * float(data["excess"].max())
    return {
        "runs": int(data["kind"].size),
        "runs at a global minimum": int((data["kind"] == "global_minimum").sum()),
        "critical points": int(data["excess"].size),
        "above the global minimum": int(above.sum()),
        "of these, a random direction descends": int(
            (above & (data["random_down"] < -noise)).sum()
        ),
        "spurious minima": int((above & (data["down"] >= -noise)).sum()),
        "maxima": int((data["up"] <= noise).sum()),
        "global minima with a way down": int((~above & (data["down"] < -noise)).sum()),
        "undecided kinds": int((data["point_kind"] == "undecided").sum()),
    }


def nearest(data: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """The smallest distance to any saddle of every run, and which saddle that was."""
    return data["distance"].min("saddle"), data["distance"].idxmin("saddle")


def closed_form(distance: np.ndarray, depth: int, weakest: float, fraction: float) -> np.ndarray:
    """Time in which the weakest mode grows from a strength to a fraction of its value."""
    grown = gf.exact.escape_time(
        weakest, np.minimum(distance, 0.999 * fraction * weakest), depth, fraction=fraction
    )
    return np.asarray(grown)


def slopes(data: xr.Dataset, below: float = 1e-2) -> dict[int, tuple[float, float]]:
    """Fitted and predicted: time per ``ln(1/δ)`` for two layers, else the power of 1/δ."""
    found = {}
    distances, _ = nearest(data)
    for depth in data["depth"].values:
        x, times = distances.sel(depth=depth).values, data["time"].sel(depth=depth).values
        close = (x < below) & np.isfinite(times)
        y, said = (
            (times, 1 / (2 * data.attrs["weakest"]))
            if depth == 2
            else (np.log(times), 1 - 2 / depth)
        )
        found[int(depth)] = float(-np.polyfit(np.log(x[close]), y[close], 1)[0]), said
    return found


def summary(data: xr.Dataset) -> str:
    """What was tried and found, the nearest saddles, and the laws of the learning time."""
    lines = [", ".join(f"{name}: {count}" for name, count in tally(data).items())]
    _, which = nearest(data)
    for depth, (slope, said) in slopes(data).items():
        times = data["time"].sel(depth=depth)
        counts = Counter(which.sel(depth=depth).values.tolist()).most_common()
        near = ", ".join(f"{name} {count}" for name, count in counts)
        law = "per ln(1/δ)" if depth == 2 else "power of 1/δ"
        lines.append(
            f"{depth} layers: learnt after {float(times.min()):.2g} to {float(times.max()):.3g}; "
            f"time {law} {slope:.2f} (closed form {said:.2f}); nearest saddle: {near}"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Learning time against the distance of the closest saddle, a panel per depth."""
    depths = data["depth"].values
    fig, axes = plt.subplots(
        1, len(depths), figsize=(1.2 + 4.9 * len(depths), 5.0), squeeze=False, layout="constrained"
    )
    distances, which = nearest(data)
    count = len(str(data["saddle"].values[-1]).split(",")) + 1
    path = [_name(tuple(range(1, r + 1))) for r in range(count)]
    groups = [*path, "another"]
    colours = dict(zip(groups, gf.plot.palette(len(groups)), strict=True))
    markers = dict(zip(groups, "osD^vP", strict=False))
    for ax, depth in zip(axes[0], depths, strict=True):
        x, times = distances.sel(depth=depth).values, data["time"].sel(depth=depth).values
        names = np.array([n if n in path else "another" for n in which.sel(depth=depth).values])
        for group in groups:
            at = names == group
            ax.plot(
                x[at], times[at], markers[group], color=colours[group], ms=4.5, mew=0, alpha=0.65
            )
        line = np.geomspace(x.min(), 0.3 * data.attrs["weakest"], 200)
        law = closed_form(line, int(depth), data.attrs["weakest"], data.attrs["fraction"])
        ax.plot(line, law, color="black", lw=1.6)
        ax.set_xscale("log")
        if depth > 2:
            ax.set_yscale("log")
        ends = data["kind"].sel(depth=depth) == "global_minimum"
        ax.set_title(
            f"{depth} layers: {int(ends.sum())} of {ends.size} starts end in a global minimum"
        )
        ax.set_xlabel(r"closest approach to a saddle, $\delta = \min_{t,S}\,\|W(t) - W_S\|_F$")
    axes[0, 0].set_ylabel(f"time until the loss is {data.attrs['learnt']:g} of the origin's")
    handles = [
        Line2D([], [], color=colours[group], marker=markers[group], ls="", ms=5) for group in groups
    ]
    labels = ["nearest: the origin", *(f"saddle {name}" for name in path[1:]), "another saddle"]
    handles.append(Line2D([], [], color="black", lw=1.6))
    labels.append(r"the weakest mode alone, grown from $\delta$ (closed form)")
    fig.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    fig.suptitle(
        "Every random start ends in a global minimum, the later the closer it passes a saddle"
    )
    return fig
