"""Depth as time: the flow of a rewrite block, integrated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import ArrayLike

from gradflow.delta import DeltaBlock
from gradflow.flows import RewriteFlow
from gradflow.method import Method
from gradflow.simulate import simulate
from gradflow.trajectory import Trajectory

__all__ = ["rewrite_flow"]


def rewrite_flow(
    block: DeltaBlock,
    X0: ArrayLike,
    t1: float,
    *,
    save: int | str | ArrayLike | Sequence[float] = 200,
    observe: Mapping[str, Callable[[Any], Any]] | None = None,
    method: Method = Method(),  # noqa: B008 - immutable
) -> Trajectory:
    """``Ẋ = β(X) k(X) (v(X)ᵀ − k(X)ᵀX)`` from ``X0`` over a depth of ``t1``.

    A thin front end of :func:`gradflow.simulate` with :class:`gradflow.RewriteFlow`; also
    ``gradflow.delta.rewrite_flow``. A stack of n blocks with step ``t1/n``
    (:func:`gradflow.delta.unroll`) differs from it by O(1/n).

    Args:
        block: a :class:`gradflow.delta.DeltaBlock`.
        X0: the state at depth 0, shape ``(d,)`` or ``(d, d_v)``.
        t1: the depth, ≥ 0: a unit of it is one block of full step.
        save, observe, method: as for :func:`gradflow.simulate`.

    Returns:
        a :class:`gradflow.Trajectory` whose states have the shape of ``X0``; beside the loss
        ``½‖kᵀX − vᵀ‖²`` it holds ``readout_error`` and ``gate``.

    Raises:
        ValueError: no delta block, a state that does not fit it, or an argument out of range.
    """
    return simulate(RewriteFlow(block), X0, t1, save=save, observe=observe, method=method)
