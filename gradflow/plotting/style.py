"""Colours, font sizes and labels that all pictures share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.colors import to_hex
from matplotlib.rcsetup import cycler

__all__ = ["CHANGE_COLOURS", "TIME_LABEL", "palette", "style"]

# Gradient flow at unit speed has no unit of time of its own.
TIME_LABEL = "time t (learning rate × steps)"
# Diverging, white at 0, and told apart with every common colour vision deficiency.
CHANGE_COLOURS = "RdBu_r"

# Okabe & Ito (2008) without their yellow, which is too light for a line on white.
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

_SETTINGS: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.labelsize": 10.0,
    "legend.fontsize": 9.0,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "figure.titlesize": 12.0,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=_OKABE_ITO),
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "savefig.dpi": 115,
}


def style() -> AbstractContextManager[None]:
    """Settings for figures in print: ``with gf.plot.style(): …``.

    Returns:
        a context manager; matplotlib's own settings are back when it ends.
    """
    return mpl.rc_context(_SETTINGS)


def palette(count: int) -> list[str]:
    """Colours for ``count`` curves that stay apart with colour vision deficiencies.

    Args:
        count: how many, ≥ 0.

    Returns:
        hexadecimal colours: the palette of Okabe & Ito up to seven, else evenly spaced along
        viridis, strongest mode darkest.
    """
    if count <= len(_OKABE_ITO):
        return list(_OKABE_ITO[:count])
    # The last tenth of viridis is too light for a line on white.
    return [to_hex(mpl.colormaps["viridis"](0.9 * k / (count - 1))) for k in range(count)]
