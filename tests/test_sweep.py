"""A sweep holds every cell once, whatever is interrupted, killed or wrong on the way."""

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import gradflow as gf
from gradflow.errors import ArgumentError

module = sys.modules["gradflow.sweep"]
quiet = functools.partial(gf.sweep, progress=False)

GRID = {"scale": [0.5, -2.0], "depth": [3, 1], "seed": range(4)}
SHAPE = (2, 2, 4)


def note(log, *words):
    """One line in a file, whole even if several processes write."""
    if log:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, (" ".join(map(str, words)) + "\n").encode())
        os.close(handle)


def cell(scale, depth, seed, log=""):
    note(log, scale, depth, seed)
    return {"power": scale**depth + seed, "row": jnp.arange(3.0) * seed, "word": f"{depth}/{seed}"}


def expected():
    scale, depth, seed = np.meshgrid(*(list(v) for v in GRID.values()), indexing="ij")
    return scale**depth + seed


def lines(log):
    return Counter(Path(log).read_text().splitlines())


def assert_complete(data):
    assert data["power"].dims == ("scale", "depth", "seed")
    assert data["row"].dims == ("scale", "depth", "seed", "row_0")
    for name, values in GRID.items():
        np.testing.assert_array_equal(data[name], list(values))
    np.testing.assert_array_equal(data["power"], expected())
    rows = np.broadcast_to(np.outer(np.arange(4), np.arange(3.0)), (*SHAPE, 3))
    np.testing.assert_array_equal(data["row"], rows)
    assert data["word"].sel(scale=-2.0, depth=1, seed=2).item() == "1/2"
    np.testing.assert_array_equal(data["status"], np.ones(SHAPE))
    assert set(data["error"].values.ravel()) == {""}


# What a sweep returns.


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["memory", "zarr"])
def test_every_cell_holds_its_own_result_under_its_labels(kind, threads, tmp_path):
    store = None if kind == "memory" else tmp_path / "folder" / "a.zarr"
    assert_complete(quiet(cell, GRID, store=store, threads=threads))


def test_store_is_read_by_xarray_alone_and_says_where_it_came_from(tmp_path):
    quiet(cell, GRID, store=tmp_path / "a.zarr", version="v1")
    data = xr.open_zarr(tmp_path / "a.zarr")
    assert_complete(data.load())
    assert data["status"].attrs["flag_meanings"] == "pending done failed"
    assert json.loads(data.attrs["grid"]) == {n: list(v) for n, v in GRID.items()}
    assert data.attrs["run"].endswith("test_sweep.cell")
    assert data.attrs["version"] == "v1"
    assert data.attrs["precision"] == "float64"
    assert data.attrs["git_revision"]
    assert json.loads(data.attrs["versions"])["jax"][0].isdigit()


def labelled(depth, name):
    values = xr.DataArray(
        np.full((depth, 2), float(len(name))),
        dims=("mode", "time"),
        coords={"mode": np.arange(depth), "strength": ("mode", np.arange(depth) / 2), "sum": 7},
        attrs={"units": "1", "long_name": "numbers"},
    )
    return {"values": values, "flag": depth > 2, "phase": 1j}


@pytest.mark.parametrize("kind", ["memory", "zarr"])
def test_labels_and_attributes_of_a_result_are_kept(kind, tmp_path):
    store = None if kind == "memory" else tmp_path / "a.zarr"
    data = quiet(labelled, {"name": ["a", "bcd"], "depth": [3]}, store=store)
    assert data["values"].dims == ("name", "depth", "mode", "time")
    assert data["values"].attrs == {"units": "1", "long_name": "numbers"}
    np.testing.assert_array_equal(data["mode"], [0, 1, 2])
    assert data["values"].sel(name="bcd", depth=3, mode=1, time=1) == 3.0
    np.testing.assert_array_equal(data.coords["strength"], [0, 0.5, 1])
    np.testing.assert_array_equal(data["sum"], [[7], [7]])
    assert data["flag"].dtype == bool
    np.testing.assert_array_equal(data["phase"], [[1j], [1j]])
    assert "strength" in data["values"].coords


def dataset(seed):
    return labelled(3, "a")["values"].to_dataset(name="values") + seed


