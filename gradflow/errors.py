"""Named errors: every refused argument says what it was, what it must be, and what to do."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BalanceError",
    "BalanceWarning",
    "GradflowError",
    "PatternError",
    "PrecisionError",
    "PrecisionWarning",
    "ShapeError",
]


class GradflowError(Exception):
    """Base class of every error that gradflow raises on purpose."""


class ArgumentError(GradflowError, ValueError):
    """An argument was refused.

    The message has the form ``name: got ..., must be ...; remedy``, and the three
    parts are kept as attributes for programs.

    Attributes:
        argument: the name of the argument as the caller wrote it.
        value: a short description of what was passed.
        remedy: what the argument must be, or what to do about it.
    """

    def __init__(self, argument: str, value: str, remedy: str):
        self.argument = argument
        self.value = value
        self.remedy = remedy
        super().__init__(f"{argument}: got {value}; {remedy}")

    def __reduce__(self):
        # Rebuilt from its parts, so that the error survives a trip between processes.
        return type(self), (self.argument, self.value, self.remedy)


class ShapeError(ArgumentError):
    """An array has a shape that does not fit."""


class PatternError(ArgumentError):
    """A matrix has entries off the block sub-diagonal pattern of an adjacency matrix."""


class BalanceError(ArgumentError):
    """The requested conserved quantities do not exist for these widths."""


class PrecisionError(ArgumentError):
    """The requested accuracy is out of reach of the floating point type."""


class BalanceWarning(UserWarning):
    """A balanced theory is applied to a start that is not balanced."""


class PrecisionWarning(UserWarning):
    """The requested accuracy is within reach, but coarser than the state needs."""
