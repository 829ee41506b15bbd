"""Discrete training: gradient descent with a finite step, beside its continuous limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from gradflow import _checks
from gradflow.choice import working_type
from gradflow.errors import ArgumentError
from gradflow.flows.base import AbstractFlow
from gradflow.recording import Recorder, check_observe, tree_norm
from gradflow.trajectory import Status, Trajectory, describe_state

__all__ = ["descend"]


def descend(
    flow: AbstractFlow,
    state: PyTree,
    learning_rate: float,
    steps: int,
    *,
    momentum: float = 0.0,
    save_every: int = 1,
    observe: Mapping[str, Callable[[PyTree], PyTree]] | None = None,
    save_states: bool = True,
) -> Trajectory:
    """Gradient descent ``x⁺ = x + v⁺``, ``v⁺ = μ v + η f(x)``, along a flow's right-hand side.

    For ``momentum=0`` the explicit Euler discretisation of the flow: ``C_i⁺ − C_i =
    η²(G_{i+1}ᵀG_{i+1} − G_iG_iᵀ)`` with the gradients ``G``, and the loss falls near a balanced
    minimum only if ``η < 2/(h s_1^{2−2/h})``. One ``lax.scan``; other learning rates, momenta
    and starts of the same shapes do not compile again.

    Args:
        flow, state: as for :func:`gradflow.simulate`.
        learning_rate: η > 0.
        steps: number of steps, ≥ 0.
        momentum: μ in [0, 1), heavy-ball.
        save_every: keep every so many steps (and the start).
        observe, save_states: as for :func:`gradflow.simulate`.

    Returns:
        a :class:`gradflow.Trajectory` with ``ts = η × step``, so that it lies over the flow's. A
        run whose loss overflows ends there with ``Status.DIVERGED``.

    Raises:
        ValueError: an argument out of range or of the wrong kind; the message names it.
    """
    if not isinstance(flow, AbstractFlow):
        raise ArgumentError("flow", _checks.describe(flow), "it must be a flow, e.g. GradientFlow")
    state = flow.check_state(state)
    learning_rate = _checks.real_scalar("learning_rate", learning_rate, above=0)
    steps = _checks.whole_number("steps", steps, 0)
    momentum = _checks.real_scalar("momentum", momentum, minimum=0, below=1)
    save_every = _checks.whole_number("save_every", save_every, 1)
    observe = check_observe(observe, flow)
    dtype = working_type(flow, state)
    state = jax.tree.map(lambda leaf: leaf.astype(dtype), state)
    started = time.perf_counter()
    result = _descend(
        flow,
        state,
        jnp.asarray(learning_rate, dtype),
        jnp.asarray(momentum, dtype),
        observe,
        blocks=steps // save_every,
        save_every=save_every,
        rest=steps % save_every,
        save_states=bool(save_states),
    )
    concrete = _checks.is_concrete(result)
    if concrete:
        jax.block_until_ready(result)
    seconds = time.perf_counter() - started if concrete else float("nan")

    def plain(value):
        return float(value) if _checks.is_concrete(value) else "traced"

    end = learning_rate * steps
    trajectory = Trajectory(
        **result,
        targets=flow.target_strengths(),
        seconds=jnp.asarray(seconds, dtype),
        solver="gradient descent",
        reason="descend",
        config=json.dumps(
            {
                **flow.describe(),
                "state": describe_state(state),
                "t0": 0.0,
                "t1": plain(end),
                "learning_rate": plain(learning_rate),
                "momentum": plain(momentum),
                "steps": steps,
                "save_every": save_every,
            }
        ),
    )
    return trajectory.trimmed() if concrete else trajectory


@eqx.filter_jit
def _descend(
    flow: AbstractFlow,
    state: PyTree,
    learning_rate: Array,
    momentum: Array,
    observe: dict[str, Callable],
    *,
    blocks: int,
    save_every: int,
    rest: int,
    save_states: bool,
) -> dict[str, Any]:
    record = Recorder(flow, observe, state, jnp.zeros_like(learning_rate))

    def one_step(carry, _):
        x, velocity, rate, count, alive = carry
        new_velocity = jax.tree.map(lambda v, f: momentum * v + learning_rate * f, velocity, rate)
        new = jax.tree.map(lambda a, v: a + v, x, new_velocity)
        new_rate = flow.vector_field((count + 1) * learning_rate, new)
        # An overflow freezes the run at its last state with finite numbers.
        alive = alive & jnp.isfinite(flow.loss(new)) & jnp.isfinite(tree_norm(new_rate))
        x, velocity, rate = jax.tree.map(
            lambda a, b: jnp.where(alive, a, b),
            (new, new_velocity, new_rate),
            (x, velocity, rate),
        )
        return (x, velocity, rate, count + alive, alive), None

    def walk(carry, length):
        return jax.lax.scan(one_step, carry, None, length=length)[0]

    def row(carry):
        x, _, _, count, _ = carry
        t = count * learning_rate
        return t, (x if save_states else None), record(t, x)

    def block(carry, _):
        carry = walk(carry, save_every)
        return carry, (row(carry), carry[-1])

    first = record(jnp.zeros_like(learning_rate), state)
    healthy = jnp.isfinite(first["loss"]) & jnp.isfinite(first["gradient_norm"])
    start = (
        state,
        jax.tree.map(jnp.zeros_like, state),
        flow.vector_field(jnp.zeros_like(learning_rate), state),
        jnp.asarray(0),
        healthy,
    )
    carry, (rows, alive) = jax.lax.scan(block, start, None, length=blocks)
    carry = walk(carry, rest)
    times, states, recorded = jax.tree.map(
        lambda a, later, b: jnp.concatenate([a[None], later, b[None]]),
        row(start),
        rows,
        row(carry),
    )
    final, _, _, count, alive_at_end = carry
    last = record(count * learning_rate, final)
    # Rows to keep: the start, the blocks that ended alive, and the last state if it is further.
    kept = jnp.sum(alive)
    further = count > kept * save_every
    return {
        "ts": times,
        "states": states,
        "recorded": recorded,
        "final": final,
        "final_time": count * learning_rate,
        "final_loss": last["loss"],
        "final_gradient_norm": last["gradient_norm"],
        "code": jnp.where(
            ~alive_at_end,
            int(Status.DIVERGED),
            jnp.where(last["gradient_norm"] == 0, int(Status.STATIONARY), int(Status.REACHED_END)),
        ),
        "rows": jnp.where(healthy, 1 + kept + further, 0),
        "step_counts": jnp.stack([count, jnp.zeros_like(count), count, jnp.full_like(count, -1)]),
    }