def test_dataset_array_or_number_is_taken_as_it_is():
    data = quiet(dataset, {"seed": [0, 5]}, store=None)
    np.testing.assert_array_equal(data["values"].isel(mode=0, time=0), [1, 6])
    data = quiet(lambda seed: dataset(seed)["values"], {"seed": [0, 5]}, store=None)
    np.testing.assert_array_equal(data["values"].isel(mode=0, time=0), [1, 6])
    data = quiet(lambda x: abs(x), {"x": [-1, 2]}, store=None)
    np.testing.assert_array_equal(data["result"], [1, 2])


def test_empty_arrays_and_arrays_of_several_chunks_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LARGEST_CHUNK", 64)

    def run(seed):
        return {"none": np.zeros((2, 0)), "many": seed + np.arange(40.0).reshape(5, 8)}

    data = quiet(run, {"seed": range(3)}, store=tmp_path / "a.zarr")
    assert data["none"].shape == (3, 2, 0)
    assert np.prod(data["many"].encoding["chunks"]) <= 8
    for seed in range(3):
        np.testing.assert_array_equal(data["many"][seed], seed + np.arange(40.0).reshape(5, 8))


PROBLEM = gf.Problem.from_singular_values([2.0, 1.0])
FLOW = gf.GradientFlow(PROBLEM)
TIMES = 11


def trained(seed, t1=60.0):
    start = gf.initialize.gaussian(jax.random.key(seed), (2, 2, 2), 0.5)
    method = gf.Method(solver="explicit", rtol=1e-6)
    return gf.simulate(FLOW, start, t1, save=TIMES, method=method, stop_gradient_norm=1e-3)


@pytest.fixture(scope="module")
def trajectories():
    return quiet(trained, {"seed": [0, 1, 2]}, store=None)


def test_trajectories_are_stored_whole_and_early_ends_repeat_their_last_row(trajectories):
    data = trajectories
    assert data["loss"].dims == ("seed", "time")
    assert data["W1"].dims == ("seed", "time", "node_1", "node_0")
    assert data.sizes["time"] == TIMES
    for seed in data["seed"].values:
        traj, one = trained(int(seed)), data.sel(seed=seed)
        assert traj.status is gf.Status.STATIONARY
        rows = len(traj.ts)
        assert rows == one["rows"] < TIMES
        np.testing.assert_array_equal(one["loss"][:rows], traj.loss)
        np.testing.assert_array_equal(one["t"][:rows], traj.ts)
        np.testing.assert_array_equal(one["t"][rows:], float(traj.final_time))
        np.testing.assert_array_equal(one["W2"][-1], traj.final.weights[1])
        np.testing.assert_array_equal(one["step_counts"], traj.step_counts)
        assert one["code"] == gf.Status.STATIONARY
    assert "seconds" not in data


def test_diverged_descents_keep_the_rows_of_the_others():
    def run(rate):
        start = gf.initialize.identity((2, 2, 2))
        return gf.descend(FLOW, start, rate, 10, save_every=4)

    data = quiet(run, {"rate": [5.0, 0.1]}, store=None)
    np.testing.assert_array_equal(data["status"], [1, 1])
    np.testing.assert_array_equal(data["code"], [gf.Status.DIVERGED, gf.Status.REACHED_END])
    assert data.sizes["time"] == 4
    np.testing.assert_allclose(data["t"][1], [0, 0.4, 0.8, 1.0])


# Batches.


