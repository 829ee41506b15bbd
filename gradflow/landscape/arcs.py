"""Arcs between critical points, and the lattice of signatures they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from gradflow.errors import ArgumentError
from gradflow.landscape import _chain
from gradflow.landscape.points import _widths, checked, conditioned, critical_values, generator
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["arc", "lattice"]


def arc(
    problem: Problem,
    widths: Iterable[int],
    S1: Iterable[int],
    S2: Iterable[int],
    *,
    key: Any = None,
) -> Callable[[Any], LinearNetwork]:
    """The arc from a critical point of signature ``S1`` to one of ``S2 ⊃ S1``.

    The modes of ``S2 ∖ S1`` grow together, ``τ s_i^{1/h}`` in every layer, so that
    ``u_i = τ^h s_i`` and the loss falls monotonically, by ``½ Σ s_i² (1 − (1 − τ^h)²)``. It lies in
    the unstable set of the upper point and in the stable set of the lower one
    (Wendin & Altafini, arXiv 2511.10362).

    Args:
        problem: a loss with a target; inputs may be coloured.
        widths: ``(d_0, …, d_h)``.
        S1, S2: signatures, mode numbers from 1; S1 a proper subset of S2.
        key: random key or seed for random hidden bases; the standard ones if left out.

    Returns:
        a function of τ in [0, 1], a number or a traced scalar, to the network there; the ends are
        ``critical_point(problem, widths, S)`` for the standard bases.

    Raises:
        ValueError: as for :func:`critical_point`, or S1 no proper subset of S2.
    """
    modes = _chain.modes_of(problem)
    widths = _widths(problem, widths)
    higher = checked(problem, modes, widths, S1)
    lower = checked(problem, modes, widths, S2)
    if not set(higher) < set(lower):
        raise ArgumentError("S2", f"{lower}", f"it must hold S1 = {higher} and more")
    h, rank, dtype = len(widths) - 1, len(lower), problem.irreducible_loss.dtype
    # The grown modes first: the ends are then the canonical points.
    order = [*higher, *(i for i in lower if i not in higher)]
    places = [i - 1 for i in order]
    rng = None if key is None else generator(key)
    inner = [(np.eye(d), np.eye(d)) if rng is None else conditioned(rng, d) for d in widths[1:-1]]
    out = [*(basis[:, :rank] for basis, _ in inner), modes.U[:, places]]
    into = [modes.V[:, places].T @ modes.inverse_root, *(inverse[:rank] for _, inverse in inner)]
    pairs = [(jnp.asarray(a, dtype), jnp.asarray(b, dtype)) for a, b in zip(out, into, strict=True)]
    roots = jnp.asarray(modes.s[places] ** (1 / h), dtype)
    grown = jnp.asarray([i in higher for i in order])

    def at(tau: Any) -> LinearNetwork:
        strength = roots * jnp.where(grown, 1.0, jnp.asarray(tau, dtype))
        layers = tuple((a * strength[None, :]) @ b for a, b in pairs)
        return LinearNetwork(layers)

    return at


def lattice(problem: Problem, widths: Iterable[int]) -> Any:
    """The signatures as a graph: an edge for every arc that adds one mode.

    Args:
        problem, widths: as for :func:`critical_values`; more than a thousand signatures make a
            large graph.

    Returns:
        a ``networkx.DiGraph``. Nodes are signatures with ``value``, ``rank``, ``global_minimum``;
        edges ``S → S ∪ {i}`` lead down, with ``mode`` i and ``drop``, ``½ s_i²``.

    Raises:
        ValueError: as for :func:`critical_values`.
        ImportError: networkx is not installed.
    """
    import networkx  # most runs never need it

    graph = networkx.DiGraph()
    values = dict(critical_values(problem, widths))
    least = min(values.values())
    spread = max(values.values()) - least
    for signature, value in values.items():
        bottom = value - least <= 1e-12 * spread
        graph.add_node(signature, value=value, rank=len(signature), global_minimum=bottom)
    for signature, value in values.items():
        for mode in signature:
            upper = tuple(i for i in signature if i != mode)
            if upper in values:
                graph.add_edge(upper, signature, mode=mode, drop=values[upper] - value)
    return graph
