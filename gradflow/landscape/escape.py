"""Ways out of a saddle: directions, their order, and the stable and unstable sets at a point."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.landscape import _chain, hessian
from gradflow.landscape.classify import Pivots, with_pivots
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["LocalSets", "escape_direction", "local_sets", "loss_change"]


def escape_direction(problem: Problem, net: LinearNetwork) -> tuple[LinearNetwork, int]:
    """A direction along which the loss falls from a saddle, and at which order.

    At a strict saddle the eigenvector of the most negative Hessian eigenvalue, order 2. At a
    non-strict one a straight line ``W + τV`` that moves the fewest layers that can be joined by
    what the others leave open, one rank-one block each beside the learnt modes: the first term of
    the loss that is not zero is then of the order of their number, ``−c τ^k``. At the origin these
    are all h layers. Where the gradient does not vanish, minus the gradient, order 1.

    Args:
        problem: a loss with a target.
        net: a concrete network; next to a critical point is enough.

    Returns:
        ``(V, order)``: V a network of the same widths holding the perturbation, of unit Frobenius
        norm over all layers. Verify it by :func:`loss_change`.

    Raises:
        ValueError: at a global minimum, a problem without a target, or a network that does not
            fit.
    """
    verdict, moves = with_pivots(problem, net)
    chain = _chain.Chain.of(net)
    if moves is None:
        slope = _chain.gradient(chain, _chain.residual(problem, chain.product))
        return _direction(net, [-g for g in slope]), 1
    if verdict.theory == "global_minimum":
        raise ArgumentError(
            "net", f"a global minimum (loss {verdict.value:.6g})", "no direction descends from it"
        )
    if verdict.theory == "strict_saddle":
        return _stacked(net, _lowest_vector(problem, net, chain)), 2
    modes = _chain.modes_of(problem)
    layers = joined_layers(moves, [np.zeros(w.shape) for w in chain.weights])
    layers[0] = layers[0] @ modes.inverse_root
    return _direction(net, layers), len(moves.path)


def _lowest_vector(problem: Problem, net: LinearNetwork, chain: _chain.Chain) -> np.ndarray:
    if chain.parameters <= hessian.DENSE_LIMIT:
        matrix = hessian.dense(problem, chain)
        return scipy.linalg.eigh(matrix, subset_by_index=[0, 0])[1][:, 0]
    return hessian.lowest(problem, net, 1)[1][:, 0]


def _stacked(net: LinearNetwork, vectors: np.ndarray) -> LinearNetwork:
    """Host vectors of all parameters, on the last axis, as a network or a stack of them."""
    parts = np.split(vectors, np.cumsum([w.size for w in net.weights])[:-1], axis=-1)
    shapes = [(*vectors.shape[:-1], *w.shape) for w in net.weights]
    dtype = net.weights[0].dtype
    shaped = (p.reshape(shape) for p, shape in zip(parts, shapes, strict=True))
    return net.with_weights(tuple(jnp.asarray(p, dtype) for p in shaped))


def joined_layers(moves: Pivots, layers: list[np.ndarray]) -> list[np.ndarray]:
    """One rank-one block in each layer of the path, so that their product meets the residual."""
    rest, path = moves.split.rest, moves.path
    free = [np.eye(len(P)) - P for P in moves.split.learnt]
    gain = rest.after(path[-1]).T @ moves.split.residual @ rest.before(path[0]).T
    left, _, right = np.linalg.svd(gain)
    reads, writes = {path[0]: right[0]}, {path[-1]: left[:, 0]}
    for lower, upper in itertools.pairwise(path):
        out, _, into = np.linalg.svd(rest.between(upper, lower))
        reads[upper], writes[lower] = out[:, 0], into[0]
    for layer in path:
        block = free[layer] @ np.outer(writes[layer], reads[layer]) @ free[layer - 1]
        layers[layer - 1] = block / np.linalg.norm(block)
    return layers


def _direction(net: LinearNetwork, layers: list[np.ndarray]) -> LinearNetwork:
    size, dtype = _chain.norm(layers), net.weights[0].dtype
    return net.with_weights(tuple(jnp.asarray(layer / size, dtype) for layer in layers))


def loss_change(
    problem: Problem,
    net: LinearNetwork,
    V: LinearNetwork,
    taus: ArrayLike | Sequence[float],
) -> Float[Array, " taus"]:
    """``L(W + τV) − L(W)`` for every τ, without subtracting the two losses.

    The change of the map is carried through the layers, ``D_l = (W_l + τV_l) D_{l-1} +
    τV_l W_{1:l-1}``, so that a fall of order τ^6 is seen at τ = 10^{-3} in float64.

    Args:
        problem: the loss; one given by a function is subtracted after all.
        net: where, with weights W.
        V: the direction, a network of the same widths.
        taus: positions along it, shape ``(taus,)``.

    Raises:
        ValueError: widths that do not fit, or a network with entries that are not finite.
    """
    net = _chain.fitting(problem, net)
    V = _chain.same_layers("V", net, V)
    taus = _checks.real_array("taus", taus, ndim=1)
    return _changes(problem, net, V, taus.astype(net.weights[0].dtype))


@eqx.filter_jit
def _changes(problem: Problem, net: LinearNetwork, V: LinearNetwork, taus: Array) -> Array:
    def change(tau):
        product, moved = net.weights[0], tau * V.weights[0]
        for w, v in zip(net.weights[1:], V.weights[1:], strict=True):
            moved = (w + tau * v) @ moved + tau * (v @ product)
            product = w @ product
        if problem.target is None:
            return problem.loss(product + moved) - problem.loss(product)
        R = problem.residual(product)
        return 0.5 * jnp.sum(problem.whitened(moved) ** 2) - jnp.sum(R * moved)

    return jax.vmap(change)(taus)


class LocalSets(NamedTuple):
    """The flow around a critical point, as far as its linear part and the fibre tell.

    Attributes:
        unstable: directions of negative curvature, a network whose weights are stacked along the
            first axis, shape ``(negative, d_i, d_{i-1})``: tangent to the unstable set.
        stable: directions of positive curvature, likewise, tangent to the stable set.
        rates: the eigenvalues, ascending; flow leaves or returns along eigenvector j like
            ``e^{−λ_j t}``.
        inertia: (negative, zero, positive), with the tolerance.
        orbit: dimension of the hidden changes of basis of this point: critical points of the same
            kind, along which nothing moves.
        blind: zero eigenvalues beyond the orbit. The form says nothing there: they hold other
            critical points and, at a non-strict saddle, ways down.
        escape: at a non-strict saddle one of these ways down, from :func:`escape_direction`; at
            other points None.
        escape_order: the order of the fall along it.
    """

    unstable: LinearNetwork
    stable: LinearNetwork
    rates: Float[Array, " n"]
    inertia: hessian.Inertia
    orbit: int
    blind: int
    escape: LinearNetwork | None
    escape_order: int | None


def local_sets(problem: Problem, net: LinearNetwork) -> LocalSets:
    """Tangent spaces of the unstable and stable sets at a critical point, and where they end.

    Args:
        problem: a loss with a target.
        net: a concrete network next to a critical point, at most 4,000 parameters.

    Returns:
        :class:`LocalSets`.

    Raises:
        ValueError: a gradient that is not small, and as for :func:`classify`.
    """
    verdict, moves = with_pivots(problem, net)
    if moves is None:
        raise ArgumentError(
            "net", f"a gradient of norm {verdict.gradient_norm:.3g}", "it must be critical"
        )
    chain = _chain.Chain.of(net)
    values, vectors = scipy.linalg.eigh(hessian.dense(problem, chain))
    counts = hessian.counted(problem, chain, values, None)
    orbit = _orbit_dimension(chain)
    blind_saddle = verdict.theory == "nonstrict_saddle"
    way, order = escape_direction(problem, net) if blind_saddle else (None, None)
    return LocalSets(
        unstable=_stacked(net, vectors.T[: counts.negative]),
        stable=_stacked(net, vectors.T[len(values) - counts.positive :]),
        rates=jnp.asarray(values, net.weights[0].dtype),
        inertia=counts,
        orbit=orbit,
        blind=max(0, counts.zero - orbit),
        escape=way,
        escape_order=order,
    )


def _orbit_dimension(chain: _chain.Chain) -> int:
    """Rank of ``X ↦ (X_i W_i − W_i X_{i-1})_i`` over the hidden nodes."""
    columns = []
    for node in range(1, chain.depth):
        into, out = chain.weights[node - 1], chain.weights[node]
        d = chain.widths[node]
        parts = [np.zeros((w.size, d * d)) for w in chain.weights]
        parts[node - 1] = np.kron(np.eye(d), into.T)  # X W_i
        parts[node] = -np.kron(out, np.eye(d))  # −W_{i+1} X
        columns.append(np.concatenate(parts))
    if not columns:
        return 0
    return int(np.linalg.matrix_rank(np.concatenate(columns, axis=1), rtol=1e-8))
