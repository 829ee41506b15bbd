"""gradflow in JAX's default float32, in a process of its own."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from cases import TARGET, largest_error, run

# Prints one JSON object; every case is judged by a test below.
PROGRAM = """
import json, sys, warnings
import jax
import numpy as np
import gradflow as gf

assert not jax.config.jax_enable_x64
found = {}

def refusal(call):
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"

target = np.array(json.loads(sys.argv[1]))
start = gf.LinearNetwork([np.array(w) for w in json.loads(sys.argv[2])])
flow = gf.GradientFlow(gf.Problem(target))
loose = gf.Method(solver="explicit", rtol=1e-5, atol=1e-7)
traj = gf.simulate(flow, start, 4.0, save=41, method=loose)
found["types"] = sorted({str(x.dtype) for x in jax.tree.leaves((traj.states, traj.recorded))})
found["status"] = traj.status.name
found["final"] = [np.asarray(w).tolist() for w in traj.final.weights]
found["drift"] = float(traj["drift"].max())
found["finite"] = all(bool(np.isfinite(x).all()) for x in jax.tree.leaves(traj.recorded))
found["default_method"] = refusal(lambda: gf.simulate(flow, start, 4.0))
found["tight"] = refusal(lambda: gf.simulate(flow, start, 4.0, method=gf.Method(rtol=1e-10)))
found["load"] = refusal(lambda: gf.load(sys.argv[3]))
traj.save(sys.argv[4])
found["own_file"] = refusal(lambda: gf.load(sys.argv[4]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tiny = gf.initialize.balanced(0, (4, 3, 5, 3), 1e-6)
    gf.simulate(flow, tiny, 4.0, save=41, method=loose)
found["warnings"] = [f"{w.category.__name__} {w.filename}" for w in caught]
descent = gf.descend(flow, start, 0.02, 10)
found["descent_types"] = sorted({str(x.dtype) for x in jax.tree.leaves(descent.states)})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float32")
    doubles = run("whitened").save(folder / "float64.nc")
    weights = [np.asarray(w).tolist() for w in run("whitened").network(0).weights]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            json.dumps(TARGET.tolist()),
            json.dumps(weights),
            str(doubles),
            str(folder / "float32.nc"),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**environment, "JAX_NUMPY_RANK_PROMOTION": "raise"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_run_is_in_float32_throughout(found):
    assert found["types"] == ["float32"]
    assert found["descent_types"] == ["float32"]
    assert found["status"] == "REACHED_END"
    assert found["finite"]


def test_run_agrees_with_float64_to_the_tolerance(found):
    # rtol 1e-5 per step; a hundred times that over the run.
    assert largest_error(run("whitened").final, [np.array(w) for w in found["final"]]) < 1e-3
    assert 0 < found["drift"] < 1e-3


@pytest.mark.parametrize("case", ["default_method", "tight"])
def test_tolerance_beyond_float32_is_refused_with_the_flag_to_set(found, case):
    assert found[case].startswith("PrecisionError: rtol: got 1e-")
    assert 'jax.config.update("jax_enable_x64", True)' in found[case]
    assert "float32" in found[case]
    assert "loosen" in found[case]


def test_float64_file_is_refused_with_the_flag_to_set(found):
    assert found["load"].startswith("ArgumentError: path: got ")
    assert 'jax.config.update("jax_enable_x64", True)' in found["load"]


def test_float32_file_is_read_in_float32(found):
    assert found["own_file"] == "accepted"


def test_precision_warning_points_at_the_callers_line(found):
    assert found["warnings"] == ["PrecisionWarning <string>"]
