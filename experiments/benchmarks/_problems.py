"""The problems on which solvers are compared, from easy to stiff and from small to large."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

import gradflow as gf

__all__ = ["CASES", "Case", "drift", "end_to_end", "gaussian"]

POINTS = 50
DECADES = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: data, widths, start and horizon.

    The data are whitened and diagonal with singular values ``m, m − 1, …, 1``, or the scanned
    digits. The reference solution comes from the solver ``reference``, and ``check``, of other
    make, says how far it can be trusted.
    """

    name: str
    widths: tuple[int, ...]
    scale: float
    t1: float
    reference: str = "gradflow conserving"
    check: str = "SciPy Radau"
    digits: bool = False
    # Runs of large networks may take so many times longer.
    patience: float = 1.0

    @property
    def label(self) -> str:
        """Widths, scale of the start and horizon in a few words."""
        if self.digits:
            widths = "digits, " + "–".join(map(str, self.widths))
        else:
            widths = f"{len(self.widths) - 1} layers of {self.widths[0]}"
        return f"{widths}, start {self.scale:g}, $t_1$ = {_number(self.t1)}"

    @property
    def unknowns(self) -> int:
        """The number of weights."""
        return sum(a * b for a, b in itertools.pairwise(self.widths))

    def problem(self) -> gf.Problem:
        if self.digits:
            return gf.Problem.from_data(*gf.datasets.digits(), whiten=True)
        return gf.Problem.from_singular_values(np.arange(self.widths[0], 0, -1.0))

    def start(self) -> gf.LinearNetwork:
        return gf.LinearNetwork(gaussian(self.widths, self.scale))

    def times(self, t1: float | None = None) -> np.ndarray:
        """0 and 50 geometrically spaced times over the last four decades, shape ``(51,)``."""
        t1 = self.t1 if t1 is None else t1
        spaced = np.geomspace(10.0**-DECADES, 1.0, POINTS) * t1
        spaced[-1] = t1
        return np.concatenate([[0.0], spaced])

    def atol(self, rtol: float) -> float:
        """The absolute tolerance that goes with a relative one: far below the start's weights."""
        return 1e-2 * rtol * min(1.0, self.scale)


def _number(value: float) -> str:
    if value < 1e4:
        return f"{value:g}"
    power = int(np.floor(np.log10(value)))
    front = value / 10**power
    return rf"$10^{power}$" if front == 1 else rf"${front:g}\times 10^{power}$"


def gaussian(widths: tuple[int, ...], scale: float, seed: int = 0) -> list[np.ndarray]:
    """Weights with entries N(0, scale²/d_{i−1}); another scale is a multiple of the same draw."""
    rng = np.random.default_rng(seed)
    return [
        scale * rng.standard_normal((d_out, d_in)) / np.sqrt(d_in)
        for d_in, d_out in itertools.pairwise(widths)
    ]


# Solvers of a reference and its check where explicit methods are up to it.
_EXPLICIT = "SciPy DOP853", "diffrax Dopri8"
# The horizons are long enough for every mode to be learnt, but for the last of B2 and the last four
# of B6. B7 has learnt its last at t = 5.5e7, B8 at t = 11.3.
CASES = {
    case.name: case
    for case in (
        Case("B1", (5,) * 4, 0.1, 200.0),
        Case("B2", (5,) * 5, 0.1, 5000.0),
        Case("B3", (5,) * 5, 0.02, 4e5),
        Case("B4", (10,) * 4, 0.1, 500.0),
        Case("B5", (20,) * 4, 0.3, 100.0, *_EXPLICIT),
        Case("B6", (100,) * 4, 0.5, 5.0, *_EXPLICIT, patience=6.0),
        Case("B7", (5,) * 5, 1e-3, 1e9),
        Case("B8", (64, 32, 10), 0.1, 200.0, *_EXPLICIT, digits=True),
    )
}


def end_to_end(states: list[np.ndarray]) -> np.ndarray:
    """``W_h ⋯ W_1`` at all saved times, from the stacked weights of every layer."""
    product = states[0]
    for weights in states[1:]:
        product = weights @ product
    return product


def drift(states: list[np.ndarray]) -> float:
    """The largest entry of ``|C_i(t) − C_i(0)|`` over all saved times and layers.

    Relative to ``‖C‖ + ‖W‖²`` at the same time, in Frobenius norms over all layers.
    """
    laws = [
        np.swapaxes(b, 1, 2) @ b - a @ np.swapaxes(a, 1, 2) for a, b in itertools.pairwise(states)
    ]
    moved = np.max([np.abs(C - C[:1]).max(axis=(1, 2)) for C in laws], axis=0)
    size = np.sqrt(sum(np.sum(C**2, axis=(1, 2)) for C in laws))
    size = size + sum(np.sum(W**2, axis=(1, 2)) for W in states)
    return float(np.max(moved / size))
