"""The loss of the end-to-end map: target, covariances, canonical frame, assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from gradflow import _checks
from gradflow._products import product, spectral_norm
from gradflow.errors import ArgumentError, ShapeError

__all__ = ["Assumptions", "Check", "Problem"]


class Check(NamedTuple):
    """One assumption: whether it holds, its number, and a sentence about it."""

    holds: bool
    number: float
    text: str

    def __bool__(self) -> bool:
        return self.holds


class Assumptions(Mapping[str, Check]):
    """The standard assumptions of the theory, each with whether it holds and its number.

    A mapping from names to :class:`Check`; prints itself as a table. ``bool(report)`` says
    whether all of them hold.
    """

    def __init__(self, checks: Mapping[str, Check]):
        self._checks = dict(checks)

    def __getitem__(self, name: str) -> Check:
        return self._checks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._checks)

    def __len__(self) -> int:
        return len(self._checks)

    def __bool__(self) -> bool:
        return all(check.holds for check in self._checks.values())

    def __repr__(self) -> str:
        width = max(map(len, self._checks), default=0)
        rows = (
            f"  {name:<{width}}  {'yes' if check.holds else 'NO ':<3}  {check.text}"
            for name, check in self._checks.items()
        )
        return "\n".join(("Assumptions", *rows))


class _Factors(NamedTuple):
    """What the eigenvalues of an input covariance give."""

    root: Any  # C_x^{1/2}
    pseudo_inverse: Any  # C_x^+
    projector: Any  # onto the range of C_x
    smallest: Any  # the smallest eigenvalue
    rank: Any


def _factorise(covariance: Any) -> _Factors:
    xp = np if _checks.is_concrete(covariance) else jnp
    matrix = xp.asarray(covariance)
    values, vectors = xp.linalg.eigh(matrix)
    cutoff = values[-1] * len(values) * float(jnp.finfo(matrix.dtype).eps)
    kept = values > cutoff
    safe = xp.where(kept, values, 1.0)

    def rebuilt(spectrum):
        return (vectors * xp.where(kept, spectrum, 0.0)[None, :]) @ vectors.T

    return _Factors(
        root=rebuilt(xp.sqrt(safe)),
        pseudo_inverse=rebuilt(1 / safe),
        projector=rebuilt(xp.ones_like(safe)),
        smallest=values[0],
        rank=kept.sum(),
    )


class Problem(eqx.Module):
    """The loss ``ℓ(W)`` of the end-to-end map ``W = W_{1:h}``.

    The quadratic loss with input covariance ``C_x`` and cross-covariance ``C_yx`` is

    .. math:: \\ell(W) = \\tfrac12 \\mathrm{tr}\\,(W - W_*) C_x (W - W_*)^\\top + \\ell_*,
       \\qquad W_* = C_{yx} C_x^+,

    so that ``−∇ℓ(W) = C_yx − W C_x``. Without ``input_covariance`` the inputs are whitened
    (``C_x = I``) and the loss is ``½‖target − W‖_F²``. ``ℓ_* = 0`` unless the problem comes from
    data that no linear map fits (:meth:`from_data`).

    Args:
        target: the cross-covariance ``C_yx``, shape ``(d_h, d_0)``.
        input_covariance: ``C_x``, symmetric positive semi-definite, shape ``(d_0, d_0)``;
            the identity if left out. It may be singular if ``target`` vanishes on its kernel.

    Attributes:
        target, input_covariance: as given (``None`` where there is none).
        optimum: ``W_* = C_yx C_x^+``, the minimiser of least norm.
        irreducible_loss: ``ℓ_*``, the infimum of the loss.
        shape: ``(d_h, d_0)``.

    Raises:
        ValueError: wrong shapes, entries that are not finite real floats, a covariance that is
            not symmetric positive semi-definite, or a target with a part on the kernel of the
            covariance (the loss would have no lower bound).
    """

    target: Float[Array, "d_out d_in"] | None
    input_covariance: Float[Array, "d_in d_in"] | None
    optimum: Float[Array, "d_out d_in"] | None
    covariance_root: Float[Array, "d_in d_in"] | None
    irreducible_loss: Float[Array, ""]
    loss_function: Callable[[Array], Array] | None
    shape: tuple[int, int] = eqx.field(static=True)
    samples: int | None = eqx.field(static=True)
    input_rank: int | None = eqx.field(static=True)

    def __init__(self, target: ArrayLike | Sequence, input_covariance: ArrayLike | None = None):
        target = _checks.real_array("target", target, ndim=2)
        self.shape = (target.shape[0], target.shape[1])
        self.loss_function = None
        self.samples = None
        self.irreducible_loss = jnp.zeros((), target.dtype)
        if input_covariance is None:
            self.target = self.optimum = target
            self.input_covariance = self.covariance_root = None
            self.input_rank = target.shape[1]
            return
        covariance = _checks.real_array("input_covariance", input_covariance, ndim=2)
        d_in = target.shape[1]
        if covariance.shape != (d_in, d_in):
            raise ShapeError(
                "input_covariance",
                f"shape {covariance.shape}",
                f"a target of shape {target.shape} needs shape ({d_in}, {d_in})",
            )
        dtype = jnp.result_type(target, covariance)
        target, covariance = target.astype(dtype), covariance.astype(dtype)
        factors = _factorise(covariance)
        if _checks.is_concrete(target, covariance):
            _check_covariance(np.asarray(target), np.asarray(covariance), factors)
            self.input_rank = int(factors.rank)
        else:
            self.input_rank = None
        self.target = target
        self.input_covariance = covariance
        self.covariance_root = jnp.asarray(factors.root)
        self.optimum = target @ jnp.asarray(factors.pseudo_inverse)

    @classmethod
    def _assemble(cls, **fields: Any) -> Problem:
        """A problem from fields that are already consistent."""
        problem = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(problem, name, value)
        return problem

    @classmethod
    def from_data(cls, X: ArrayLike, Y: ArrayLike, whiten: bool = False) -> Problem:
        """Half the mean squared error of a linear map on data.

        ``ℓ(W) = (1/2N) Σ_n ‖y_n − W x_n‖²``, constant included: 0 only if a linear map fits the
        data exactly. ``C_x = XᵀX/N`` and ``C_yx = YᵀX/N``; nothing is centred.

        Args:
            X: inputs, shape ``(N, d_0)``, one sample per row.
            Y: outputs, shape ``(N, d_h)``.
            whiten: replace each input by ``(C_x^+)^{1/2} x``. Where ``C_x`` is singular
                (a constant-zero pixel, fewer samples than inputs) the pseudo-inverse leaves
                the covariance a projector instead of the identity, and
                :meth:`assumptions` says so.

        Raises:
            ValueError: fewer than two samples, other shapes than these, entries that are not
                finite real floats, or inputs that are all zero.
        """
        X = _checks.real_array("X", X, ndim=2, allow_empty=True)
        Y = _checks.real_array("Y", Y, ndim=2, allow_empty=True)
        if not isinstance(whiten, (bool, np.bool_)):
            raise ArgumentError("whiten", _checks.describe(whiten), "it must be True or False")
        for name, array in (("X", X), ("Y", Y)):
            if array.shape[0] < 2:
                raise ShapeError(
                    name, f"{array.shape[0]} sample(s)", "it must have at least 2 rows, one each"
                )
            if array.shape[1] == 0:
                raise ShapeError(name, _checks.describe(array), "it must have a column")
        if X.shape[0] != Y.shape[0]:
            raise ShapeError(
                "Y", f"{Y.shape[0]} samples", f"it must have as many rows as X, {X.shape[0]}"
            )
        dtype = jnp.result_type(X, Y)
        # The singular values of X itself: those of XᵀX/N would cost half the digits.
        x, y = np.asarray(X, dtype=float), np.asarray(Y, dtype=float)
        samples, d_in = x.shape
        left, spectrum, right = np.linalg.svd(x, full_matrices=False)
        cutoff = spectrum[0] * max(x.shape) * float(jnp.finfo(dtype).eps)
        kept = spectrum > cutoff
        if not kept.any():
            raise ArgumentError("X", "all zeros", "it must have a sample that is not zero")
        left, spectrum, right = left[:, kept], spectrum[kept], right[kept]
        coefficients = y.T @ left  # C_yx in the singular frame, times N / spectrum
        full_map = (coefficients / spectrum) @ right
        misfit = y - x @ full_map.T
        rank = int(kept.sum())
        if whiten:
            target = coefficients @ right / np.sqrt(samples)
            projector = right.T @ right
            covariance = root = None if rank == d_in else projector
            optimum = target
        else:
            target = y.T @ x / samples
            covariance = x.T @ x / samples
            root = (right.T * (spectrum / np.sqrt(samples))) @ right
            optimum = full_map

        def cast(array):
            return None if array is None else jnp.asarray(array, dtype)

        return cls._assemble(
            target=cast(target),
            input_covariance=cast(covariance),
            optimum=cast(optimum),
            covariance_root=cast(root),
            irreducible_loss=cast(0.5 * np.sum(misfit**2) / samples),
            loss_function=None,
            shape=(y.shape[1], d_in),
            samples=samples,
            input_rank=rank,
        )

    @classmethod
    def from_singular_values(
        cls, singular_values: ArrayLike | Sequence[float], shape: tuple[int, int] | None = None
    ) -> Problem:
        """The whitened diagonal problem with these singular values.

        Args:
            singular_values: numbers ≥ 0, shape ``(r,)``, in any order (kept as given).
            shape: ``(d_h, d_0)`` of the target, each ≥ r; ``(r, r)`` if left out.

        Raises:
            ValueError: a negative value, or a shape too small to hold them.
        """
        values = _checks.real_array("singular_values", singular_values, ndim=1)
        if _checks.is_concrete(values) and float(values.min()) < 0:
            raise ArgumentError("singular_values", f"{values.min()}", "each must be >= 0")
        rank = values.shape[0]
        d_out, d_in = _map_shape(shape if shape is not None else (rank, rank))
        if rank > min(d_out, d_in):
            raise ShapeError(
                "shape",
                f"({d_out}, {d_in})",
                f"it must hold {rank} singular values on its diagonal",
            )
        diagonal = jnp.arange(rank)
        return cls(jnp.zeros((d_out, d_in), values.dtype).at[diagonal, diagonal].set(values))

    @classmethod
    def from_loss(cls, loss: Callable[[Array], Array], shape: tuple[int, int]) -> Problem:
        """Any differentiable loss of the end-to-end map.

        The conservation laws of gradient flow hold for all of them. The value is reported as
        ``loss`` gives it: choose the constant so that its infimum is 0.

        Args:
            loss: ``ℓ(W)``, from an array of shape ``(d_h, d_0)`` to a scalar, in JAX operations.
            shape: ``(d_h, d_0)``.

        Raises:
            ValueError: ``loss`` is no function of such an array to a real scalar.
        """
        if not callable(loss):
            raise ArgumentError("loss", _checks.describe(loss), "it must be a function of W")
        d_out, d_in = _map_shape(shape)
        dtype = jnp.zeros(()).dtype
        try:
            value = eqx.filter_eval_shape(loss, jax.ShapeDtypeStruct((d_out, d_in), dtype))
        except (TypeError, ValueError) as error:
            raise ShapeError(
                "loss", f"{error}", f"it must accept an array of shape ({d_out}, {d_in})"
            ) from error
        if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ShapeError("loss", f"a value {value}", "it must return a real scalar")
        return cls._assemble(
            target=None,
            input_covariance=None,
            optimum=None,
            covariance_root=None,
            irreducible_loss=jnp.zeros((), dtype),
            loss_function=loss,
            shape=(d_out, d_in),
            samples=None,
            input_rank=None,
        )

    def loss(self, W: ArrayLike) -> Float[Array, ""]:
        """``ℓ(W)`` ≥ 0 (for :meth:`from_loss`: as given), a scalar."""
        W = self._fitting(W)
        if self.loss_function is not None:
            return self.loss_function(W)
        _, optimum = self._quadratic()
        # A sum of squares, so that no cancellation can bring it below the infimum.
        return 0.5 * jnp.sum(self.whitened(W - optimum) ** 2) + self.irreducible_loss

    def residual(self, W: ArrayLike) -> Float[Array, "d_out d_in"]:
        """``R = −∇ℓ(W)``, for the quadratic loss ``C_yx − W C_x``; shape ``(d_h, d_0)``."""
        W = self._fitting(W)
        if self.loss_function is not None:
            return -jax.grad(self.loss_function)(W)
        target, _ = self._quadratic()
        return target - (W if self.input_covariance is None else product(W, self.input_covariance))

    def whitened(self, W: Float[Array, "d_out d_in"]) -> Float[Array, "d_out d_in"]:
        """The map in the whitened frame, ``W C_x^{1/2}``; ``W`` itself for whitened inputs."""
        return W if self.covariance_root is None else product(W, self.covariance_root)

    @property
    def singular_values(self) -> Float[Array, " modes"]:
        """Singular values of the target in the whitened frame, ``C_yx (C_x^+)^{1/2}``, descending.

        Raises:
            ValueError: the problem is given by a loss and has no target.
        """
        return jnp.linalg.svd(self.whitened(self._quadratic()[1]), compute_uv=False)

    def singular_bases(self) -> tuple[Float[Array, "d_out r"], Float[Array, "d_in r"]]:
        """Left and right singular vectors of the target in the whitened frame, as columns."""
        left, _, right = jnp.linalg.svd(self.whitened(self._quadratic()[1]), full_matrices=False)
        return left, right.T

    def canonical(self) -> tuple[Problem, Float[Array, "d_out d_out"], Float[Array, "d_in d_in"]]:
        """The problem in the singular bases of its target.

        Returns:
            ``(problem, U, V)`` with orthogonal ``U`` (d_h, d_h) and ``V`` (d_0, d_0) such that
            the new target ``Uᵀ C_yx V`` is diagonal and descending. The flow is the same one
            with ``W_1 → W_1 V`` and ``W_h → Uᵀ W_h``. A general input covariance becomes
            ``Vᵀ C_x V``: it cannot be absorbed into ``W_1`` without changing the metric.

        Raises:
            ValueError: the problem is given by a loss and has no target.
        """
        target, optimum = self._quadratic()
        U, values, Vt = jnp.linalg.svd(target, full_matrices=True)
        V = Vt.T
        rank_bound = values.shape[0]
        diagonal = jnp.arange(rank_bound)
        covariance, root = self.input_covariance, self.covariance_root
        if covariance is not None and root is not None:
            # The basis of the target's kernel is free: choose it to diagonalise C_x there.
            kernel = V[:, rank_bound:]
            _, turn = jnp.linalg.eigh(kernel.T @ covariance @ kernel)
            V = V.at[:, rank_bound:].set(kernel @ turn[:, ::-1])
            covariance, root = V.T @ covariance @ V, V.T @ root @ V
        new = jnp.zeros_like(target).at[diagonal, diagonal].set(values)
        optimum = new if covariance is None else U.T @ optimum @ V
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields |= {
            "target": new,
            "input_covariance": covariance,
            "covariance_root": root,
            "optimum": optimum,
        }
        return self._assemble(**fields), U, V

    def assumptions(self, widths: Iterable[int]) -> Assumptions:
        """Which of the theory's standard assumptions hold for a network of these widths.

        Args:
            widths: ``(d_0, …, d_h)``.

        Returns:
            named checks, each with whether it holds, its number and a sentence.

        Raises:
            ValueError: widths that do not fit the target.
        """
        widths = _checks.layer_widths("widths", widths)
        self.check_widths(widths)
        d_out, d_in = self.shape
        checks: dict[str, Check] = {}
        if self.target is not None:
            checks |= self._data_checks()
        narrowest = min(widths[1:-1], default=min(d_in, d_out))
        checks["hidden_widths"] = Check(
            narrowest >= min(d_in, d_out),
            narrowest,
            f"narrowest hidden layer {narrowest}, min(d_0, d_h) = {min(d_in, d_out)}",
        )
        return Assumptions(checks)

    def _data_checks(self) -> dict[str, Check]:
        d_in = self.shape[1]
        checks: dict[str, Check] = {}
        if self.samples is not None:
            checks["overdetermined"] = Check(
                self.samples >= d_in,
                self.samples / d_in,
                f"{self.samples} samples for {d_in} inputs",
            )
        if self.input_rank is not None:
            full = self.input_rank == d_in
            text = f"rank of C_x is {self.input_rank} of {d_in}"
            if not full:
                text += "; its pseudo-inverse is used, and W is free on the kernel"
            checks["full_rank_inputs"] = Check(full, self.input_rank, text)
        identity = jnp.eye(d_in)
        distance = (
            0.0
            if self.input_covariance is None
            else float(jnp.linalg.norm(self.input_covariance - identity))
        )
        checks["whitened_inputs"] = Check(
            distance <= 1e-10 * d_in, distance, f"‖C_x − I‖ = {distance:.3g}"
        )
        values = np.asarray(self.singular_values)
        scale = values[0] if values[0] > 0 else 1.0
        rank = int((values > scale * max(self.shape) * float(jnp.finfo(values.dtype).eps)).sum())
        checks["full_rank_target"] = Check(
            rank == len(values), rank, f"rank of C_yx is {rank} of {len(values)}"
        )
        gap = float(np.min(-np.diff(values)) / scale) if len(values) > 1 else 1.0
        checks["distinct_singular_values"] = Check(
            gap > 1e-10, gap, f"smallest gap is {gap:.3g} of the largest value"
        )
        return checks

    def largest_curvature(self) -> float:
        """``λ_max(C_x)``, the largest Hessian eigenvalue of the quadratic loss in W."""
        if self.input_covariance is None:
            return 1.0
        return spectral_norm(np.asarray(self.input_covariance))

    def check_widths(self, widths: tuple[int, ...]) -> None:
        """Raise ``ValueError`` unless the end-to-end map of ``widths`` has this problem's shape."""
        if (widths[-1], widths[0]) != self.shape:
            raise ShapeError(
                "widths",
                f"{widths}",
                f"this problem needs d_0 = {self.shape[1]} and d_h = {self.shape[0]}",
            )

    def _fitting(self, W: Any) -> Array:
        W = jnp.asarray(W)
        if W.shape != self.shape:
            raise ShapeError("W", f"shape {W.shape}", f"this problem needs shape {self.shape}")
        return W

    def _quadratic(self) -> tuple[Array, Array]:
        """Target and optimum, which a problem given by a loss does not have."""
        if self.target is None or self.optimum is None:
            raise ArgumentError(
                "problem",
                "a problem given by a loss",
                "it has no target: use Problem(target), from_data or from_singular_values",
            )
        return self.target, self.optimum

    def __repr__(self) -> str:
        d_out, d_in = self.shape
        if self.loss_function is not None:
            name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
            return f"Problem(loss={name}, {d_out}x{d_in})"
        inputs = "whitened" if self.input_covariance is None else f"rank {self.input_rank}"
        data = "" if self.samples is None else f", {self.samples} samples"
        return f"Problem({d_out}x{d_in}, {inputs} inputs{data})"


