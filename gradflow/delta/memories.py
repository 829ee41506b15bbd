"""Fast-weight memories: the delta rule over time, the additive rule, and what the latter mixes up.

``S_t = S_{t−1} + β_t (v_t − S_{t−1} k_t) k_tᵀ`` (Schlag, Irie & Schmidhuber 2021; Yang et al. 2024,
DeltaNet) is the rewrite of ``X = Sᵀ`` with depth replaced by time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow.delta.blocks import DeltaBlock, Stack
from gradflow.delta.operators import check_gates
from gradflow.errors import ShapeError

__all__ = ["crosstalk", "depth_stack", "hebbian_memory", "memory"]


def memory(
    keys: ArrayLike | Sequence,
    values: ArrayLike | Sequence,
    gates: ArrayLike | Sequence,
    initial: ArrayLike | None = None,
) -> Float[Array, "steps d_v d_k"]:
    """The delta rule over time, ``S ← S + β (v − S k) kᵀ``: each write first erases at its key.

    Args:
        keys: shape ``(T, d_k)``, taken as they are (unit vectors in DeltaNet).
        values: shape ``(T, d_v)``.
        gates: β in [0, 2], shape ``(T,)``.
        initial: the first memory, shape ``(d_v, d_k)``; zero if left out.

    Returns:
        the memory before the first and after every step, shape ``(T + 1, d_v, d_k)``; read it with
        ``S @ k``.

    Raises:
        ValueError: shapes that do not fit, or a gate outside [0, 2].
    """
    return _run(lambda S, k, v, beta: beta * jnp.outer(v - S @ k, k), keys, values, gates, initial)


def hebbian_memory(
    keys: ArrayLike | Sequence,
    values: ArrayLike | Sequence,
    gates: ArrayLike | Sequence,
    initial: ArrayLike | None = None,
) -> Float[Array, "steps d_v d_k"]:
    """The additive rule ``S ← S + β v kᵀ``, which writes and never erases.

    Arguments, result and errors as for :func:`memory`.
    """
    return _run(lambda S, k, v, beta: beta * jnp.outer(v, k), keys, values, gates, initial)


def crosstalk(
    keys: ArrayLike | Sequence, values: ArrayLike | Sequence, gates: ArrayLike | Sequence
) -> Float[Array, "steps d_v"]:
    """What the additive memory adds to each value on recall: ``Σ_{s≠t} β_s v_s ⟨k_s, k_t⟩``.

    The final memory of :func:`hebbian_memory` from zero reads ``S k_t = β_t ‖k_t‖² v_t`` plus this;
    it vanishes for all values only where the other keys are orthogonal to ``k_t``.

    Arguments and errors as for :func:`memory`; shape ``(T, d_v)``.
    """
    keys, values, gates = _sequences(keys, values, gates)
    overlaps = keys @ keys.T
    overlaps = overlaps - jnp.diag(jnp.diag(overlaps))
    return (overlaps * gates[None, :]) @ values


def depth_stack(
    keys: ArrayLike | Sequence, values: ArrayLike | Sequence, gates: ArrayLike | Sequence
) -> Stack:
    """The same writes over depth: one delta block for every step, acting on ``X = Sᵀ``.

    Equal to :func:`memory` for unit keys: the blocks normalise theirs.

    Arguments as for :func:`memory`; no key may be zero.
    """
    keys, values, gates = _sequences(keys, values, gates)
    parts = zip(keys, values, gates, strict=True)
    return Stack([DeltaBlock(k, v, beta, squash=False) for k, v, beta in parts])


def _sequences(keys: Any, values: Any, gates: Any) -> tuple[Array, Array, Array]:
    keys = _checks.real_array("keys", keys, ndim=2)
    values = _checks.real_array("values", values, ndim=2)
    gates = check_gates("gates", gates, ndim=1)
    for name, array in (("values", values), ("gates", gates)):
        if array.shape[0] != keys.shape[0]:
            raise ShapeError(name, f"{array.shape[0]} steps", f"there are {keys.shape[0]} keys")
    return keys, values, gates


def _run(update: Callable, keys: Any, values: Any, gates: Any, initial: Any) -> Array:
    keys, values, gates = _sequences(keys, values, gates)
    wanted = (values.shape[1], keys.shape[1])
    if initial is None:
        S = jnp.zeros(wanted, jnp.result_type(keys, values, gates))
    else:
        S = _checks.real_array("initial", initial, ndim=2)
        if S.shape != wanted:
            raise ShapeError("initial", f"shape {S.shape}", f"it must be {wanted}, (d_v, d_k)")

    def step(S, row):
        new = S + update(S, *row)
        return new, new

    _, later = jax.lax.scan(step, S, (keys, values, gates))
    return jnp.concatenate([S[None], later])
