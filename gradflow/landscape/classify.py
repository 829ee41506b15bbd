"""What kind of critical point a network is, by theory and by numbers.

With ``A_k``, ``B_l``, ``M_kl`` as in :mod:`gradflow.landscape.hessian`, ``R = Σ − U_S U_Sᵀ Σ`` and
``r = |S|``, a pair of layers (*pivot*) k > l is **tightened** if one of its blocks ``A_k``,
``M_kl``, ``B_l`` has rank r (Achour, Malgouyres & Gerchinovitz, arXiv 2107.13289). It is **inert**
if ``A_kᵀ R B_lᵀ = 0`` or ``M_kl`` has rank r: moving both layers gains nothing at second order.
Tightened pivots are inert; a pivot that is not tightened is inert only where its blocks reach out
to modes of the two sides that the residual does not join.

* S holds the strongest modes and as many as fit: a global minimum.
* S holds the strongest modes, fewer than fit, and every pivot is inert: the form is positive
  semi-definite, a non-strict saddle. (Where all pivots are inert every second-order term is
  ``⟨R, δ W^+ δ⟩`` of the change δ of the map, and ``‖δ‖² ≥ 2⟨R, δ W^+ δ⟩`` because
  ``‖R‖₂ ≤ s_r``.)
* Otherwise a strict saddle: an active pivot, or a weaker mode exchanged for a stronger one, has
  negative curvature.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import scipy.linalg

from gradflow import _checks
from gradflow.landscape import _chain, hessian
from gradflow.landscape.points import EQUAL, clusters
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = ["Classification", "classify", "nearest_signature"]


class Classification(NamedTuple):
    """The kind of a point, and what it rests on.

    Attributes:
        kind: ``"global_minimum"``, ``"strict_saddle"``, ``"nonstrict_saddle"``,
            ``"not_critical"``, or ``"undecided"`` where theory and numbers disagree.
        signature: the learnt modes, counted from 1; None where not critical.
        value: the loss at the network.
        critical_value: ``½ Σ_{i∉S} s_i²`` above the infimum; None where not critical.
        inertia: (negative, zero, positive) Hessian eigenvalues with the tolerance; None where not
            critical and above 4,000 parameters.
        tightened: whether every pivot is tightened; None where not critical.
        gradient_norm: Frobenius norm of the gradient over all layers.
        escape_order: the order at which the loss falls along the best curve known: 1 where not
            critical, 2 at strict saddles, 3 or more at non-strict ones, None at minima.
        theory, numerical: the kind by rank pattern and signature, and by eigenvalues.
        agree: whether they are the same.
        reason: one sentence on what decided, or on how they disagree.
        distance: of the whitened end-to-end map from ``U_S U_Sᵀ Σ`` (Frobenius).
        smallest_eigenvalue: of the Hessian; None where not critical.
        gradient_tolerance, eigenvalue_tolerance, rank_tolerance: what counts as zero; the last
            one is a fraction of the natural size of a layer, ``‖W_*‖^{1/h}``.
    """

    kind: str
    signature: tuple[int, ...] | None
    value: float
    critical_value: float | None
    inertia: hessian.Inertia | None
    tightened: bool | None
    gradient_norm: float
    escape_order: int | None
    theory: str
    numerical: str
    agree: bool
    reason: str
    distance: float | None
    smallest_eigenvalue: float | None
    gradient_tolerance: float
    eigenvalue_tolerance: float | None
    rank_tolerance: float | None

    def __repr__(self) -> str:
        where = "" if self.signature is None else f" of signature {self.signature}"
        lines = [
            f"{self.kind}{where}, loss {self.value:.6g}",
            f"  theory {self.theory}, numbers {self.numerical}: {self.reason}",
            f"  gradient norm {self.gradient_norm:.2g} (critical up to "
            f"{self.gradient_tolerance:.2g})",
        ]
        if self.inertia is not None:
            lines.append(
                f"  inertia {tuple(self.inertia)}, smallest eigenvalue "
                f"{self.smallest_eigenvalue:.4g}, zero up to {self.eigenvalue_tolerance:.2g}"
            )
        return "\n".join(lines)


def nearest_signature(problem: Problem, net: LinearNetwork) -> tuple[tuple[int, ...], float]:
    """The signature whose end-to-end map is nearest, and its distance.

    ``‖W C_x^{1/2} − U_S U_Sᵀ Σ‖_F`` is smallest for the modes whose strength
    ``u_iᵀ W C_x^{1/2} v_i`` is above ``s_i/2``. Among equal singular values only their number
    counts: the lowest stand for all, and the distance is to the continuum.

    Args:
        problem: a loss with a target.
        net: any network of its shape, critical or not; concrete.

    Returns:
        ``(signature, distance)``.

    Raises:
        ValueError: a problem without a target, or a network that does not fit.
    """
    modes = _chain.modes_of(problem)
    chain = _chain.Chain.of(_chain.fitting(problem, net))
    signature, distance, _ = nearest(modes, chain.widths, chain.product)
    return signature, distance


def nearest(
    modes: _chain.Modes, widths: tuple[int, ...], W: np.ndarray
) -> tuple[tuple[int, ...], float, np.ndarray]:
    """The nearest signature of a map, the distance, and the critical map, in the whitened frame."""
    white = W @ modes.root
    gains: list[tuple[float, int]] = []
    closest = np.zeros_like(white)
    parts: dict[int, np.ndarray] = {}
    for group in clusters(modes):
        index = [i - 1 for i in group]
        left, right, s = modes.U[:, index], modes.V[:, index], modes.s[index[0]]
        P, strengths, Qt = np.linalg.svd(left.T @ white @ right)
        if len(group) == 1:  # with its sign: −s_i is far from s_i
            strengths = strengths * P[0] * Qt[:, 0]
            P, Qt = np.ones((1, 1)), np.ones((1, 1))
        for j, (i, strength) in enumerate(zip(group, strengths, strict=True)):
            gains.append((s * (2 * strength - s), i))
            parts[i] = s * (left @ P[:, [j]]) @ (Qt[[j]] @ right.T)
    # Largest gain first, as many as fit.
    kept = [i for gain, i in sorted(gains, reverse=True)[: min(widths)] if gain > 0]
    if len(widths) == 2:
        kept = [i for _, i in gains]
    for i in kept:
        closest = closest + parts[i]
    return tuple(sorted(kept)), float(np.linalg.norm(white - closest)), closest


class Pivots(NamedTuple):
    """What the rank pattern says about moving several layers at once.

    Attributes:
        tightened: whether every pivot is.
        path: the fewest layers that have to move together for a gain, lower first; empty if no
            movement of layers alone gains.
        split: the network as learnt modes and rest.
    """

    tightened: bool
    path: tuple[int, ...]
    split: _chain.Split


def pivots(
    modes: _chain.Modes,
    chain: _chain.Chain,
    tolerance: float,
    scale: float,
) -> Pivots:
    """Look at all pairs of layers, and find the shortest chain of layers that joins them."""
    signature, _, learnt_map = nearest(modes, chain.widths, chain.product)
    split = _chain.split(modes, chain, len(signature), learnt_map)
    rest, h = split.rest, chain.depth
    strength = float(modes.s[0]) if modes.number else 1.0

    def present(block: np.ndarray, layers: int, unit: float = 1.0) -> bool:
        if not block.size:
            return False
        return float(np.linalg.norm(block, 2)) > tolerance * unit * scale**layers

    pairs = [(k, l) for l, k in itertools.combinations(range(1, h + 1), 2)]
    # A block of no layers is the identity of its node: beyond the learnt modes if there is room.
    above = {k: present(rest.after(k), h - k) for k in range(1, h + 1)}
    below = {l: present(_unwhitened(modes, rest, l), l - 1) for l in range(1, h + 1)}
    joined = {(k, l): present(rest.between(k, l), k - l - 1) for k, l in pairs}
    paired = {
        (k, l): present(
            rest.after(k).T @ split.residual @ rest.before(l).T, h - k + l - 1, strength
        )
        for k, l in pairs
    }
    tightened = not any(above[k] and joined[k, l] and below[l] for k, l in pairs)
    best: tuple[int, ...] = ()
    for first in range(1, h):
        paths: dict[int, tuple[int, ...]] = {first: (first,)}
        frontier = [first]
        while frontier:
            reached = []
            for l in frontier:
                for k in range(l + 1, h + 1):
                    if k not in paths and joined[k, l]:
                        paths[k] = (*paths[l], k)
                        reached.append(k)
            frontier = reached
        for last, path in paths.items():
            if last > first and paired[last, first] and (not best or len(path) < len(best)):
                best = path
    return Pivots(tightened, best, split)


def _unwhitened(modes: _chain.Modes, rest: _chain.Chain, layer: int) -> np.ndarray:
    # Inputs that never occur (the kernel of C_x) are no directions to escape into.
    return rest.before(layer) @ modes.root if layer == 1 else rest.before(layer)


def is_top(modes: _chain.Modes, signature: tuple[int, ...]) -> bool:
    """Whether no mode outside is stronger than one inside."""
    inside = [modes.s[i - 1] for i in signature]
    outside = [modes.s[i] for i in range(modes.number) if i + 1 not in signature]
    return not inside or not outside or min(inside) >= max(outside) - EQUAL * modes.s[0]


def rank_tolerance(chain: _chain.Chain, slope: float, eps: float) -> float:
    """What fraction of a layer's natural size is zero, for a gradient of relative size ``slope``.

    Where the loss falls at order h, the gradient is of order h − 1 in the distance.
    """
    floor = max(slope, chain.parameters * eps)
    return min(0.3, 3 * floor ** (1 / max(1, chain.depth - 1)))


def classify(
    problem: Problem,
    net: LinearNetwork,
    *,
    gradient_tol: float | None = None,
    eigenvalue_tol: float | None = None,
    rank_tol: float | None = None,
) -> Classification:
    """The kind of a critical point: global minimum, strict or non-strict saddle.

    Decided twice, from the rank pattern and signature (see the module), and from the inertia of
    the Hessian; there are no other kinds, as there are no maxima and no spurious minima. Also for
    the state that a run ended in, where the gradient is small and not zero: all tolerances follow
    from it and from the scale of the problem, and are reported.

    Args:
        problem: a loss with a target; inputs may be coloured.
        net: a concrete network.
        gradient_tol: gradient norms up to this are zero; 1e-6 of the natural size
            ``λ_max(C_x) ‖W_*‖^{2−1/h}`` if left out.
        eigenvalue_tol: as ``tol`` of :func:`inertia`.
        rank_tol: singular values of a block of layers up to this fraction of the natural one,
            ``‖W_*‖^{1/h}`` a layer, do not count for its rank; ``3 ĝ^{1/(h−1)}`` if left out, ĝ the
            gradient norm over its natural size, or round-off if that is more.

    Returns:
        a :class:`Classification`. Above 4,000 parameters the numbers rest on the smallest
        eigenvalue alone.

    Raises:
        ValueError: a problem without a target, or a network that does not fit or is not finite.
    """
    modes = _chain.modes_of(problem)
    net = hessian._concrete(problem, net)
    given = {"gradient_tol": gradient_tol, "eigenvalue_tol": eigenvalue_tol, "rank_tol": rank_tol}
    for name, number in given.items():
        if number is not None:
            _checks.real_scalar(name, number, minimum=0)
    chain = _chain.Chain.of(net)
    W = chain.product
    value = _chain.loss_value(problem, W)
    slope = _chain.norm(_chain.gradient(chain, _chain.residual(problem, W)))
    natural = hessian.scales(problem, chain, modes.curvature)
    if gradient_tol is None:
        gradient_tol = max(1e-6, 10 * chain.parameters * modes.eps) * natural.gradient
    if slope > gradient_tol:
        return Classification(
            "not_critical", None, value, None, None, None, slope, 1, "not_critical",
            "not_critical", True, f"the gradient has norm {slope:.3g}", None, None, gradient_tol,
            None, None,
        )  # fmt: skip
    if rank_tol is None:
        rank_tol = rank_tolerance(chain, slope / natural.gradient, modes.eps)
    signature, distance, _ = nearest(modes, chain.widths, W)
    moves = pivots(modes, chain, rank_tol, natural.layer)
    theory, order, why = _by_theory(modes, chain, signature, moves)

    counts: hessian.Inertia | None = None
    if chain.parameters <= hessian.DENSE_LIMIT:
        values = scipy.linalg.eigvalsh(hessian.dense(problem, chain))
        counts = hessian.counted(problem, chain, values, eigenvalue_tol)
        smallest, zero = counts.smallest, counts.tolerance
    else:
        smallest = float(hessian.lowest(problem, net, 1)[0][0])
        zero = (
            hessian.eigenvalue_tolerance(problem, chain, natural.curvature)
            if eigenvalue_tol is None
            else eigenvalue_tol
        )
    numerical = _by_numbers(modes, chain.widths, value, smallest, zero)
    agree = theory == numerical
    if not agree:
        why = (
            f"{why} makes it a {theory}, the smallest eigenvalue {smallest:.3g} (zero up to "
            f"{zero:.3g}) a {numerical}"
        )
    return Classification(
        kind=theory if agree else "undecided",
        signature=signature,
        value=value,
        critical_value=modes.value(signature),
        inertia=counts,
        tightened=moves.tightened,
        gradient_norm=slope,
        escape_order=order,
        theory=theory,
        numerical=numerical,
        agree=agree,
        reason=why,
        distance=distance,
        smallest_eigenvalue=smallest,
        gradient_tolerance=gradient_tol,
        eigenvalue_tolerance=zero,
        rank_tolerance=rank_tol,
    )


def _by_theory(
    modes: _chain.Modes, chain: _chain.Chain, signature: tuple[int, ...], moves: Pivots
) -> tuple[str, int | None, str]:
    if is_top(modes, signature):
        if len(signature) == modes.admissible(chain.widths):
            return "global_minimum", None, "all modes that fit are learnt"
        if len(moves.path) != 2:
            order = len(moves.path) or None
            return "nonstrict_saddle", order, "every pivot is inert below the strongest modes"
        upper, lower = moves.path[1], moves.path[0]
        return "strict_saddle", 2, f"the pivot of layers {upper} and {lower} is active"
    return "strict_saddle", 2, "a stronger mode is left out for a weaker one"


def _by_numbers(
    modes: _chain.Modes, widths: tuple[int, ...], value: float, smallest: float, zero: float
) -> str:
    if smallest < -zero:
        return "strict_saddle"
    top = modes.admissible(widths)
    least = modes.value(tuple(range(1, top + 1)))
    # The next critical value above the least: the weakest learnt mode exchanged or dropped.
    weakest = modes.s[top - 1] if top else 0.0
    outside = modes.s[top:]
    rivals = outside[outside < weakest - EQUAL * modes.s[0]] if top else outside
    gap = 0.5 * (weakest**2 - (float(rivals[0]) ** 2 if len(rivals) else 0.0))
    # A zero target has one critical value only.
    return "nonstrict_saddle" if gap > 0 and value > least + 0.5 * gap else "global_minimum"


def with_pivots(problem: Problem, net: LinearNetwork) -> tuple[Classification, Pivots | None]:
    """A classification together with the chain of layers that it rests on."""
    verdict = classify(problem, net)
    if verdict.signature is None:
        return verdict, None
    modes, chain = _chain.modes_of(problem), _chain.Chain.of(net)
    natural = hessian.scales(problem, chain, modes.curvature)
    assert verdict.rank_tolerance is not None
    return verdict, pivots(modes, chain, verdict.rank_tolerance, natural.layer)
