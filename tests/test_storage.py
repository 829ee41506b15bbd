"""A saved run comes back bit for bit, in another process too, and says where it came from."""

import hashlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import gradflow as gf
from cases import SAVES, WIDTHS, explicit, problem, run, start

FLOW = gf.GradientFlow(problem("whitened"))

# Run by another interpreter: prints a hash of every array of the loaded trajectory.
READER = """
import hashlib, sys
import jax
jax.config.update("jax_enable_x64", True)
import gradflow as gf
import numpy as np
traj = gf.load(sys.argv[1])
digest = hashlib.sha256()
for leaf in jax.tree.leaves(traj):
    array = np.asarray(leaf)
    digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
print(digest.hexdigest())
print(type(traj.final).__name__, traj.status.name, traj.stats.solver, len(traj.ts))
"""


def digest(traj):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(traj):
        array = np.asarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def nested(net):
    return {"trace": jnp.trace(net.end_to_end()[:, :3]), "rows": [w[0] for w in net.weights]}


def listed(net):
    return [net.weights[0], net.weights[1].sum()]


@pytest.fixture(scope="module")
def observed():
    return gf.simulate(
        FLOW,
        start(),
        4.0,
        save=SAVES,
        method=explicit(),
        observe={"nested": nested, "listed": listed},
        save_states=False,
    )


def assert_same(a, b):
    assert jax.tree.structure(a.states) == jax.tree.structure(b.states)
    assert jax.tree.structure(a.recorded) == jax.tree.structure(b.recorded)
    assert digest(a) == digest(b)
    assert (a.solver, a.reason, a.config) == (b.solver, b.reason, b.config)
    assert (a.status, a.stats) == (b.status, b.stats)


@pytest.mark.parametrize("kind", ["whitened", "from_loss"])
def test_loaded_run_equals_the_saved_one_bit_for_bit(kind, tmp_path):
    path = run(kind).save(tmp_path / "folder" / "run.nc")
    assert path == tmp_path / "folder" / "run.nc"
    loaded = gf.load(path)
    assert_same(loaded, run(kind))
    assert isinstance(loaded.network(3), gf.LinearNetwork)
    np.testing.assert_array_equal(loaded["drift"], run(kind)["drift"])
    assert repr(loaded) == repr(run(kind))