def test_batch_gives_the_values_of_single_cells(trajectories):
    data = quiet(trained, {"seed": [0, 1, 2]}, store=None, batch="seed")
    assert set(data["error"].values) == {""}
    assert data.sizes == trajectories.sizes
    for name in ("t", "loss", "W1", "rows", "code"):
        np.testing.assert_allclose(data[name], trajectories[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("batch", "traces", "chunk"),
    [
        ("seed", 4, (1, 1, 4)),
        (("seed", "scale"), 2, (2, 1, 4)),
        ({"scale": 1, "seed": 3}, 2, (1, 1, 3)),
    ],
)
def test_batch_is_traced_once_for_each_combination_of_other_values(batch, traces, chunk, tmp_path):
    calls = []

    def run(scale, depth, seed):
        calls.append((type(depth), np.ndim(seed)))
        return {"power": scale**depth + seed, "row": seed * jnp.arange(3.0)}

    data = quiet(run, GRID, store=tmp_path / "a.zarr", batch=batch)
    np.testing.assert_array_equal(data["power"], expected())
    np.testing.assert_array_equal(data["row"][1, 0], np.outer(np.arange(4), np.arange(3)))
    assert calls == [(int, 0)] * traces
    assert data["power"].encoding["chunks"] == chunk


def test_batch_that_cannot_be_mapped_is_recorded(tmp_path):
    data = quiet(lambda x: {"y": float(x)}, {"x": [1.0, 2.0]}, store=None, batch="x")
    assert all("ConcretizationTypeError" in text for text in data["error"].values)
    data = quiet(lambda seed: xr.DataArray(seed), {"seed": [1, 2]}, store=None, batch="seed")
    assert all("must return a dict or a Trajectory" in text for text in data["error"].values)


# Interruptions and crashes.


def interrupted(scale, depth, seed, log, flag):
    """Interrupts the driver in one cell, as long as a file is there."""
    if (scale, depth, seed) == (-2.0, 3, 1) and Path(flag).exists():
        Path(flag).unlink()
        raise KeyboardInterrupt
    return cell(scale, depth, seed, log)


@pytest.mark.parametrize("threads", [1, 2])
def test_interrupted_sweep_goes_on_without_running_finished_cells_again(threads, tmp_path):
    log, flag, store = tmp_path / "log", tmp_path / "flag", tmp_path / "a.zarr"
    flag.touch()
    run = functools.partial(interrupted, log=str(log), flag=str(flag))
    with pytest.raises(KeyboardInterrupt):
        quiet(run, GRID, store=store, threads=threads)
    half = xr.open_zarr(store).load()
    done = half["status"].values == 1
    assert 8 <= done.sum() < 16
    np.testing.assert_array_equal(half["power"].values[done], expected()[done])
    assert np.isnan(half["power"].values[~done]).all()
    finished = {
        f"{a} {b} {c}"
        for a, b, c in itertools.compress(itertools.product(*GRID.values()), done.flat)
    }
    data = quiet(run, GRID, store=store, threads=threads)
    assert_complete(data)
    assert data.attrs["summary"].startswith(f"16 cells: 16 done, 0 failed; {done.sum()} were")
    counts = lines(log)
    assert len(counts) == 16
    assert all(counts[name] == 1 for name in finished)
    # Nothing left: nothing runs.
    assert_complete(quiet(run, GRID, store=store))
    assert lines(log) == counts


@pytest.mark.parametrize(
    ("method", "call", "done"),
    [
        ("_array", 1, None),  # while the store is built
        ("_array", 3, 0),  # between the first arrays of results
        ("write", 5, 5),
        ("_mark", 0, 0),  # the first values are written, their status is not
        ("_mark", 5, 5),
    ],
)
def test_crash_within_a_write_leaves_the_cell_to_be_run_again(
    method, call, done, tmp_path, monkeypatch
):
    log, store = tmp_path / "log", tmp_path / "folder" / "a.zarr"
    run = functools.partial(cell, log=str(log))
    calls, real = itertools.count(), getattr(module._ZarrStore, method)

    def crashing(*arguments):
        if next(calls) == call:
            raise MemoryError
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module._ZarrStore, method, crashing)
        with pytest.raises(MemoryError):
            quiet(run, GRID, store=store)
    if done is None:
        assert not list(store.parent.iterdir())
    else:
        assert int((xr.open_zarr(store)["status"] == 1).sum()) == done
    assert_complete(quiet(run, GRID, store=store))
    again = [name for name, count in lines(log).items() if count > 1] if done is not None else []
    assert len(again) == (done is not None)
    assert [p.name for p in store.parent.iterdir()] == ["a.zarr"]


def test_status_is_written_after_the_last_value(tmp_path, monkeypatch):
    zarr, store, calls = pytest.importorskip("zarr"), tmp_path / "a.zarr", itertools.count()
    real = zarr.Array.__setitem__

    def crashing(self, *arguments):
        if self.basename == "row" and next(calls) == 5:
            raise MemoryError
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", crashing)
        with pytest.raises(MemoryError):
            quiet(cell, GRID, store=store)
    half = xr.open_zarr(store)
    assert half["status"].values.ravel().tolist() == [1] * 5 + [0] * 11
    assert not np.isnan(half["power"].values.ravel()[5])  # half of the sixth cell is there
    assert_complete(quiet(cell, GRID, store=store))


