"""The delta operator I − βkkᵀ against its gate: eigenvalues, determinant, and a circle of states.

One eigenvalue moves, ``1 − β`` along k; the others stay at 1. The gate so leads from the identity
(β = 0) over a projection (β = 1) to a reflection (β = 2), and the determinant, ``(1 − β)^m`` on
states with m columns, changes its sign at β = 1 for odd m (Zhang et al., arXiv 2601.00417).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gradflow as gf


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of this experiment."""

    # Number of dimensions d of a column of the state.
    dimension: int = 4
    # Numbers of columns m of the states whose determinants are drawn.
    columns: tuple[int, ...] = (1, 2, 3)
    # Number of gates, evenly spaced from 0 to 2.
    gates: int = 41
    # Gates at which a circle of states is drawn.
    circles: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    # Number of states on the circle.
    points: int = 241
    # Angle of the direction k in the plane of the circle, in degrees.
    angle: float = 35.0
    # Seed of the direction in d dimensions.
    seed: int = 0

    @classmethod
    def full(cls) -> Config:
        """More dimensions, columns and gates."""
        return cls(dimension=64, columns=(1, 2, 3, 4, 8), gates=201, points=721)


def compute(config: Config) -> xr.Dataset:
    """Formulas and dense eigenvalues and determinants by gate; the images of a circle of states."""
    d = config.dimension
    betas = np.linspace(0, 2, config.gates)
    k = np.random.default_rng(config.seed).standard_normal(d)
    dense = np.asarray(jax.vmap(lambda beta: gf.delta.operator(beta, k).matrix())(betas))
    eigenvalues = np.linalg.eigvalsh(dense)[:, ::-1]
    lifted = [
        np.linalg.det(np.stack([np.kron(np.eye(m), M) for M in dense])) for m in config.columns
    ]
    spectra = jax.vmap(lambda beta: gf.delta.spectrum(beta, d))(betas)
    determinants = [
        jax.vmap(lambda b, m=m: gf.delta.determinant(b, m))(betas) for m in config.columns
    ]
    turn = np.deg2rad(config.angle)
    direction = np.array([np.cos(turn), np.sin(turn)])
    # From the side of −k to that of k, so that each half of the circle is one piece.
    angles = turn + np.linspace(-1.5 * np.pi, 0.5 * np.pi, config.points)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    images = [np.asarray(gf.delta.operator(beta, direction) @ circle) for beta in config.circles]
    return xr.Dataset(
        {
            "spectrum": (("beta", "eigenvalue"), np.asarray(spectra)),
            "dense_eigenvalues": (("beta", "eigenvalue"), eigenvalues),
            "determinant": (("m", "beta"), np.array(determinants)),
            "dense_determinant": (("m", "beta"), np.array(lifted)),
            "circle": (("axis", "state"), circle),
            "image": (("gate", "axis", "state"), np.array(images)),
            "direction": ("axis", direction),
            "regime": ("gate", [gf.delta.regime(beta) for beta in config.circles]),
        },
        coords={"beta": betas, "m": list(config.columns), "gate": list(config.circles)},
        attrs={"runs": "no integration: formulas against dense linear algebra"},
    )


def deviations(data: xr.Dataset) -> tuple[float, float]:
    """Largest differences of eigenvalues and of determinants from the dense ones."""
    return (
        float(abs(data["spectrum"] - data["dense_eigenvalues"]).max()),
        float(abs(data["determinant"] - data["dense_determinant"]).max()),
    )


def summary(data: xr.Dataset) -> str:
    """Deviations of the formulas, and the lengths of the images of the circle by gate."""
    values, determinants = deviations(data)
    lines = [
        f"{data.sizes['eigenvalue']} dimensions: eigenvalues within {values:.1e}, determinants "
        f"within {determinants:.1e} of the dense matrices"
    ]
    lengths = np.linalg.norm(data["image"].values, axis=1)
    for gate, name, row in zip(data["gate"].values, data["regime"].values, lengths, strict=True):
        lines.append(
            f"β = {gate:g}, {name}: the unit circle has lengths {row.min():.3f} to {row.max():.3f}"
        )
    return "\n".join(lines)


