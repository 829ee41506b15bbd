"""Small real and synthetic data sets; nothing is downloaded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["HIERARCHY_ITEMS", "HIERARCHY_PROPERTIES", "Dataset", "digits", "hierarchy"]


class Dataset(NamedTuple):
    """Inputs ``X`` (N, d_0) and outputs ``Y`` (N, d_h), one sample per row, float64."""

    X: np.ndarray
    Y: np.ndarray


def digits() -> Dataset:
    """Scanned handwritten digits with one-hot labels.

    The 1,797 images of 8 × 8 pixels bundled with scikit-learn (Optical Recognition of
    Handwritten Digits, UCI Machine Learning Repository).

    Returns:
        ``X`` of shape (1797, 64), grey values in [0, 1], not centred; ``Y`` of shape (1797, 10),
        one-hot. Three pixels are zero in every image, so ``XᵀX/N`` is singular (rank 61).
    """
    from sklearn.datasets import load_digits  # slow to import, needed by few

    images, labels = load_digits(return_X_y=True)
    return Dataset(images / 16.0, np.eye(10)[labels])


# A tree of living things, three levels below the root: each row of HIERARCHY_PROPERTIES holds
# for a whole branch, so that broad distinctions are carried by more items than fine ones.
HIERARCHY_ITEMS = ("robin", "owl", "trout", "shark", "oak", "birch", "rose", "daisy")
_HOLDS_FOR = {
    "grows": "robin owl trout shark oak birch rose daisy",
    "moves": "robin owl trout shark",
    "has eyes": "robin owl trout shark",
    "has roots": "oak birch rose daisy",
    "makes its own food": "oak birch rose daisy",
    "flies": "robin owl",
    "swims": "trout shark",
    "has bark": "oak birch",
    "has petals": "rose daisy",
    "sings": "robin",
    "hunts at night": "owl",
    "lives in rivers": "trout",
    "has many teeth": "shark",
    "bears acorns": "oak",
    "has white bark": "birch",
    "has thorns": "rose",
    "closes at night": "daisy",
}
HIERARCHY_PROPERTIES = tuple(_HOLDS_FOR)


def hierarchy() -> Dataset:
    """Eight items of a semantic tree and the properties they have.

    In the spirit of Saxe, McClelland & Ganguli (2014, arXiv 1312.6120): a property of a higher
    branch is shared by more items, so the singular values of the item-property covariance fall
    with the depth in the tree, and broad distinctions are learnt before fine ones.

    Returns:
        ``X`` of shape (8, 8), one-hot items in the order of ``HIERARCHY_ITEMS``; ``Y`` of shape
        (8, 17), 1.0 where the item has the property, in the order of ``HIERARCHY_PROPERTIES``.
    """
    holders = [_HOLDS_FOR[name].split() for name in HIERARCHY_PROPERTIES]
    Y = np.array([[float(item in names) for names in holders] for item in HIERARCHY_ITEMS])
    return Dataset(np.eye(len(HIERARCHY_ITEMS)), Y)
