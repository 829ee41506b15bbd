"""Exact reduction of hidden widths: the subspaces that gradient flow never leaves."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.network import LinearNetwork

__all__ = ["Lift", "compress"]

# Starts with exact subspaces leave them by up to 8 round-offs of a layer's norm, at any width.
_ROUND_OFFS = 32


class Lift(eqx.Module):
    """The way back from the small network of :func:`compress` to the full one.

    ``lift(small)`` is ``W_i = Q_i S_i Q_{i-1}ᵀ + Z_i``, with orthonormal ``Q_i`` and the part
    ``Z_i`` of the start that the flow does not move. End-to-end map and loss of ``small`` and
    ``lift(small)`` are the same, and ``C_i`` of the lift is ``Q_i C_i(small) Q_iᵀ`` plus the
    constant ``Z_{i+1}ᵀZ_{i+1} − Z_iZ_iᵀ``. A pytree: works under ``jax.jit`` and ``jax.vmap``.

    Attributes:
        frames: ``Q_0, …, Q_h``, ``Q_i`` of shape ``(widths[i], small_widths[i])``; None for an
            identity.
        frozen: ``Z_1, …, Z_h``, of the shapes of the full weights; None for zero.
        widths: of the full network, ``(d_0, …, d_h)``.
        small_widths: of the small one.
        reason: one sentence on what was found.
    """

    frames: tuple[Float[Array, "..."] | None, ...]
    frozen: tuple[Float[Array, "..."] | None, ...]
    widths: tuple[int, ...] = eqx.field(static=True)
    small_widths: tuple[int, ...] = eqx.field(static=True)
    reason: str = eqx.field(static=True)

    @property
    def reduced(self) -> bool:
        """Whether any layer became narrower."""
        return self.small_widths != self.widths

    def __call__(self, state: LinearNetwork, *, decayed: ArrayLike = 0.0) -> LinearNetwork:
        """The full network of a state of the small one.

        Args:
            state: a network of widths ``small_widths``, or stacked ones such as ``traj.states``,
                weights of shape ``(..., r_i, r_{i-1})``.
            decayed: with weight decay λ, ``λ (t − t_0)`` of the state: a number, or an array of
                the leading axes of stacked states. The frozen part shrinks by ``exp(−decayed)``.
                It matters only where ``frozen`` is not None throughout.

        Returns:
            weights of shape ``(..., d_i, d_{i-1})``.

        Raises:
            ValueError: ``state`` is no network of widths ``small_widths``.
        """
        if not isinstance(state, LinearNetwork):
            raise ArgumentError(
                "state", _checks.describe(state), "it must be a gradflow.LinearNetwork"
            )
        if state.widths != self.small_widths:
            raise ShapeError("state", f"widths {state.widths}", f"it must have {self.small_widths}")
        shrunk = jnp.exp(-jnp.asarray(decayed, state.weights[0].dtype))
        batch = state.weights[0].shape[:-2]
        if shrunk.shape not in ((), batch):
            raise ShapeError(
                "decayed", f"shape {shrunk.shape}", f"it must be a number or have shape {batch}"
            )
        shrunk = jnp.broadcast_to(shrunk, batch)[..., None, None]
        weights = []
        for i, small in enumerate(state.weights):
            before, after, rest = self.frames[i], self.frames[i + 1], self.frozen[i]
            full = small if before is None else small @ before.T
            full = full if after is None else after @ full
            if rest is not None:
                full = full + shrunk * rest.reshape((1,) * len(batch) + rest.shape)
            weights.append(full)
        return state.with_weights(tuple(weights))

    def __repr__(self) -> str:
        return f"Lift(widths {self.small_widths} -> {self.widths}; {self.reason})"


def compress(net: LinearNetwork, *, tol: float | None = None) -> tuple[LinearNetwork, Lift]:
    """A narrower network with exactly the same gradient flow, and the lift back from it.

    With ``V_0`` and ``V_h`` the whole input and output space, let the hidden ``V_i ⊂ R^{d_i}`` be
    the smallest subspaces with ``W_i V_{i-1} ⊂ V_i`` and ``W_iᵀ V_i ⊂ V_{i-1}``, and ``Q_i``
    orthonormal bases of them. Then

    .. math:: W_i = Q_i S_i Q_{i-1}^\\top + Z_i, \\qquad
       S_i = Q_i^\\top W_i Q_{i-1}, \\quad Z_i : V_{i-1}^\\perp \\to V_i^\\perp .

    The prefix ``W_{i-1} ⋯ W_1`` has its range in ``V_{i-1}`` and the suffix ``(W_h ⋯ W_{i+1})ᵀ``
    in ``V_i``, so that the gradient ``W_{i+1:h}ᵀ R W_{1:i-1}ᵀ`` is ``Q_i (·) Q_{i-1}ᵀ`` where
    ``(·)`` is the gradient of the small network. The curve ``Q_i S_i(t) Q_{i-1}ᵀ + Z_i`` of its
    flow hence keeps the form above and solves the full flow, which has one solution only.

    This holds for every loss of the end-to-end map, and for :func:`gradflow.descend` with any
    momentum; with weight decay ``Z_i`` decays as well (argument ``decayed`` of the lift). Two
    layers always reduce to ``d_1 ≤ d_0 + d_2``. Deeper ones do where layers act alike on all
    hidden directions (balanced starts, isometries, identities, aligned diagonals); for generic
    hidden layers ``V_i`` is everything and the network comes back as it is. ``lift.reason`` says
    which. Costs thin QR decompositions, ``O(Σ_i d_i r_i (d_{i-1} + d_{i+1} + r_i))``, and forms
    no ``(d_i, d_i)`` matrix.

    Args:
        net: a network with weights of shape ``(d_i, d_{i-1})``.
        tol: directions are left out of ``V_i`` if together they hold at most this share of the
            Frobenius norms of ``W_i`` and ``W_{i+1}``, in [0, 1). Default: 32 times the round-off
            of the weights' type. Where ``V_i`` takes several rounds between the layers to find,
            round-off adds up and hides it: ``tol=1e-12`` finds it, for an error of that size.

    Returns:
        the small network, weights ``S_i`` of shape ``(r_i, r_{i-1})``, ``r_0 = d_0``,
        ``r_h = d_h``, ``1 ≤ r_i ≤ d_i``; and the :class:`Lift`. ``lift(small)`` is ``net`` to
        round-off of each layer's norm. Where nothing shrinks, ``net`` and the identity.

    Raises:
        ValueError: ``net`` is no single network, or is traced (its small widths depend on its
            numbers); or ``tol`` out of range.
    """
    weights = _concrete_weights(net)
    widths, dtype = net.widths, net.weights[0].dtype
    if tol is None:
        tol = _ROUND_OFFS * float(jnp.finfo(dtype).eps)
    tol = _checks.real_scalar("tol", tol, minimum=0, below=1)
    norms = [_frobenius_norm(w) for w in weights]
    bases = _closed_subspaces(weights, norms, tol)
    small_widths = tuple(basis.shape[1] for basis in bases)
    reason = _reason(widths, small_widths)
    # A full subspace keeps its standard basis, so that its layer's numbers stay as they are.
    frames = [b if b.shape[1] < b.shape[0] else None for b in bases]
    small, frozen = [], []
    for i, w in enumerate(weights):
        before, after = frames[i], frames[i + 1]
        core = w if after is None else after.T @ w
        core = core if before is None else core @ before
        small.append(jnp.asarray(core, dtype))
        rest = None
        # The first and the last layer have nothing beside: input and output space are whole.
        if 0 < i < net.depth - 1 and not (before is None and after is None):
            rest = core if before is None else core @ before.T
            rest = w - (rest if after is None else after @ rest)
            rest = rest if _frobenius_norm(rest) > tol * norms[i] else None
        frozen.append(None if rest is None else jnp.asarray(rest, dtype))
    lift = Lift(
        frames=tuple(None if f is None else jnp.asarray(f, dtype) for f in frames),
        frozen=tuple(frozen),
        widths=widths,
        small_widths=small_widths,
        reason=reason,
    )
    return (net.with_weights(tuple(small)) if lift.reduced else net), lift


def _concrete_weights(net: Any) -> list[np.ndarray]:
    """The weights on the host, in double precision."""
    if not isinstance(net, LinearNetwork):
        raise ArgumentError("net", _checks.describe(net), "it must be a gradflow.LinearNetwork")
    if not _checks.is_concrete(net):
        raise ArgumentError(
            "net",
            "a traced network",
            "the small widths depend on its numbers: call compress outside jax.jit and jax.vmap",
        )
    if net.weights[0].ndim != 2:
        raise ArgumentError(
            "net", f"a batch {net!r}", "it must be one network: their small widths may differ"
        )
    return [
        np.asarray(_checks.real_array(f"net.weights[{i}]", w)).astype(float, copy=False)
        for i, w in enumerate(net.weights)
    ]


def _frobenius_norm(matrix: np.ndarray) -> float:
    """``‖·‖_F`` without overflow or underflow of the squares."""
    largest = float(np.abs(matrix).max())
    return largest * float(np.sqrt(np.sum((matrix / largest) ** 2))) if largest > 0 else 0.0


def _closed_subspaces(
    weights: list[np.ndarray], norms: list[float], tol: float
) -> list[np.ndarray]:
    """Orthonormal bases of ``V_0, …, V_h``, grown by block Krylov steps until they are closed.

    Directions are taken strongest first, over all layers: a weak one is known to round-off over
    its share only, and may be one that arrives strongly from elsewhere.
    """
    widths = [weights[0].shape[1], *(w.shape[0] for w in weights)]
    last = len(weights)
    bases = [np.eye(d, d if i in (0, last) else 0) for i, d in enumerate(widths)]
    waiting = [np.zeros((d, 0)) for d in widths]

    def carry(i: int, block: np.ndarray | None = None) -> None:
        for j, matrix, norm in (
            (i - 1, weights[i - 1].T, norms[i - 1]),
            (i + 1, weights[i % last], norms[i % last]),
        ):
            if 0 < j < last and norm > 0:
                arrived = (matrix if block is None else matrix @ block) / norm
                waiting[j] = np.hstack([waiting[j], _without(bases[j], arrived)])

    for end in (0, last):
        carry(end)
    while any(columns.shape[1] for columns in waiting):
        i = max(range(1, last), key=lambda j: _largest_column(waiting[j]))
        taken, waiting[i] = _strongest_directions(bases[i], waiting[i], tol)
        bases[i] = np.hstack([bases[i], taken])
        if taken.shape[1]:
            carry(i, taken)
    # A layer that no signal reaches stays as it is; one dead unit keeps the network a network.
    return [basis if basis.shape[1] else np.eye(len(basis), 1) for basis in bases]


def _largest_column(columns: np.ndarray) -> float:
    """The largest Euclidean norm of a column; −1 if there is none."""
    return float(np.linalg.norm(columns, axis=0).max(initial=-1.0))


def _strongest_directions(
    basis: np.ndarray, columns: np.ndarray, tol: float
) -> tuple[np.ndarray, np.ndarray]:
    """Orthonormal directions of ``columns`` beside ``basis``, and the columns' part left over.

    Those down to a hundredth of the strongest; what holds less than ``tol`` together is dropped.
    """
    # Pivoted QR rather than the SVD, whose vectors are tens of round-offs off among equal values.
    frame, triangle = _pivoted_qr(columns)
    beyond = np.sqrt(np.cumsum(np.sum(triangle**2, axis=1)[::-1])[::-1])
    # Round-off may seem to need more directions than there are.
    kept = min(int((beyond > tol).sum()), basis.shape[0] - basis.shape[1])
    sizes = np.abs(np.diag(triangle))
    taken = int((sizes[:kept] >= 0.01 * sizes[0]).sum())
    directions, rest = frame[:, :taken], columns[:, :0]
    if basis.shape[1] and taken:
        # A weak direction inherits round-off of the strong ones it was freed from.
        directions = _without(basis, directions)
        directions = scipy.linalg.qr(directions, mode="economic", check_finite=False)[0]
    if taken < kept:
        rest = frame[:, taken:kept] @ triangle[taken:kept]
    return directions, rest


def _pivoted_qr(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``Q, R`` with ``Q R`` the columns in another order, ``|R_kk|`` falling."""
    rows, count = columns.shape
    # Tall blocks in pieces, small enough for one thread each: threads that wait for one another
    # take a hundred times longer than this on a busy machine.
    size = 4096 // count
    pieces = rows // size if size > 2 * count else 0
    if pieces < 2:
        frame, triangle = scipy.linalg.qr(columns, mode="economic", check_finite=False)
        inner, triangle, _ = scipy.linalg.qr(
            triangle, mode="economic", pivoting=True, check_finite=False
        )
        return frame @ inner, triangle
    cut = pieces * size
    frames, triangles = np.linalg.qr(columns[:cut].reshape(pieces, size, count))
    inner, triangle = _pivoted_qr(np.vstack([triangles.reshape(-1, count), columns[cut:]]))
    top = frames @ inner[: pieces * count].reshape(pieces, count, count)
    return np.vstack([top.reshape(cut, count), inner[pieces * count :]]), triangle


