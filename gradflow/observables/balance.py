"""Conserved quantities: how far from balance, how well kept, how many independent."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.flows.base import AbstractFlow
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


def independent_laws(net: Any, flow: AbstractFlow | None = None) -> int:
    """How many of the conserved quantities are independent at this network.

    The rank of the stacked gradients of all entries of all ``C_i``; at a generic point it equals
    the number of parameters minus the dimension of the Lie algebra that the flows generate
    (Marcotte, Gribonval & Peyré 2023, arXiv 2307.00144). Costs a dense matrix of
    ``Σ_i d_i(d_i+1)/2`` rows and as many columns as parameters.

    Args:
        net: the network, or any state of ``flow``.
        flow: whose laws to count, all entries of ``flow.conserved``; gradient flow's ``C_i`` if
            left out. With fixed gates a :class:`gradflow.DeltaModulatedFlow` has ``d_i − 1`` fewer
            than gradient flow for every hidden layer that it modulates.

    Raises:
        ValueError: the flow refuses the state.
    """
    if flow is not None:
        if not isinstance(flow, AbstractFlow):
            raise ArgumentError("flow", _checks.describe(flow), "it must be a flow")
        net = flow.check_state(net)
    gradients = np.asarray(_law_gradients(flow, net))
    if not gradients.size:
        return 0
    values = np.linalg.svd(gradients, compute_uv=False)
    cutoff = values.max() * max(gradients.shape) * np.finfo(values.dtype).eps
    return int((values > cutoff).sum())


@eqx.filter_jit
def _law_gradients(flow: AbstractFlow | None, net: Any) -> Float[Array, "laws parameters"]:
    """The gradients of all entries of all laws, one per row."""
    flat, unravel = ravel_pytree(net)

    def laws(flat):
        if flow is None:
            found = interior_commutators(unravel(flat).weights)
            arrays = [c[jnp.triu_indices(len(c))] for c in found]
        else:
            arrays = flow.conserved(unravel(flat))
        return jnp.concatenate([jnp.zeros(0, flat.dtype), *(a.ravel() for a in arrays)])

    return jax.jacrev(laws)(flat)
