"""A stabilised explicit method of order 4 for flows whose Jacobian has a real spectrum."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, ClassVar, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from diffrax import RESULTS
from jaxtyping import Array, PyTree

from gradflow.errors import ArgumentError
from gradflow.solvers.controllers import Costed
from gradflow.solvers.linearisation import scattered

__all__ = ["OrthogonalChebyshev"]

# The stability polynomials R_s(z) = w(z) P_{s−4}(z), one to a line: the number of stages s; real
# and imaginary parts of minus the two pairs of zeros of w in the upper half plane,
# w(z) ∝ ((z + A₁)² + B₁²)((z + A₂)² + B₂²); D and e of the map z = s²D(x − 1) − e from [−1, 1],
# on which P is orthogonal. A and B solve the four order conditions; D and e level the largest
# |R_s| on either side of the rightmost zero at 0.95, as far as their digits go.
_POLYNOMIALS = """
  5 0.221928857281786 2.856242651738363 2.011369025814080 1.086894126657300 0.06160 2.918
  7 0.228497222946545 3.192671156324312 2.249471620992587 1.211827284315848 0.07746 6.859
  9 0.248652709025136 3.341591982077861 2.347382370205557 1.255817409930503 0.11101 7.748
 11 0.263785208590304 3.419297937904324 2.397153937361596 1.276765656945374 0.13069 8.221
 13 0.274160116860832 3.464758177187682 2.425956686508767 1.288496678974746 0.14287 8.500
 15 0.281340530666894 3.493515876764576 2.444070165213318 1.295722070880151 0.15085 8.678
 17 0.286437061858931 3.512848518442387 2.456208806673923 1.300502784401828 0.15633 8.798
 19 0.290156009731238 3.526472794281637 2.464748454973404 1.303839345800939 0.16024 8.883
 21 0.292943485227215 3.536386323560857 2.470949668365492 1.306241082277410 0.16313 8.945
 23 0.295079835937002 3.543838032959573 2.475605955687201 1.308035050563668 0.16532 8.992
 25 0.296745588194693 3.549640095282908 2.479237037133177 1.309439851089652 0.16701 9.028
 29 0.299148080608091 3.557783524329432 2.484318678686597 1.311383215266622 0.16943 9.080
 33 0.300756327844726 3.563138692580988 2.487656231963076 1.312652046614955 0.17104 9.114
 37 0.301877407484262 3.566948169295566 2.490041998052227 1.313573823048893 0.17215 9.137
 41 0.302699331925193 3.569585531008926 2.491678405111629 1.314184826349358 0.17297 9.154
 47 0.303562539732202 3.572437213956090 2.493458430331411 1.314863599384245 0.17382 9.172
 53 0.304152346705350 3.574377314474092 2.494669384851085 1.315325009713910 0.17440 9.184
 61 0.304688993257392 3.576087832041860 2.495731567963653 1.315722068609320 0.17493 9.195
