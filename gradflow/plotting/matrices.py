"""The adjacency matrix, its powers and commutator as heat maps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.network import LinearNetwork, block_offsets
from gradflow.plotting._axes import axes_or_new
from gradflow.plotting.style import CHANGE_COLOURS

__all__ = ["adjacency"]


def adjacency(
    net: Any,
    ax: Axes | None = None,
    *,
    widths: Iterable[int] | None = None,
    limit: float | None = None,
    labels: Sequence[str] | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw an adjacency matrix, or any matrix on its node blocks, as a heat map.

    The colours are symmetric about 0 (white); lines part the node blocks ``0 … h``.

    Args:
        net: a :class:`gradflow.LinearNetwork`, or a square matrix ``(n, n)`` such as a power of
            ``A`` or ``AAᵀ − AᵀA``.
        ax: axes to draw on; those of a new figure if left out.
        widths: ``(d_0, …, d_h)`` with sum ``n``, for a matrix; without them no blocks are drawn.
        limit: the value at full colour, > 0; the largest absolute entry if left out.
        labels: one name per node block; input, 1, 2, …, output if left out.
        colorbar: whether to add a colour bar beside the axes.

    Returns:
        the axes, with rows (the receiving nodes) downwards.

    Raises:
        ValueError: a batch of networks, a matrix that is not square and finite, or widths, labels
            or a limit that do not fit.
    """
    if isinstance(net, LinearNetwork):
        if net.weights[0].ndim != 2:
            raise ShapeError("net", f"a batch {net!r}", "draw one of its networks")
        if widths is not None:
            raise ArgumentError("widths", f"{widths!r} for a network", "it has its own: leave out")
        matrix, widths = np.asarray(net.adjacency()), net.widths
    else:
        matrix = np.asarray(_checks.real_array("net", net, ndim=2))
    size = matrix.shape[0]
    if matrix.shape != (size, size):
        raise ShapeError("net", f"shape {matrix.shape}", "it must be square")
    if limit is None:
        limit = float(np.abs(matrix).max()) or 1.0
    limit = _checks.real_scalar("limit", limit, above=0)
    blocks = None if widths is None else _checks.layer_widths("widths", widths)
    if blocks is not None and sum(blocks) != size:
        raise ShapeError("widths", f"{blocks}", f"they must add up to {size}, the matrix's size")
    if labels is not None and (blocks is None or len(labels) != len(blocks)):
        wanted = "it needs widths" if blocks is None else f"there are {len(blocks)} node blocks"
        raise ShapeError("labels", f"{len(labels)} names", wanted)

    ax = axes_or_new(ax)
    image = ax.imshow(matrix, cmap=CHANGE_COLOURS, vmin=-limit, vmax=limit, interpolation="nearest")
    ax.spines[:].set_visible(True)
    ax.set_xlabel("from node")
    ax.set_ylabel("to node")
    if blocks is not None:
        _draw_blocks(ax, blocks, labels)
    if colorbar:
        ax.figure.colorbar(image, ax=ax, shrink=0.8)
    return ax


def _draw_blocks(ax: Axes, widths: tuple[int, ...], labels: Sequence[str] | None) -> None:
    offsets = block_offsets(widths)
    for offset in offsets[1:-1]:
        ax.axhline(offset - 0.5, color="0.55", linewidth=0.8)
        ax.axvline(offset - 0.5, color="0.55", linewidth=0.8)
    if labels is None:
        labels = ["input", *(str(i) for i in range(1, len(widths) - 1)), "output"]
    centres = [(low + high - 1) / 2 for low, high in itertools.pairwise(offsets)]
    ax.set_xticks(centres, labels)
    ax.set_yticks(centres, labels)
    ax.tick_params(length=0)