def test_what_a_kill_leaves_in_the_folder_is_cleared(tmp_path):
    store = tmp_path / "a.zarr"
    data = quiet(fragile, {"x": [2, 4]}, store=store)
    assert list(data["status"]) == [2, 2]
    (store / ".zmetadata.0.partial").touch()
    (store / "power").mkdir()
    (store / "power" / ".zarray.0.partial").touch()
    data = quiet(fragile, {"x": [2, 4]}, store=store)
    assert set(data.variables) == {"x", "status", "error"}
    assert not list(store.rglob("*.partial"))


@pytest.mark.parametrize("batch", [None, {"a": 2, "b": 7}])
def test_marks_survive_where_their_chunks_are_smaller_than_the_grid(batch, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_STATUS_CHUNK", 15)
    grid, store = {"a": range(5), "b": range(10), "c": range(2)}, tmp_path / "a.zarr"
    stop = itertools.count()
    real = module._ZarrStore.write

    def interrupting(*arguments):
        if next(stop) == 3:
            raise KeyboardInterrupt
        real(*arguments)

    def run(a, b, c):
        return a * 100 + b * 10 + c

    with monkeypatch.context() as patch:
        patch.setattr(module._ZarrStore, "write", interrupting)
        with pytest.raises(KeyboardInterrupt):
            quiet(run, grid, store=store, batch=batch)
    half = xr.open_zarr(store)
    assert half["status"].encoding["chunks"] == (1, 7, 2)
    assert int((half["status"] == 1).sum()) == (3 if batch is None else 2 * (7 + 7 + 3))
    data = quiet(run, grid, store=store, batch=batch)
    a, b, c = np.meshgrid(*grid.values(), indexing="ij")
    np.testing.assert_array_equal(data["result"], a * 100 + b * 10 + c)
    assert (xr.open_zarr(store)["status"] == 1).all()


def test_cells_of_other_versions_are_told_apart(tmp_path, monkeypatch):
    store, flag = tmp_path / "a.zarr", tmp_path / "flag"
    flag.touch()
    run = functools.partial(interrupted, log="", flag=str(flag))
    monkeypatch.setattr(module, "git_revision", lambda: "one")
    with pytest.raises(KeyboardInterrupt):
        quiet(run, GRID, store=store)
    assert "resumed" not in xr.open_zarr(store).attrs
    monkeypatch.setattr(module, "git_revision", lambda: "two")
    data = quiet(run, GRID, store=store)
    assert data.attrs["git_revision"] == "one"
    assert [origin["git_revision"] for origin in json.loads(data.attrs["resumed"])] == ["two"]


# Failures.


def fragile(x, log="", flag=""):
    note(log, x)
    if x == 2 and not (flag and Path(flag).exists()):
        raise ZeroDivisionError("two is out")
    if x == 4:
        sys.exit("gone")
    return {"y": float(x), "n": x}


@pytest.mark.parametrize("kind", ["memory", "zarr"])
def test_failed_cells_are_recorded_and_stop_nothing(kind, tmp_path, capsys):
    store = None if kind == "memory" else tmp_path / "a.zarr"
    data = gf.sweep(fragile, {"x": [1, 2, 3, 4]}, store=store)
    np.testing.assert_array_equal(data["status"], [1, 2, 1, 2])
    assert list(data["error"].values) == [
        "",
        "ZeroDivisionError: two is out",
        "",
        "SystemExit: gone",
    ]
    np.testing.assert_array_equal(data["y"], [1, np.nan, 3, np.nan])
    np.testing.assert_array_equal(data["n"], [1, 0, 3, 0])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "sweep: 4 cells: 2 done, 2 failed; 0 were so before; "
        "first failure at x=2: ZeroDivisionError: two is out"
    )


