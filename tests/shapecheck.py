"""A type checker for jaxtyping's import hook that looks at array annotations only.

Plain annotations (``float``, ``Iterable[int]``) are left alone: the library takes NumPy scalars,
traced numbers and whole numbers where they say ``float``, and refuses the rest by a ValueError
of its own, which a type error raised before it would hide.
"""

import typing

import beartype
import jaxtyping


def _mentions_array(hint) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(_mentions_array(part) for part in typing.get_args(hint))


def array_annotations_only(function):
    """``function`` with only its array annotations checked, by beartype."""
    if isinstance(function, type):
        return function
    try:
        hints = typing.get_type_hints(function)
    except NameError:
        return function
    kept = {name: hint for name, hint in hints.items() if _mentions_array(hint)}
    function.__annotations__ = kept
    return beartype.beartype(function)
