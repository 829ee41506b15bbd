"""Concrete networks and problems on the host, for what is decided rather than differentiated.

Classification, ranks and random constructions look at numbers, so that nothing can be traced; in
NumPy they need no compilation, which for one network of its own widths would take longest.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.network import LinearNetwork
from gradflow.problem import Problem

__all__ = [
    "Chain",
    "Modes",
    "fitting",
    "gradient",
    "modes_of",
    "residual",
    "same_layers",
    "single_network",
    "split",
]


def single_network(name: str, net: Any) -> LinearNetwork:
    """``net`` if it is one network of finite numbers (or a traced one)."""
    if not isinstance(net, LinearNetwork):
        raise ArgumentError(name, _checks.describe(net), "it must be a gradflow.LinearNetwork")
    if net.weights[0].ndim != 2:
        raise ArgumentError(name, f"a batch {net!r}", "it must be one network: use jax.vmap")
    if _checks.is_concrete(net):
        for i, w in enumerate(net.weights):
            bad = ~np.isfinite(np.asarray(w, dtype=float))
            if bad.any():
                raise ArgumentError(
                    name,
                    f"{int(bad.sum())} entries of W_{i + 1} that are not finite",
                    "every weight must be finite",
                )
    return net


def fitting(problem: Any, net: Any, name: str = "net") -> LinearNetwork:
    """``net`` if it is one finite network of this problem's shape."""
    check_problem(problem)
    net = single_network(name, net)
    problem.check_widths(net.widths)
    return net


def check_problem(problem: Any) -> Problem:
    if not isinstance(problem, Problem):
        raise ArgumentError("problem", _checks.describe(problem), "it must be a gradflow.Problem")
    return problem


def same_layers(name: str, net: LinearNetwork, V: Any) -> LinearNetwork:
    """``V`` if its layers have the shapes of ``net``'s: a perturbation of its weights."""
    if not isinstance(V, LinearNetwork) or V.widths != net.widths or V.depth != net.depth:
        raise ArgumentError(
            name, _checks.describe(V), f"it must be a LinearNetwork of widths {net.widths}"
        )
    return V


class Chain:
    """Products of consecutive layers: ``chain(i, j) = W_j ⋯ W_{i+1}``, from node i to node j.

    Args:
        weights: host arrays, ``W_1`` first.
        identities: what stands for the empty product at every node; identity matrices if left
            out, projectors for a network on subspaces.
    """

    def __init__(self, weights: list[np.ndarray], identities: list[np.ndarray] | None = None):
        self.weights = weights
        self.depth = len(weights)
        self.widths = (weights[0].shape[1], *(w.shape[0] for w in weights))
        self._known: dict[tuple[int, int], np.ndarray] = {}
        for node, width in enumerate(self.widths):
            self._known[node, node] = np.eye(width) if identities is None else identities[node]

    @classmethod
    def of(cls, net: LinearNetwork) -> Chain:
        return cls([np.asarray(w, dtype=float) for w in net.weights])

    def __call__(self, i: int, j: int) -> np.ndarray:
        if (i, j) not in self._known:
            step = self.weights[j - 1]
            self._known[i, j] = step if j == i + 1 else step @ self(i, j - 1)
        return self._known[i, j]

    def after(self, layer: int) -> np.ndarray:
        """``A_l = W_h ⋯ W_{l+1}``."""
        return self(layer, self.depth)

    def before(self, layer: int) -> np.ndarray:
        """``B_l = W_{l-1} ⋯ W_1``."""
        return self(0, layer - 1)

    def between(self, upper: int, lower: int) -> np.ndarray:
        """``M_kl = W_{k-1} ⋯ W_{l+1}`` of two layers k > l."""
        return self(lower, upper - 1)

    @property
    def product(self) -> np.ndarray:
        return self(0, self.depth)

    @property
    def parameters(self) -> int:
        return sum(w.size for w in self.weights)


class Modes(NamedTuple):
    """A quadratic problem on the host, in its whitened frame.

    Attributes:
        U, V: all left (d_h, d_h) and right (d_0, d_0) singular vectors of the whitened target.
        s: its singular values, shape ``(min(d_0, d_h),)``, descending.
        number: how many of them are not zero to round-off.
        root, inverse_root: ``C_x^{1/2}`` and its pseudo-inverse.
        optimum: ``W_*``, the minimiser of least norm.
        curvature: ``λ_max(C_x)``.
        floor: the infimum of the loss.
        eps: unit round-off of the problem's floating point type.
    """

    U: np.ndarray
    V: np.ndarray
    s: np.ndarray
    number: int
    root: np.ndarray
    inverse_root: np.ndarray
    optimum: np.ndarray
    curvature: float
    floor: float
    eps: float

    @property
    def target(self) -> np.ndarray:
        """The whitened target ``Σ``."""
        r = len(self.s)
        return (self.U[:, :r] * self.s) @ self.V[:, :r].T

    def admissible(self, widths: tuple[int, ...]) -> int:
        """``r_max``, the number of modes of a global minimum."""
        return min(min(widths), self.number)

    def partial(self, signature: tuple[int, ...]) -> np.ndarray:
        """``U_S U_Sᵀ Σ``, the whitened map of the critical points of a signature."""
        index = [i - 1 for i in signature]
        return (self.U[:, index] * self.s[index]) @ self.V[:, index].T

    def value(self, signature: tuple[int, ...]) -> float:
        """``½ Σ_{i∉S} s_i²`` above the infimum."""
        left = np.ones(len(self.s), bool)
        left[[i - 1 for i in signature]] = False
        return 0.5 * float(np.sum(self.s[left] ** 2)) + self.floor