def figure(data: xr.Dataset) -> Figure:
    """Eigenvalues and determinants against the gate; below, a circle of states for some gates."""
    count = data.sizes["gate"]
    fig = plt.figure(figsize=(10.5, 6.6), layout="constrained")
    parts: Any = fig.subfigures(2, 1, height_ratios=(1.25, 1))
    top, bottom = parts
    values, determinants = top.subplots(1, 2)
    _against_gate(data, values, determinants)
    circles = bottom.subplots(1, count, sharex=True, sharey=True, squeeze=False)[0]
    for ax, gate in zip(circles, data["gate"].values, strict=True):
        _circle(data.sel(gate=gate), ax)
    circles[0].set_ylabel("second coordinate")
    bottom.supxlabel("first coordinate", fontsize=10)
    handles, labels = circles[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4)
    fig.suptitle("One gate leads from the identity over a projection to a reflection")
    return fig


_REGIMES = (
    (0.0, "identity"),
    (0.5, "contraction"),
    (1.0, "projection"),
    (1.5, "over-relaxed"),
    (2.0, "reflection"),
)


def _against_gate(data: xr.Dataset, values: Axes, determinants: Axes) -> None:
    d, beta = data.sizes["eigenvalue"], data["beta"].values
    blue, orange = gf.plot.palette(2)
    some = slice(None, None, max(1, (len(beta) - 1) // 20))
    circles: dict[str, Any] = {"ls": "", "marker": "o", "mfc": "white", "ms": 4.5}
    stays = f"1, {d - 1} times" if d > 2 else "1"
    values.plot(beta, data["spectrum"][:, 0], color=blue, label=stays)
    values.plot(beta, data["spectrum"][:, -1], color=orange, label="1 − β, along k")
    values.plot(beta[some], data["dense_eigenvalues"][some, 0], color=blue, **circles)
    values.plot(beta[some], data["dense_eigenvalues"][some, -1], color=orange, **circles)
    values.plot([], [], color="black", label="of the dense matrix", **circles)
    values.set_ylabel("eigenvalue of Δ")
    values.legend(loc="lower left")
    styles = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
    for i, (m, colour) in enumerate(
        zip(data["m"].values, gf.plot.palette(data.sizes["m"]), strict=True)
    ):
        one = data.sel(m=m)
        label = f"m = {m}: " + ("1 − β" if m == 1 else rf"$(1 - \beta)^{{{m}}}$")
        line = styles[i % len(styles)]
        determinants.plot(beta, one["determinant"], color=colour, ls=line, label=label)
        determinants.plot(beta[some], one["dense_determinant"][some], color=colour, **circles)
    determinants.set_ylabel("determinant on states with m columns")
    determinants.legend(loc="lower left")
    for ax in (values, determinants):
        ax.axhline(0, color="0.7", lw=0.8, zorder=0)
        ax.axvline(1, color="0.7", lw=0.8, zorder=0)
        ax.set_ylim(-1.15, 1.3)
        ax.set_xlabel("gate β")
        for at, name in _REGIMES:
            place = {0.0: "left", 2.0: "right"}.get(at, "center")
            ax.annotate(
                name,
                (at, 1.02),
                xycoords=("data", "axes fraction"),
                ha=place,
                fontsize=9,
                color="0.35",
            )


def _circle(one: xr.Dataset, ax: Axes) -> None:
    blue, orange, green = gf.plot.palette(3)
    k, circle, image = (one[name].values for name in ("direction", "circle", "image"))
    ahead = k @ circle >= -1e-12
    ax.plot(*circle, color="0.75", lw=1.0, label="states, unit circle")
    ax.axline((0, 0), tuple(k), color=green, lw=1.0, ls="--", label="direction k")
    # The first one wider, to be seen where the projection lays both on one line.
    for side, colour, name, lw in ((~ahead, blue, "−k", 4.5), (ahead, orange, "+k", 2.0)):
        part = np.where(side, image, np.nan)
        ax.plot(*part, color=colour, lw=lw, label=f"image of the half on the side of {name}")
    # A state on the side of k and where it goes.
    at = int(np.argmin(abs(k @ circle - np.cos(np.deg2rad(30)))))
    ax.plot(*circle[:, at], "o", color="black", ms=4)
    if np.linalg.norm(image[:, at] - circle[:, at]) > 1e-9:
        ax.annotate(
            "",
            tuple(image[:, at]),
            tuple(circle[:, at]),
            arrowprops={"arrowstyle": "->", "color": "black", "lw": 1.2, "shrinkA": 2},
        )
    ax.set_title(f"β = {float(one['gate']):g}, {one['regime'].item()}", fontsize=10)
    ax.set_aspect("equal")
    ax.set_xlim(-1.25, 1.25)
    ax.set_ylim(-1.25, 1.25)
