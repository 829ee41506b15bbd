"""The quotient by ``A^h``: fibres, moves in them, rank patterns and their dimensions.

Two networks are in the same fibre if their end-to-end maps are equal. A fibre is cut into pieces
by the *rank pattern* ``r_ij = rank(W_j ⋯ W_{i+1})``, constant under changes of basis of all nodes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Int

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.landscape import _chain
from gradflow.landscape.points import conditioned, generator
from gradflow.network import LinearNetwork

__all__ = [
    "fiber_dimension",
    "map_rank_from_pattern",
    "move_in_fiber",
    "multiplicities",
    "orbit_codimension",
    "rank_pattern",
    "same_fiber",
    "stratum_dimension",
]


def same_fiber(net1: LinearNetwork, net2: LinearNetwork, *, rtol: float = 1e-8) -> bool:
    """Whether two networks have the same end-to-end map, ``A^h = B^h``.

    Args:
        net1, net2: concrete networks with the same ``d_0`` and ``d_h``; hidden widths and depths
            may differ.
        rtol: ``‖W − W'‖_F`` up to this fraction of the larger of ``Π‖W_i‖_F`` is equal.

    Raises:
        ValueError: no networks, other ends, or entries that are not finite.
    """
    rtol = _checks.real_scalar("rtol", rtol, minimum=0)
    first = _chain.Chain.of(_single("net1", net1))
    second = _chain.Chain.of(_single("net2", net2))
    ends = (first.widths[0], first.widths[-1])
    if ends != (second.widths[0], second.widths[-1]):
        raise ArgumentError(
            "net2",
            f"widths {second.widths}",
            f"it must have d_0 = {ends[0]} and d_h = {ends[1]}, as net1",
        )
    sizes = [np.prod([np.linalg.norm(w) for w in chain.weights]) for chain in (first, second)]
    return bool(np.linalg.norm(first.product - second.product) <= rtol * max(sizes))


def move_in_fiber(
    key: Any, net: LinearNetwork, *, strength: float = 0.7, vanishing: float = 0.0
) -> LinearNetwork:
    """A random move to another network with the same end-to-end map.

    ``(W_{i+1} G_i^{-1}, G_i W_i)`` with random hidden changes of basis ``G_i``, singular values in
    ``e^{±strength}``: rank pattern, loss, criticality, kind and inertia stay. With
    ``vanishing > 0`` then also ``W_i + N`` layer by layer, ``W_{i+1:h} N W_{1:i-1} = 0``: terms
    that vanish in ``A^h`` and change the rank pattern; the loss stays, a saddle may become another
    kind or no critical point at all.

    Args:
        key: random key or seed.
        net: a concrete network.
        strength: ≥ 0, logarithmic spread of the changes of basis; small for a short step (the
            rotations of the bases scale with it below 0.5).
        vanishing: ≥ 0, size of N as a fraction of ``‖W_i‖_F`` (of 1 where ``W_i = 0``).

    Returns:
        a network of the same widths.

    Raises:
        ValueError: no key, no network, or a negative strength.
    """
    rng = generator(key)
    net = _single("net", net)
    strength = _checks.real_scalar("strength", strength, minimum=0)
    vanishing = _checks.real_scalar("vanishing", vanishing, minimum=0)
    layers = [np.asarray(w, dtype=float) for w in net.weights]
    for node, d in enumerate(net.widths[1:-1]):
        basis, inverse = _change(rng, d, strength)
        layers[node] = basis @ layers[node]
        layers[node + 1] = layers[node + 1] @ inverse
    if vanishing:
        for i in range(len(layers)):
            chain = _chain.Chain(layers)
            size = float(np.linalg.norm(layers[i])) or 1.0
            noise = rng.standard_normal(layers[i].shape)
            noise -= _onto_rows(chain.after(i + 1)) @ noise @ _onto_rows(chain.before(i + 1).T)
            length = float(np.linalg.norm(noise))
            if length > 1e-12 * np.sqrt(noise.size):
                layers[i] = layers[i] + vanishing * size / length * noise
    dtype = net.weights[0].dtype
    return net.with_weights(tuple(jnp.asarray(layer, dtype) for layer in layers))


def _change(rng: np.random.Generator, d: int, strength: float) -> tuple[np.ndarray, np.ndarray]:
    if strength >= 0.5:
        return conditioned(rng, d, strength)
    # Near the identity: a turn by about the strength, then a stretch.
    spin = rng.standard_normal((d, d)) / np.sqrt(d)
    turn = scipy.linalg.expm(strength * (spin - spin.T))
    left = np.linalg.qr(rng.standard_normal((d, d)))[0]
    stretch = np.exp(rng.uniform(-strength, strength, d))
    return (left * stretch) @ left.T @ turn, turn.T @ (left / stretch) @ left.T


def _onto_rows(M: np.ndarray) -> np.ndarray:
    """The projector onto the row space."""
    _, values, Vt = np.linalg.svd(M, full_matrices=False)
    kept = Vt[values > (values.max(initial=0.0) * 1e-10 or np.inf)]
    return kept.T @ kept


def rank_pattern(
    net: LinearNetwork, *, rtol: float | None = None
) -> Int[np.ndarray, "nodes nodes"]:
    """``r_ij = rank(W_j ⋯ W_{i+1})`` for nodes ``0 ≤ i ≤ j ≤ h``.

    Args:
        net: a concrete network.
        rtol: singular values up to this fraction of the product of the layers' norms are zero;
            by default ``max d_i · n · eps`` for n layers multiplied.

    Returns:
        whole numbers, shape ``(h + 1, h + 1)``, row i, column j; ``d_i`` on the diagonal, 0 below.

    Raises:
        ValueError: no network, or entries that are not finite.
    """
    chain = _chain.Chain.of(_single("net", net))
    if rtol is not None:
        rtol = _checks.real_scalar("rtol", rtol, minimum=0)
    eps = float(jnp.finfo(net.weights[0].dtype).eps)
    norms = [float(np.linalg.norm(w, 2)) for w in chain.weights]
    h = chain.depth
    ranks = np.diag(chain.widths)
    for i in range(h + 1):
        for j in range(i + 1, h + 1):
            cutoff = rtol if rtol is not None else 10 * max(chain.widths) * (j - i) * eps
            values = np.linalg.svd(chain(i, j), compute_uv=False)
            ranks[i, j] = int((values > cutoff * float(np.prod(norms[i:j]))).sum())
    return ranks


def multiplicities(pattern: np.ndarray) -> Int[np.ndarray, "nodes nodes"]:
    """``m_ij = r_ij − r_{i,j+1} − r_{i-1,j} + r_{i-1,j+1}``: the chains that live on nodes i…j.

    Up to changes of basis of all nodes the network is the direct sum of ``m_ij`` chains of ones
    from node i to node j.

    Args:
        pattern: as from :func:`rank_pattern`, shape ``(h + 1, h + 1)``.

    Raises:
        ValueError: no rank pattern (a multiplicity below 0).
    """
    ranks = np.asarray(pattern)
    if ranks.ndim != 2 or ranks.shape[0] != ranks.shape[1]:
        raise ArgumentError("pattern", _checks.describe(ranks), "it must be a square matrix")
    padded = np.zeros((len(ranks) + 1,) * 2, dtype=ranks.dtype)
    padded[1:, :-1] = np.triu(ranks)
    counts = np.triu(padded[1:, :-1] - padded[1:, 1:] - padded[:-1, :-1] + padded[:-1, 1:])
    if (counts < 0).any():
        i, j = map(int, np.argwhere(counts < 0)[0])
        raise ArgumentError(
            "pattern", f"multiplicity {counts[i, j]} of nodes {i} to {j}", "no network has it"
        )
    return counts


def _pattern(net_or_pattern: LinearNetwork | np.ndarray) -> np.ndarray:
    if isinstance(net_or_pattern, LinearNetwork):
        return rank_pattern(net_or_pattern)
    return np.asarray(net_or_pattern)


def orbit_codimension(net: LinearNetwork | np.ndarray) -> int:
    """Codimension of all networks with this rank pattern, ``Σ_{1≤i≤u≤j≤v≤h} m_{i-1,j-1} m_{uv}``.

    In the space of all weights; the orbit of the changes of basis of all nodes, the first and last
    included (Pepin Lehalleur & Rimányi, arXiv 2411.19920).

    Args:
        net: a network, or a rank pattern.

    Raises:
        ValueError: no network and no rank pattern.
    """
    m = multiplicities(_pattern(net))
    h = len(m) - 1
    return sum(
        int(m[i - 1, j - 1]) * int(m[u, v])
        for i in range(1, h + 1)
        for u in range(i, h + 1)
        for j in range(u, h + 1)
        for v in range(j, h + 1)
    )


def map_rank_from_pattern(pattern: np.ndarray) -> int:
    """Rank of the differential of ``(W_1, …, W_h) ↦ W_{1:h}``, from the rank pattern.

    Its image is ``Σ_l range(W_{l+1:h}) ⊗ rows(W_{1:l-1})``; the ranges grow with l and the row
    spaces shrink, so that the dimensions add up like the steps of a staircase,
    ``Σ_l (r_{lh} − r_{l-1,h}) r_{0,l-1}`` with nothing before the first.
    """
    ranks = np.asarray(pattern)
    h = len(ranks) - 1
    heights = [int(ranks[layer, h]) for layer in range(1, h + 1)]
    steps = np.diff([0, *heights])
    return int(sum(step * int(ranks[0, layer]) for layer, step in enumerate(steps)))


def fiber_dimension(net: LinearNetwork) -> int:
    """Dimension of the directions that leave the end-to-end map unchanged at first order.

    The number of parameters less the rank of the differential of ``(W_1, …, W_h) ↦ W_{1:h}``, found
    from singular values. Where the fibre is smooth with that tangent space it is its dimension;
    elsewhere an upper bound, see :func:`stratum_dimension`.

    Args:
        net: a concrete network.

    Raises:
        ValueError: no network, or entries that are not finite.
    """
    chain = _chain.Chain.of(_single("net", net))
    layers = range(1, chain.depth + 1)
    jacobian = np.concatenate(
        [np.kron(chain.after(layer), chain.before(layer).T) for layer in layers], axis=1
    )
    return chain.parameters - int(np.linalg.matrix_rank(jacobian, rtol=1e-10))


def stratum_dimension(net: LinearNetwork | np.ndarray) -> int:
    """Dimension of the networks with this rank pattern *and* this end-to-end map.

    ``n − codimension − r (d_0 + d_h − r)``, r the rank of the map: the orbit of all changes of
    basis lies over all maps of rank r, with fibres that are alike.

    Args:
        net: a network, or a rank pattern.

    Raises:
        ValueError: as for :func:`orbit_codimension`.
    """
    pattern = _pattern(net)
    widths = np.diag(pattern)
    parameters = int(np.sum(widths[1:] * widths[:-1]))
    rank = int(pattern[0, -1])
    return parameters - orbit_codimension(pattern) - rank * int(widths[0] + widths[-1] - rank)


def _single(name: str, net: Any) -> LinearNetwork:
    net = _chain.single_network(name, net)
    if not _checks.is_concrete(net):
        raise ArgumentError(name, "a traced network", "ranks are found outside jit and vmap")
    return net
