"""Critical points and values of the loss, by signature.

In the whitened frame the target has singular values ``s_1 ≥ s_2 ≥ …``. At a critical point the
end-to-end map is ``U_S U_Sᵀ Σ`` for a set S of modes, its *signature*: a tuple of mode numbers,
counted from 1, ascending. The value is ``½ Σ_{i∉S} s_i²``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.landscape import _chain
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["Continuum", "continuum", "critical_point", "critical_values"]

MOST_SIGNATURES = 2**20
# Singular values closer than this fraction of the largest are taken to be equal.
EQUAL = 1e-10


def critical_values(problem: Problem, widths: Iterable[int]) -> list[tuple[tuple[int, ...], float]]:
    """All signatures that a network of these widths admits, with their critical values.

    ``S ⊂ {1 … r}``, r the number of non-zero singular values, with ``|S| ≤ min_i d_i``; for a
    single layer, whose loss is convex, the full signature only. Equal singular values give equal
    values for different S: those are single points of one continuum, see :func:`continuum`.

    Args:
        problem: a loss with a target; inputs may be coloured.
        widths: ``(d_0, …, d_h)``.

    Returns:
        ``[(signature, value), …]`` sorted by value (equal ones by signature), the global minimum
        first; value in units of the loss, ``½ Σ_{i∉S} s_i²`` above the infimum.

    Raises:
        ValueError: a problem without a target, widths that do not fit, or more than a million
            signatures.
    """
    modes = _chain.modes_of(problem)
    widths = _widths(problem, widths)
    top = modes.admissible(widths)
    sizes: Iterable[int] = range(top + 1) if len(widths) > 2 else (top,)
    number = sum(math.comb(modes.number, size) for size in sizes)
    if number > MOST_SIGNATURES:
        raise ArgumentError(
            "problem",
            f"{modes.number} modes for {top} places, {number} signatures",
            f"at most {MOST_SIGNATURES} are listed: lower the rank of the target",
        )
    found = [
        (signature, modes.value(signature))
        for size in sizes
        for signature in itertools.combinations(range(1, modes.number + 1), size)
    ]
    return sorted(found, key=lambda pair: (pair[1], pair[0]))


class Continuum(NamedTuple):
    """What critical points of a signature are joined to through equal singular values.

    Attributes:
        dimension: of the set of end-to-end maps, ``Σ c(m − c)`` over the groups; 0 for a point.
        groups: ``(singular value, m, c)`` per group of m > 1 equal values with c of them in S:
            any c-dimensional subspace of the m-dimensional singular space may be learnt, a
            Grassmannian ``Gr(c, m)``.
        signatures: all signatures that are points of this continuum.
    """

    dimension: int
    groups: list[tuple[float, int, int]]
    signatures: list[tuple[int, ...]]


def continuum(problem: Problem, widths: Iterable[int], signature: Iterable[int]) -> Continuum:
    """The continuum of end-to-end maps through a critical point, where singular values are equal.

    Args:
        problem, widths: as for :func:`critical_values`.
        signature: mode numbers from 1.

    Raises:
        ValueError: as for :func:`critical_point`.
    """
    modes = _chain.modes_of(problem)
    signature = checked(problem, modes, _widths(problem, widths), signature)
    groups, choices, dimension = [], [], 0
    for group in clusters(modes):
        chosen = sum(i in signature for i in group)
        choices.append(itertools.combinations(group, chosen))
        if len(group) > 1:
            groups.append((float(modes.s[group[0] - 1]), len(group), chosen))
            dimension += chosen * (len(group) - chosen)
    together = sorted(
        tuple(sorted(itertools.chain.from_iterable(parts))) for parts in itertools.product(*choices)
    )
    return Continuum(dimension, groups, together)


def clusters(modes: _chain.Modes) -> list[tuple[int, ...]]:
    """Numbers of the non-zero modes, those of equal singular value together."""
    groups: list[list[int]] = []
    for i in range(modes.number):
        if groups and modes.s[groups[-1][-1] - 1] - modes.s[i] <= EQUAL * modes.s[0]:
            groups[-1].append(i + 1)
        else:
            groups.append([i + 1])
    return [tuple(group) for group in groups]


def critical_point(
    problem: Problem,
    widths: Iterable[int],
    signature: Iterable[int],
    *,
    key: Any = None,
    tightened: bool = True,
) -> LinearNetwork:
    """A network at which the gradient vanishes, of any admissible signature.

    The learnt modes have singular value ``s_i^{1/h}`` in every layer (of the whitened frame).
    Beside them run blocks ``Z_i`` with vanishing product (Achour, Malgouyres & Gerchinovitz,
    arXiv 2107.13289), up to hidden changes of basis:

    * tightened: at least three ``Z_i`` vanish, so that no pair of layers can be moved to join
      them; for ``S = {1 … r}`` a non-strict saddle below ``r_max``.
    * not tightened: exactly two vanish, ``Z_i`` and ``Z_j``, and moving both is an escape; a strict
      saddle.

    Args:
        problem: a loss with a target; inputs may be coloured.
        widths: ``(d_0, …, d_h)``.
        signature: mode numbers, counted from 1 in the order of ``problem.singular_values``.
        key: random key or seed for random ``Z_i``, well-conditioned random hidden bases, and
            random rows on the kernel of ``C_x``; without one the standard bases, and ``Z_i`` zero
            or, where not tightened, one chain of unit blocks from the strongest mode that is left
            up to layer h−2.
        tightened: which of the two. Two layers below ``r_max`` have no tightened points: there
            True gives the only kind. A network with a hidden layer of width ``|S|`` has only
            tightened ones, and at a minimum of a target of lower rank nothing is left to escape
            to: True is needed.

    Returns:
        a network of these widths in the problem's floating point type.

    Raises:
        ValueError: a problem without a target, widths that do not fit, a signature that is
            repeated, out of range or larger than the bottleneck, one layer and less than all
            modes, or ``tightened=False`` where there is no such point.
    """
    modes = _chain.modes_of(problem)
    widths = _widths(problem, widths)
    signature = checked(problem, modes, widths, signature)
    if not isinstance(tightened, (bool, np.bool_)):
        raise ArgumentError("tightened", _checks.describe(tightened), "it must be True or False")
    h, rank, finished = len(widths) - 1, len(signature), len(signature) == modes.number
    narrow = h > 1 and min(widths[1:-1]) == rank
    if not tightened and (narrow or finished or h == 1):
        raise ArgumentError(
            "tightened",
            f"False for signature {signature} and widths {widths}",
            "every critical point of this signature is tightened",
        )
    rng = None if key is None else generator(key)
    places = [i - 1 for i in signature]
    others = [i for i in range(max(modes.U.shape[0], modes.V.shape[0])) if i not in places]
    ends = [
        np.concatenate([Q[:, places], Q[:, [i for i in others if i < len(Q)]]], axis=1)
        for Q in (modes.V, modes.U)
    ]
    scale = float(modes.s[0]) ** (1 / h) if modes.number else 1.0
    extra = _extra_blocks(widths, rank, rng, scale, finished, narrow, bool(tightened))
    bases, inverses = [ends[0]], [ends[0].T]
    for d in widths[1:-1]:
        basis, inverse = (np.eye(d), np.eye(d)) if rng is None else conditioned(rng, d)
        bases.append(basis)
        inverses.append(inverse)
    bases.append(ends[1])
    grown = np.diag(modes.s[places] ** (1 / h))
    layers = []
    for i, Z in enumerate(extra):
        block = np.zeros((widths[i + 1], widths[i]))
        block[:rank, :rank], block[rank:, rank:] = grown, Z
        layers.append(bases[i + 1] @ block @ inverses[i])
    layers[0] = layers[0] @ modes.inverse_root
    if rng is not None and problem.covariance_root is not None:
        kernel = np.eye(widths[0]) - modes.inverse_root @ modes.root
        layers[0] = layers[0] + rng.standard_normal(layers[0].shape) @ kernel
    dtype = problem.irreducible_loss.dtype
    return LinearNetwork([layer.astype(dtype) for layer in layers])


def _extra_blocks(
    widths: tuple[int, ...],
    rank: int,
    rng: Any,
    scale: float,
    finished: bool,
    narrow: bool,
    tightened: bool,
) -> list[np.ndarray]:
    """The blocks ``Z_1 … Z_h`` beside the learnt modes."""
    h = len(widths) - 1
    shapes = [(d_out - rank, d_in - rank) for d_in, d_out in itertools.pairwise(widths)]
    if rng is None:
        extra = [np.zeros(shape) for shape in shapes]
        if not tightened and h > 2:
            for Z in extra[: h - 2]:
                Z[0, 0] = scale
        return extra
    extra = [scale * rng.standard_normal(shape) / np.sqrt(max(1, *shape)) for shape in shapes]
    if finished:
        fewest, most = 1, h  # only the product has to vanish
    elif narrow:
        fewest, most = 0, h  # and does so through the hidden layer that is full
    elif tightened and h > 2:
        fewest, most = 3, h
    else:
        fewest, most = 2, 2
    number = int(rng.integers(fewest, most + 1))
    for i in rng.choice(h, size=number, replace=False):
        extra[i] = np.zeros(shapes[i])
    return extra


def checked(
    problem: Problem, modes: _chain.Modes, widths: tuple[int, ...], signature: Any
) -> tuple[int, ...]:
    """``signature`` as an ascending tuple, if a network of these widths can have it."""
    try:
        entries = list(signature)
    except TypeError as error:
        raise ArgumentError(
            "signature", _checks.describe(signature), "it must be a set of mode numbers from 1"
        ) from error
    numbers = [_checks.whole_number(f"signature[{i}]", entry, 1) for i, entry in enumerate(entries)]
    if len(set(numbers)) < len(numbers):
        raise ArgumentError("signature", f"{tuple(numbers)}", "no mode may be repeated")
    if numbers and max(numbers) > modes.number:
        raise ArgumentError(
            "signature",
            f"{tuple(numbers)}",
            f"mode numbers go from 1 to {modes.number}, the number of non-zero singular values",
        )
    if len(numbers) > min(widths):
        raise ArgumentError(
            "signature",
            f"{tuple(numbers)}, {len(numbers)} modes",
            f"the narrowest layer of widths {widths} has room for {min(widths)}",
        )
    if len(widths) == 2 and len(numbers) < modes.number:
        raise ArgumentError(
            "signature",
            f"{tuple(numbers)} for a single layer",
            "its loss is convex: only the full signature is critical",
        )
    return tuple(sorted(numbers))


def _widths(problem: Problem, widths: Iterable[int]) -> tuple[int, ...]:
    widths = _checks.layer_widths("widths", widths)
    problem.check_widths(widths)
    return widths


def generator(key: Any) -> np.random.Generator:
    """Random numbers of the host from a JAX key or seed."""
    key = _checks.random_key("key", key)
    if not _checks.is_concrete(key):
        raise ArgumentError("key", "a traced key", "use a Python loop over keys, not jax.vmap")
    data: Array = jax.random.key_data(key) if key.dtype != np.uint32 else key
    return np.random.default_rng(np.asarray(data).ravel().tolist())


def conditioned(
    rng: np.random.Generator, d: int, spread: float = 0.7
) -> tuple[np.ndarray, np.ndarray]:
    """A random change of basis with singular values in ``e^{±spread}``, and its inverse."""
    left, right = (np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(2))
    stretch = np.exp(rng.uniform(-spread, spread, d))
    return (left * stretch) @ right.T, (right / stretch) @ left.T
