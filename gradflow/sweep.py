"""Many runs: a function over a labelled grid of parameters, in a store that outlives crashes.

A *cell* is one point of the grid. Cells are run, written and marked in *blocks*: one cell each, or
those of one ``batch``. No chunk of the store holds cells of two blocks, and a block's values are
written before its status: a crash at any moment leaves it either done or to be run again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from gradflow import _checks
from gradflow.errors import ArgumentError
from gradflow.provenance import git_revision, versions
from gradflow.simulate import LOG_POINTS
from gradflow.trajectory import Trajectory

__all__ = ["sweep"]

PENDING, DONE, FAILED = 0, 1, 2
_FORMAT = 1
_RESERVED = ("status", "error")
_LONGEST_MESSAGE = 2000
_LARGEST_CHUNK = 2**28  # bytes; the compressor takes no more than 2**31
_STATUS_CHUNK = 2**14  # cells: a file for each cell would take minutes to read back
_EXTRA = "pip install 'gradflow[distributed]'"


def sweep(
    run: Callable[..., Any],
    grid: Mapping[str, Iterable[Any]],
    *,
    client: Any = None,
    store: str | os.PathLike | None = "sweep.zarr",
    progress: bool = True,
    batch: str | Sequence[str] | Mapping[str, int | None] | None = None,
    version: str | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    threads: int = 1,
) -> Any:
    """Call ``run(**cell)`` for every cell of a grid, and collect the results by name and label.

    Results are written to a Zarr store as they come. The same call again, after an interruption
    or a crash, runs the cells that are missing and no others. A cell that raises is recorded with
    its message and stops nothing. Inside ``run`` JAX has the caller's ``jax_enable_x64``, in
    whatever process it runs.

    Args:
        run: a function of one cell, with the grid's names as keyword arguments. It returns a dict
            of numbers, strings and arrays by name, one such value, an ``xarray.Dataset`` or
            ``DataArray``, or a :class:`gradflow.Trajectory`, of the same names, shapes and types
            in every cell. With a client it is pickled.
        grid: the values of each parameter by name: distinct numbers, or strings, or booleans.
        client: a ``distributed.Client``; without one the cells run in this process.
        store: the folder of the Zarr store (made if there is none), or None to keep the results
            in memory only.
        progress: show a progress bar and a line with the counts.
        batch: names of numeric parameters over which ``run`` is mapped by one jitted
            ``jax.vmap``, or a dict from these to the number of values in one call (None: all).
            The other parameters stay plain Python values; each combination of them compiles.
            A batch succeeds or fails as a whole.
        version: a label of your own; change it when ``run`` changes its meaning.
        overwrite: begin again, and delete the sweep that ``store`` holds.
        retry_failed: run failed cells again. Without it they keep their recorded error.
        threads: without a client, the number of cells that run at once.

    Returns:
        an ``xarray.Dataset`` with the grid's parameters as first dimensions of every result, in
        their order, and the results' own dimensions behind (``name_0``, ``name_1``, ... for plain
        arrays). ``status`` is 0 for pending cells, 1 for done, 2 for failed; ``error`` holds the
        messages of failed ones. In cells that are not done floats are nan, integers 0. Of a
        trajectory the saved times are the variable ``t``; rows past the end of a run that stopped
        early repeat its last one; its wall time is left out, being never the same twice. With a
        store the results are read from there when they are used.

    Raises:
        ValueError: a grid that is empty, has repeated values or names that ``run`` does not take;
            a store that holds another sweep, or something else; a ``run`` that cannot be pickled.
        ImportError: a store or a client without the optional packages.
        RuntimeError: the client lost its cluster; call again to go on.
    """
    axes = _check_grid(run, grid)
    batched = _check_batch(batch, axes)
    threads = _checks.whole_number("threads", threads, 1)
    x64 = jnp.zeros(()).dtype == np.float64
    program = _Program(run, tuple(axes), batched, x64)
    identity = {
        "run": _qualified_name(run),
        "version": "" if version is None else str(version),
        "grid": json.dumps(axes),
        "batch": json.dumps(batched),
        "precision": "float64" if x64 else "float32",
    }
    start: Callable[[Iterator[_Block]], _Outcomes]
    if client is not None:
        _check_client(client)
        start = functools.partial(_on_cluster, client, _pickled(program))
    elif threads > 1:
        start = functools.partial(_in_threads, threads, program)
    else:
        start = functools.partial(_serially, program)
    kept: _Store
    if store is None:
        kept = _MemoryStore(axes, identity)
    else:
        kept = _ZarrStore(axes, identity, batched, store, overwrite)

    status = kept.status
    to_run = (status == PENDING) | (retry_failed & (status == FAILED))
    before = int(np.sum(~to_run))
    failures = int(np.sum(status[~to_run] == FAILED))
    blocks = (block for block in _blocks(axes, batched) if to_run[block.place].any())
    bar = tqdm(total=status.size, initial=before, desc="sweep", unit="cell", disable=not progress)
    with bar, contextlib.closing(start(blocks)) as outcomes:
        for block, outcome in outcomes:
            if isinstance(outcome, _Result):
                outcome = kept.accept(outcome)
            if isinstance(outcome, _Result):
                kept.write(block.place, outcome)
            else:
                kept.fail(block.place, outcome.message)
                failures += status[block.place].size
                bar.set_postfix(failed=failures, refresh=False)
            bar.update(status[block.place].size)
    dataset = kept.dataset()
    dataset.attrs["summary"] = _summary(dataset, before)
    if progress:
        tqdm.write(f"sweep: {dataset.attrs['summary']}", file=sys.stderr)
    return dataset


def _summary(dataset: Any, before: int) -> str:
    status = dataset["status"].values
    done, failed = int(np.sum(status == DONE)), int(np.sum(status == FAILED))
    line = f"{status.size} cells: {done} done, {failed} failed; {before} were so before"
    if failed:
        cell = tuple(int(i) for i in np.argwhere(status == FAILED)[0])
        labels = ", ".join(
            f"{name}={dataset[name].values[i]}"
            for name, i in zip(dataset["status"].dims, cell, strict=True)
        )
        line += f"; first failure at {labels}: {dataset['error'].values[cell]}"
    return line


# What to run: the grid and its blocks.


class _Block(NamedTuple):
    """A rectangle of cells: its place in the grid, and the values of each parameter."""

    place: tuple[slice, ...]
    values: dict[str, list]


def _blocks(axes: dict[str, list], batched: dict[str, int]) -> Iterator[_Block]:
    sizes = [batched.get(name, 1) for name in axes]
    starts = [range(0, len(v), size) for v, size in zip(axes.values(), sizes, strict=True)]
    for corner in itertools.product(*starts):
        index = tuple(
            slice(first, min(first + size, len(values)))
            for first, size, values in zip(corner, sizes, axes.values(), strict=True)
        )
        pieces = zip(axes.items(), index, strict=True)
        yield _Block(index, {name: values[piece] for (name, values), piece in pieces})


def _check_grid(run: Any, grid: Any) -> dict[str, list]:
    """The grid with plain Python values, of one type for each parameter."""
    if not callable(run):
        raise ArgumentError("run", _checks.describe(run), "it must be a function of one cell")
    wanted = "it must be a dict from parameter names to sequences of values"
    if not isinstance(grid, Mapping):
        raise ArgumentError("grid", _checks.describe(grid), wanted)
    if not grid:
        raise ArgumentError("grid", "an empty grid", wanted)
    for name in grid:
        if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
            raise ArgumentError(
                "grid",
                f"a parameter named {name!r}",
                f"names must be those of keyword arguments, and not {' or '.join(_RESERVED)}",
            )
    axes = {name: _check_axis(name, values) for name, values in grid.items()}
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):  # built in: nothing to compare with
        return axes
    try:
        signature.bind(**axes)
    except TypeError as error:
        raise ArgumentError(
            "grid",
            f"parameters {', '.join(axes)} for {_qualified_name(run)}{signature} ({error})",
            "they must be arguments that run takes, and all that it needs",
        ) from error
    return axes


def _check_axis(name: str, values: Any) -> list:
    where = f"grid[{name!r}]"
    wanted = "it must be a non-empty sequence of numbers, of strings or of booleans"
    try:
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError("a sequence, but not of values")
        items = [np.asarray(item) for item in values]
    except (TypeError, ValueError) as error:
        raise ArgumentError(where, _checks.describe(values), wanted) from error
    kinds = {item.dtype.kind if item.ndim == 0 else "no scalar" for item in items}
    if not kinds or not (kinds <= set("iuf") or kinds in ({"U"}, {"b"})):
        raise ArgumentError(where, _checks.describe(values), wanted)
    array = np.asarray(items)
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise ArgumentError(where, "nan", "every value must be equal to itself")
    distinct, counts = np.unique(array, return_counts=True)
    if len(distinct) < len(array):
        raise ArgumentError(
            where, f"{distinct[counts > 1][0]} more than once", "every value must be distinct"
        )
    return array.tolist()


def _check_batch(batch: Any, axes: dict[str, list]) -> dict[str, int]:
    """The number of values in one call, for each parameter that is batched."""
    if isinstance(batch, str):
        batch = [batch]
    asked = batch if isinstance(batch, Mapping) else dict.fromkeys(batch or ())
    sizes = {}
    for name, size in asked.items():
        _checks.choice("batch", name, list(axes))
        if isinstance(axes[name][0], str):
            raise ArgumentError("batch", f"{name!r}, which has strings", "vmap needs numbers")
        if size is not None:
            size = _checks.whole_number(f"batch[{name!r}]", size, 1)
        sizes[name] = min(size or len(axes[name]), len(axes[name]))
    return {name: sizes[name] for name in axes if name in sizes}


def _qualified_name(run: Any) -> str:
    """The function's name with its module, and the plain values that a partial has fixed."""
    if isinstance(run, functools.partial):
        # Arrays and objects are left out: their text is not the same in the next process.
        fixed = [("", value) for value in run.args] + sorted(run.keywords.items())
        plain = (
            f"{name}={value!r}" for name, value in fixed if isinstance(value, (str, int, float))
        )
        return f"{_qualified_name(run.func)}({', '.join(plain)})"
    named = run if hasattr(run, "__qualname__") else type(run)
    return f"{named.__module__}.{named.__qualname__}"


