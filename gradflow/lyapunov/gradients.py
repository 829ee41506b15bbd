"""Backpropagated norms through depth, against what Lyapunov exponents predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.lyapunov._frames import generator
from gradflow.lyapunov.ensembles import AbstractEnsemble, Finite, check_ensemble
from gradflow.lyapunov.layers import layer_weights
from gradflow.lyapunov.spectrum import exponents

__all__ = ["GradientNorms", "gradient_norms"]


class GradientNorms(NamedTuple):
    """``|∂ℓ/∂x_i|`` for the activations of all layers, input first.

    Attributes:
        layers: 0 … h, ``(h + 1,)``.
        log_norms: mean over output gradients of ``log |δ_i|``, ``(h + 1,)``; ``δ_h`` has norm 1 if
            drawn.
        spread: standard deviation of it over output gradients, ``(h + 1,)``.
        rate: slope of ``log_norms`` per layer on the way back, by least squares.
        predicted_rate: γ_1 of products of the layers' law, ``nan`` where layers are not square.
        predicted_error: its standard error.
        predicted: ``log |δ_h| + (h − i) γ_1``, ``(h + 1,)``.
        fluctuation: what ``log |δ_i|`` of independent layers deviates from that: standard
            deviation per square root of the number of layers passed.
    """

    layers: np.ndarray
    log_norms: np.ndarray
    spread: np.ndarray
    rate: float
    predicted_rate: float
    predicted_error: float
    predicted: np.ndarray
    fluctuation: float

    def __repr__(self) -> str:
        return (
            f"GradientNorms of {len(self.layers) - 1} layers: log norm {self.log_norms[-1]:.3g} at "
            f"the output, {self.log_norms[0]:.4g} at the input\n"
            f"  rate {self.rate:.4g} per layer, predicted {self.predicted_rate:.4g} ± "
            f"{self.predicted_error:.1g}"
        )


def gradient_norms(
    net: Any,
    *,
    shortcut: Any = None,
    output_gradient: Any = None,
    ensemble: AbstractEnsemble | None = None,
    at: Any = None,
    probes: int = 256,
    steps: int = 2000,
    key: Any = 0,
) -> Any:
    """Norms of gradients with respect to activations, ``δ_{i−1} = M_iᵀ δ_i``, through depth.

    ``M_i = W_i`` for a plain network; with shortcuts ``M_i = D_i + W_i``, the weights being those
    of the branches.

    Args:
        net: a :class:`gradflow.LinearNetwork`, or a run of one with stored states.
        shortcut: None; ``"identity"``; or D, a matrix ``(d, d)`` for all layers (such as
            :func:`delta_operator`) or ``(h, d, d)``, one for each.
        output_gradient: ``δ_h``, shape ``(d_h,)`` or ``(d_h, m)``; random directions if left out.
        ensemble: the law that the prediction is made from; if left out, independent draws from the
            layers ``M_i`` themselves.
        at: of a run, which saved time or times; the last if left out.
        probes: number of random directions, at least 1.
        steps: of the sampling of the prediction.
        key: random key or seed.

    Returns:
        a :class:`GradientNorms`, or a list of them if ``at`` is a sequence.

    Raises:
        ValueError: no network, shortcuts or gradients that do not fit, or a zero output gradient.
    """
    if at is not None and isinstance(at, (Sequence, np.ndarray)):
        options: dict[str, Any] = {"shortcut": shortcut, "output_gradient": output_gradient}
        options |= {"ensemble": ensemble, "probes": probes, "steps": steps, "key": key}
        return [gradient_norms(net, at=int(i), **options) for i in at]
    layers = _with_shortcuts([np.asarray(w, float) for w in layer_weights(net, at)], shortcut)
    key = _checks.random_key("key", key)
    delta = _output_gradients(layers[-1].shape[0], output_gradient, probes, key)
    h = len(layers)
    logs = np.empty((h + 1, delta.shape[1]))
    size = np.linalg.norm(delta, axis=0)
    grown = np.log(size)
    logs[h], delta = grown, delta / size
    for i in range(h - 1, -1, -1):
        delta = layers[i].T @ delta
        size = np.linalg.norm(delta, axis=0)
        with np.errstate(divide="ignore"):
            grown = grown + np.log(size)
        logs[i], delta = grown, delta / np.where(size > 0, size, 1.0)
    means = logs.mean(axis=1)
    finite = np.isfinite(means)
    # Where norms are exactly 0 their logarithms have no spread.
    spread = np.where(finite, np.where(finite[:, None], logs, 0.0).std(axis=1), 0.0)
    passed = h - np.arange(h + 1)
    rate = -np.inf if not finite.all() else float(np.polyfit(passed, means, 1)[0])
    gamma, error, fluctuation = _prediction(layers, ensemble, steps, key)
    with np.errstate(invalid="ignore"):
        predicted = np.where(passed == 0, means[h], means[h] + passed * gamma)
    return GradientNorms(
        np.arange(h + 1), means, spread, rate, gamma, error, predicted, fluctuation
    )


def _with_shortcuts(weights: list[np.ndarray], shortcut: Any) -> list[np.ndarray]:
    if shortcut is None:
        return weights
    if isinstance(shortcut, str):
        _checks.choice("shortcut", shortcut, ("identity",), ", a matrix, or one for each layer")
        for i, w in enumerate(weights):
            if w.shape[0] != w.shape[1]:
                raise ShapeError(
                    "shortcut", f"'identity' for W_{i + 1} of shape {w.shape}", "it must be square"
                )
        return [np.eye(w.shape[0]) + w for w in weights]
    if isinstance(shortcut, (list, tuple)):
        given = [
            np.asarray(_checks.real_array(f"shortcut[{i}]", D)) for i, D in enumerate(shortcut)
        ]
        if given and given[0].ndim == 1:  # one matrix as nested lists
            given = [np.stack(given)] * len(weights)
    else:
        array = np.asarray(_checks.real_array("shortcut", shortcut))
        given = list(array) if array.ndim == 3 else [array] * len(weights)
    if len(given) != len(weights):
        raise ShapeError("shortcut", f"{len(given)} matrices", f"there are {len(weights)} layers")
    for i, (D, w) in enumerate(zip(given, weights, strict=True)):
        if D.shape != w.shape:
            raise ShapeError("shortcut", f"shape {D.shape}", f"it must be {w.shape} as W_{i + 1}")
    return [D + w for D, w in zip(given, weights, strict=True)]


def _output_gradients(d: int, given: Any, probes: int, key: Any) -> np.ndarray:
    if given is None:
        probes = _checks.whole_number("probes", probes, 1)
        drawn = generator(key).standard_normal((d, probes))
        return drawn / np.linalg.norm(drawn, axis=0)
    delta = np.asarray(_checks.real_array("output_gradient", given), float)
    delta = delta[:, None] if delta.ndim == 1 else delta
    if delta.ndim != 2 or delta.shape[0] != d:
        raise ShapeError("output_gradient", f"shape {np.shape(given)}", f"it must have {d} rows")
    if (np.linalg.norm(delta, axis=0) == 0).any():
        raise ArgumentError("output_gradient", "a vector of norm 0", "its norm must be > 0")
    return delta


def _prediction(
    layers: list[np.ndarray], ensemble: AbstractEnsemble | None, steps: int, key: Any
) -> tuple[float, float, float]:
    """γ_1, its standard error, and the spread per square root of a layer."""
    if ensemble is None:
        square = [M for M in layers if M.shape[0] == M.shape[1]]
        if not square or len({M.shape for M in square}) > 1:
            return float("nan"), float("nan"), float("nan")
        ensemble = Finite(np.stack(square))
    check_ensemble("ensemble", ensemble)
    run = exponents(key, ensemble, steps, 1)
    means = np.asarray(run.chain_means[:, 0], float)
    known = len(means) > 1 and np.isfinite(means).all()
    fluctuation = float(np.std(means, ddof=1) * np.sqrt(run.steps)) if known else float("nan")
    return float(run.exponents[0]), float(run.standard_error[0]), fluctuation
