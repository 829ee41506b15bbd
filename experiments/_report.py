"""How runs and samplings ended, one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

import gradflow as gf

__all__ = ["run_lines", "spectrum_lines"]


def run_lines(runs: Mapping[str, gf.Trajectory | Sequence[gf.Trajectory]]) -> str:
    """Status, steps, loss and drift of every run, for the attribute ``runs`` of a data set.

    Args:
        runs: by name, a run or several runs to be summed up in one line.
    """
    return "\n".join(
        _line(name, [one] if isinstance(one, gf.Trajectory) else one) for name, one in runs.items()
    )


def _line(name: str, runs: Sequence[gf.Trajectory]) -> str:
    counts = Counter(run.status.name for run in runs)
    if len(runs) == 1:
        status = runs[0].status.name
    else:
        status = ", ".join(f"{count} {status}" for status, count in counts.items())
    solvers = "/".join(sorted({run.solver for run in runs}))
    accepted = sum(run.stats.accepted for run in runs)
    rejected = sum(run.stats.rejected for run in runs)
    first, last = max(float(r.loss[0]) for r in runs), max(float(r.final_loss) for r in runs)
    if not runs[0].recorded["law_drift"].shape[-1]:
        laws = "no conserved laws"
    else:
        drift = max(float(np.max(gf.observables.conservation_drift(run))) for run in runs)
        laws = f"largest drift {drift:.1e}"
    return (
        f"{name}: {status}, {solvers}, {accepted} steps + {rejected} rejected, "
        f"loss {first:.4g} -> {last:.4g}, {laws}"
    )


def spectrum_lines(
    runs: Mapping[str, gf.lyapunov.Spectrum | Sequence[gf.lyapunov.Spectrum]],
) -> str:
    """Chains, steps and largest standard error of sampled exponents, for the attribute ``runs``.

    Args:
        runs: by name, a spectrum or several spectra to be summed up in one line.
    """
    lines = []
    for name, one in runs.items():
        spectra = [one] if isinstance(one, gf.lyapunov.Spectrum) else one
        error = max(float(np.max(s.standard_error)) for s in spectra)
        diverged = sum(not bool(s.orbit_finite) for s in spectra)
        lines.append(
            f"{name}: {len(spectra)} {'spectrum' if len(spectra) == 1 else 'spectra'} by QR, "
            f"{spectra[0].chains} chains of {spectra[0].steps} steps after "
            f"{int(spectra[0].burn_in)}, largest standard error {error:.1e}"
            + (f", {diverged} orbits DIVERGED" if diverged else "")
        )
    return "\n".join(lines)