# One block: call, and bring what comes back into one form.


class _Table(NamedTuple):
    """A variable: its own dimensions, its values and its attributes.

    The values of results have the axes of the block in front of their own.
    """

    dims: tuple[str, ...]
    values: np.ndarray
    attrs: dict[str, Any]


class _Result(NamedTuple):
    variables: dict[str, _Table]
    coords: dict[str, _Table]


class _Failure(NamedTuple):
    message: str


_Outcomes = Generator[tuple[_Block, _Result | _Failure], None, None]


class _Program:
    """``run`` with all that it takes to give the same values in any process."""

    def __init__(self, run: Callable, names: tuple[str, ...], batched: dict[str, int], x64: bool):
        self.run, self.names, self.batched, self.x64 = run, names, batched, x64

    def __reduce__(self):
        # Without the compiled functions, which belong to their process.
        return type(self), (self.run, self.names, self.batched, self.x64)

    def __call__(self, values: dict[str, list]) -> _Result | _Failure:
        """The result of a block, or why there is none."""
        shape = tuple(len(values[name]) for name in self.names)
        try:
            with _checks.precision(self.x64):
                if self.batched:
                    results = self._batch(values)
                else:
                    results = [self.run(**{name: one for name, (one,) in values.items()})]
                return _tables([_dataset(result) for result in results], shape, self.names)
        except (Exception, SystemExit) as error:
            return _Failure(_message(error))

    def _batch(self, values: dict[str, list]) -> list:
        fixed = tuple((n, v[0]) for n, v in values.items() if n not in self.batched)
        # A last batch with fewer values is filled up, so that all run the same program.
        full = [values[n] + values[n][-1:] * (k - len(values[n])) for n, k in self.batched.items()]
        lanes = np.meshgrid(*full, indexing="ij")
        out = self._mapped(fixed, {n: m.ravel() for n, m in zip(self.batched, lanes, strict=True)})
        host = jax.tree.map(np.asarray, out)
        numbers = np.arange(lanes[0].size).reshape(lanes[0].shape)
        wanted = numbers[tuple(slice(len(values[n])) for n in self.batched)].ravel()
        return [jax.tree.map(lambda x, i=i: x[i], host) for i in wanted]

    @functools.cached_property
    def _mapped(self) -> Callable:
        def one(fixed, cell):
            result = self.run(**dict(fixed), **cell)
            leaves = jax.tree.leaves(result)
            if any(type(leaf).__module__.partition(".")[0] == "xarray" for leaf in leaves):
                raise ArgumentError(
                    "run", "xarray objects in a batch", "it must return a dict or a Trajectory"
                )
            return result

        def lanes(fixed, cells):
            return jax.vmap(functools.partial(one, fixed))(cells)

        return jax.jit(lanes, static_argnums=0)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]


