"""The result of a run: what was saved, how it ended, and what it cost."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from gradflow import _checks, observables
from gradflow.errors import ArgumentError, ShapeError

__all__ = ["Stats", "Status", "Trajectory", "describe_state"]


class Status(enum.IntEnum):
    """How a run ended; ``message`` says what that means and what to do about it."""

    REACHED_END = 0
    STATIONARY = 1
    MAX_STEPS = 2
    DIVERGED = 3

    @property
    def message(self) -> str:
        """One sentence on what the status means, with the remedy where there is one."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.REACHED_END: "the run reached its end t1",
    Status.STATIONARY: (
        "the gradient is within stop_gradient_norm of zero: a critical point or close to one, "
        "be it minimum or saddle"
    ),
    Status.MAX_STEPS: (
        "the run met max_steps before t1: raise Method(max_steps=...), loosen rtol, or use "
        "Method(solver='conserving') or 'implicit' if the problem is stiff"
    ),
    Status.DIVERGED: (
        "the state overflowed or the step size fell below round-off: take a smaller step_size or "
        "learning_rate, a smaller start, or a loss that is bounded below"
    ),
}


def describe_state(state: PyTree) -> str:
    """A state in a few words, for the record of a run."""
    if not _checks.is_concrete(state):
        return "traced"
    return f"array of shape {state.shape}" if hasattr(state, "shape") else repr(state)


class Stats(NamedTuple):
    """What a run cost.

    Attributes:
        steps: attempted steps (accepted + rejected).
        accepted, rejected: steps kept and steps repeated with a smaller size.
        rhs_evaluations: right-hand sides evaluated by the steps, a product with the Jacobian
            counted as one; None where the solver does not tell (diffrax's implicit ones).
        stiff_steps: attempted steps by the solver for stiff phases, where there are two; else None.
        seconds: wall time of the call, compilation included if it compiled; nan inside ``vmap``.
        solver: the solver that ran.
        reason: why it was chosen.
    """

    steps: Any
    accepted: Any
    rejected: Any
    rhs_evaluations: Any
    stiff_steps: Any
    seconds: float
    solver: str
    reason: str


# Observables that can be had from stored states alone, without recording them during the run.
_FROM_STATES: dict[str, Callable] = {
    name: getattr(observables, name)
    for name in ("imbalance", "layer_singular_values", "effective_rank", "nonnormality")
}