def _without(basis: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """``columns`` minus their part in ``basis``; twice, for orthogonality to round-off."""
    for _ in range(2 if basis.shape[1] else 0):
        columns = columns - basis @ (basis.T @ columns)
    return columns


def _reason(widths: tuple[int, ...], small: tuple[int, ...]) -> str:
    """What was found, in one sentence."""
    hidden = range(1, len(widths) - 1)
    if not hidden:
        return "a single layer has no hidden width to reduce"
    ends = widths[0] + widths[-1]
    full = [i for i in hidden if small[i] == widths[i]]
    wide = [i for i in full if widths[i] > ends]
    if small != widths:
        kept, there = sum(small[i] for i in hidden), sum(widths[i] for i in hidden)
        text = f"the flow stays in {kept} of {there} hidden directions"
    elif not wide:
        return f"no hidden layer is wider than d_0 + d_h = {ends}, and the flow fills all of them"
    else:
        text = "nothing shrinks"
    if wide:
        i = max(wide, key=lambda i: widths[i])
        text += (
            f"; hidden layer {i} needs all its {widths[i]} directions, {widths[i] - ends} beyond "
            f"the d_0 + d_h = {ends} that input and output fill, because W_{i} and W_{i + 1} mix "
            "them with the rest (starts with balanced or isometric hidden layers reduce)"
        )
    return text