def test_failed_cells_run_again_only_when_asked(tmp_path):
    log, flag, store = tmp_path / "log", tmp_path / "flag", tmp_path / "a.zarr"
    run = functools.partial(fragile, log=str(log), flag=str(flag))
    quiet(run, {"x": [1, 2, 3]}, store=store)
    flag.touch()
    assert list(quiet(run, {"x": [1, 2, 3]}, store=store)["status"]) == [1, 2, 1]
    data = quiet(run, {"x": [1, 2, 3]}, store=store, retry_failed=True)
    assert list(data["status"]) == [1, 1, 1]
    assert set(data["error"].values) == {""}
    np.testing.assert_array_equal(data["y"], [1, 2, 3])
    assert lines(log) == {"1": 1, "2": 2, "3": 1}


def test_sweep_where_everything_fails_ends_and_can_be_retried(tmp_path):
    flag, store = tmp_path / "flag", tmp_path / "a.zarr"
    run = functools.partial(fragile, flag=str(flag))
    data = quiet(run, {"x": [2]}, store=store)
    assert set(data.data_vars) == {"status", "error"}
    flag.touch()
    assert quiet(run, {"x": [2]}, store=store, retry_failed=True)["y"] == [2.0]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"a": np.ones(3)}, r"'a' as float64 \(a_0: 3\) instead of float64 \(a_0: 2\)"),
        ({"b": np.ones(2)}, "results b instead of a"),
        ({"a": np.ones(2), "b": 1}, "results a, b instead of a"),
        ({"a": np.ones(2) * 1j}, r"'a' as complex128 \(a_0: 2\) instead of float64"),
        ({"a": "text"}, r"'a' as str \(\) instead of float64"),
        ({"a": xr.DataArray(np.ones(2), dims="a_0", coords={"a_0": [0, 1]})}, "coordinates other"),
        ({"a": None}, "'a' of type NoneType; results must be numbers"),
        ({"a": {"b": 1}}, "'a' of type dict"),
        ({"a": jax.random.key(0)}, "key"),
        ({1: 1.0}, "a result named 1; names must be strings"),
        ({}, "no results"),
        ({"status": 1.0}, "named 'status'; x, status, error are the sweep's own"),
        ({"a": xr.DataArray(np.ones(2), dims="x")}, "named 'x'"),
    ],
)
def test_result_of_another_form_is_that_cells_failure(second, message):
    data = quiet(lambda x: second if x else {"a": np.ones(2)}, {"x": [0, 1, 0.5]}, store=None)
    np.testing.assert_array_equal(data["status"], [1, 2, 2])
    np.testing.assert_array_equal(data["a"][0], [1, 1])
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(data["error"].values[1])


def test_form_is_held_against_the_stored_one_after_a_restart(tmp_path):
    flag, store = tmp_path / "flag", tmp_path / "a.zarr"

    def run(x):
        if flag.exists():
            return {"word": "longer than before", "y": np.zeros(x)}
        if x == 2:
            raise KeyboardInterrupt
        return {"word": "a", "y": np.zeros(x)}

    with pytest.raises(KeyboardInterrupt):
        quiet(run, {"x": [1, 2]}, store=store)
    flag.touch()
    data = quiet(run, {"x": [1, 2]}, store=store)
    assert "'y' as float64 (y_0: 2) instead of float64 (y_0: 1)" in data["error"].values[1]


# Arguments.


def other(scale, depth, seed):
    return cell(scale, depth, seed)


@pytest.mark.parametrize(
    ("run", "grid", "options", "named"),
    [
        (cell, {**GRID, "seed": range(5)}, {}, "grid"),
        (cell, {**GRID, "scale": [-2.0, 0.5]}, {}, "grid"),
        (other, GRID, {}, "run"),
        (functools.partial(cell, log=""), GRID, {}, "run"),
        (cell, GRID, {"version": "2"}, "version"),
        (cell, GRID, {"batch": "seed"}, "batch"),
    ],
)
def test_store_of_another_sweep_is_refused(run, grid, options, named, small_store):
    with pytest.raises(ArgumentError, match=rf"store: .*a\.zarr, which holds .* {named} .*another"):
        quiet(run, grid, store=small_store, **options)
    assert_complete(xr.open_zarr(small_store).load())


def test_store_of_another_precision_is_refused(small_store):
    with jax.enable_x64(False), pytest.raises(ValueError, match="precision float64, not float32"):
        quiet(cell, GRID, store=small_store)


