"""The file format of trajectories: netCDF-4 with the configuration embedded, no pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow.errors import ArgumentError
from gradflow.provenance import git_revision, versions
from gradflow.trajectory import Trajectory

__all__ = ["load", "save", "to_xarray"]

_FORMAT = 1
_LONG_NAMES = {
    "loss": "loss",
    "gradient_norm": "norm of the gradient of the loss",
    "law_drift": "largest change of each conserved matrix since the start",
    "singular_values": "singular values of the end-to-end map",
    "modes": "strengths of the end-to-end map along the data's singular vectors",
    "balancedness": "largest Frobenius norm of the conserved matrices",
}
_DIMENSIONS = {"law_drift": ("law",), "singular_values": ("mode",), "modes": ("mode",)}
_FINAL = ("final_time", "final_loss", "final_gradient_norm", "code", "rows", "seconds")
_STATIC = ("solver", "reason")


def to_xarray(traj: Trajectory) -> Any:
    """The trajectory as an ``xarray.Dataset``; see :meth:`gradflow.Trajectory.to_xarray`."""
    import xarray as xr

    variables: dict[str, Any] = {}

    def add(name, array, dims, long_name):
        # Dimensionless throughout: gradient flow at unit speed counts learning rate × steps.
        attributes = {"units": "1", "long_name": long_name}
        variables[name] = (dims, np.asarray(array), attributes)

    recorded_names: dict[str, Any] = {}
    for name, tree in traj.recorded.items():
        leaves, recorded_names[name] = _name_leaves(name, tree)
        for key, leaf in leaves:
            dims = _DIMENSIONS.get(key) or tuple(f"{key}_{k}" for k in range(leaf.ndim - 1))
            add(key, leaf, ("time", *dims), _LONG_NAMES.get(key, key))
    state_type, final_arrays = _pack(traj.final)
    for name, (array, dims) in final_arrays.items():
        add(f"final_{name}", array, dims, f"{name} at the end of the run")
    if traj.states is not None:
        # The axes of the stacked arrays are those of one state behind the time.
        stacked, _ = jax.tree.flatten(traj.states)
        for (name, (_, dims)), array in zip(final_arrays.items(), stacked, strict=True):
            add(name, array, ("time", *dims), f"{name} at the saved times")
    for name in _FINAL:
        add(name, getattr(traj, name), (), name.replace("_", " "))
    add("step_counts", traj.step_counts, ("step_kind",), "what the steps cost; -1: not counted")
    if traj.targets is not None:
        add("targets", traj.targets, ("mode",), "strengths of the data's modes")
    dataset = xr.Dataset(
        variables,
        coords={
            "time": (
                "time",
                np.asarray(traj.ts),
                {"units": "1", "long_name": "gradient-flow time (learning rate times steps)"},
            ),
            "step_kind": ["accepted", "rejected", "evaluations", "stiff"],
        },
    )
    status = traj.status
    dataset.attrs = {
        "title": "trajectory of a gradient flow",
        "gradflow_format": _FORMAT,
        "status": status.name,
        "status_message": status.message,
        "configuration": traj.config,
        "versions": json.dumps(versions()),
        "git_revision": git_revision(),
        "state_type": state_type,
        "recorded": json.dumps(recorded_names),
        "static": json.dumps({name: getattr(traj, name) for name in _STATIC}),
    }
    return dataset


def save(traj: Trajectory, path: str | Path) -> Path:
    """Write to a netCDF-4 file; see :meth:`gradflow.Trajectory.save`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset = to_xarray(traj)
    # Bits must survive: no fill values, no packing. Written beside and moved over, so that an
    # interrupted run leaves no half file under the final name.
    encoding = {name: {"_FillValue": None} for name in dataset.variables}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        dataset.to_netcdf(part, engine="netcdf4", encoding=encoding)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def load(path: str | Path) -> Trajectory:
    """Read a trajectory written by :meth:`gradflow.Trajectory.save`, bit for bit.

    States of gradflow's own types come back as such, other states as a tuple of their arrays;
    observables that were named tuples come back as lists.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file was not written by gradflow, or by an incompatible version; or it
            holds float64 numbers while JAX is in float32.
    """
    import xarray as xr

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        dataset = xr.load_dataset(path, engine="netcdf4", decode_cf=False)
    except OSError as error:
        raise ArgumentError("path", f"{path}", "it must be a netCDF file") from error
    if dataset.attrs.get("gradflow_format") != _FORMAT:
        raise ArgumentError(
            "path", f"{path}", f"it must be a trajectory saved by gradflow (format {_FORMAT})"
        )
    if dataset["time"].dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise ArgumentError(
            "path",
            f"{path}, which holds float64 numbers",
            'JAX would round them: jax.config.update("jax_enable_x64", True) first',
        )

    def array(name):
        return jnp.asarray(dataset[name].values)

    kind = dataset.attrs["state_type"]
    names = [
        name.removeprefix("final_")
        for name in map(str, dataset.data_vars)
        if name.startswith("final_") and name not in _FINAL
    ]
    stored = all(name in dataset for name in names)
    states = _unpack(kind, {name: array(name) for name in names}) if stored else None
    static = json.loads(dataset.attrs["static"])
    return Trajectory(
        ts=array("time"),
        states=states,
        final=_unpack(kind, {name: array(f"final_{name}") for name in names}),
        recorded={
            name: _rename_leaves(spec, array)
            for name, spec in json.loads(dataset.attrs["recorded"]).items()
        },
        targets=array("targets") if "targets" in dataset else None,
        step_counts=array("step_counts"),
        config=dataset.attrs["configuration"],
        **{name: array(name) for name in _FINAL},
        **static,
    )