def _dataset(result: Any) -> Any:
    """What a cell returned, as an ``xarray.Dataset``."""
    import xarray as xr

    if isinstance(result, Trajectory):
        return _trajectory_dataset(result)
    if isinstance(result, xr.Dataset):
        return result
    if isinstance(result, xr.DataArray):
        result = {result.name or "result": result}
    elif not isinstance(result, Mapping):
        result = {"result": result}
    labelled, plain = [], {}
    for name, value in result.items():
        if not isinstance(name, str):
            raise ArgumentError("run", f"a result named {name!r}", "names must be strings")
        if isinstance(value, xr.DataArray):
            labelled.append(value.rename(name))
        else:
            array = np.asarray(value)
            plain[name] = (tuple(f"{name}_{k}" for k in range(array.ndim)), array)
    dataset = xr.Dataset(plain)
    return xr.merge([dataset, *labelled], join="exact", compat="equals") if labelled else dataset


def _trajectory_dataset(traj: Trajectory) -> Any:
    """A trajectory with all its rows, the last repeated where the run stopped early."""
    config = json.loads(traj.config)
    if "steps" in config:
        rows = (
            config["steps"] // config["save_every"]
            + 1
            + bool(config["steps"] % config["save_every"])
        )
    else:
        rows = {"log": LOG_POINTS}.get(config["save"], config["save"])
        rows = rows if isinstance(rows, int) else len(traj.ts)
    dataset = traj.trimmed().to_xarray()
    times = dataset["time"]
    dataset = dataset.drop_vars(["time", "seconds"])
    dataset["t"] = ("time", times.values, times.attrs)
    missing = max(rows - times.size, 0)
    # A run that was never finite has no last row; nan stands for it.
    return dataset.pad(time=(0, missing), mode="edge" if times.size else "constant")