def _map_shape(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ArgumentError("shape", _checks.describe(shape), "it must be a pair (d_h, d_0)")
    return _checks.whole_number("shape[0]", shape[0], 1), _checks.whole_number(
        "shape[1]", shape[1], 1
    )


def _check_covariance(target: np.ndarray, covariance: np.ndarray, factors: _Factors) -> None:
    scale = float(np.abs(covariance).max())
    tolerance = float(jnp.finfo(covariance.dtype).eps) ** 0.5
    if scale == 0:
        raise ArgumentError("input_covariance", "all zeros", "it must not vanish")
    asymmetry = float(np.abs(covariance - covariance.T).max()) / scale
    if asymmetry > tolerance:
        raise ArgumentError(
            "input_covariance", f"a relative asymmetry of {asymmetry:.2g}", "it must be symmetric"
        )
    if factors.smallest < -tolerance * scale:
        raise ArgumentError(
            "input_covariance",
            f"an eigenvalue {factors.smallest:.3g}",
            "it must be positive semi-definite",
        )
    outside = float(np.linalg.norm(target - target @ factors.projector))
    if outside > tolerance * max(float(np.linalg.norm(target)), np.finfo(float).tiny):
        raise ArgumentError(
            "target",
            f"a part of norm {outside:.3g} on the kernel of input_covariance",
            "the loss would have no lower bound: project the target onto the covariance's range",
        )
