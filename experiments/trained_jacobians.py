"""Lyapunov exponents of the layers of a network before, during and after its training.

Layers ``M_i = D_i + W_i`` of a deep linear network under gradient flow of the W_i: without a
shortcut (``D = 0``), with the identity, and with delta operators ``I − β k kᵀ``. What is compared:

In order. The h layers make one product, and ``(1/h) log s_k(M_h ⋯ M_1)`` are its exponents at its
own depth. Training pins them: with each mode that is learnt one ends at ``(1/h) log s_k`` of the
target.

Shuffled. Layers drawn again and again, independently, from the h layers that there are: their
exponents are what :func:`gradflow.lyapunov.gradient_norms` predicts with, and have standard errors.
They know every layer and nothing of how neighbours fit together. Layers repeated in their order
would tell nothing new: their exponents are ``(1/h) log |λ_k|`` of the product's eigenvalues.

The sum is ``(1/h) Σ_i log |det M_i|`` in any order. What can differ is how it is shared out.

Gradients are propagated back through the layers in their order, ``δ_{i−1} = M_iᵀ δ_i``, from
random directions at the output. At the start the layers are independent, and norms follow
``(h − i) γ₁`` up to the fluctuations of shuffled layers; they lag behind while directions turn to
the one that grows fastest. Once all modes are learnt the mean over directions of ``log |δ_0|`` is
that of ``log |W*ᵀ u|``, u uniform on the sphere and W* the target, whatever the shortcuts. Without
shortcuts the weakest modes start at ``e^{hγ_k}``, and deep networks do not learn them in the time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import scipy.linalg
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tqdm.auto import tqdm

import gradflow as gf
from experiments._report import run_lines

KINDS = ("no shortcut", "residual", "delta")
MOMENTS = ("start", "loss halved", "end")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Singular values of the target; as many as the width of the layers.
    strengths: tuple[float, ...] = (3.0, 2.0, 1.0)
    # Angle, in radians, of the rotation in a random plane that the target ends with.
    angle: float = 0.5
    # Number of layers h.
    layers: int = 12
    # Size of the Gaussian weights of layers without shortcut: 1 is where γ₁ of their law is 0.
    plain_scale: float = 1.0
    # Standard deviation of the weights beside shortcuts.
    branch_scale: float = 0.1
    # β of the delta shortcuts.
    beta: float = 0.5
    # End of the runs, and number of saved times, evenly spaced in the logarithm.
    end: float = 100.0
    saves: int = 60
    # Saved times at which shuffled layers are sampled.
    sampled: int = 7
    # Depth of the shuffled products, and number of them.
    steps: int = 500
    chains: int = 256
    # Directions of gradients at the output.
    probes: int = 256
    # Seed of target, start, shortcuts and samples.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More and wider layers, and more samples."""
        return cls(
            strengths=(4.0, 3.0, 2.0, 1.0),
            layers=24,
            saves=200,
            sampled=15,
            steps=5000,
            chains=512,
            probes=4096,
        )


def target(config: Config) -> np.ndarray:
    """A positive matrix with the given singular values, followed by a rotation in a plane."""
    rng = np.random.default_rng(config.seed)
    d = len(config.strengths)
    Q = np.linalg.qr(rng.standard_normal((d, d)))[0]
    a, b = np.linalg.qr(rng.standard_normal((d, 2)))[0].T
    turn = scipy.linalg.expm(config.angle * (np.outer(a, b) - np.outer(b, a)))
    return turn @ Q @ np.diag(config.strengths) @ Q.T