def _tables(datasets: list, block: tuple[int, ...], taken: tuple[str, ...]) -> _Result:
    """The results of the cells of a block, stacked."""
    first = datasets[0]
    coords = {
        name: _table(name, variable)
        for name, variable in first.variables.items()
        if name in first.coords and variable.ndim
    }
    for other in datasets[1:]:
        if any(not np.array_equal(first[name].values, other[name].values) for name in coords):
            raise ArgumentError("run", "coordinates that differ", "return them as variables")
    variables = {}
    for name in first.variables:
        if name in coords:
            continue
        table = _table(name, first.variables[name])
        stack = np.stack([table.values, *(other[name].values for other in datasets[1:])])
        variables[name] = table._replace(values=stack.reshape(block + table.values.shape))
    if not variables:
        raise ArgumentError("run", "no results", "it must return at least one number or array")
    for name in [*first.variables, *first.sizes]:
        if name in taken or name in _RESERVED:
            raise ArgumentError(
                "run",
                f"a result or dimension named {name!r}",
                f"{', '.join([*taken, *_RESERVED])} are the sweep's own: rename it",
            )
    return _Result(variables, coords)


def _table(name: Any, variable: Any) -> _Table:
    values = np.asarray(variable.values)
    if values.dtype.kind == "T" or (
        values.dtype.kind == "O" and all(isinstance(value, str) for value in values.flat)
    ):
        values = values.astype(str)
    if values.dtype.kind not in "biufcU":
        kind = values.dtype if values.dtype.kind != "O" else type(values.flat[0]).__name__
        raise ArgumentError(
            "run", f"{name!r} of type {kind}", "results must be numbers, strings or arrays of them"
        )
    attrs = {
        str(key): value.item() if isinstance(value, np.generic) else value
        for key, value in variable.attrs.items()
        if isinstance(value, (str, int, float, np.number))
    }
    return _Table(tuple(map(str, variable.dims)), values, attrs)