"""
# Nodes of the second and third of the last four stages: small coefficients, and errors of order 5
# within a few per cent of the least.
_NODES = (0.2, 0.4)
_LAST = 4

_SAFETY = 1.1  # on the spectral radius
_REFRESH = 40  # evaluations between two estimates of the spectral radius
_ROUNDS = 12  # of power iteration for an estimate, at most
_MAX_SUBSTEPS = 50
# Of the derivative at the end of a step in the error estimate.
_ERROR_WEIGHT = 0.1


class _Table(NamedTuple):
    """Coefficients of all members of the family; ``i`` runs over members."""

    stages: np.ndarray
    reach: np.ndarray  # |R_s| ≤ 0.95 down to z = −reach
    noise: np.ndarray  # round-off in the error estimate, in units of that in the state
    first: np.ndarray  # (i,) weight μ of the first stage
    offset: np.ndarray  # (i,) row in `recurrence` of the second stage
    recurrence: np.ndarray  # K_j = μ h f(t + c h, K_{j−1}) + ν K_{j−1} + κ K_{j−2}: μ, ν, κ, c
    finish: np.ndarray  # (i, 4, 4): rows of the last stages 2, 3, 4 and of the end value
    nodes: np.ndarray  # (i, 4)
    error: np.ndarray  # (i, 5): the last stages and the derivative at the end


def _recurrence(s: int, zeros: np.ndarray, D: float, e: float) -> np.ndarray:
    """Rows μ, ν, κ of ``P_j(z)/P_j(0)``, ``j = 1 … s − 4``, by the Stieltjes procedure.

    P_j is orthogonal on [−1, 1] with respect to ``w²/√(1 − x²)``; Gauss–Chebyshev quadrature with
    s + 1 nodes is exact for all the inner products.
    """
    slope, origin = D * s * s, 1 + e / (D * s * s)  # z = slope · (x − origin)
    x = np.cos((np.arange(s + 1) + 0.5) * np.pi / (s + 1))
    w = np.prod(((x - origin)[:, None] + zeros[:, 0] / slope) ** 2 + (zeros[:, 1] / slope) ** 2, 1)
    weight = w**2 / np.sum(w**2)
    older, old, norm, ratio = np.zeros_like(x), np.ones_like(x), 1.0, 1.0
    rows, c = [], 0.0
    for _ in range(s - _LAST):
        b = np.sum(weight * x * old**2) / norm
        carried = c / ratio
        ratio = origin - b - carried  # P_j / P_{j−1} at z = 0
        rows.append((1 / (slope * ratio), (origin - b) / ratio, -carried / ratio))
        older, old = old, (x - b) * old - c * older
        norm, previous = np.sum(weight * old**2), norm
        c = norm / previous
    return np.array(rows)


def _tableau_of_recurrence(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weights (A, b) with which the stages and the end of a recurrence read ``h f``."""
    count = len(rows)
    A = np.zeros((count + 1, count))
    for j, (mu, nu, kappa) in enumerate(rows):
        A[j + 1] = nu * A[j] + (kappa * A[j - 1] if j else 0.0)
        A[j + 1, j] += mu
    return A[:-1], A[-1]


