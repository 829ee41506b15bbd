"""Run the experiments: all of them, one, or ``list`` them.

``python -m experiments`` runs all in order, ``python -m experiments list`` names them, and
``python -m experiments NAME --option value`` runs one; ``NAME --help`` shows its options.
Benchmarks, ``benchmarks.NAME``, run one at a time and measure anew each time.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import matplotlib as mpl
import tyro

from experiments import _runner


@dataclasses.dataclass(frozen=True)
class Shared:
    """Options of every experiment."""

    # Compute even if a saved result with the same configuration exists.
    force: bool = False
    # The version at the scale of a paper: other defaults, results in a folder of their own.
    full: bool = False
    # Folder for data and figures.
    results: Path = Path("results")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    # The closed forms are met to 1e-8 and better, which float32 cannot show.
    jax.config.update("jax_enable_x64", True)
    mpl.use("Agg")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    known = _runner.names()
    if not arguments or arguments[0].startswith("-"):
        shared = _parse(Shared, arguments, "python -m experiments", __doc__ or "")
        return _run_all(known, shared)
    benchmarks = _runner.benchmark_names()
    name, rest = arguments[0], arguments[1:]
    if name == "list":
        width = max(map(len, known + benchmarks))
        for each in known + benchmarks:
            print(f"{each:<{width}}  {_runner.one_line(_runner.find(each))}")
        return 0
    if name not in known + benchmarks:
        near = difflib.get_close_matches(name, known + benchmarks, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        print(
            f"There is no experiment {name!r}.{hint} The experiments are: {', '.join(known)}.",
            file=sys.stderr,
        )
        return 2
    config, shared = _parse_one(name, rest)
    if name in benchmarks:
        # Times of another day or machine are not what was asked for.
        shared = dataclasses.replace(shared, force=True)
    return _run_all([name], shared, config)


def _run_all(chosen: Sequence[str], shared: Shared, config: Any = None) -> int:
    failed = []
    begun = time.perf_counter()
    for i, name in enumerate(chosen):
        started = time.perf_counter()
        print(f"[{i + 1}/{len(chosen)}] {name}", flush=True)
        try:
            experiment = _runner.find(name)
            print(f"  {_runner.one_line(experiment)}")
            folder = shared.results / name / ("full" if shared.full else "")
            used = _defaults(experiment, shared.full) if config is None else config
            _runner.run(name, used, folder, shared.force)
        except Exception:  # the others are still worth running
            traceback.print_exc()
            failed.append(name)
        print(f"  {time.perf_counter() - started:.1f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    if len(chosen) > 1:
        print(f"all {len(chosen)} experiments in {time.perf_counter() - begun:.1f} s")
    return 0


def _defaults(experiment: _runner.Experiment, full: bool) -> Any:
    return experiment.Config.full() if full else experiment.Config()


def _parse_one(name: str, arguments: Sequence[str]) -> tuple[Any, Shared]:
    experiment = _runner.find(name)
    defaults = _defaults(experiment, "--full" in arguments)
    # An empty name puts the fields of both at the top level of the command line.
    flat = tyro.conf.arg(name="")
    options = dataclasses.make_dataclass(
        "Options",
        [
            ("config", Annotated[experiment.Config, flat], dataclasses.field(default=defaults)),
            ("shared", Annotated[Shared, flat], dataclasses.field(default=Shared())),
        ],
    )
    found = _parse(options, arguments, f"python -m experiments {name}", experiment.__doc__)
    return found.config, found.shared


def _parse(kind: Any, arguments: Sequence[str], program: str, description: str) -> Any:
    return tyro.cli(
        kind,
        args=arguments,
        prog=program,
        description=description,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


if __name__ == "__main__":
    sys.exit(main())
