"""Conserved quantities: how far from balance, how well kept, how many independent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow.flows.gradient import interior_commutators, largest_imbalance
from gradflow.network import LinearNetwork

__all__ = ["balancedness", "conservation_drift", "imbalance", "independent_laws"]


def imbalance(net: LinearNetwork) -> list[Float[Array, "d d"]]:
    """``[C_1, …, C_{h-1}]``, ``C_i = W_{i+1}ᵀ W_{i+1} − W_i W_iᵀ`` of shape ``(d_i, d_i)``.

    Constant along gradient flow of any loss of the end-to-end map (Arora, Cohen & Hazan 2018;
    minus the interior diagonal blocks of ``AAᵀ − AᵀA``).
    """
    return interior_commutators(net.weights)


def balancedness(net: LinearNetwork) -> Float[Array, ""]:
    """``max_i ‖C_i‖_F``; 0 for a balanced network and for a single layer."""
    return largest_imbalance(net.weights)


def conservation_drift(traj: Any) -> Float[Array, " times"]:
    """How far the conserved quantities have moved since the start, one number per saved time.

    The maximum over laws and entries of ``|C_i(t) − C_i(t_0)|``; with weight decay λ, of
    ``|C_i(t) − e^{−2λ(t−t_0)} C_i(t_0)|``. It is the solver's error: the exact flow has none.

    Args:
        traj: a :class:`gradflow.Trajectory`.
    """
    return traj["drift"]


def independent_laws(net: LinearNetwork) -> int:
    """How many of the conserved quantities are independent at this network.

    The rank of the stacked gradients of all entries of all ``C_i``; at a generic point it equals
    the number of parameters minus the dimension of the Lie algebra that the flows generate
    (Marcotte, Gribonval & Peyré 2023, arXiv 2307.00144). Costs a dense matrix of
    ``Σ_i d_i(d_i+1)/2`` rows and as many columns as parameters.
    """
    if net.depth == 1:
        return 0
    shapes = [w.shape for w in net.weights]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])

    def laws(flat):
        parts = jnp.split(flat, ends[:-1])
        weights = tuple(p.reshape(shape) for p, shape in zip(parts, shapes, strict=True))
        return jnp.concatenate([c[jnp.triu_indices(len(c))] for c in interior_commutators(weights)])

    flat = jnp.concatenate([w.ravel() for w in net.weights])
    values = np.linalg.svd(np.asarray(jax.jacrev(laws)(flat)), compute_uv=False)
    cutoff = values.max(initial=0.0) * max(len(flat), len(values)) * np.finfo(values.dtype).eps
    return int((values > cutoff).sum())
