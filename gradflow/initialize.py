"""Families of starts, each with the guarantee that theory asks of it.

All return a :class:`gradflow.LinearNetwork`. Random ones take a ``jax.random`` key (or a
whole-number seed) and work under ``jax.vmap`` over keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from gradflow import _checks
from gradflow.errors import ArgumentError, BalanceError, ShapeError
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = [
    "balanced",
    "decoupled",
    "delta_balanced",
    "from_product",
    "gaussian",
    "identity",
    "lambda_balanced",
    "orthogonal",
]


def gaussian(key: Any, widths: Iterable[int], scale: float) -> LinearNetwork:
    """Independent entries ``N(0, scale²/d_{i-1})``.

    Args:
        key: random key or seed.
        widths: ``(d_0, …, d_h)``.
        scale: standard deviation of a layer's output for an input of unit variance, ≥ 0.

    Guarantees: nothing beyond the distribution; generically no ``C_i`` vanishes.

    Raises:
        ValueError: no key, widths below 1 or fewer than two of them, or ``scale < 0``.
    """
    key, widths = _checks.random_key("key", key), _checks.layer_widths("widths", widths)
    scale = _checks.real_scalar("scale", scale, minimum=0)
    return _network(
        scale * g / np.sqrt(d_in)
        for g, d_in in zip(_normal_layers(key, widths), widths[:-1], strict=True)
    )


def orthogonal(key: Any, widths: Iterable[int], scale: float) -> LinearNetwork:
    """Every layer ``scale`` times a Haar-random (partial) isometry.

    Args:
        key: random key or seed.
        widths: ``(d_0, …, d_h)``.
        scale: every singular value of every layer, ≥ 0.

    Guarantees: ``W_iᵀW_i = scale² I`` where ``d_i ≥ d_{i-1}``, ``W_iW_iᵀ = scale² I`` where
    ``d_i ≤ d_{i-1}``. Hence ``C_i = 0`` at every hidden layer with
    ``d_{i-1} ≥ d_i ≤ d_{i+1}``; elsewhere use :func:`balanced`.

    Raises:
        ValueError: no key, widths below 1 or fewer than two of them, or ``scale < 0``.
    """
    key, widths = _checks.random_key("key", key), _checks.layer_widths("widths", widths)
    scale = _checks.real_scalar("scale", scale, minimum=0)
    keys = jax.random.split(key, len(widths) - 1)
    layers = []
    for k, d_in, d_out in zip(keys, widths[:-1], widths[1:], strict=True):
        frame = jax.random.orthogonal(k, max(d_in, d_out))
        layers.append(scale * frame[:d_out, :d_in])
    return _network(layers)


def balanced(key: Any, widths: Iterable[int], scale: float) -> LinearNetwork:
    """A 0-balanced start with equal singular values in random directions.

    Args:
        key: random key or seed.
        widths: ``(d_0, …, d_h)``.
        scale: the ``min(widths)`` non-zero singular values of every layer, ≥ 0.

    Guarantees: every ``C_i = 0`` to round-off, and the end-to-end map has ``min(widths)``
    singular values ``scale^h`` in Haar-random singular directions.

    Raises:
        ValueError: no key, widths below 1 or fewer than two of them, or ``scale < 0``.
    """
    key, widths = _checks.random_key("key", key), _checks.layer_widths("widths", widths)
    scale = _checks.real_scalar("scale", scale, minimum=0)
    return _network(_balanced_layers(key, widths, scale))


def from_product(
    W: ArrayLike | Sequence, widths: Iterable[int], *, key: Any = None
) -> LinearNetwork:
    """The balanced factorisation of a given end-to-end map.

    Args:
        W: the wanted ``W_{1:h}``, shape ``(d_h, d_0)``, of rank at most ``min(widths)``.
        widths: ``(d_0, …, d_h)``.
        key: random key or seed for Haar-random hidden bases; the standard bases if left out.

    Guarantees: ``W_h ⋯ W_1 = W`` and every ``C_i = 0``, both to round-off; every layer has the
    singular values ``σ_r(W)^{1/h}``.

    Raises:
        ValueError: the rank of ``W`` exceeds the narrowest layer.
    """
    widths = _checks.layer_widths("widths", widths)
    W = _checks.real_array("W", W, ndim=2)
    if W.shape != (widths[-1], widths[0]):
        raise ShapeError(
            "W", f"shape {W.shape}", f"widths {widths} need ({widths[-1]}, {widths[0]})"
        )
    depth, rank = len(widths) - 1, min(widths)
    U, values, Vt = jnp.linalg.svd(W, full_matrices=False)
    if _checks.is_concrete(values) and rank < len(values):
        lost = float(values[rank])
        if lost > float(values[0]) * max(W.shape) * float(jnp.finfo(W.dtype).eps):
            raise ArgumentError(
                "W",
                f"singular value number {rank + 1} equal to {lost:.3g}",
                f"its rank must be at most the narrowest width, {rank}",
            )
    if key is None:
        hidden = [jnp.eye(d, dtype=W.dtype) for d in widths[1:-1]]
    else:
        keys = jax.random.split(_checks.random_key("key", key), max(depth - 1, 1))
        hidden = [
            jax.random.orthogonal(k, d, dtype=W.dtype)
            for k, d in zip(keys, widths[1:-1], strict=False)
        ]
    bases = [Vt[:rank].T, *(q[:, :rank] for q in hidden), U[:, :rank]]
    strengths = values[:rank] ** (1.0 / depth)
    return _network((bases[i + 1] * strengths[None, :]) @ bases[i].T for i in range(depth))


def lambda_balanced(
    key: Any, widths: Iterable[int], scale: float, lam: float | Sequence[float]
) -> LinearNetwork:
    """A λ-balanced start, ``C_i = W_{i+1}ᵀW_{i+1} − W_iW_iᵀ = λ_i I``, in random directions.

    Args:
        key: random key or seed.
        widths: ``(d_0, …, d_h)``.
        scale: the end-to-end map has ``min(widths)`` singular values ``scale^h`` (where the
            widths leave them free), ≥ 0.
        lam: λ, one number for all hidden layers, or one for each.

    Guarantees: ``C_i = λ_i I`` to round-off. For two layers the layer spectra are
    ``√((√(λ²+4s²) ± λ)/2)`` with ``s = scale²`` (Dominé et al. 2025, arXiv 2409.14623).

    Raises:
        BalanceError: no such weights exist for these widths; for two layers λ > 0 needs
            ``d_1 ≤ d_2`` and λ < 0 needs ``d_1 ≤ d_0``. The message names the layer.
    """
    key, widths = _checks.random_key("key", key), _checks.layer_widths("widths", widths)
    scale = _checks.real_scalar("scale", scale, minimum=0)
    hidden = len(widths) - 2
    if np.ndim(lam) > 1 or (np.ndim(lam) == 1 and len(lam) != hidden):  # type: ignore[arg-type]
        raise ShapeError("lam", _checks.describe(lam), f"it must be a number or {hidden} numbers")
    each = [lam] * hidden if np.ndim(lam) == 0 else list(lam)  # type: ignore[arg-type]
    lams = [_checks.real_scalar("lam", value) for value in each]
    diagonals = _chain_diagonals(widths, float(scale), lams)
    keys = jax.random.split(key, len(widths))
    bases = [jax.random.orthogonal(k, d) for k, d in zip(keys, widths, strict=True)]
    return _network(
        (bases[i + 1][:, : len(a)] * jnp.asarray(a)[None, :]) @ bases[i][:, : len(a)].T
        for i, a in enumerate(diagonals)
    )


def delta_balanced(key: Any, widths: Iterable[int], scale: float, delta: float) -> LinearNetwork:
    """A start at a set distance from balance: a balanced one plus a random perturbation.

    Args:
        key: random key or seed.
        widths: ``(d_0, …, d_h)``.
        scale: singular values of the layers of the balanced part, as in :func:`balanced`.
        delta: the wanted ``max_i ‖C_i‖_F``, ≥ 0.

    Guarantees: ``max_i ‖C_i‖_F = delta`` to round-off of the weights.

    Raises:
        ValueError: ``delta > 0`` for a single layer, which has no ``C_i``.
    """
    key, widths = _checks.random_key("key", key), _checks.layer_widths("widths", widths)
    scale = _checks.real_scalar("scale", scale, minimum=0)
    delta = _checks.real_scalar("delta", delta, minimum=0)
    if len(widths) == 2 and _checks.is_concrete(delta) and delta > 0:
        raise BalanceError("delta", f"{delta}", "one layer has no C_i: it must be 0 for depth 1")
    key_base, key_shift = jax.random.split(key)
    base = _balanced_layers(key_base, widths, scale)
    if len(widths) == 2:
        return _network(base)
    shift = [
        g / np.sqrt(d_in)
        for g, d_in in zip(_normal_layers(key_shift, widths), widths[:-1], strict=True)
    ]
    size = _shift_size(base, shift, delta)
    return _network(b + size * g for b, g in zip(base, shift, strict=True))


def decoupled(
    problem: Problem, widths: Iterable[int], scales: ArrayLike | Sequence
) -> LinearNetwork:
    """A start aligned with the data: every layer diagonal in shared singular bases.

    ``W_1 = D_1 Vᵀ``, ``W_i = D_i``, ``W_h = U D_h`` with the singular bases ``U, V`` of the
    target and ``D_i`` diagonal; the modes then evolve as independent scalar chains.

    Args:
        problem: a quadratic problem; its input covariance, if any, must be diagonal in ``V``.
        widths: ``(d_0, …, d_h)``.
        scales: diagonal entries of the layers: one number, one per mode (r,), or one per layer
            and mode (h, r), with ``r ≤ min(widths)`` modes (missing ones are 0).

    Guarantees: ``Uᵀ W_{1:h} V`` is diagonal with entries ``Π_i scales[i]``.

    Raises:
        ValueError: more modes than the narrowest layer holds, widths that do not fit, or an
            input covariance that couples the modes (with by how much).
    """
    widths = _checks.layer_widths("widths", widths)
    if not isinstance(problem, Problem):
        raise ArgumentError("problem", _checks.describe(problem), "it must be a gradflow.Problem")
    problem.check_widths(widths)
    scales = _checks.real_array("scales", scales)
    depth, modes = len(widths) - 1, min(widths)
    if scales.ndim > 2 or (scales.ndim == 2 and scales.shape[0] != depth):
        raise ShapeError(
            "scales",
            f"shape {scales.shape}",
            f"it must be (), (r,) or ({depth}, r) for {depth} layers",
        )
    if scales.ndim > 0 and scales.shape[-1] > modes:
        raise ShapeError(
            "scales", f"{scales.shape[-1]} modes", f"the narrowest layer holds {modes}"
        )
    canonical, U, V = problem.canonical()
    entries = jnp.broadcast_to(scales, (depth, modes if scales.ndim == 0 else scales.shape[-1]))
    rank = entries.shape[1]
    if canonical.input_covariance is not None:
        coupling = canonical.input_covariance - jnp.diag(jnp.diag(canonical.input_covariance))
        size = float(jnp.abs(coupling[:rank]).max())
        if size > 1e-8 * float(jnp.abs(canonical.input_covariance).max()):
            raise ArgumentError(
                "problem",
                f"an input covariance that couples modes by {size:.3g}",
                "its modes do not decouple: whiten the inputs, Problem.from_data(..., whiten=True)",
            )
    layers = []
    for i in range(depth):
        left = U[:, :rank] if i == depth - 1 else jnp.eye(widths[i + 1], rank, dtype=U.dtype)
        right = V[:, :rank] if i == 0 else jnp.eye(widths[i], rank, dtype=V.dtype)
        layers.append((left * entries[i][None, :]) @ right.T)
    return _network(layers)


def identity(widths: Iterable[int]) -> LinearNetwork:
    """The residual start: every layer the identity (1 on the main diagonal, 0 elsewhere).

    Args:
        widths: ``(d_0, …, d_h)``.

    Guarantees: where all widths are equal the end-to-end map is the identity and every
    ``C_i = 0``.

    Raises:
        ValueError: widths below 1 or fewer than two of them.
    """
    widths = _checks.layer_widths("widths", widths)
    return _network(jnp.eye(d_out, d_in) for d_in, d_out in itertools.pairwise(widths))


def _network(layers: Iterable[Array]) -> LinearNetwork:
    return LinearNetwork(list(layers))


def _normal_layers(key: Array, widths: Sequence[int]) -> list[Array]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        jax.random.normal(k, (d_out, d_in))
        for k, d_in, d_out in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def _balanced_layers(key: Array, widths: Sequence[int], scale: Any) -> list[Array]:
    rank = min(widths)
    keys = jax.random.split(key, len(widths))
    frames = [jax.random.orthogonal(k, d)[:, :rank] for k, d in zip(keys, widths, strict=True)]
    return [scale * frames[i + 1] @ frames[i].T for i in range(len(widths) - 1)]


def _chain_diagonals(
    widths: tuple[int, ...], scale: float, lams: Sequence[float]
) -> list[np.ndarray]:
    """Diagonal entries of aligned layers with ``a_{i+1}² − a_i² = λ_i`` on every coordinate.

    Coordinate k of hidden layer i carries the condition if ``k < d_i``; an entry outside the
    layer's matrix counts as 0. A run of layers that is cut off at a side has its entries forced
    from there; a coordinate that lives in all layers has one free number, set by the product.
    """
    depth = len(widths) - 1
    squares = [np.zeros(min(widths[i], widths[i + 1])) for i in range(depth)]
    for k in range(max(widths)):
        alive = [k < d for d in widths]
        node = 0
        while node <= depth:
            if not alive[node]:
                node += 1
                continue
            last = node
            while last + 1 <= depth and alive[last + 1]:
                last += 1
            _fill_run(squares, k, node, last, depth, scale, lams, widths)
            node = last + 1
    return [np.sqrt(square) for square in squares]


def _fill_run(squares, k, first, last, depth, scale, lams, widths) -> None:
    """Fill coordinate ``k`` of the layers between the node blocks ``first … last``."""
    # Layer i (0-based) joins nodes i and i+1, and hidden node i carries lams[i-1].
    if first == 0 and last == depth:
        steps = np.concatenate([[0.0], np.cumsum(lams)])
        for i, square in enumerate(_squares_with_scale(steps, scale)):
            squares[i][k] = square
        return
    carried = [lams[node - 1] for node in range(max(first, 1), min(last, depth - 1) + 1)]
    # The square of the entry before the run's first layer: 0 if a smaller layer cuts it off
    # there, otherwise what makes the entry after its last layer 0.
    entry = 0.0 if first > 0 else -float(np.sum(carried))
    entries = [entry]
    for lam in carried:
        entries.append(entries[-1] + lam)
    slack = 64 * np.finfo(float).eps * (1 + float(np.abs(lams).max(initial=0.0)))
    cut_both = first > 0 and last < depth
    worst = min(entries)
    if worst < -slack or (cut_both and abs(entries[-1]) > slack):
        narrow = first - 1 if first > 0 else last + 1
        size = abs(entries[-1]) if cut_both else -worst
        raise BalanceError(
            "lam",
            f"{tuple(lams)} for widths {widths}",
            f"no weights satisfy it: hidden unit {k + 1} of layer(s) {max(first, 1)}.."
            f"{min(last, depth - 1)} is cut off by layer {narrow} of width {widths[narrow]} and "
            f"would need a squared singular value wrong by {size:.3g}. For two layers lam > 0 "
            "needs d_1 <= d_2 and lam < 0 needs d_1 <= d_0: change the sign of lam or the widths",
        )
    offset = 1 if first > 0 else 0
    for i in range(first, last):
        squares[i][k] = max(entries[i - first + offset], 0.0)


def _squares_with_scale(steps: np.ndarray, scale: float) -> np.ndarray:
    """Squares ``x + steps ≥ 0`` whose geometric mean is ``scale²``."""
    from scipy.optimize import brentq  # SciPy's optimisers are slow to import

    # x = shift − min(steps), shift ≥ 0: the smallest square is the shift itself, so that a
    # tiny scale is met to full relative accuracy.
    raised = steps - steps.min()
    if scale == 0:
        return raised
    wanted = 2 * len(steps) * np.log(scale)

    def excess(log_shift: float) -> float:
        return float(np.sum(np.log(raised + np.exp(log_shift)))) - wanted

    # All squares are at least the shift, and at most shift + max(raised).
    high = wanted / len(steps)
    low = wanted - (len(steps) - 1) * np.log(max(raised.max() + np.exp(high), 1e-300))
    low = min(low, high) - 1.0
    return raised + np.exp(brentq(excess, low, high + 1.0, xtol=1e-15, rtol=1e-15))


def _shift_size(base: list[Array], shift: list[Array], delta: Any) -> Array:
    """An ε ≥ 0 at which ``base + ε·shift`` has ``max_i ‖C_i‖_F = delta``.

    With a balanced base, ``C_i = ε L_i + ε² Q_i``, so every ``‖C_i‖²`` is a quartic in ε that
    starts at 0 and grows without bound.
    """
    coefficients = []
    for i in range(len(base) - 1):
        cross = base[i + 1].T @ shift[i + 1] - shift[i] @ base[i].T
        linear = cross + cross.T
        quadratic = shift[i + 1].T @ shift[i + 1] - shift[i] @ shift[i].T
        coefficients.append(
            jnp.stack([jnp.sum(linear**2), 2 * jnp.sum(linear * quadratic), jnp.sum(quadratic**2)])
        )
    c2, c3, c4 = jnp.stack(coefficients).T

    def imbalance(size):
        return size * jnp.sqrt(jnp.max((c4 * size + c3) * size + c2))

    upper = jnp.where(delta > 0, 1.0, 0.0)
    upper = jax.lax.while_loop(lambda size: imbalance(size) < delta, lambda size: 2 * size, upper)

    # Bisection down to neighbouring floats; it also copes with a quartic that is not monotone.
    def halve(ends):
        left, right = ends
        middle = 0.5 * (left + right)
        below = imbalance(middle) < delta
        return jnp.where(below, middle, left), jnp.where(below, right, middle)

    def apart(ends):
        middle = 0.5 * (ends[0] + ends[1])
        return (ends[0] < middle) & (middle < ends[1])

    return jax.lax.while_loop(apart, halve, (jnp.zeros_like(upper), upper))[1]