def modes_of(problem: Problem) -> Modes:
    """The modes of a problem with a target; refuses one that is given by a loss."""
    check_problem(problem)
    if problem.target is None or problem.optimum is None:
        raise ArgumentError(
            "problem",
            "a problem given by a loss",
            "its critical points are not known in closed form: it needs a target, as in "
            "Problem(target), from_data or from_singular_values",
        )
    optimum = np.asarray(problem.optimum, dtype=float)
    eps = float(jnp.finfo(problem.optimum.dtype).eps)
    d_in = problem.shape[1]
    curvature = 1.0
    if problem.covariance_root is None:
        root = inverse = np.eye(d_in)
    else:
        root = np.asarray(problem.covariance_root, dtype=float)
        values, vectors = np.linalg.eigh(0.5 * (root + root.T))
        kept = values > values[-1] * d_in * eps
        inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
        curvature = float(values[-1] ** 2)
    U, s, Vt = np.linalg.svd(optimum @ root)
    count = int((s > s[0] * max(problem.shape) * eps).sum()) if s[0] > 0 else 0
    floor = float(problem.irreducible_loss)
    return Modes(U, Vt.T, s, count, root, inverse, optimum, curvature, floor, eps)


def residual(problem: Problem, W: np.ndarray) -> np.ndarray:
    """``−∇ℓ(W)`` on the host."""
    if problem.target is None:
        return np.asarray(problem.residual(jnp.asarray(W)), dtype=float)
    target = np.asarray(problem.target, dtype=float)
    if problem.input_covariance is None:
        return target - W
    return target - W @ np.asarray(problem.input_covariance, dtype=float)


def loss_value(problem: Problem, W: np.ndarray) -> float:
    """``ℓ(W)`` on the host."""
    if problem.optimum is None:
        return float(problem.loss(jnp.asarray(W)))
    gap = W - np.asarray(problem.optimum, dtype=float)
    if problem.covariance_root is not None:
        gap = gap @ np.asarray(problem.covariance_root, dtype=float)
    return 0.5 * float(np.sum(gap**2)) + float(problem.irreducible_loss)


def gradient(chain: Chain, R: np.ndarray) -> list[np.ndarray]:
    """``∂L/∂W_l = −A_lᵀ R B_lᵀ`` for every layer."""
    layers = range(1, chain.depth + 1)
    return [-chain.after(layer).T @ R @ chain.before(layer).T for layer in layers]


def norm(parts: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(part**2) for part in parts)))


class Split(NamedTuple):
    """A network as the direct sum of the modes it has learnt and the rest.

    Attributes:
        learnt: projectors ``Π_i = W_{1:i} W^+ W_{i+1:h}`` at every node i (orthogonal at the
            ends, oblique between), which commute with the layers: ``W_i Π_{i-1} = Π_i W_i``.
        rest: the chain of ``Z_i = W_i (I − Π_{i-1})``, whose product is ``W − Σ_S`` to the
            accuracy of the state; the first layer in the whitened frame.
        residual: the whitened residual of the learnt map, ``Σ − U_S U_Sᵀ Σ``.
    """

    learnt: list[np.ndarray]
    rest: Chain
    residual: np.ndarray


def split(modes: Modes, chain: Chain, rank: int, learnt_map: np.ndarray) -> Split:
    """Split a network next to a critical point with this whitened map ``U_S U_Sᵀ Σ`` of this rank.

    A product of three blocks through a node has rank above ``|S|`` exactly where the
    corresponding product of the rest does not vanish.
    """
    h = chain.depth
    white = Chain([chain.weights[0] @ modes.root, *chain.weights[1:]])
    U, values, Vt = np.linalg.svd(white.product)
    inverse = (Vt[:rank].T / values[:rank]) @ U[:, :rank].T
    learnt = [white(0, i) @ inverse @ white(i, h) for i in range(h + 1)]
    complements = [np.eye(len(P)) - P for P in learnt]
    rest = [w @ Q for w, Q in zip(white.weights, complements[:-1], strict=True)]
    return Split(learnt, Chain(rest, complements), modes.target - learnt_map)


@functools.cache
def _loss_hessian(loss: Any, shape: tuple[int, int]) -> Any:
    return jax.jit(jax.hessian(loss))


def loss_hessian(problem: Problem, W: np.ndarray) -> np.ndarray:
    """``∇²ℓ(W)`` as a matrix over the row-major entries of W."""
    size = W.size
    if problem.target is not None:
        d_out, d_in = problem.shape
        covariance = problem.input_covariance
        C = np.eye(d_in) if covariance is None else np.asarray(covariance, dtype=float)
        return np.kron(np.eye(d_out), C)
    full = _loss_hessian(problem.loss_function, W.shape)(jnp.asarray(W))
    return np.asarray(full, dtype=float).reshape(size, size)