def test_fresh_process_reads_the_same_bits(tmp_path):
    path = run("coloured").save(tmp_path / "run.nc")
    done = subprocess.run(
        [sys.executable, "-c", READER, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    found, description = done.stdout.splitlines()
    assert found == digest(run("coloured"))
    assert description == f"LinearNetwork REACHED_END Tsit5 {SAVES}"


def test_nested_observables_and_a_run_without_states_come_back(observed, tmp_path):
    loaded = gf.load(observed.save(tmp_path / "run.nc"))
    assert loaded.states is None
    assert_same(loaded, observed)
    np.testing.assert_array_equal(loaded["nested"]["rows"][2], observed["nested"]["rows"][2])
    np.testing.assert_array_equal(loaded["listed"][0], observed["listed"][0])


def test_nan_and_extreme_numbers_of_an_observable_survive(tmp_path):
    traj = run("whitened")
    odd = np.resize([np.nan, -0.0, 5e-324, 1.7e308], SAVES)
    recorded = {**traj.recorded, "odd": jnp.asarray(odd)}
    traj = gf.Trajectory(**{**vars(traj), "recorded": recorded})
    assert gf.load(traj.save(tmp_path / "run.nc"))["odd"].tobytes() == odd.tobytes()


def test_descent_and_early_stops_come_back(tmp_path):
    descent = gf.descend(FLOW, start(), 0.02, 40)
    assert_same(gf.load(descent.save(tmp_path / "descent.nc")), descent)
    diverged = gf.descend(FLOW, start(), 2.0, 40)
    again = gf.load(diverged.save(tmp_path / "diverged.nc"))
    assert again.status is gf.Status.DIVERGED
    assert_same(again, diverged)


def test_file_is_replaced_and_leaves_nothing_else_behind(tmp_path):
    path = tmp_path / "run.nc"
    run("whitened").save(path)
    run("coloured").save(path)
    assert digest(gf.load(path)) == digest(run("coloured"))
    assert [p.name for p in tmp_path.iterdir()] == ["run.nc"]


def test_file_embeds_configuration_versions_and_git_revision(tmp_path):
    attributes = xarray.load_dataset(
        run("coloured").save(tmp_path / "run.nc"), engine="netcdf4"
    ).attrs
    configuration = json.loads(attributes["configuration"])
    assert configuration["flow"] == "GradientFlow"
    assert configuration["t1"] == 4.0
    assert configuration["save"] == SAVES
    assert configuration["method"]["rtol"] == 1e-10
    assert configuration["method"]["solver"] == "explicit"
    assert "(4, 3, 5, 3)" in configuration["state"]
    versions = json.loads(attributes["versions"])
    for library in ("python", "gradflow", "jax", "diffrax", "numpy"):
        assert versions[library][0].isdigit()
    assert attributes["git_revision"]
    assert attributes["status"] == "REACHED_END"


def git(folder, *arguments):
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *who, *arguments],
        cwd=folder,
        env={**os.environ, **quiet},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_git_revision_is_the_commit_and_marks_changed_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run("whitened").to_xarray().attrs["git_revision"] == "unknown"
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert run("whitened").to_xarray().attrs["git_revision"] == commit
    (tmp_path / "file").write_text("two")
    assert run("whitened").to_xarray().attrs["git_revision"] == f"{commit}-dirty"


def test_dataset_has_named_dimensions_and_units():
    dataset = run("whitened").to_xarray()
    assert dataset["loss"].dims == ("time",)
    assert dataset["W1"].dims == ("time", "node_1", "node_0")
    assert dataset["W3"].dims == ("time", "node_3", "node_2")
    assert dataset["singular_values"].dims == ("time", "mode")
    assert dataset["modes"].dims == ("time", "mode")
    assert dataset["law_drift"].dims == ("time", "law")
    assert dataset.sizes["node_2"] == WIDTHS[2]
    assert dataset.sizes["time"] == SAVES
    for variable in [*dataset.data_vars.values(), dataset["time"]]:
        assert variable.attrs["units"] == "1"
        assert variable.attrs["long_name"]
    np.testing.assert_array_equal(dataset["W2"][5], run("whitened").network(5).weights[1])
    np.testing.assert_array_equal(dataset["final_W2"], run("whitened").final.weights[1])
    np.testing.assert_array_equal(dataset["time"], run("whitened").ts)


def test_batch_is_not_saved_as_one_run(tmp_path):
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), run("whitened"))
    for call in (lambda: batch.save(tmp_path / "run.nc"), batch.to_xarray):
        with pytest.raises(ValueError, match=r"batch of \(2,\) runs; use traj.lane\(i\)"):
            call()
    assert not list(tmp_path.iterdir())


def test_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.nc"):
        gf.load(tmp_path / "run.nc")


def test_file_that_is_no_netcdf_is_refused(tmp_path):
    path = tmp_path / "run.nc"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"path: got .*run\.nc; it must be a netCDF file"):
        gf.load(path)


def test_netcdf_file_that_is_no_trajectory_is_refused(tmp_path):
    path = tmp_path / "other.nc"
    xarray.Dataset({"x": ("t", np.zeros(3))}).to_netcdf(path, engine="netcdf4")
    with pytest.raises(ValueError, match=r"path: .*other\.nc; .* saved by gradflow"):
        gf.load(path)


def test_file_that_names_a_state_of_another_library_is_refused(tmp_path):
    path = run("whitened").save(tmp_path / "run.nc")
    dataset = xarray.load_dataset(path, engine="netcdf4", decode_cf=False)
    dataset.attrs["state_type"] = "os:system"
    dataset.to_netcdf(path, engine="netcdf4")
    with pytest.raises(ValueError, match="os:system; it must be one of gradflow's"):
        gf.load(path)