# Where blocks run: each yields every block with its outcome, in any order.


def _serially(program: _Program, blocks: Iterator[_Block]) -> _Outcomes:
    for block in blocks:
        yield block, program(block.values)


def _in_threads(threads: int, program: _Program, blocks: Iterator[_Block]) -> _Outcomes:
    running: dict[Any, _Block] = {}
    with ThreadPoolExecutor(threads) as pool:
        try:
            while True:
                for block in itertools.islice(blocks, max(2 * threads - len(running), 0)):
                    running[pool.submit(program, block.values)] = block
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _on_cluster(client: Any, payload: bytes, blocks: Iterator[_Block]) -> _Outcomes:
    from distributed import KilledWorker, as_completed

    label, numbers = f"gradflow-sweep-{uuid.uuid4().hex[:8]}", itertools.count()
    running: dict[Any, _Block] = {}
    suspects: list[_Block] = []

    def submit(block):
        future = client.submit(
            _execute, payload, block.values, key=f"{label}-{next(numbers)}", pure=False
        )
        running[future] = block
        return future

    def outcome(future):
        try:
            return future.result()
        except CancelledError as error:
            raise RuntimeError(
                "client: the cluster was lost or restarted during the sweep; the cells that "
                "finished are in the store: connect again and make the same call to go on"
            ) from error
        except Exception as error:
            if future.status != "error":  # the driver's own trouble, not the cell's
                raise
            return error if isinstance(error, KilledWorker) else _Failure(_message(error))

    try:
        finished, window, counted = as_completed(), 1, -np.inf
        while True:
            # A bounded number of tasks in flight, on a cluster that may grow and shrink.
            if time.monotonic() - counted > 1:
                window = max(4 * sum(client.nthreads().values()), 2)
                counted = time.monotonic()
            for block in itertools.islice(blocks, max(window - len(running), 0)):
                finished.add(submit(block))
            if not running:
                break
            future = next(finished)
            block, found = running.pop(future), outcome(future)
            # Dask computes a result again if its worker dies while anyone holds the future.
            del future
            if isinstance(found, KilledWorker):
                suspects.append(block)
            else:
                yield block, found
        # Dask blames every task that waited on a dead worker. Alone, only the guilty one dies.
        for block in suspects:
            future = submit(block)
            found = outcome(future)
            del running[future], future
            yield block, _Failure(_message(found)) if isinstance(found, KilledWorker) else found
    finally:
        if running and client.status == "running":
            client.cancel(list(running))


def _execute(payload: bytes, values: dict[str, list]) -> _Result | _Failure:
    return _unpickled(payload)(values)


@functools.lru_cache(maxsize=4)
def _unpickled(payload: bytes) -> _Program:
    """Once for each sweep in each worker, so that compiled functions are used again."""
    return importlib.import_module("cloudpickle").loads(payload)


def _pickled(program: _Program) -> bytes:
    try:
        return importlib.import_module("cloudpickle").dumps(program)
    except Exception as error:
        raise ArgumentError(
            "run",
            f"{_qualified_name(program.run)}, which cannot be pickled ({error})",
            "with a client it must be a function that can be sent to other processes",
        ) from error