@pytest.fixture(scope="module")
def small_store(tmp_path_factory):
    store = tmp_path_factory.mktemp("small") / "a.zarr"
    quiet(cell, GRID, store=store)
    return store


def test_overwrite_begins_again(tmp_path):
    log, store = tmp_path / "log", tmp_path / "a.zarr"
    run = functools.partial(cell, log=str(log))
    quiet(other, GRID, store=store)
    assert_complete(quiet(run, GRID, store=store, overwrite=True))
    assert len(lines(log)) == 16
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr", "log"]


def test_what_is_no_sweep_is_refused_and_never_deleted(tmp_path):
    folder, file, foreign = tmp_path / "folder", tmp_path / "file", tmp_path / "b.zarr"
    folder.mkdir()
    file.write_text("hello")
    xr.Dataset({"x": ("t", np.zeros(3))}).to_zarr(foreign, zarr_format=2)
    for path, overwrite in itertools.product((folder, file, foreign), (False, True)):
        with pytest.raises(ValueError, match=rf"store: got .*{path.name}, .* is no sweep"):
            quiet(cell, GRID, store=path, overwrite=overwrite)
    assert file.read_text() == "hello"
    assert "x" in xr.open_zarr(foreign)
    with pytest.raises(ValueError, match="store: got 3; it must be a path"):
        quiet(cell, GRID, store=3)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "grid: got an empty grid; it must be a dict"),
        ([1, 2], "grid: got .*it must be a dict"),
        ({"scale": []}, r"grid\['scale'\]: got .*non-empty"),
        ({"scale": 1.0}, r"grid\['scale'\]: got 1.0; it must be a non-empty sequence"),
        ({"scale": "abc"}, r"grid\['scale'\]: got 'abc'"),
        ({"scale": [1, "a"]}, r"grid\['scale'\]: .*of numbers, of strings or of booleans"),
        ({"scale": [None]}, r"grid\['scale'\]: .*of numbers"),
        ({"scale": [[1, 2]]}, r"grid\['scale'\]: .*of numbers"),
        ({"scale": [1j]}, r"grid\['scale'\]: .*of numbers"),
        ({"scale": [2**70]}, r"grid\['scale'\]: .*of numbers"),
        ({"scale": [float("nan")]}, r"grid\['scale'\]: got nan"),
        ({"scale": [1, 2, 1.0]}, r"grid\['scale'\]: got 1.0 more than once"),
        ({"a b": [1]}, "parameter named 'a b'"),
        ({"status": [1]}, "parameter named 'status'"),
        ({**GRID, "rate": [1]}, "got an unexpected keyword argument 'rate'.*that run takes"),
        ({"scale": [1], "depth": [1]}, "missing a required argument: 'seed'"),
    ],
)
def test_bad_grid_is_refused_by_name(grid, message):
    with pytest.raises(ArgumentError, match=message):
        quiet(cell, grid, store=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": "sed"}, "batch: got 'sed'; .*did you mean 'seed'"),
        ({"batch": {"seed": 0}}, r"batch\['seed'\]: got 0; .*>= 1"),
        ({"threads": 0}, "threads: got 0"),
        ({"client": "localhost"}, "client: got 'localhost'; .*distributed.Client"),
    ],
)
def test_bad_option_is_refused_by_name(options, message):
    with pytest.raises(ArgumentError, match=message):
        quiet(cell, GRID, store=None, **options)


def test_batch_over_strings_is_refused():
    with pytest.raises(ArgumentError, match="batch: got 'name', which has strings"):
        quiet(labelled, {"name": ["a"], "depth": [3]}, store=None, batch="name")


def test_run_that_is_no_function_is_refused():
    with pytest.raises(ArgumentError, match="run: got 3; it must be a function"):
        quiet(3, GRID, store=None)


def test_numbers_arrive_as_plain_python_values():
    seen = []

    def run(**values):
        seen.append(values)
        return 0

    grid = {"a": np.array([1.5]), "b": jnp.arange(1), "c": [1, 0.5], "d": ("x",), "e": [True]}
    quiet(run, grid, store=None)
    assert [[*map(type, values.values())] for values in seen] == [
        [float, int, float, str, bool]
    ] * 2


