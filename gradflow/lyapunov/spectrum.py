"""Lyapunov spectra of random products by repeated orthonormalisation (QR).

A frame ``Q`` of k orthonormal columns is carried along: ``A_l Q_{l−1} = Q_l R_l``, and
``γ_j = lim (1/n) Σ_l log (R_l)_jj`` (Benettin et al. 1980). Many independent chains run side by
side; their means give standard errors that hold however correlated the increments are.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float
from tqdm import tqdm

from gradflow import _checks
from gradflow.errors import ArgumentError, ShapeError
from gradflow.lyapunov._frames import chains_last, generator, orthonormalised
from gradflow.lyapunov.ensembles import AbstractEnsemble, check_ensemble
from gradflow.lyapunov.layers import Layers

__all__ = ["Spectrum", "exponents"]

# With at least this many chains their means alone give the standard error.
_CHAINS = 8
# Batches per chain otherwise.
_BATCHES = 16
# Blocks before a run may stop at a wanted error: its estimate is too rough before.
_FEWEST_BLOCKS = 8
# What leaving out orthonormalisations may cost, in units of an exponent.
_ROUND_OFF = 1e-11
_INTERVALS = (8, 4, 2)
# chains · steps · d³ from which on, some ten seconds, it pays to look for a longer interval by a
# run of so many steps before and after frames have settled.
_WORTH_A_PILOT = 1e10
_PILOT = (32, 64)


class Spectrum(eqx.Module):
    """Estimated Lyapunov exponents, with what is known of their errors.

    Attributes:
        exponents: γ_1 ≥ γ_2 ≥ … for a generic start, shape ``(k,)``, per step; ``−inf`` where the
            product loses rank.
        standard_error: of the exponents, shape ``(k,)``; 0 for ``−inf``.
        running: estimates from the first steps up to each checkpoint, ``(checkpoints, k)``.
        running_steps: how many steps those are, ``(checkpoints,)``.
        chain_means: the estimates of single chains, ``(chains, k)``.
        degrees: degrees of freedom of the standard error.
        burn_in: steps left out before the first.
        interval: steps between orthonormalisations.
        reached: whether the wanted error was reached; True if none was wanted.
        orbit_finite: whether the orbit of :class:`Layers` stayed finite.
    """

    exponents: Float[Array, "... k"]
    standard_error: Float[Array, "... k"]
    running: Float[Array, "... checkpoints k"]
    running_steps: Array
    chain_means: Float[Array, "... chains k"]
    degrees: int = eqx.field(static=True)
    burn_in: Any
    interval: int = eqx.field(static=True)
    reached: Any
    orbit_finite: Any
    name: str = eqx.field(static=True)

    @property
    def steps(self) -> int:
        """Steps per chain behind the estimate."""
        return int(self.running_steps[-1])

    @property
    def chains(self) -> int:
        """Independent chains behind the estimate."""
        return self.chain_means.shape[-2]

    def confidence_interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """Lower and upper ends of intervals of Student's t, shape ``(k,)`` each.

        Args:
            level: in (0, 1).
        """
        level = _checks.real_scalar("level", level, above=0, below=1)
        half = float(scipy.stats.t.ppf(0.5 + 0.5 * level, self.degrees)) * self.standard_error
        return self.exponents - half, self.exponents + half

    @property
    def sum(self) -> Array:
        """Sum of the exponents: the growth of k-dimensional volumes."""
        return self.exponents.sum(axis=-1)

    @property
    def kaplan_yorke(self) -> float:
        """The Kaplan–Yorke dimension of the computed exponents."""
        sums = np.cumsum(np.asarray(self.exponents, float))
        kept = int(np.sum(sums >= 0))
        if kept == 0 or kept == len(sums):
            return float(kept)
        return kept + float(sums[kept - 1] / -self.exponents[kept])

    def __repr__(self) -> str:
        if not _checks.is_concrete(self) or not hasattr(self.exponents, "shape"):
            return "Spectrum(traced)"
        if np.ndim(self.exponents) != 1:
            return f"Spectrum: batch of {np.shape(self.exponents)[:-1]} runs"
        shown = [
            f"{g:.6g} ± {e:.1g}"
            for g, e in zip(self.exponents.tolist(), self.standard_error.tolist(), strict=True)
        ]
        if len(shown) > 6:
            shown = [*shown[:3], "...", *shown[-2:]]
        lines = [
            f"Spectrum of {self.name}",
            f"  exponents {', '.join(shown)} (standard errors)",
            f"  {self.chains} chains of {self.steps} steps after {int(self.burn_in)}, "
            f"QR every {self.interval}",
        ]
        if not bool(self.reached):
            lines.append("  the wanted error was NOT reached: give more steps or chains")
        if not bool(self.orbit_finite):
            lines.append("  the orbit left the floating point range")
        return "\n".join(lines)


class _State(NamedTuple):
    """Where all chains are: arrays, of the host before the first step."""

    memory: Any
    frames: Any
    step: Any
    block: Any
    sums: Any  # (checkpoints, k, chains), 0 where not reached
    lost: Any  # whether some column vanished
    error: Any


def exponents(
    key: Any,
    ensemble: AbstractEnsemble,
    steps: int,
    k: int | None = None,
    *,
    burn_in: int | None = None,
    start: Any = None,
    chains: int | None = None,
    checkpoints: int = 64,
    qr_every: int | str = "auto",
    error: float | None = None,
    progress: bool = False,
) -> Spectrum:
    """Lyapunov exponents of the products ``A_n ⋯ A_1`` of an ensemble, by QR.

    Compiles once for an ensemble of given shapes, k, chains and checkpoints; other numbers of
    steps, keys, parameters and wanted errors use the same program. Works inside ``jax.vmap`` and
    ``jax.jit`` (over keys and parameters of the ensemble), where checks on values are left out.

    Singular matrices give ``−inf``: a diagonal entry of R counts as zero below ``8 d ε`` of the
    length of its column before projection, ε the round-off.

    Args:
        key: random key or seed.
        ensemble: the law of the matrices.
        steps: per chain, at least 1; the most to be taken where an ``error`` is wanted. Rounded up
            to whole intervals of ``qr_every``.
        k: how many of the leading exponents, 1 … d; all if left out.
        burn_in: steps left out at the beginning; a tenth of ``steps``, at least 50 and at most
            20,000, if left out.
        start: a vector ``(d,)`` or a frame ``(d, k)`` from which all chains start; random frames
            if left out. A start in an invariant subspace sees the exponents of that subspace only.
        chains: independent products; 256 up to d = 8, fewer above, if left out.
        checkpoints: rows of the running estimate, at least 1.
        qr_every: steps between orthonormalisations, or ``"auto"``: as many as cost less than 1e-11
            by round-off, found by a short run; 1 for runs that are short themselves.
        error: stop as soon as no standard error is larger, > 0.
        progress: show a progress bar.

    Returns:
        the :class:`Spectrum`.

    Raises:
        ValueError: no ensemble, a number out of range, ``k > d``, a start of zero norm, of another
            length or of dependent columns, or a Jacobian that is not finite.
    """
    key = _checks.random_key("key", key)
    check_ensemble("ensemble", ensemble)
    d = ensemble.dimension
    steps = _checks.whole_number("steps", steps, 1)
    last = chains_last(d)
    start, k = _start(start, k, ensemble)
    chains = _default_chains(d) if chains is None else _checks.whole_number("chains", chains, 1)
    checkpoints = _checks.whole_number("checkpoints", checkpoints, 1)
    if burn_in is None:
        burn_in = min(max(50, steps // 10), 20_000)
    burn_in = _checks.whole_number("burn_in", burn_in, 0)
    traced = not _checks.is_concrete(key, ensemble, start)
    if error is not None:
        error = _checks.real_scalar("error", error, above=0)
        if traced:
            raise ArgumentError("error", "a run under jax.jit or jax.vmap", "it must be left out")
    every = _interval(qr_every, key, ensemble, start, k, chains, steps, traced, last)
    checkpoints = min(checkpoints, -(-steps // every))

    def run(every: int) -> _State:
        state = _begin(ensemble, key, start, k, chains, checkpoints, last)
        # Never weakly typed, which would be another program.
        numbers = (
            np.asarray(-(-burn_in // every), _whole()),
            np.asarray(-(-steps // every), _whole()),
            np.asarray(error or -1.0, jnp.finfo(ensemble.dtype).dtype),
        )
        strides = np.linspace(0, checkpoints, 51 if progress else 2).astype(int)[1:]
        with tqdm(total=checkpoints, desc="exponents", unit="block", disable=not progress) as bar:
            for until in strides:
                state = _advance(
                    ensemble,
                    key,
                    state,
                    *numbers,
                    np.asarray(until, _whole()),
                    every=every,
                    last=last,
                    stops=error is not None,
                )
                if traced:
                    continue
                bar.update(max(int(state.block), 0) - bar.n)
                if int(state.block) < until:
                    break
        return state

    state = run(every)
    if not traced and qr_every == "auto" and every > 1 and bool(state.lost):
        # Only from one step to the next can a loss of rank be told from a product of bad condition.
        every = 1
        state = run(1)
    groups = -(-steps // every)
    done = checkpoints if traced else int(state.block)
    sums: Any = state.sums if traced else np.asarray(state.sums)
    sums = sums[:done].swapaxes(1, 2)  # (done, chains, k)
    ends = every * _edges(groups, checkpoints)[1 : done + 1]
    if not traced:
        _refuse_nan(sums, ends, ensemble)
    means, errors, running, chain_means, degrees = _estimate(sums, ends)
    if not traced:
        means, errors, running, chain_means = map(
            jnp.asarray, (means, errors, running, chain_means)
        )
    finite = jnp.asarray(True)
    if isinstance(ensemble, Layers):
        finite = jnp.isfinite(state.memory).all()
    return Spectrum(
        exponents=means,
        standard_error=errors,
        running=running,
        running_steps=jnp.asarray(ends),
        chain_means=chain_means,
        degrees=degrees,
        burn_in=every * -(-burn_in // every),
        interval=every,
        reached=jnp.asarray(error is None or bool(np.max(errors) <= error)),
        orbit_finite=finite,
        name=f"{_name(ensemble)}, d = {d}",
    )


def _name(ensemble: Any) -> str:
    inner = getattr(ensemble, "ensemble", None)
    beta = getattr(ensemble, "beta", None)
    if inner is not None:
        return f"{'residual' if beta is None else 'delta'}({_name(inner)})"
    if isinstance(ensemble, Layers) and beta is not None:
        plain = _checks.is_concrete(beta) and float(beta) == 0
        return f"{'residual' if plain else 'delta'}(Layers)"
    return type(ensemble).__name__


def _default_chains(d: int) -> int:
    return 256 if d <= 8 else 64 if d <= 16 else 16


def _start(start: Any, k: int | None, ensemble: AbstractEnsemble) -> tuple[Array | None, int]:
    """The frame to start from, orthonormalised, and k."""
    d = ensemble.dimension
    if k is not None:
        k = _checks.whole_number("k", k, 1)
        if k > d:
            raise ArgumentError("k", str(k), f"there are d = {d} exponents")
    if start is None:
        return None, d if k is None else k
    start = jnp.asarray(start)
    if not jnp.issubdtype(start.dtype, jnp.complexfloating):
        start = _checks.real_array("start", start.astype(jnp.finfo(ensemble.dtype).dtype))
    elif not jnp.issubdtype(ensemble.dtype, jnp.complexfloating):
        raise ArgumentError("start", "complex numbers", "the matrices are real: start at Re or Im")
    if start.ndim not in (1, 2) or start.shape[0] != d:
        raise ShapeError("start", f"shape {start.shape}", f"it must be ({d},) or ({d}, k)")
    frame = start[:, None] if start.ndim == 1 else start
    if k is not None and frame.shape[1] != k:
        raise ShapeError("start", f"{frame.shape[1]} columns", f"k = {k} needs as many")
    if frame.shape[1] > d:
        raise ShapeError("start", f"{frame.shape[1]} columns", f"there are d = {d} exponents")
    norms = jnp.linalg.norm(frame, axis=0)
    if _checks.is_concrete(norms) and bool((norms == 0).any()):
        raise ArgumentError("start", "a vector of norm 0", "its norm must be > 0")
    frame = frame.astype(ensemble.dtype)
    scaled = frame / jnp.max(jnp.abs(frame), axis=0)[None]
    Q, _, gone = orthonormalised(scaled[:, :, None], True)
    if _checks.is_concrete(gone) and bool(gone.any()):
        raise ArgumentError("start", "dependent columns", "its columns must be independent")
    return Q[:, :, 0], frame.shape[1]


def _begin(
    ensemble: AbstractEnsemble,
    key: Array,
    start: Array | None,
    k: int,
    chains: int,
    checkpoints: int,
    last: bool,
) -> _State:
    d, dtype = ensemble.dimension, ensemble.dtype
    # On the host where nothing is traced: a program that runs once takes longer to compile.
    xp: Any = np if _checks.is_concrete(key, start) else jnp
    frames = _random_frames(key, d, k, chains, dtype) if start is None else xp.asarray(start)[None]
    if last:
        frames = frames.transpose(1, 2, 0)
    frames = xp.broadcast_to(frames, (d, k, chains) if last else (chains, d, k))
    real = jnp.finfo(dtype).dtype
    return _State(
        ensemble.start(chains, last),
        frames,
        np.zeros((), _whole()),
        np.full((), -1, _whole()),
        np.zeros((checkpoints, k, chains), real),
        np.asarray(False),
        np.asarray(np.inf, real),
    )


def _whole() -> Any:
    return jnp.result_type(int)


def _random_frames(key: Array, d: int, k: int, chains: int, dtype: Any) -> Any:
    """Frames uniform among all orthonormal ones, ``(chains, d, k)``."""
    shape = (chains, d, k)
    if not _checks.is_concrete(key):
        key = jax.random.fold_in(key, 2**32 - 1)  # not the number of any step
        return jnp.linalg.qr(jax.random.normal(key, shape, dtype))[0]
    rng = generator(key)
    frames = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        frames = frames + 1j * rng.standard_normal(shape)
    return np.linalg.qr(frames)[0].astype(dtype)


def _group(ensemble: AbstractEnsemble, key: Array, state: _State, every: int, last: bool) -> Any:
    """``every`` steps and an orthonormalisation: the new state, logarithms, and what vanished."""

    def step(i, carry):
        memory, frames = carry
        frames, memory = ensemble.advance(
            jax.random.fold_in(key, state.step + i), memory, frames, last
        )
        return memory, frames

    if every == 1:
        memory, frames = step(0, (state.memory, state.frames))
    else:
        memory, frames = jax.lax.fori_loop(0, every, step, (state.memory, state.frames))
    frames, logs, gone = orthonormalised(frames, last)
    return state._replace(memory=memory, frames=frames, step=state.step + every), logs, gone


@eqx.filter_jit
def _advance(
    ensemble: AbstractEnsemble,
    key: Any,
    state: _State,
    burn_in: Any,
    groups: Any,
    threshold: Any,
    until: Any,
    *,
    every: int,
    last: bool,
    stops: bool,
) -> _State:
    """Blocks up to ``until``, or until the standard error is at most ``threshold``.

    The burn-in is block −1: so the steps are compiled once.
    """
    checkpoints = state.sums.shape[0]

    def edge(block):
        # As _edges, without overflow of 32-bit numbers.
        whole, rest = groups // checkpoints, groups % checkpoints
        return block * whole + jnp.minimum(block, rest)

    def block(state):
        def group(_, carry):
            state, total, lost = carry
            state, logs, gone = _group(ensemble, key, state, every, last)
            return state, total + logs, lost | gone.any()

        counted = state.block >= 0
        number = jnp.where(counted, edge(state.block + 1) - edge(state.block), burn_in)
        total = jnp.zeros_like(state.sums[0])
        state, total, lost = jax.lax.fori_loop(0, number, group, (state, total, state.lost))
        row = jnp.where(counted, state.block, checkpoints)
        sums = state.sums.at[row].set(total, mode="drop")
        done = state.block + 1
        if not stops:
            return state._replace(sums=sums, block=done, lost=lost)
        error = _stopping_error(sums, done, every * edge(done))
        enough = counted & (done >= min(_FEWEST_BLOCKS, checkpoints))
        error = jnp.where(enough, error, jnp.inf)
        return state._replace(sums=sums, block=done, lost=lost, error=error)

    return jax.lax.while_loop(
        lambda state: (state.block < until) & ~(state.error <= threshold), block, state
    )


def _edges(groups: int, checkpoints: int) -> np.ndarray:
    """Where blocks begin and end, in groups: the first ones are longer by one."""
    block = np.arange(checkpoints + 1)
    return block * (groups // checkpoints) + np.minimum(block, groups % checkpoints)


def _stopping_error(sums: Array, done: Array, steps: Array) -> Array:
    """The largest standard error after ``done`` blocks."""
    checkpoints, _, chains = sums.shape
    finite = jnp.isfinite(sums).all(axis=(0, 2))
    safe = jnp.where(finite[None, :, None], sums, 0.0)
    if chains >= _CHAINS:
        errors = jnp.std(safe.sum(0), axis=1, ddof=1) / steps / math.sqrt(chains)
    else:
        # Blocks are too short to be independent batches at first: pool to _BATCHES per chain.
        width = jnp.maximum(done // _BATCHES, 1)
        label = jnp.minimum(jnp.arange(checkpoints) // width, _BATCHES - 1)
        valid = jnp.arange(checkpoints) < done
        weights = jnp.zeros((_BATCHES, checkpoints), sums.dtype)
        weights = weights.at[label, jnp.arange(checkpoints)].set(valid.astype(sums.dtype))
        filled = weights.sum(1)
        means = jnp.tensordot(weights, safe, 1) / jnp.where(filled > 0, filled, 1)[:, None, None]
        number = jnp.sum(filled > 0) * chains
        centre = safe.sum((0, 2)) / (done * chains)
        spread = jnp.where(filled[:, None, None] > 0, means - centre[None, :, None], 0.0)
        variance = jnp.sum(spread**2, axis=(0, 2)) / jnp.maximum(number - 1, 1)
        errors = jnp.sqrt(variance / number) * done / steps
        errors = jnp.where(done >= 2 * _BATCHES, errors, jnp.inf)
    return jnp.max(errors)


def _estimate(sums: Any, ends: np.ndarray) -> tuple[Any, Any, Any, Any, int]:
    """Means, standard errors, running means, means of chains, and degrees of freedom.

    Args:
        sums: logarithms summed over blocks, ``(blocks, chains, k)``, of NumPy or traced.
        ends: steps at the end of each block.
    """
    xp: Any = np if isinstance(sums, np.ndarray) else jnp
    blocks, chains, _ = sums.shape
    steps = float(ends[-1])
    infinite = xp.isneginf(sums)
    safe = xp.where(infinite, 0.0, sums)
    chain_means = safe.sum(0) / steps
    running = xp.cumsum(safe.mean(1), axis=0) / ends.astype(sums.dtype)[:, None]
    running = xp.where(xp.cumsum(infinite.any(axis=1), axis=0) > 0, -xp.inf, running)
    means = chain_means.mean(0)
    if chains >= _CHAINS:
        errors, degrees = xp.std(chain_means, axis=0, ddof=1) / math.sqrt(chains), chains - 1
    else:
        number = min(blocks, _BATCHES)
        bounds = np.linspace(0, blocks, number + 1).astype(int)
        lengths = np.diff(np.concatenate([[0.0], ends[bounds[1:] - 1]]))
        parts = [safe[a:b].sum(0) for a, b in itertools.pairwise(bounds)]
        batch = xp.stack(parts) / lengths.astype(sums.dtype)[:, None, None]
        total = number * chains
        if total == 1:
            errors, degrees = xp.full_like(means, xp.inf), 1
        else:
            spread = xp.std(batch.reshape(total, -1), axis=0, ddof=1)
            errors, degrees = spread / math.sqrt(total), total - 1
    lost = infinite.any(axis=(0, 1))
    return (
        xp.where(lost, -xp.inf, means),
        xp.where(lost, 0.0, errors),
        running,
        xp.where(infinite.any(axis=0), -xp.inf, chain_means),
        degrees,
    )


def _refuse_nan(sums: Array, ends: np.ndarray, ensemble: AbstractEnsemble) -> None:
    bad = np.isnan(np.asarray(sums)) | np.isposinf(np.asarray(sums))
    if bad.any():
        first = int(np.argwhere(bad.any(axis=(1, 2)))[0, 0])
        before = int(ends[first - 1]) if first else 0
        raise ArgumentError(
            "ensemble",
            f"a Jacobian of {_name(ensemble)} with NaN or infinite entries between steps {before} "
            f"and {int(ends[first])}",
            "every sampled Jacobian must be finite",
        )


def _interval(
    qr_every: Any,
    key: Array,
    ensemble: AbstractEnsemble,
    start: Array | None,
    k: int,
    chains: int,
    steps: int,
    traced: bool,
    last: bool,
) -> int:
    if isinstance(qr_every, str):
        _checks.choice("qr_every", qr_every, ("auto",), ", or a whole number")
        # Below SMALL rows an orthonormalisation is cheaper than the matrices are to draw.
        if traced or last or steps * chains * ensemble.dimension**3 < _WORTH_A_PILOT:
            return 1
        key = jax.random.fold_in(key, 2**32 - 2)
        state = _begin(ensemble, key, start, k, min(chains, 16), 1, last)
        logs = np.asarray(_pilot(ensemble, key, state, last), float)
        return _longest_interval(logs, float(jnp.finfo(ensemble.dtype).eps))
    return _checks.whole_number("qr_every", qr_every, 1)


@eqx.filter_jit
def _pilot(ensemble: AbstractEnsemble, key: Array, state: _State, last: bool) -> Array:
    """Logarithms of single steps, ``(steps, k, chains)``."""

    def step(state, _):
        state, logs, _ = _group(ensemble, key, state, 1, last)
        return state, logs

    return jax.lax.scan(step, state, length=sum(_PILOT))[1][_PILOT[0] :]


def _longest_interval(logs: np.ndarray, eps: float) -> int:
    """The longest interval at which round-off costs little, from logarithms of single steps."""
    if not np.isfinite(logs).all():
        return 1
    range_left = 200.0 if eps < 1e-10 else 25.0
    for every in _INTERVALS:
        blocks = logs[: len(logs) // every * every].reshape(-1, every, *logs.shape[1:]).sum(1)
        condition = blocks.max(axis=1) - blocks.min(axis=1)
        cost = np.mean(np.minimum(eps * np.exp(np.minimum(condition, 700.0)), 1.0)) / every
        if cost <= max(_ROUND_OFF, 100 * eps) and np.abs(blocks).max() < range_left:
            return every
    return 1