class Trajectory(eqx.Module):
    """A run: saved times, states and observables, the final state, status and statistics.

    ``traj[name]`` is an observable at all saved times: a recorded one, ``"drift"``, or (if the
    states are stored and are networks) ``"imbalance"``, ``"layer_singular_values"``,
    ``"effective_rank"``, ``"nonnormality"``. Every row is finite. A run that stopped early has a
    last row at the time it stopped. Inside ``jax.vmap`` all lanes keep the full number of rows,
    those past a lane's end repeating its final one; :meth:`lane` picks a lane and cuts them.

    Attributes:
        ts: saved times, shape ``(times,)``, in units of gradient-flow time.
        states: the states at these times, stacked along the first axis; None if not stored.
        final: the last state, ``final_time`` its time, ``final_loss`` and
            ``final_gradient_norm`` its numbers.
        recorded: dict of recorded observables, stacked along the first axis.
        targets: the data's mode strengths, or None.
    """

    ts: Float[Array, "..."]
    states: PyTree
    final: PyTree
    final_time: Float[Array, "..."]
    final_loss: Float[Array, "..."]
    final_gradient_norm: Float[Array, "..."]
    recorded: dict[str, PyTree]
    targets: Float[Array, "..."] | None
    code: Int[Array, "..."]
    rows: Int[Array, "..."]
    step_counts: Int[Array, "..."]  # accepted, rejected, evaluations, stiff; -1: not counted
    seconds: float | Array
    solver: str = eqx.field(static=True)
    reason: str = eqx.field(static=True)
    config: str = eqx.field(static=True)  # JSON: hashable, as a static field must be

    @property
    def loss(self) -> Float[Array, "..."]:
        """The loss at the saved times, shape ``(times,)``."""
        return self["loss"]

    @property
    def singular_values(self) -> Float[Array, "..."]:
        """Singular values of the end-to-end map, shape ``(times, r)``, descending."""
        return self["singular_values"]

    @property
    def status(self) -> Any:
        """The :class:`Status`; an array of them for a batch."""
        codes = np.asarray(self.code)
        if codes.ndim == 0:
            return Status(int(codes))
        return np.array([Status(int(c)) for c in codes.ravel()], dtype=object).reshape(codes.shape)

    @property
    def stats(self) -> Stats:
        """Steps, evaluations, seconds, and which solver ran and why."""
        counts: Any = np.asarray(self.step_counts)
        single = counts.ndim == 1

        def told(count):
            return None if np.any(count < 0) else int(count) if single else count

        accepted, rejected, evaluations, stiff = (told(counts[..., k]) for k in range(4))
        steps = accepted + rejected
        seconds = np.asarray(self.seconds)
        return Stats(
            steps,
            accepted,
            rejected,
            evaluations,
            stiff,
            float(seconds.ravel()[0]) if seconds.size else float("nan"),
            self.solver,
            self.reason,
        )

    def __getitem__(self, name: str) -> Any:
        if name in self.recorded:
            return self.recorded[name]
        if name == "drift":
            drifts = self.recorded["law_drift"]
            return jnp.max(drifts, axis=-1, initial=0.0)
        if name in _FROM_STATES:
            if self.states is None:
                raise ArgumentError(
                    "name",
                    f"{name!r}, which needs the states",
                    f"record it with observe={{{name!r}: ...}}, or run with save_states=True",
                )
            measure = _FROM_STATES[name]
            for _ in range(np.ndim(self.ts)):
                measure = jax.vmap(measure)
            return measure(self.states)
        known = sorted({*self.recorded, "drift", *_FROM_STATES})
        raise KeyError(f"no observable {name!r} in this trajectory; there are {', '.join(known)}")

    def network(self, i: int) -> PyTree:
        """The state at saved index ``i`` (negative counts from the end).

        Raises:
            ValueError: the states were not stored. IndexError: no such index.
        """
        if self.states is None:
            raise ArgumentError(
                "i", f"{i} for a run without stored states", "run with save_states=True"
            )
        self._single("network")
        if not -len(self.ts) <= i < len(self.ts):
            raise IndexError(f"index {i} is out of range for {len(self.ts)} saved times")
        return jax.tree.map(lambda x: x[i], self.states)

    def lane(self, i: int) -> Trajectory:
        """Run ``i`` of a batch made by ``jax.vmap``, without the repeated rows past its end.

        Raises:
            ValueError: this is a single run, or the index is out of range.
        """
        lanes = np.shape(self.code)
        if len(lanes) != 1:
            raise ShapeError("traj", f"batch shape {lanes}", "lane(i) needs one batch axis")
        if not -lanes[0] <= i < lanes[0]:
            raise ArgumentError("i", f"{i}", f"there are {lanes[0]} lanes")
        return jax.tree.map(lambda x: x[i], self).trimmed()

    def trimmed(self) -> Trajectory:
        """Without the rows past the end of the run."""
        keep = int(self.rows)
        if keep == self.ts.shape[0]:
            return self

        # Cut on the host: every new length would otherwise compile a slice per array.
        def cut(x):
            return jnp.asarray(np.asarray(x)[:keep])

        return eqx.tree_at(
            lambda t: (t.ts, t.states, t.recorded),
            self,
            jax.tree.map(cut, (self.ts, self.states, self.recorded)),
            is_leaf=lambda x: x is None,
        )

    def to_xarray(self) -> Any:
        """All of it as an ``xarray.Dataset`` with named dimensions, units and attributes."""
        from gradflow.storage import to_xarray

        self._single("to_xarray")
        return to_xarray(self)

    def save(self, path: str | Path) -> Path:
        """Write the run to a netCDF-4 file; read it back with :func:`gradflow.load`.

        The file embeds the configuration, the versions of the libraries and the git revision of
        the working directory. Missing folders are made; an existing file is replaced.
        """
        from gradflow.storage import save

        self._single("save")
        return save(self, path)

    def _single(self, what: str) -> None:
        if np.ndim(self.ts) != 1:
            raise ShapeError(
                "traj", f"a batch of {np.shape(self.code)} runs", f"use traj.lane(i).{what}(...)"
            )

    def __repr__(self) -> str:
        if not _checks.is_concrete(self) or not hasattr(self.ts, "shape"):
            return "Trajectory(traced)"
        if np.ndim(self.ts) != 1:
            codes = np.asarray(self.code).ravel()
            counts = ", ".join(
                f"{int((codes == s).sum())} {s.name}" for s in Status if (codes == s).any()
            )
            return f"Trajectory: batch of {np.shape(self.code)} runs ({counts})"
        config, stats, status = json.loads(self.config), self.stats, self.status
        what = ", ".join(
            str(config[key]) for key in ("flow", "state", "problem") if config.get(key) is not None
        )
        evaluations = (
            "" if stats.rhs_evaluations is None else f", {stats.rhs_evaluations} evaluations"
        )
        first = f"{float(self.loss[0]):.4g} -> " if len(self.ts) else ""
        lines = [
            f"Trajectory of {what}",
            f"  t {config['t0']:g} -> {float(self.final_time):.6g} of {config['t1']:g}, "
            f"{len(self.ts)} saved times",
            f"  status {status.name}: {status.message}",
            f"  {stats.solver}, {stats.accepted} steps + {stats.rejected} rejected{evaluations}, "
            f"{stats.seconds:.2f} s",
            f"  loss {first}{float(self.final_loss):.4g}, "
            f"gradient norm {float(self.final_gradient_norm):.3g}",
        ]
        laws = self.recorded["law_drift"].shape[-1]
        if laws and len(self.ts):
            drift = float(jnp.max(self["drift"]))
            lines.append(
                f"  {laws} conserved {'law' if laws == 1 else 'laws'}, largest drift {drift:.2g}"
            )
        return "\n".join(lines)