def _pack(state: Any) -> tuple[str, dict[str, tuple[Any, tuple[str, ...]]]]:
    """The type's name, and the state's arrays by name with the names of their dimensions."""
    named = getattr(state, "named_arrays", None)
    if named is not None:
        return f"{type(state).__module__}:{type(state).__name__}", named()
    leaves = jax.tree.leaves(state)
    kind = "array" if hasattr(state, "dtype") else "leaves"
    names = ["state"] if kind == "array" else [f"state_{k}" for k in range(len(leaves))]
    return kind, {
        name: (leaf, tuple(f"{name}_{k}" for k in range(leaf.ndim)))
        for name, leaf in zip(names, leaves, strict=True)
    }


def _unpack(kind: str, arrays: dict[str, Any]) -> Any:
    if kind == "array":
        return arrays["state"]
    if kind == "leaves":
        return tuple(arrays.values())
    module, _, name = kind.partition(":")
    # A file must not be able to import anything but this library's own states.
    if module.partition(".")[0] != "gradflow":
        raise ArgumentError("path", f"a state of type {kind}", "it must be one of gradflow's")
    return getattr(import_module(module), name).from_named_arrays(arrays)


def _name_leaves(name: str, tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The arrays of an observable by name, and the nested lists and dicts of those names."""
    if isinstance(tree, dict):
        parts: Iterator = ((key, _name_leaves(f"{name}_{key}", sub)) for key, sub in tree.items())
        found = list(parts)
        return [leaf for _, (leaves, _) in found for leaf in leaves], {
            key: spec for key, (_, spec) in found
        }
    if isinstance(tree, (list, tuple)):
        items = [_name_leaves(f"{name}_{k}", sub) for k, sub in enumerate(tree)]
        return [leaf for leaves, _ in items for leaf in leaves], [spec for _, spec in items]
    return [(name, tree)], name


def _rename_leaves(spec: Any, array: Any) -> Any:
    if isinstance(spec, dict):
        return {key: _rename_leaves(sub, array) for key, sub in spec.items()}
    if isinstance(spec, list):
        return [_rename_leaves(sub, array) for sub in spec]
    return array(spec)