def test_missing_packages_are_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(
        ImportError, match=r"store: needs zarr: pip .*gradflow\[distributed\].*None"
    ):
        quiet(cell, GRID)
    with pytest.raises(ImportError, match=r"client: needs distributed: pip .*distributed\]"):
        quiet(cell, GRID, client=object(), store=None)
    assert_complete(quiet(cell, GRID, store=None))


# Precision, and Dask.


def precision(x):
    return {"value": jnp.asarray(x), "bits": jnp.zeros(()).dtype.itemsize}


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_take_over_the_callers_precision(threads):
    assert quiet(precision, {"x": [0.1]}, store=None, threads=threads)["bits"] == 8
    with jax.enable_x64(False):
        data = quiet(precision, {"x": [0.1]}, store=None, threads=threads)
    assert data["bits"] == 4
    assert data["value"].dtype == np.float32


@pytest.fixture(scope="module")
def client():
    from distributed import Client

    with Client(
        processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0"
    ) as client:
        yield client


def test_dask_client_gives_what_a_loop_gives(client, tmp_path):
    log, store = tmp_path / "log", tmp_path / "a.zarr"
    run = functools.partial(cell, log=str(log))
    assert_complete(quiet(run, GRID, client=client, store=store))
    assert_complete(quiet(run, GRID, client=client, store=store))
    assert set(lines(log).values()) == {1}
    data = quiet(fragile, {"x": [1, 2, 3, 4]}, client=client, store=None)
    assert list(data["status"]) == [1, 2, 1, 2]
    assert data["error"].values[1] == "ZeroDivisionError: two is out"


def test_dask_workers_take_over_the_callers_precision(client):
    assert quiet(precision, {"x": [0.1]}, client=client, store=None)["bits"] == 8
    with jax.enable_x64(False):
        assert quiet(precision, {"x": [0.1]}, client=client, store=None)["bits"] == 4


TRACES = []


def traced(x):
    TRACES.append(x)
    return {"y": x**2}


def test_batch_is_compiled_once_in_a_worker(client):
    x = np.arange(40.0)
    TRACES.clear()
    data = quiet(traced, {"x": x}, client=client, store=None, batch={"x": 2})
    np.testing.assert_array_equal(data["y"], x**2)
    # Both workers live in this process; two threads may trace at once.
    assert 1 <= len(TRACES) <= 2


def test_number_of_tasks_in_flight_is_bounded(client, monkeypatch):
    held, real = [], type(client).submit

    def submit(self, *arguments, **options):
        future = real(self, *arguments, **options)
        held.append(len(self.futures))
        return future

    monkeypatch.setattr(type(client), "submit", submit)
    x = np.arange(60.0)
    data = quiet(precision, {"x": x}, client=client, store=None)
    np.testing.assert_array_equal(data["value"], x)
    assert len(held) == 60
    assert max(held) <= 4 * 2 + 1  # and the one whose result is being read


def test_run_that_cannot_be_sent_is_refused(client):
    lock = threading.Lock()

    def run(x):
        with lock:
            return x

    with pytest.raises(ArgumentError, match=r"run: .*run, which cannot be pickled .*lock"):
        quiet(run, {"x": [1]}, client=client, store=None)


def test_interrupted_dask_sweep_cancels_and_goes_on(client, tmp_path, monkeypatch):
    log, store = tmp_path / "log", tmp_path / "a.zarr"
    run = functools.partial(cell, log=str(log))
    calls, real = itertools.count(), module._ZarrStore.write

    def interrupting(*arguments):
        if next(calls) == 5:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module._ZarrStore, "write", interrupting)
        with pytest.raises(KeyboardInterrupt):
            quiet(run, GRID, client=client, store=store)
    assert int((xr.open_zarr(store)["status"] == 1).sum()) == 5
    assert_complete(quiet(run, GRID, client=client, store=store))


def test_closed_client_is_refused():
    from distributed import Client

    with Client(processes=False, n_workers=1, dashboard_address=":0") as closed:
        pass
    with pytest.raises(ArgumentError, match="client: got a client that is closed"):
        quiet(cell, GRID, client=closed, store=None)


# Processes that die. The programs below run by themselves, as a user's script does.

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import dask
import jax
import jax.numpy as jnp
import gradflow as gf

folder = Path(sys.argv[1])
GRID = {"scale": [0.3, 0.6, 0.9, 1.2, 1.5], "seed": range(40)}