def _last_stages(zeros: np.ndarray, A: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
    """Four stages (A, b, c) with stability polynomial w, so that (A, b) and they are of order 4.

    The order conditions of the composition are conditions on the moments of the last stages. With
    two nodes given they are solved as for the classical methods of Kutta: the third node follows
    from a determinant, the weights b from a Vandermonde system, A row by row.
    """
    factors = [[1.0, 2 * re, re**2 + im**2] for re, im in zeros]
    w = np.polymul(*factors)[::-1]
    # Σb, Σbc, ΣbAc, ΣbAAc
    m0, m1, n, chain = w[1:] / w[0]
    c = A.sum(axis=1)
    C, f2, f21 = b.sum(), b @ c, b @ c**2
    f41, f42, f43 = b @ c**3, b @ (c * (A @ c)), b @ A @ c**2
    # Σbc², Σbc³, Σbc(Ac), ΣbAc² from the conditions for the other four trees.
    m2 = 1 / 3 - f21 - C**2 * m0 - 2 * C * m1
    m3 = 1 / 4 - f41 - C**3 * m0 - 3 * C**2 * m1 - 3 * C * m2
    v = 1 / 8 - f42 - C * f2 * m0 - (C**2 + f2) * m1 - C * n - C * m2
    u = 1 / 12 - f43 - f21 * m0 - C**2 * m1 - 2 * C * n
    c2, c3 = _NODES
    c4 = v * (u - c2 * n) - chain * (m3 - c2 * m2)
    c4 /= n * (u - c2 * n) - chain * (m2 - c2 * m1)
    nodes = np.array([0.0, c2, c3, c4])
    weights = np.linalg.solve(np.vander(nodes, increasing=True).T, [m0, m1, m2, m3])
    # (Ac)_3 and (Ac)_4 from ΣbAc = n and Σbc(Ac) = v.
    third, fourth = np.linalg.solve([weights[2:], weights[2:] * nodes[2:]], [n, v])
    last = np.zeros((_LAST, _LAST))
    last[2, 1] = third / c2
    last[3, 2] = chain / (weights[3] * third)
    last[3, 1] = (fourth - last[3, 2] * c3) / c2
    last[:, 0] = nodes - last.sum(axis=1)
    return last, weights, nodes


def _error_weights(A: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Weights on the last stages and the derivative at the end that vanish to order 3."""
    nodes = np.append(c, b.sum())
    conditions = np.stack([np.ones(5), nodes, nodes**2, np.append(A @ c, b @ c)])
    null = np.linalg.svd(conditions)[2][-1]
    return null * (_ERROR_WEIGHT / null[-1])


@cache
def _table() -> _Table:
    numbers = np.array(_POLYNOMIALS.split(), dtype=float).reshape(-1, 7)
    stages = numbers[:, 0].astype(int)
    first, offsets, finish, nodes, error = [], [], [], [], []
    recurrence: list[np.ndarray] = []
    for s, (*flat, D, e) in zip(stages, numbers[:, 1:], strict=True):
        zeros = np.array(flat).reshape(2, 2)
        rows = _recurrence(s, zeros, D, e)
        A, b = _tableau_of_recurrence(rows)
        last, weights, c = _last_stages(zeros, A, b)
        first.append(rows[0, 0])
        offsets.append(sum(len(done) for done in recurrence))
        recurrence.append(np.column_stack([rows[1:], A.sum(axis=1)[1:]]))
        finish.append(np.vstack([last[1:], weights]))
        nodes.append(b.sum() + c)
        error.append(_error_weights(last, weights, c))
    # z = −2Ds² − e is x = −1.
    reach = 2 * numbers[:, 5] * stages**2 + numbers[:, 6]
    re, im = numbers[:, 1:5:2], numbers[:, 2:5:2]
    # The last stages multiply the first ones' round-off by w(z)/w(0), and its slope by z.
    noise = _ERROR_WEIGHT * reach
    noise *= np.prod(((re - reach[:, None]) ** 2 + im**2) / (re**2 + im**2), axis=1)
    return _Table(
        stages,
        reach,
        noise,
        np.array(first),
        np.array(offsets),
        np.concatenate(recurrence),
        np.stack(finish),
        np.stack(nodes),
        np.stack(error),
    )


def _norm(tree: PyTree) -> Array:
    return jnp.sqrt(reduce(operator.add, [jnp.sum(x * x) for x in jax.tree.leaves(tree)]))


def _normalised(tree: PyTree) -> PyTree:
    size = _norm(tree)
    usable = jnp.isfinite(size) & (size > 0)
    factor = jnp.where(usable, 1 / jnp.where(usable, size, 1.0), 0.0)
    return jax.tree.map(lambda x: jnp.where(usable, factor * x, 0.0), tree)


def _scattered(tree: PyTree) -> PyTree:
    """A fixed unit vector that no eigenspace is likely to be orthogonal to."""

    def leaf(k, x):
        return scattered(x.size, x.dtype, k).reshape(x.shape)

    leaves, structure = jax.tree.flatten(tree)
    return _normalised(jax.tree.unflatten(structure, [leaf(k, x) for k, x in enumerate(leaves)]))


class _Estimate(NamedTuple):
    """Of the spectral radius of the Jacobian."""

    radius: Any
    vector: PyTree  # the latest direction of the power iteration
    spent: Any  # evaluations


def _power_iteration(rate, t, y, slope, guess: _Estimate, most: Any) -> _Estimate:
    """At most ``most`` rounds ``v ← Jv/‖Jv‖`` from a guess, with differences for ``Jv``."""
    size = _norm(y)
    eps = jnp.finfo(size.dtype).eps
    shift = jnp.sqrt(eps) * jnp.where(size > 0, size, 1.0)

    def iterate(carry):
        (radius, v, count), _ = carry
        # Some of every direction, so that one that takes the lead later is found.
        stir = jnp.where(count == 0, 0.1, 0.0)
        v = _normalised(jax.tree.map(lambda a, b: a + stir * b, v, _scattered(v)))
        moved = rate(t, jax.tree.map(lambda a, b: a + shift * b, y, v))
        image = jax.tree.map(lambda a, b: (a - b) / shift, moved, slope)
        return _Estimate(_norm(image), _normalised(image), count + 1), radius

    def unsettled(carry):
        (radius, _, count), previous = carry
        # Two rounds at least: the first one sees what was mixed in.
        settled = (jnp.abs(radius - previous) <= 5e-3 * radius) & (count > 1)
        return (count < most) & ~settled

    start = guess._replace(spent=jnp.asarray(0))
    (radius, vector, spent), _ = jax.lax.while_loop(
        unsettled, iterate, (start, -jnp.ones_like(size))
    )
    found = (spent > 0) & jnp.isfinite(radius)
    radius = jnp.where(found, radius, guess.radius)
    vector = jax.tree.map(lambda a, b: jnp.where(found, a, b), vector, guess.vector)
    return _Estimate(radius, vector, spent)


def _advance(rate, t0, t1, h, y0, rate0, member) -> tuple[PyTree, PyTree, PyTree, Any]:
    """One step with a member of the family, of size ``h`` from ``t0`` to ``t1``.

    Returns the end, the derivative there, the error, and how steep f is between the last stage
    and the end: a lower bound of its Lipschitz constant, NaN after an overflow.
    """
    table = _table()
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    recurrence = jnp.asarray(table.recurrence, dtype)
    first, finish, nodes, weights = (
        jnp.asarray(x, dtype)[member] for x in (table.first, table.finish, table.nodes, table.error)
    )
    offset = jnp.asarray(table.offset)[member]

    def stage(row, last, older):
        mu, nu, kappa, c = recurrence[row]
        slope = rate(t0 + c * h, last)
        return jax.tree.map(lambda f, a, b: (mu * h) * f + nu * a + kappa * b, slope, last, older)

    def two_stages(k, carry):
        # Two at a time, so that no array changes its place in the carry.
        last, older = carry
        older = stage(offset + 2 * k, last, older)
        last = stage(offset + 2 * k + 1, older, last)
        return last, older

    def combined(base, weights, slopes):
        def leaf(base, *slopes):
            terms = [(h * w) * k for w, k in zip(weights, slopes, strict=True)]
            return reduce(operator.add, terms, base)

        return jax.tree.map(leaf, base, *slopes)

    y = jax.tree.map(lambda y, f: y + (first * h) * f, y0, rate0)
    pairs = jnp.asarray(table.stages)[member] // 2 - 2
    y, _ = jax.lax.fori_loop(0, pairs, two_stages, (y, y0))
    points, slopes = [y], [rate(t0 + nodes[0] * h, y)]
    for i in range(_LAST):
        points.append(combined(y, finish[i, : i + 1], slopes))
        slopes.append(rate(t1 if i == _LAST - 1 else t0 + nodes[i + 1] * h, points[-1]))
    error = combined(jax.tree.map(jnp.zeros_like, y), weights, slopes)
    moved, turned = (_norm(jax.tree.map(jnp.subtract, x[-1], x[-2])) for x in (points, slopes))
    # Below this the quotient is one of round-off.
    visible = moved > 1e4 * jnp.finfo(dtype).eps * _norm(y0)
    steepness = jnp.where(visible, turned / jnp.where(visible, moved, 1.0), 0.0)
    return (
        points[-1],
        slopes[-1],
        error,
        jnp.where(jnp.isfinite(moved + turned), steepness, jnp.nan),
    )


def known_stages() -> tuple[int, ...]:
    """The numbers of stages of the family's members."""
    return tuple(int(s) for s in _table().stages)


class _State(NamedTuple):
    rate: PyTree  # f at the start of the step
    estimate: _Estimate
    age: Any  # evaluations of accepted steps since then


class _Walk(NamedTuple):
    """How far a step has come, which may be made of several substeps."""

    t: Any
    y: PyTree
    rate: PyTree
    error: PyTree
    estimate: _Estimate
    rounds: Any  # of power iteration before the next substep, at most
    floor: Any  # a lower bound of the spectral radius that a substep has found
    restarts: Any
    spent: Any  # evaluations
    done: Any


class OrthogonalChebyshev(diffrax.AbstractAdaptiveSolver):
    """Stabilised explicit Runge–Kutta–Chebyshev method of order 4 with orthogonal polynomials.

    For stiff flows whose Jacobian has real, mostly non-positive eigenvalues: with s stages a step
    is stable to ``h ρ ≈ 0.353 s²``, ρ the spectral radius, where a classical explicit method
    reaches about 3. Stability polynomials ``R_s(z) = w(z) P_{s−4}(z)``, w of degree 4 without real
    zeros and P orthogonal with respect to ``w²/√(1 − x²)``; the first s − 4 stages are the
    three-term recurrence of P, the last four a classical method with stability polynomial w
    (Abdulle 2002, *SIAM J. Sci. Comput.* 23, 2041–2054; the coefficients are computed here). The
    error is estimated by an embedded formula of order 3 on the last stages and the derivative at
    the end, which is the next step's first.

    In every step s follows from h and an estimate of ρ by power iteration on differences of f. A
    step too long for the largest s is made of several equal ones. Where the last stages show a
    Jacobian larger than the s at hand can bear, the step is made again from a new estimate.

    Args:
        stages: a fixed s, one of the method's (odd, 5 to 61), for steps known to be stable;
            otherwise chosen in every step.
        tolerance: the relative tolerance of the run. The last stages enlarge round-off by
            ``|w(z)/w(0)| ≈ (hρ)⁴/100``, so it bounds s: 11, 19, 29 at 1e-10, 1e-8, 1e-6 in double
            precision, 7 at 1e-4 in single.
        costed: hand the number of evaluations to the step size controller along with the error.

    Raises:
        ValueError: ``stages`` that the method does not have.
    """

    stages: int | None = eqx.field(static=True, default=None)
    # An array, so that another tolerance is no other program.
    tolerance: Any = eqx.field(converter=jnp.asarray, default=1e-8)
    costed: bool = eqx.field(static=True, default=False)

    # Cubic interpolation is of the order of the error estimate, but not of the method.
    lands_on_saves: ClassVar[bool] = True

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar[Callable[..., diffrax.ThirdOrderHermitePolynomialInterpolation]] = (
        diffrax.ThirdOrderHermitePolynomialInterpolation
    )

    def __post_init__(self):
        known = known_stages()
        if self.stages is not None and self.stages not in known:
            raise ArgumentError("stages", repr(self.stages), f"it must be one of {known}")

    def order(self, terms: Any) -> int:
        return 4

    def error_order(self, terms: Any) -> int:
        return 4

    def init(self, terms: Any, t0: Any, t1: Any, y0: PyTree, args: Any) -> _State:
        rate = terms.vf(t0, y0, args)
        radius = jnp.zeros((), jnp.result_type(*jax.tree.leaves(y0)))
        start = _Estimate(radius, _normalised(rate), jnp.asarray(0))
        return _State(rate, start, jnp.asarray(_REFRESH))

    def func(self, terms: Any, t0: Any, y0: PyTree, args: Any) -> PyTree:
        return terms.vf(t0, y0, args)

    def step(self, terms, t0, t1, y0, args, solver_state: _State, made_jump):
        table = _table()
        dtype = solver_state.estimate.radius.dtype
        reach = jnp.asarray(table.reach, dtype)
        quiet = jnp.asarray(table.noise, dtype) * jnp.finfo(dtype).eps <= self.tolerance
        last = jnp.maximum(jnp.sum(quiet), 1) - 1

        def rate(t, y):
            return terms.vf(t, y, args)

        def dense(y1, rate1):
            whole = terms.contr(t0, t1)
            k0, k1 = (jax.tree.map(lambda f: whole * f, k) for k in (rate0, rate1))
            return {"y0": y0, "y1": y1, "k0": k0, "k1": k1}

        if made_jump is False:
            rate0 = solver_state.rate
        else:
            rate0 = jax.lax.cond(made_jump, lambda: rate(t0, y0), lambda: solver_state.rate)
        if self.stages is not None:
            member = known_stages().index(self.stages)
            h = terms.contr(t0, t1)
            y, slope, error, _ = _advance(rate, t0, t1, h, y0, rate0, member)
            error = self._told(error, jnp.asarray(self.stages))
            state = solver_state._replace(rate=slope)
            return y, error, dense(y, slope), state, RESULTS.successful

        zeros = jax.tree.map(jnp.zeros_like, y0)
        start = _Walk(
            t0,
            y0,
            rate0,
            zeros,
            solver_state.estimate,
            jnp.where(solver_state.age >= _REFRESH, _ROUNDS, 0),
            jnp.zeros((), dtype),
            jnp.asarray(0),
            jnp.asarray(0),
            jnp.asarray(False),
        )

        def substep(walk: _Walk) -> _Walk:
            estimate = _power_iteration(rate, walk.t, walk.y, walk.rate, walk.estimate, walk.rounds)
            radius = _SAFETY * jnp.maximum(estimate.radius, walk.floor)
            # Rounding must not make one more of the last substep.
            parts = jnp.ceil((1 - 1e-5) * jnp.abs(terms.contr(walk.t, t1)) * radius / reach[last])
            hopeless = parts > _MAX_SUBSTEPS
            parts = jnp.where(hopeless, 1, jnp.maximum(parts, 1))
            end = jnp.where(parts == 1, t1, walk.t + (t1 - walk.t) / parts)
            h = terms.contr(walk.t, end)
            z = jnp.where(hopeless, 0, jnp.abs(h) * radius)
            member = jnp.minimum(jnp.searchsorted(reach, z), last)
            y, slope, error, steepness = _advance(rate, walk.t, end, h, walk.y, walk.rate, member)
            finite = jnp.isfinite(steepness)
            unstable = ~finite | (jnp.abs(h) * steepness > reach[member])
            again = unstable & ~hopeless & (walk.restarts < 2)
            failed = hopeless | (unstable & ~again)

            def chosen(new, old):
                return jax.tree.map(lambda a, b: jnp.where(again | failed, b, a), new, old)

            error = jax.tree.map(jnp.add, walk.error, error)
            error = jax.tree.map(lambda a: jnp.where(failed, jnp.inf, a), chosen(error, zeros))
            found = jnp.where(finite, steepness, 2 * radius)
            return _Walk(
                jnp.where(again, t0, end),
                chosen(y, y0),
                chosen(slope, rate0),
                error,
                estimate,
                jnp.where(again, 4 * _ROUNDS, 0),
                jnp.where(again, found, walk.floor),
                walk.restarts + again,
                walk.spent + estimate.spent + jnp.asarray(table.stages)[member],
                ~again & (failed | (parts == 1)),
            )

        walk = jax.lax.while_loop(lambda walk: ~walk.done, substep, start)
        radius = jnp.maximum(walk.estimate.radius, walk.floor)
        estimate = walk.estimate._replace(radius=radius, spent=jnp.zeros_like(walk.spent))
        refreshed = (start.rounds > 0) | (walk.restarts > 0)
        age = jnp.where(refreshed, 0, solver_state.age) + walk.spent
        error = self._told(walk.error, walk.spent)
        state = _State(walk.rate, estimate, age)
        return walk.y, error, dense(walk.y, walk.rate), state, RESULTS.successful

    def spectral_radius(self, state: _State) -> Any:
        """The estimate of ``|λ|`` that a state holds."""
        return state.estimate.radius

    def _told(self, error: PyTree, evaluations: Any) -> Any:
        return Costed(error, evaluations) if self.costed else error
