"""Where a result came from: versions of the libraries and the git revision."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata

__all__ = ["git_revision", "versions"]

_LIBRARIES = ("gradflow", "jax", "diffrax", "equinox", "numpy", "xarray")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide a result."""
    return dict(_installed())


@functools.cache
def _installed() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_revision() -> str:
    """The working directory's git commit, with ``-dirty`` for changed files; else ``unknown``."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
