"""Find an experiment, produce or load its data, draw it, and say what is in it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import textwrap
import time
from pathlib import Path
from typing import Any, Protocol, cast

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

import experiments
import experiments.benchmarks
import gradflow as gf

__all__ = ["Experiment", "benchmark_names", "find", "names", "one_line", "produce_or_load", "run"]


class Experiment(Protocol):
    """What a module in this package offers."""

    __doc__: str
    Config: Any

    def compute(self, config: Any) -> xr.Dataset:
        """All that the figure shows; the attribute ``runs`` says how each integration ended."""

    def summary(self, data: xr.Dataset) -> str:
        """The key numbers, a few lines."""

    def figure(self, data: xr.Dataset) -> Figure | dict[str, Figure]:
        """One figure, or several by a suffix of the file name (``""`` for none)."""


def names() -> list[str]:
    """The names of all experiments, in alphabetical order, without the benchmarks."""
    found = pkgutil.iter_modules(experiments.__path__)
    return sorted(m.name for m in found if not m.ispkg and not m.name.startswith("_"))


def benchmark_names() -> list[str]:
    """The names of all benchmarks that are run as experiments are, ``benchmarks.NAME``."""
    found = pkgutil.iter_modules(experiments.benchmarks.__path__)
    dotted = (f"benchmarks.{m.name}" for m in found if not m.name.startswith("_"))
    return sorted(name for name in dotted if hasattr(find(name), "Config"))


def find(name: str) -> Experiment:
    """The module of an experiment."""
    return cast(Experiment, importlib.import_module(f"experiments.{name}"))


def one_line(experiment: Experiment) -> str:
    """The first line of an experiment's docstring."""
    return experiment.__doc__.strip().splitlines()[0]


def run(name: str, config: Any, folder: Path, force: bool) -> None:
    """Produce or load, draw and save one experiment, and print what came out.

    Args:
        name: which experiment.
        config: its ``Config``.
        folder: where ``data.nc`` and ``NAME.png`` go; made if missing.
        force: compute even if ``data.nc`` holds this very configuration.
    """
    experiment = find(name)
    path = folder / "data.nc"
    data, loaded = produce_or_load(name, config, path, force)
    if loaded:
        print(f"  loaded {path} (revision {data.attrs['git_revision'][:12]}); --force recomputes")
    else:
        print(f"  computed in {data.attrs['seconds']:.1f} s, saved {path}")
    print(textwrap.indent(f"{data.attrs['runs']}\n{experiment.summary(data)}", "    "))
    with gf.plot.style():
        drawn = experiment.figure(data)
        figures = drawn if isinstance(drawn, dict) else {"": drawn}
        for suffix, figure in figures.items():
            picture = folder / f"{name.rpartition('.')[2]}{suffix and '_' + suffix}.png"
            figure.savefig(picture, pil_kwargs={"optimize": True})
            plt.close(figure)
            print(f"  drew {picture}")


def produce_or_load(name: str, config: Any, path: Path, force: bool) -> tuple[xr.Dataset, bool]:
    """The data of an experiment, and whether it was loaded rather than computed.

    A saved file is used if it was made by this experiment with an equal configuration and this
    version of gradflow.
    """
    key = {
        "experiment": name,
        "configuration": json.dumps(dataclasses.asdict(config)),
        "gradflow_version": gf.__version__,
    }
    if not force and path.exists():
        saved = _read(path)
        if saved is not None and all(saved.attrs.get(k) == value for k, value in key.items()):
            return saved, True
    started = time.perf_counter()
    data = find(name).compute(config)
    data.attrs |= {
        **key,
        "seconds": time.perf_counter() - started,
        "versions": json.dumps(gf.provenance.versions()),
        "git_revision": gf.provenance.git_revision(),
    }
    _write(data, path)
    return data, False


def _read(path: Path) -> xr.Dataset | None:
    try:
        return xr.load_dataset(path, engine="netcdf4")
    except (OSError, ValueError):
        print(f"  {path} cannot be read and is made anew")
        return None


def _write(data: xr.Dataset, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Moved over when complete, so that an interrupted run leaves no half file behind.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        data.to_netcdf(part, engine="netcdf4")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