def _check_client(client: Any) -> None:
    distributed = _optional("distributed", "client")
    if not isinstance(client, distributed.Client) or client.asynchronous:
        raise ArgumentError(
            "client", _checks.describe(client), "it must be a synchronous distributed.Client"
        )
    if client.status != "running":
        raise ArgumentError("client", f"a client that is {client.status}", "connect a new one")


def _optional(module: str, argument: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = ", or pass store=None to keep the results in memory" if argument == "store" else ""
        raise ImportError(f"{argument}: needs {module}: {_EXTRA}{advice}") from error


# Where results are kept.


class _Kind(NamedTuple):
    """What must be the same for a variable in all cells."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        sizes = ", ".join(f"{d}: {n}" for d, n in zip(self.dims, self.shape, strict=True))
        return f"{'str' if self.dtype.kind == 'U' else self.dtype} ({sizes})"


class _Store:
    """Results of cells by name; :attr:`status` mirrors what is stored."""

    status: np.ndarray
    arrays: dict[str, Any]  # error and results
    kinds: dict[str, _Kind] | None = None  # of the results, once a cell is done
    coords: dict[str, np.ndarray]

    def __init__(self, axes: dict[str, list]):
        self.axes = axes
        self.shape = tuple(map(len, axes.values()))

    def accept(self, result: _Result) -> _Result | _Failure:
        """The result, if it has the form of the first one."""
        kinds = {
            name: _Kind(table.dims, table.values.shape[len(self.shape) :], table.values.dtype)
            for name, table in result.variables.items()
        }
        if self.kinds is None:
            self._create(kinds, result)
            self.kinds = kinds
            self.coords = {name: table.values for name, table in result.coords.items()}
            return result
        wrong = None
        if kinds.keys() != self.kinds.keys():
            wrong = f"results {', '.join(kinds)} instead of {', '.join(self.kinds)}"
        elif self.coords.keys() != result.coords.keys() or not all(
            np.array_equal(self.coords[name], table.values) for name, table in result.coords.items()
        ):
            wrong = f"coordinates other than the first cell's {', '.join(self.coords)}"
        else:
            for name, kind in kinds.items():
                first = self.kinds[name]
                fits = (kind.dtype.kind == first.dtype.kind == "U") or np.can_cast(
                    kind.dtype, first.dtype, "safe"
                )
                if kind[:2] != first[:2] or not fits:
                    wrong = f"{name!r} as {kind} instead of {first}"
        if wrong is None:
            return result
        return _Failure(f"run: got {wrong}; names, shapes and types must be those of the first")

    def write(self, place: tuple[slice, ...], result: _Result) -> None:
        for name, table in result.variables.items():
            self.arrays[name][place] = table.values
        if (self.status[place] == FAILED).any():
            self.arrays["error"][place] = ""
        self._mark(place, DONE)

    def fail(self, place: tuple[slice, ...], message: str) -> None:
        self.arrays["error"][place] = message
        self._mark(place, FAILED)

    def _mark(self, place: tuple[slice, ...], status: int) -> None:
        self.status[place] = status

    def _create(self, kinds: dict[str, _Kind], result: _Result) -> None:
        raise NotImplementedError

    def dataset(self) -> Any:
        raise NotImplementedError


_STATUS_ATTRIBUTES = {
    "long_name": "how the cell ended",
    "flag_values": [PENDING, DONE, FAILED],
    "flag_meanings": "pending done failed",
}


def _attributes(identity: dict[str, str]) -> dict[str, Any]:
    return {
        "title": "parameter sweep",
        "gradflow_sweep_format": _FORMAT,
        **identity,
        "versions": json.dumps(versions()),
        "git_revision": git_revision(),
    }


def _short(text: str | None) -> str:
    text = text or "none"
    return text if len(text) <= 300 else f"{text[:297]}..."


def _empty(dtype: np.dtype) -> Any:
    """What stands in cells that are not done; None where the type has no such value."""
    return {"f": np.nan, "c": complex(np.nan, np.nan)}.get(dtype.kind)


class _MemoryStore(_Store):
    def __init__(self, axes: dict[str, list], identity: dict[str, str]):
        super().__init__(axes)
        self.attributes = _attributes(identity)
        self.status = np.zeros(self.shape, np.int8)
        self.arrays = {"error": np.full(self.shape, "", object)}
        self.tables: dict[str, _Table] = {}

    def _create(self, kinds, result):
        for name, kind in kinds.items():
            shape, text = self.shape + kind.shape, kind.dtype.kind == "U"
            array = np.full(shape, "", object) if text else np.zeros(shape, kind.dtype)
            if _empty(kind.dtype) is not None:
                array[...] = _empty(kind.dtype)
            self.arrays[name] = array
        self.tables = {**result.variables, **result.coords}

    def dataset(self):
        import xarray as xr

        def variable(name, dims):
            return dims, self.arrays[name], self.tables[name].attrs

        dims = tuple(self.axes)
        return xr.Dataset(
            {
                "status": (dims, self.status, _STATUS_ATTRIBUTES),
                "error": (dims, self.arrays["error"]),
                **{n: variable(n, dims + k.dims) for n, k in (self.kinds or {}).items()},
            },
            coords={
                **self.axes,
                **{
                    name: (table.dims, table.values, table.attrs)
                    for name, table in self.tables.items()
                    if name not in self.arrays
                },
            },
            attrs=self.attributes,
        )


class _ZarrStore(_Store):
    """A Zarr store: format 2, whose consolidated metadata and strings are specified."""

    def __init__(
        self,
        axes: dict[str, list],
        identity: dict[str, str],
        batched: dict[str, int],
        path: str | os.PathLike,
        overwrite: bool,
    ):
        super().__init__(axes)
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentError("store", _checks.describe(path), "it must be a path or None")
        self.zarr = _optional("zarr", "store")
        self.path = Path(path)
        self.chunk = tuple(batched.get(name, 1) for name in axes)
        self.attributes = _attributes(identity)
        self.noted = False
        if self.path.exists() or self.path.is_symlink():
            self._check(identity, overwrite)
        if overwrite and self.path.exists():
            # Moved first: a half-deleted store would be neither a sweep nor nothing.
            self.path.rename(self._beside("old"))
            shutil.rmtree(self._beside("old"))
        if not self.path.exists():
            self._build()
        self._open()

    def _beside(self, end: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{os.getpid()}.{end}")

    def _check(self, identity: dict[str, str], overwrite: bool) -> None:
        try:
            found = json.loads((self.path / ".zattrs").read_text())
        except (OSError, ValueError):
            found = {}
        if found.get("gradflow_sweep_format") != _FORMAT:
            raise ArgumentError(
                "store",
                f"{self.path}, which exists and is no sweep of this version of gradflow",
                "it must be a path where there is nothing, or a sweep to go on with",
            )
        for name, value in identity.items():
            if found.get(name) != value and not overwrite:
                raise ArgumentError(
                    "store",
                    f"{self.path}, which holds a sweep with {name} {_short(found.get(name))}, not "
                    f"{_short(value)}",
                    "use another store, or overwrite=True to delete what is there",
                )

    def _build(self) -> None:
        """An empty store, moved into place as a whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self._beside("part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            group = self.zarr.create_group(part, zarr_format=2, attributes=self.attributes)
            dims = tuple(self.axes)
            chunk: list[int] = []
            room = _STATUS_CHUNK
            for size in reversed(self.shape):
                chunk.insert(0, min(size, room))
                room //= chunk[0]
            self._array(group, "status", dims, chunk, np.dtype("int8"), _STATUS_ATTRIBUTES)
            self._array(group, "error", dims, chunk, np.dtype("U"), {})
            for name, values in self.axes.items():
                self._fixed(group, name, _Table((name,), np.asarray(values), {}))
            self.zarr.consolidate_metadata(part)
            part.rename(self.path)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _open(self) -> None:
        # What a kill has left behind: files before their renaming, arrays of a first result.
        for left in self.path.glob("*.partial"):
            left.unlink()
        status = self.zarr.open_array(self.path / "status", mode="r")
        self.status = np.array(status[...])
        self.status_chunk = status.chunks
        if not (self.status == DONE).any():
            for left in self.path.iterdir():
                if left.is_dir() and left.name not in (*self.axes, *_RESERVED):
                    shutil.rmtree(left)
            self.zarr.consolidate_metadata(self.path)
        self.group = self.zarr.open_group(self.path, mode="r+", use_consolidated=False)
        self.arrays = dict(self.group.arrays())
        dims = {name: tuple(a.attrs["_ARRAY_DIMENSIONS"]) for name, a in self.arrays.items()}
        others = [name for name in dims if name not in (*self.axes, *_RESERVED)]
        if not others:
            return
        n = len(self.axes)
        self.kinds, self.coords = {}, {}
        for name in others:
            array = self.arrays[name]
            if dims[name][:n] != tuple(self.axes):
                self.coords[name] = np.asarray(array[...])
            else:
                dtype = np.dtype("U") if array.dtype.kind in "OT" else array.dtype
                self.kinds[name] = _Kind(dims[name][n:], array.shape[n:], dtype)

    def _create(self, kinds, result):
        labels = {name: table.dims for name, table in result.coords.items()}
        for name, table in result.coords.items():
            self._fixed(self.group, name, table)
        for name, (dims, shape, dtype) in kinds.items():
            attrs = dict(result.variables[name].attrs)
            own = [label for label, along in labels.items() if set(along) <= set(dims)]
            more = [label for label in own if labels[label] != (label,)]
            if more:
                attrs["coordinates"] = " ".join(more)
            chunk = (*self.chunk, *shape)
            self._array(self.group, name, (*self.axes, *dims), chunk, dtype, attrs)
        self.zarr.consolidate_metadata(self.path)
        self.arrays = dict(self.group.arrays())

    def _array(self, group, name, dims, chunk, dtype, attrs):
        n = len(self.axes)
        shape, chunk = (*self.shape, *chunk[n:]), [max(size, 1) for size in chunk]
        while np.prod(chunk) * dtype.itemsize > _LARGEST_CHUNK and max(chunk[n:], default=1) > 1:
            widest = max(range(n, len(chunk)), key=chunk.__getitem__)
            chunk[widest] = -(-chunk[widest] // 2)
        group.create_array(
            name,
            shape=shape,
            chunks=tuple(chunk),
            dtype=str if dtype.kind == "U" else dtype,
            fill_value=_empty(dtype),
            attributes={**attrs, "_ARRAY_DIMENSIONS": list(dims)},
            chunk_key_encoding={"name": "v2", "separator": "/"},
        )

    def _fixed(self, group, name, table):
        group.create_array(
            name,
            data=table.values,
            fill_value=None,
            attributes={**table.attrs, "_ARRAY_DIMENSIONS": list(table.dims)},
        )

    def _mark(self, place, status):
        if not self.noted:
            self._note_origin()
        super()._mark(place, status)
        # Whole chunks, from memory: each is replaced at once by a file with the old marks and new.
        around = tuple(
            slice(along.start // size * size, along.stop + -along.stop % size)
            for along, size in zip(place, self.status_chunk, strict=True)
        )
        self.arrays["status"][around] = self.status[around]

    def _note_origin(self) -> None:
        """Cells that other versions or another revision have computed are not passed over."""
        self.noted = True
        origin = {name: self.attributes[name] for name in ("versions", "git_revision")}
        attrs = dict(self.group.attrs)
        known = [{name: attrs[name] for name in origin}, *json.loads(attrs.get("resumed", "[]"))]
        if origin not in known:
            self.group.attrs["resumed"] = json.dumps([*known[1:], origin])
            self.zarr.consolidate_metadata(self.path)

    def dataset(self):
        import xarray as xr

        dataset = xr.open_zarr(self.path, chunks=None, decode_times=False)
        dataset["status"].load()
        dataset["error"] = dataset["error"].astype(object)
        return dataset
