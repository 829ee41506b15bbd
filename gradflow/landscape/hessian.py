"""The Hessian form of the loss in the weights: products, spectrum, inertia.

With ``A_l = W_h ⋯ W_{l+1}``, ``B_l = W_{l-1} ⋯ W_1``, ``M_kl = W_{k-1} ⋯ W_{l+1}`` and the
residual ``R = −∇ℓ(W)``,

.. math:: d^2L[V, V] = \\nabla^2\\ell(W)\\Big[\\sum_l A_l V_l B_l,\\ \\sum_l A_l V_l B_l\\Big]
   - 2 \\sum_{k > l} \\langle R,\\ A_k V_k M_{kl} V_l B_l \\rangle .

The form has a large kernel, the directions in which the end-to-end map does not change, so that
nothing here asks for an inverse.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.sparse.linalg
from jaxtyping import Array, Float

from gradflow import _checks
from gradflow._products import product
from gradflow.errors import ArgumentError
from gradflow.landscape import _chain
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = [
    "HessianOperator",
    "Inertia",
    "hessian_form",
    "hessian_matrix",
    "hessian_product",
    "inertia",
    "spectrum",
]

# Above this many parameters the dense matrix (8 n² bytes) is not built.
DENSE_LIMIT = 4000
# Below it the dense eigenvalues take less time than Lanczos.
DENSE_ALWAYS = 1500


class HessianOperator(eqx.Module):
    """The Hessian at one network as a linear map of directions, all products prepared.

    Six products of matrices a layer, where the derivative of the gradient takes eight: those of
    the network alone are done once. ``operator(V)`` is the same as :func:`hessian_product`; it
    goes through ``jax.jit``, and ``jax.vmap`` over directions makes one multiplication of each
    product.

    Args:
        problem: the loss of the end-to-end map, also one given by a function.
        net: where, layers of shapes ``(d_i, d_{i-1})``.

    Raises:
        ValueError: widths that do not fit, or a network with entries that are not finite.
    """

    problem: Problem
    net: LinearNetwork
    layers: tuple[Array, ...]
    prefixes: tuple[Array, ...]  # W_{1:l}, l = 1 … h
    carried: tuple[Array, ...]  # −A_lᵀ R, l = 1 … h
    mirrored: bool = eqx.field(static=True)

    def __init__(self, problem: Problem, net: LinearNetwork):
        self.net = _chain.fitting(problem, net)
        self.problem = problem
        # The transposed network where that has the narrow end at its input, which two layers do
        # not notice.
        self.mirrored = net.depth > 2 and net.widths[-1] < net.widths[0]
        self.layers = self._turned(net.weights)
        prefixes = [self.layers[0]]
        for w in self.layers[1:]:
            prefixes.append(product(w, prefixes[-1]))
        carried = [self._slope(prefixes[-1])]
        for w in self.layers[:0:-1]:
            carried.append(product(w.T, carried[-1]))
        self.prefixes, self.carried = tuple(prefixes), tuple(reversed(carried))

    def _turned(self, layers: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(w.T for w in reversed(layers)) if self.mirrored else tuple(layers)

    def _slope(self, W: Array) -> Array:
        return -(self.problem.residual(W.T).T if self.mirrored else self.problem.residual(W))

    def __call__(self, V: LinearNetwork) -> LinearNetwork:
        """The Hessian applied to ``V``, as a network of the same widths."""
        directions = self._turned(_chain.same_layers("V", self.net, V).weights)
        changes = [directions[0]]
        for w, v, before in zip(self.layers[1:], directions[1:], self.prefixes[:-1], strict=True):
            changes.append(product(w, changes[-1]) + product(v, before))
        _, change = jax.jvp(self._slope, (self.prefixes[-1],), (changes[-1],))
        products = []
        for i in range(self.net.depth - 1, 0, -1):
            w, v, carried = self.layers[i], directions[i], self.carried[i]
            before, moved = self.prefixes[i - 1], changes[i - 1]
            products.append(self._outer((change, carried), (before, moved)))
            change = product(w.T, change) + product(v.T, carried)
        products.append(change.T if self.mirrored else change)
        return self.net.with_weights(tuple(products if self.mirrored else reversed(products)))

    def _outer(self, left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
        """``a bᵀ + c dᵀ``, as the layer of the network itself."""
        if self.mirrored:
            left, right = right, left
        if 4 * left[0].shape[1] <= left[0].shape[0]:
            # Thin factors: side by side the large result is written once.
            return jnp.concatenate(left, axis=1) @ jnp.concatenate(right, axis=1).T
        return product(left[0], right[0].T) + product(left[1], right[1].T)

    def flat(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """The same on vectors of all parameters, layer after layer, row-major."""
        return flatten(self(unflatten(x, self.net)))


def flatten(net: LinearNetwork) -> Float[Array, " n"]:
    """All weights as one vector, layer after layer, row-major."""
    return jnp.concatenate([w.ravel() for w in net.weights])


def unflatten(x: Float[Array, " n"], net: LinearNetwork) -> LinearNetwork:
    """The inverse of :func:`flatten`, with the widths of ``net``."""
    ends = np.cumsum([w.size for w in net.weights])
    parts = jnp.split(x, ends[:-1])
    shapes = [w.shape for w in net.weights]
    return net.with_weights(tuple(p.reshape(s) for p, s in zip(parts, shapes, strict=True)))


def hessian_product(problem: Problem, net: LinearNetwork, V: LinearNetwork) -> LinearNetwork:
    """The Hessian of the loss applied to a direction, without the matrix.

    For many directions at one network use :class:`HessianOperator`.

    Args:
        problem: the loss of the end-to-end map, also one given by a function.
        net: where, layers of shapes ``(d_i, d_{i-1})``.
        V: the direction, a network of the same widths whose weights are the perturbations.

    Returns:
        a network of the same widths holding ``∂/∂W_l`` of ``½ d²L[V, V]`` seen as a function of
        ``V``: ``d²L[V, V2]`` is its inner product with ``V2``.

    Raises:
        ValueError: widths that do not fit, or a network with entries that are not finite.
    """
    net = _chain.fitting(problem, net)
    return _product(problem, net, _chain.same_layers("V", net, V))


@eqx.filter_jit
def _product(problem: Problem, net: LinearNetwork, V: LinearNetwork) -> LinearNetwork:
    return HessianOperator(problem, net)(V)


def hessian_form(
    problem: Problem, net: LinearNetwork, V: LinearNetwork, V2: LinearNetwork | None = None
) -> Float[Array, ""]:
    """``d²L[V, V2]``, the second derivative of the loss along two directions, a scalar.

    ``d²L(W + εV)/dε²`` at ε = 0 for ``V2 = V`` (the default).

    Args:
        problem, net, V: as for :func:`hessian_product`.
        V2: the second direction.

    Raises:
        ValueError: as for :func:`hessian_product`.
    """
    product = hessian_product(problem, net, V)
    other = V if V2 is None else _chain.same_layers("V2", net, V2)
    pairs = zip(product.weights, other.weights, strict=True)
    return sum((jnp.sum(a * b) for a, b in pairs), jnp.zeros((), net.weights[0].dtype))


def hessian_matrix(problem: Problem, net: LinearNetwork) -> Float[Array, "n n"]:
    """The Hessian as a dense symmetric matrix, in the order of :func:`flatten`.

    Its blocks are outer products, ``(A_kᵀA_l) ⊗ (B_k C_x B_lᵀ)`` less ``M_kl`` times
    ``A_kᵀ R B_lᵀ``, so that it costs no more than it holds.

    Args:
        problem, net: as for :func:`hessian_product`; concrete, not traced.

    Returns:
        shape ``(n, n)``, n the number of parameters.

    Raises:
        ValueError: as for :func:`hessian_product`; more than 4,000 parameters.
    """
    net = _concrete(problem, net)
    return jnp.asarray(dense(problem, _chain.Chain.of(net)), net.weights[0].dtype)


def dense(problem: Problem, chain: _chain.Chain) -> np.ndarray:
    """The Hessian matrix on the host."""
    if chain.parameters > DENSE_LIMIT:
        raise ArgumentError(
            "net",
            f"{chain.parameters} parameters",
            f"the dense Hessian is built up to {DENSE_LIMIT}: use spectrum(problem, net, k=...) "
            "or hessian_product",
        )
    W = chain.product
    R = _chain.residual(problem, W)
    curvature = _chain.loss_hessian(problem, W)
    layers = range(1, chain.depth + 1)
    # vec(A V B) = (A ⊗ Bᵀ) vec(V), row-major.
    jacobian = np.concatenate(
        [np.kron(chain.after(layer), chain.before(layer).T) for layer in layers], axis=1
    )
    H = jacobian.T @ (curvature @ jacobian)
    ends = np.cumsum([0, *(w.size for w in chain.weights)])
    for upper, lower in itertools.combinations(reversed(layers), 2):
        outer = chain.after(upper).T @ R @ chain.before(lower).T
        block = np.einsum("ad,bc->abcd", outer, chain.between(upper, lower))
        rows = slice(ends[upper - 1], ends[upper])
        columns = slice(ends[lower - 1], ends[lower])
        H[rows, columns] -= block.reshape(rows.stop - rows.start, -1)
        H[columns, rows] = H[rows, columns].T
    return 0.5 * (H + H.T)


def spectrum(
    problem: Problem, net: LinearNetwork, k: int | None = None, *, rtol: float = 1e-6
) -> Float[Array, " k"]:
    """Eigenvalues of the Hessian in the weights, ascending.

    All of them from the dense matrix, or the ``k`` smallest, for large networks without it: one
    eigenvalue by Lanczos (ARPACK), then a block around it by LOBPCG, which finds repeated
    eigenvalues as often as they occur. Both come from scipy and see products only. The block
    starts with directions of hidden changes of basis, which the Hessian of a critical point
    annihilates.

    Args:
        problem, net: as for :func:`hessian_product`; concrete, not traced.
        k: how many, smallest first; all if left out.
        rtol: where products are used, the residual ``‖Hv − λv‖`` of every returned pair as a
            fraction of ``‖H‖``; the error of λ is smaller.

    Returns:
        shape ``(k,)``, or ``(n,)`` for all n parameters; units of loss per weight squared.

    Raises:
        ValueError: as for :func:`hessian_product`; ``k`` below 1 or above n; all eigenvalues of
            more than 4,000 parameters.
        RuntimeError: the products did not converge.
    """
    net = _concrete(problem, net)
    chain = _chain.Chain.of(net)
    dtype = net.weights[0].dtype
    if k is not None:
        k = _checks.whole_number("k", k, 1)
        if k > chain.parameters:
            raise ArgumentError("k", f"{k}", f"it must be at most {chain.parameters}, all of them")
    if k is None or chain.parameters <= DENSE_ALWAYS or 5 * k > chain.parameters:
        values = scipy.linalg.eigvalsh(dense(problem, chain))
        return jnp.asarray(values[:k], dtype)
    values, _ = lowest(problem, net, k, rtol=rtol)
    return jnp.asarray(values, dtype)


# One program for all networks of the same shapes: the operator is an argument.
@jax.jit
def _one_column(operator: HessianOperator, x: Array) -> Array:
    return operator.flat(x)


@jax.jit
def _columns(operator: HessianOperator, X: Array) -> Array:
    return jax.vmap(operator.flat, in_axes=1, out_axes=1)(X)


def lowest(
    problem: Problem, net: LinearNetwork, k: int, *, rtol: float = 1e-6, rounds: int = 24
) -> tuple[np.ndarray, np.ndarray]:
    """The ``k`` smallest eigenvalues and their vectors ``(n, k)``, from products alone."""
    operator = HessianOperator(problem, net)
    size, dtype = sum(w.size for w in net.weights), net.weights[0].dtype
    block = min(k + max(4, k // 2), size // 5)
    rng = np.random.default_rng(0)

    def one(x):
        return np.asarray(_one_column(operator, jnp.asarray(x.ravel(), dtype)), dtype=float)

    def many(X):
        # LOBPCG drops converged columns: padded, so that only one program is compiled.
        padded = np.zeros((size, block))
        padded[:, : X.shape[1]] = X
        full = _columns(operator, jnp.asarray(padded, dtype))
        return np.asarray(full, dtype=float)[:, : X.shape[1]]

    linear = scipy.sparse.linalg.LinearOperator(
        (size, size), matvec=one, matmat=many, dtype=np.dtype(float)
    )
    scale = _size(linear, rng)
    if scale == 0:  # the origin of three layers and more: no second derivative at all
        return np.zeros(k), np.linalg.qr(rng.standard_normal((size, k)))[0]
    found = _lanczos(linear, k, scale, rtol, rng)
    neutral = np.stack([_change_of_basis(net, rng) for _ in range(k)], axis=1)
    values, basis = _ritz(linear, np.concatenate([found, neutral], axis=1), k)
    for _ in range(rounds):
        guard = rng.standard_normal((size, block - k))
        basis = np.linalg.qr(np.concatenate([basis, guard], axis=1))[0]
        before = values
        with warnings.catch_warnings():
            # It warns of columns that are not there yet: what is returned is measured below.
            warnings.simplefilter("ignore")
            _, basis = scipy.sparse.linalg.lobpcg(
                linear, basis, largest=False, maxiter=20, tol=0.3 * rtol * scale
            )
        values, basis = _ritz(linear, basis, k)
        worst = float(np.linalg.norm(linear.matmat(basis) - basis * values, axis=0).max())
        moved = float(np.abs(values - before).max())
        if max(worst, moved) <= rtol * scale:
            return values, basis
    raise RuntimeError(
        f"the {k} smallest eigenvalues did not converge: residual {worst:.2g} of ‖H‖ = "
        f"{scale:.3g}, wanted {rtol:g}; loosen rtol, or ask for another k (a gap above the last "
        "one helps)"
    )


def _ritz(linear: Any, basis: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k smallest Ritz pairs of a subspace."""
    left, sizes, _ = np.linalg.svd(basis / np.linalg.norm(basis, axis=0).clip(1e-300), False)
    basis = left[:, sizes > 1e-10 * sizes[0]]
    columns = [linear.matmat(part) for part in np.array_split(basis, 1 + basis.shape[1] // k, 1)]
    small = basis.T @ np.concatenate(columns, axis=1)
    values, turn = np.linalg.eigh(0.5 * (small + small.T))
    return values[:k], basis @ turn[:, :k]


def _size(linear: Any, rng: Any, steps: int = 20) -> float:
    """``‖H‖`` to some per cent, by power iteration."""
    x, size = rng.standard_normal(linear.shape[0]), 0.0
    for _ in range(steps):
        x = linear.matvec(x / np.linalg.norm(x))
        size = float(np.linalg.norm(x))
        if size == 0:
            break
    return size


def _lanczos(linear: Any, k: int, scale: float, tol: float, rng: Any) -> np.ndarray:
    """Vectors of the k smallest eigenvalues by Lanczos, repeated ones mostly once."""
    size = linear.shape[0]
    # Shifted, because ARPACK asks for an error relative to the eigenvalue, which may be 0.
    shifted = scipy.sparse.linalg.LinearOperator(
        linear.shape, matvec=lambda x: linear.matvec(x) - 2 * scale * x, dtype=linear.dtype
    )
    ncv = min(size, max(2 * k + 1, 60))
    try:
        return scipy.sparse.linalg.eigsh(
            shifted, k=k, which="SA", tol=tol, ncv=ncv, maxiter=8, v0=rng.standard_normal(size)
        )[1]
    except scipy.sparse.linalg.ArpackNoConvergence as stopped:
        missing = rng.standard_normal((size, k - stopped.eigenvectors.shape[1]))
        return np.concatenate([stopped.eigenvectors, missing], axis=1)


def _change_of_basis(net: LinearNetwork, rng: Any) -> np.ndarray:
    """A tangent ``W_i ↦ X_i W_i − W_i X_{i-1}`` of hidden changes of basis, as a vector."""
    layers = [np.asarray(w, dtype=float) for w in net.weights]
    turns = [rng.standard_normal((d, d)) / np.sqrt(d) for d in net.widths]
    turns[0] *= 0
    turns[-1] *= 0
    moved = [turns[i + 1] @ w - w @ turns[i] for i, w in enumerate(layers)]
    return np.concatenate([m.ravel() for m in moved])


class _Counts(NamedTuple):
    negative: int
    zero: int
    positive: int


class Inertia(_Counts):
    """How many eigenvalues are negative, zero and positive, as a triple.

    Attributes:
        negative, zero, positive: the counts.
        tolerance: eigenvalues of at most this size count as zero.
        smallest, largest: the ends of the spectrum.
    """

    tolerance: float
    smallest: float
    largest: float


def inertia(problem: Problem, net: LinearNetwork, *, tol: float | None = None) -> Inertia:
    """``(negative, zero, positive)``, the inertia of the Hessian form.

    Args:
        problem, net: as for :func:`hessian_product`; concrete, at most 4,000 parameters.
        tol: eigenvalues of at most this size are zero. By default ``5 h_s √ĝ`` and at least the
            round-off of the matrix, where ``h_s = λ_max(C_x) h ‖W_*‖^{2−2/h}`` is the sharpness
            of a balanced minimum and ``ĝ`` the gradient norm over its natural scale
            ``λ_max(C_x) ‖W_*‖^{2−1/h}``: next to a saddle where the loss falls at third order the
            gradient is quadratic in the distance and the eigenvalues linear.

    Returns:
        the triple, with ``tolerance``, ``smallest`` and ``largest`` as attributes.

    Raises:
        ValueError: as for :func:`hessian_matrix`.
    """
    net = _concrete(problem, net)
    if tol is not None:
        tol = _checks.real_scalar("tol", tol, minimum=0)
    chain = _chain.Chain.of(net)
    return counted(problem, chain, scipy.linalg.eigvalsh(dense(problem, chain)), tol)


def counted(
    problem: Problem, chain: _chain.Chain, values: np.ndarray, tol: float | None
) -> Inertia:
    """The inertia of known eigenvalues."""
    if tol is None:
        tol = eigenvalue_tolerance(problem, chain, float(np.abs(values).max()))
    negative, positive = int((values < -tol).sum()), int((values > tol).sum())
    counts = Inertia(negative, len(values) - negative - positive, positive)
    counts.tolerance = float(tol)
    counts.smallest, counts.largest = float(values.min()), float(values.max())
    return counts


class Scales(NamedTuple):
    """Natural sizes of a problem for a network of some depth.

    Attributes:
        layer: singular value of the layers at a balanced minimum, ``‖W_*‖^{1/h}``.
        gradient: ``λ_max(C_x) ‖W_*‖^{2−1/h}``.
        curvature: ``λ_max(C_x) h ‖W_*‖^{2−2/h}``.
    """

    layer: float
    gradient: float
    curvature: float


def scales(problem: Problem, chain: _chain.Chain, largest: float) -> Scales:
    """The natural sizes; of a problem without a target, those of the state."""
    h = chain.depth
    if problem.optimum is not None:
        strength = float(np.linalg.norm(np.asarray(problem.optimum, dtype=float), 2))
        if strength > 0:
            top = problem.largest_curvature()
            return Scales(
                strength ** (1 / h),
                top * strength ** (2 - 1 / h),
                top * h * strength ** (2 - 2 / h),
            )
    layer = max(float(np.linalg.norm(w, 2)) for w in chain.weights) or 1.0
    largest = largest or 1.0
    return Scales(layer, layer * largest, largest)


def eigenvalue_tolerance(problem: Problem, chain: _chain.Chain, largest: float) -> float:
    natural = scales(problem, chain, largest)
    slope = _chain.norm(_chain.gradient(chain, _chain.residual(problem, chain.product)))
    eps = float(jnp.finfo(problem.irreducible_loss.dtype).eps)
    noise = 10 * chain.parameters * eps * max(largest, natural.curvature)
    return max(noise, 5 * natural.curvature * float(np.sqrt(slope / natural.gradient)))


def _concrete(problem: Problem, net: LinearNetwork) -> LinearNetwork:
    net = _chain.fitting(problem, net)
    if not _checks.is_concrete(net, problem):
        raise ArgumentError(
            "net", "a traced network", "eigenvalues are counted outside jit, vmap and grad"
        )
    return net