def note(*words):
    handle = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (" ".join(map(str, words)) + "\\n").encode())
    os.close(handle)

def run(scale, seed):
    note(scale, seed)
    flag = folder / "killer"
    if (scale, seed) == (0.9, 10) and flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if scale == 0.6 and seed == 3 and (folder / "deadly").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    flow = gf.GradientFlow(gf.Problem.from_singular_values([2.0, 1.0]))
    start = gf.initialize.gaussian(jax.random.key(seed), (2, 2, 2), scale)
    traj = gf.simulate(flow, start, 2.0, save=5, method=gf.Method(solver="explicit"))
    return {"loss": traj.loss, "final": traj.final.end_to_end()}

def main():
    from distributed import Client, LocalCluster
    jax.config.update("jax_enable_x64", True)
    dask.config.set({"distributed.scheduler.allowed-failures": int(sys.argv[2])})
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        gf.sweep(run, GRID, client=client, store=folder / "sweep.zarr")

if __name__ == "__main__":
    main()
"""


class Driver:
    def __init__(self, folder, script, allowed_failures=3):
        self.folder = folder
        program = folder.parent / "driver.py"
        program.write_text(script)
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(folder), str(allowed_failures)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, done, limit=120):
        """Until so many cells are marked in the store."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            if self.process.poll() is not None:
                raise AssertionError(self.process.stderr.read())
            store = self.folder / "sweep.zarr"
            if store.exists() and int((xr.open_zarr(store)["status"] == 1).sum()) >= done:
                return
            time.sleep(0.05)
        raise AssertionError("the sweep does not advance")

    def finish(self, limit=200):
        _, stderr = self.process.communicate(timeout=limit)
        return stderr


def swept(folder):
    return xr.open_zarr(folder / "sweep.zarr").load()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    folder.mkdir()
    driver = Driver(folder, SCRIPT)
    stderr = driver.finish()
    assert driver.process.returncode == 0, stderr
    assert "sweep: 200 cells: 200 done, 0 failed" in stderr
    assert set(lines(folder / "log").values()) == {1}
    return swept(folder)


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGKILL])
def test_killed_worker_and_interrupted_driver_lose_and_repeat_nothing(
    interrupt, undisturbed, tmp_path
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "killer").touch()
    driver = Driver(folder, SCRIPT)
    driver.wait_for(130)
    assert not (folder / "killer").exists()  # cell 90 has killed its worker
    driver.process.send_signal(interrupt)
    driver.finish()
    assert driver.process.returncode != 0
    half = swept(folder)
    done = half["status"].values == 1
    assert 130 <= done.sum() < 200
    before = lines(folder / "log")

    driver = Driver(folder, SCRIPT)
    stderr = driver.finish()
    assert driver.process.returncode == 0, stderr
    assert f"sweep: 200 cells: 200 done, 0 failed; {done.sum()} were so before" in stderr
    after, data = lines(folder / "log"), swept(folder)
    for name in ("status", "loss", "final", "scale", "seed"):
        assert data[name].dtype == undisturbed[name].dtype
        np.testing.assert_array_equal(data[name], undisturbed[name])
    assert data["loss"].dtype == np.float64
    assert (data["status"] == 1).all()
    assert data["loss"].dims == ("scale", "seed", "loss_0")
    assert (data.sizes["scale"], data.sizes["seed"]) == (5, 40)
    assert len(after) == 200
    for i, j in np.argwhere(done):
        name = f"{data['scale'].values[i]} {data['seed'].values[j]}"
        assert after[name] == before[name]


@pytest.mark.slow
def test_cell_that_always_kills_its_worker_is_recorded_and_no_other_cell_is_lost(
    undisturbed, tmp_path
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "deadly").touch()
    driver = Driver(folder, SCRIPT, allowed_failures=0)
    stderr = driver.finish()
    assert driver.process.returncode == 0, stderr
    data = swept(folder)
    failed = data.isel(scale=1, seed=3)
    assert failed["status"] == 2
    assert "KilledWorker" in failed["error"].item()
    others = data["status"].values == 1
    assert others.sum() == 199
    np.testing.assert_array_equal(data["loss"].values[others], undisturbed["loss"].values[others])