def starts(config: Config) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Shortcuts and weights of every kind of network, ``(h, d, d)`` each."""
    rng = np.random.default_rng(config.seed + 1)
    d, h = len(config.strengths), config.layers
    G = rng.standard_normal((h, d, d))
    # γ₁ of entries N(0, 1): divided by its exponential the layers have γ₁ = 0.
    growth = gf.lyapunov.closed_forms.gaussian(d, 1.0)[0]
    plain = config.plain_scale * math.exp(-growth) * G
    # A flow cannot pass from a negative determinant to the positive one of the target.
    plain[0, 0] *= np.prod(np.sign(np.linalg.det(plain)))
    k = rng.standard_normal((h, d))
    eye = np.broadcast_to(np.eye(d), G.shape)
    deltas = np.array([gf.delta.operator(config.beta, one).matrix() for one in k])
    small = config.branch_scale * G
    return dict(zip(KINDS, ((np.zeros_like(G), plain), (eye, small), (deltas, small)), strict=True))


def compute(config: Config) -> xr.Dataset:
    """Runs of the three networks, exponents along them, and gradient norms at three moments."""
    W = target(config)
    times = np.concatenate([[0.0], np.geomspace(1e-6 * config.end, config.end, config.saves - 1)])
    at = np.unique(np.linspace(0, config.saves - 1, config.sampled).round().astype(int))
    runs, found = {}, []
    for kind, (shortcuts, weights) in tqdm(starts(config).items(), leave=False, disable=None):
        # With shortcuts of 0 this is the plain flow: one program for all kinds.
        flow = gf.ResidualFlow(gf.Problem(W), list(shortcuts))
        runs[kind] = gf.simulate(
            flow,
            gf.LinearNetwork(tuple(weights)),
            config.end,
            save=times,
            method=gf.Method(solver="explicit"),
        )
        # (times, h, d, d)
        saved = shortcuts + np.stack([np.asarray(w) for w in runs[kind].states.weights], axis=1)
        found.append(_one(config, saved, np.asarray(runs[kind].loss), at))
    data = xr.concat(found, "kind").assign_coords(
        kind=list(KINDS), time=times, sampled_time=times[at], moment=list(MOMENTS)
    )
    strengths = np.sort(config.strengths)[::-1]
    return data.assign(
        target=("k", np.log(strengths) / config.layers),
        target_gradient=_mean_log(strengths),
    ).assign_attrs(
        runs=run_lines(runs),
        layers=config.layers,
        branch_scale=config.branch_scale,
        beta=config.beta,
        probes=config.probes,
    )


def _one(config: Config, saved: np.ndarray, loss: np.ndarray, at: np.ndarray) -> xr.Dataset:
    """Measurements along one run, from its layers ``M_i`` at all times, ``(times, h, d, d)``."""

    def net(i):
        return gf.LinearNetwork(tuple(saved[i]))

    maps = functools.reduce(lambda below, M: M @ below, np.moveaxis(saved, 1, 0))
    halved = int(np.argmax(loss <= loss[0] / 2))
    moments = np.array([0, halved, len(saved) - 1])
    shuffled = [
        gf.lyapunov.exponents(
            config.seed,
            gf.lyapunov.network_layers(net(i), order="random"),
            config.steps,
            chains=config.chains,
            checkpoints=1,
        )
        for i in at
    ]
    norms = [
        gf.lyapunov.gradient_norms(
            net(i), probes=config.probes, steps=config.steps, key=config.seed
        )
        for i in moments
    ]
    depth = ("moment", "layer")
    return xr.Dataset(
        {
            "loss": ("time", loss),
            "in_order": (
                ("time", "k"),
                np.log(np.linalg.svd(maps, compute_uv=False)) / config.layers,
            ),
            "shuffled": (("sampled_time", "k"), [np.asarray(s.exponents) for s in shuffled]),
            "shuffled_error": (
                ("sampled_time", "k"),
                [np.asarray(s.standard_error) for s in shuffled],
            ),
            "log_norm": (depth, [n.log_norms for n in norms]),
            "spread": (depth, [n.spread for n in norms]),
            "predicted": (depth, [n.predicted for n in norms]),
            "fluctuation": ("moment", [n.fluctuation for n in norms]),
            "rate": ("moment", [n.rate for n in norms]),
            "predicted_rate": ("moment", [n.predicted_rate for n in norms]),
            "predicted_error": ("moment", [n.predicted_error for n in norms]),
        },
        coords={"k": np.arange(1, maps.shape[-1] + 1), "layer": np.arange(config.layers + 1)},
    )


def _mean_log(strengths: np.ndarray) -> float:
    """``E log |Sᵀu|``, u uniform on the sphere: that of a Gaussian g less that of its length."""
    forms = gf.lyapunov.closed_forms
    lengths = forms.gaussian(len(strengths), 1.0)[0]
    return float(forms.correlated_gaussian_top(np.diag(strengths**2)) - lengths)


def deviation(data: xr.Dataset) -> xr.DataArray:
    """``log |δ_0|`` measured less predicted, in standard deviations of shuffled layers."""
    off = (data["log_norm"] - data["predicted"]).isel(layer=0)
    return off / (data["fluctuation"] * math.sqrt(data.attrs["layers"]))


def _learnt(data: xr.Dataset, kind: str) -> str:
    """How many modes have reached the target at the end."""
    off = abs(data["in_order"].sel(kind=kind)[-1] - data["target"]).values
    left, end = int((off > 0.01).sum()), float(data["time"][-1])
    return f"{left} of {len(off)} modes not learnt by t = {end:g}" if left else "all modes learnt"


def summary(data: xr.Dataset) -> str:
    """Exponents at the end in both orders, and gradients against what exponents predict."""

    def told(values):
        return ", ".join(f"{v:.4f}" for v in values)

    lines = [f"(1/h) log of the target's singular values: {told(data['target'].values)}"]
    off = deviation(data)
    for kind in data["kind"].values:
        one = data.sel(kind=kind)
        for name, i in (("start", 0), ("end", -1)):
            lines.append(
                f"{kind}, {name}: in order {told(one['in_order'].isel(time=i).values)}; shuffled "
                f"{told(one['shuffled'].isel(sampled_time=i).values)} ± "
                f"{float(one['shuffled_error'].isel(sampled_time=i).max()):.1g}"
            )
        for moment in data["moment"].values:
            here = one.sel(moment=moment)
            lines.append(
                f"{kind}, {moment}: log |δ| changes by {float(here['rate']):.4f} per layer on the "
                f"way back, γ₁ = {float(here['predicted_rate']):.4f} ± "
                f"{float(here['predicted_error']):.1g}; at the input "
                f"{float(off.sel(kind=kind, moment=moment)):+.1f} standard deviations off"
            )
        last = float(one["log_norm"][-1, 0])
        lines.append(
            f"{kind}: {_learnt(data, kind)}; log |δ₀| at the end {last:.4f}, "
            f"of the target {float(data['target_gradient']):.4f}"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Exponents against training time above, gradient norms through depth below."""
    fig, axes = plt.subplots(
        2, 3, figsize=(10.8, 6.8), sharex="row", sharey="row", layout="constrained"
    )
    ranks = gf.plot.palette(data.sizes["k"])
    time, sampled = data["time"].values, data["sampled_time"].values
    for ax, kind in zip(axes[0], data["kind"].values, strict=True):
        one = data.sel(kind=kind)
        for k, colour in zip(data["k"].values, ranks, strict=True):
            ax.axhline(float(data["target"].sel(k=k)), color=colour, ls=":", lw=1)
            ax.plot(time[1:], one["in_order"].sel(k=k)[1:], color=colour)
            ax.errorbar(
                np.where(sampled > 0, sampled, time[1]),
                one["shuffled"].sel(k=k),
                2 * one["shuffled_error"].sel(k=k),
                fmt="o",
                color=colour,
                ms=5,
                mfc="white",
            )
        ax.set_xscale("log")
        ax.set_xlabel(gf.plot.TIME_LABEL)
        ax.set_title(f"{kind}: {_learnt(data, kind)}")
    axes[0, 0].set_ylabel("exponents γ_k per layer")
    handles: list[Any] = [
        Line2D([], [], color=c, label=f"γ_{k}")
        for k, c in zip(data["k"].values, ranks, strict=True)
    ]
    handles += [
        Line2D([], [], color="0.3", label="layers in order"),
        Line2D([], [], color="0.3", marker="o", mfc="white", ls="", label="layers shuffled"),
        Line2D([], [], color="0.3", ls=":", lw=1, label="target"),
    ]
    axes[0, 1].legend(handles=handles, loc="lower center", ncols=2)
    moments = gf.plot.palette(len(MOMENTS))
    layer, h = data["layer"].values, data.attrs["layers"]
    for ax, kind in zip(axes[1], data["kind"].values, strict=True):
        one = data.sel(kind=kind)
        for moment, colour, mark in zip(data["moment"].values, moments, "os^", strict=True):
            here = one.sel(moment=moment)
            predicted = here["predicted"].values
            width = float(here["fluctuation"]) * np.sqrt(h - layer)
            if moment in (MOMENTS[0], MOMENTS[-1]):  # a third would hide the others
                ax.fill_between(
                    layer, predicted - width, predicted + width, color=colour, alpha=0.12, lw=0
                )
            ax.plot(layer, predicted, color=colour, ls="--", lw=1.2)
            ax.plot(layer, here["log_norm"], mark + "-", color=colour, ms=4.5, lw=1)
        ax.plot(0, data["target_gradient"], "*", color="black", ms=11, clip_on=False, zorder=5)
        ax.set_xlabel("layer i (0 is the input)")
        ax.set_title(f"{kind}: gradients")
    axes[1, 0].set_ylabel("mean of log |δ_i|, natural logarithm")
    handles = [
        Line2D([], [], color=c, marker=m, ms=4.5, lw=1, label=str(name))
        for name, c, m in zip(data["moment"].values, moments, "os^", strict=True)
    ]
    handles += [
        Line2D([], [], color="0.3", ls="--", lw=1.2, label="predicted, (h − i) γ₁"),
        Line2D(
            [], [], color="0.3", lw=7, alpha=0.2, label="± 1 standard deviation at start and end"
        ),
        Line2D([], [], color="black", marker="*", ms=10, ls="", label="of the target alone"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    fig.suptitle(
        "Training takes the exponents of layers in their order to the target's, mode by mode "
        f"(h = {h}, β = {data.attrs['beta']:g})"
    )
    return fig
