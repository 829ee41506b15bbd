"""Experiments: the command line, produce-or-load, and the physics that each figure claims."""

import dataclasses
import importlib
import json
import subprocess
import sys
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

import experiments
import gradflow as gf
from experiments import (
    _runner,
    adjacency_view,
    conservation,
    digits,
    hierarchy,
    initialization_scale,
    sequential_learning,
)
from experiments.__main__ import main

NAMES = [
    "activation_gallery",
    "adjacency_view",
    "balanced_modes",
    "broken_laws",
    "conservation",
    "convergence",
    "critical_point_atlas",
    "delta_exponents",
    "delta_memory",
    "delta_modulation",
    "delta_spectrum",
    "depth_flow",
    "digits",
    "discrete_vs_flow",
    "fibre_walk",
    "filtration",
    "gaussian_spectrum",
    "greedy_low_rank",
    "hierarchy",
    "imbalance",
    "initialization_scale",
    "lambda_balanced",
    "loss_surface",
    "losses_beyond_quadratic",
    "negative_eigenvalues",
    "random_starts",
    "readout_contraction",
    "regimes",
    "residual_effect",
    "residual_threshold",
    "saddle_to_saddle",
    "sequential_learning",
    "shortcut_gallery",
    "signature_lattice",
    "stationary_measures",
    "strict_or_not",
    "trained_jacobians",
    "two_layer_exact",
]

TOY = '''
"""{title}

More of it.
"""
import dataclasses
import matplotlib.pyplot as plt
import xarray as xr

@dataclasses.dataclass(frozen=True)
class Config:
    """Options."""
    # What to double.
    number: float = 1.0

    @classmethod
    def full(cls):
        return cls(number=100.0)

calls = []

def compute(config):
    calls.append(config)
    {fault}
    return xr.Dataset({{"twice": 2 * config.number}}, attrs={{"runs": "no runs"}})

def summary(data):
    return f"twice is {{float(data['twice']):g}}"

def figure(data):
    return {{"": plt.figure(), "more": plt.figure()}}
'''


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """A package of two experiments, each a file of its own: one works, the other, first, fails."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name, fault in (("toy", "pass"), ("broken", "raise RuntimeError('no luck')")):
        text = TOY.format(title=f"A {name} experiment.", fault=fault)
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setattr(experiments, "__path__", [str(folder)])
    yield lambda: sys.modules["experiments.toy"].calls
    for name in ("toy", "broken"):
        sys.modules.pop(f"experiments.{name}", None)
        if hasattr(experiments, name):
            delattr(experiments, name)


def test_list_prints_every_name_with_its_first_line(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES + _runner.benchmark_names()
    assert _runner.names() == NAMES
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_its_parts(name):
    module = importlib.import_module(f"experiments.{name}")
    assert _runner.one_line(module).endswith(".")
    assert dataclasses.is_dataclass(module.Config)
    assert module.Config.__dataclass_params__.frozen
    assert module.Config.full() != module.Config()
    json.dumps(dataclasses.asdict(module.Config.full()))
    assert all(callable(getattr(module, part)) for part in ("compute", "summary", "figure"))


def test_an_unknown_name_is_an_error_that_names_the_nearest(capsys):
    assert main(["sequental_learning"]) == 2
    message = capsys.readouterr().err
    assert "no experiment 'sequental_learning'" in message
    assert "Did you mean sequential_learning?" in message
    assert all(name in message for name in NAMES)


def test_an_unknown_option_is_an_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["hierarchy", "--dept", "3"])
    assert stopped.value.code == 2
    assert "--dept" in capsys.readouterr().err


def test_help_shows_options_with_their_comments_and_defaults(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["hierarchy", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--hidden-width" in shown
    assert "Width of every hidden layer." in shown
    assert "--force" in shown
    assert "--full" in shown


def test_help_of_the_full_version_shows_its_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["hierarchy", "--full", "--help"])
    assert f"(default: {hierarchy.Config.full().hidden_width})" in capsys.readouterr().out


def test_the_module_runs_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "experiments", "no_such_thing"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no experiment" in done.stderr


def test_a_second_run_loads_and_force_or_another_configuration_computes(toys, tmp_path, capsys):
    at = ["--results", str(tmp_path / "results")]
    assert main(["toy", *at]) == 0
    assert "computed" in capsys.readouterr().out
    assert main(["toy", *at]) == 0
    out = capsys.readouterr().out
    assert "loaded" in out
    assert "twice is 2" in out
    assert len(toys()) == 1
    assert main(["toy", "--force", *at]) == 0
    assert len(toys()) == 2
    assert main(["toy", "--number", "5", *at]) == 0
    assert "twice is 10" in capsys.readouterr().out
    assert len(toys()) == 3
    folder = tmp_path / "results" / "toy"
    assert sorted(p.name for p in folder.iterdir()) == ["data.nc", "toy.png", "toy_more.png"]


def test_another_version_or_an_unreadable_file_is_computed_anew(toys, tmp_path, monkeypatch):
    at = ["--results", str(tmp_path / "results")]
    assert main(["toy", *at]) == 0
    monkeypatch.setattr(gf, "__version__", "0.0.0")
    assert main(["toy", *at]) == 0
    assert len(toys()) == 2
    (tmp_path / "results" / "toy" / "data.nc").write_bytes(b"half a file")
    assert main(["toy", *at]) == 0
    assert len(toys()) == 3


def test_the_full_version_has_other_defaults_and_a_folder_of_its_own(toys, tmp_path, capsys):
    assert main(["toy", "--full", "--results", str(tmp_path)]) == 0
    assert "twice is 200" in capsys.readouterr().out
    assert (tmp_path / "toy" / "full" / "toy.png").exists()
    assert not (tmp_path / "toy" / "data.nc").exists()


def test_results_say_where_they_came_from(toys, tmp_path):
    assert main(["toy", "--number", "3", "--results", str(tmp_path)]) == 0
    attributes = xr.load_dataset(tmp_path / "toy" / "data.nc").attrs
    assert json.loads(attributes["configuration"]) == {"number": 3.0}
    assert attributes["gradflow_version"] == gf.__version__
    assert "jax" in json.loads(attributes["versions"])
    assert attributes["git_revision"]
    assert attributes["seconds"] >= 0


def test_one_failure_does_not_stop_the_others_but_is_reported(toys, tmp_path, capsys):
    assert main(["--results", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "[1/2] broken" in printed.out
    assert "[2/2] toy" in printed.out
    assert "twice is 2" in printed.out
    assert "no luck" in printed.err
    assert "failed: broken" in printed.err
    assert not (tmp_path / "broken" / "data.nc").exists()


def test_a_small_experiment_runs_from_end_to_end(tmp_path, capsys):
    arguments = ["adjacency_view", "--results", str(tmp_path), "--widths", "2", "3", "3", "2"]
    arguments += ["--singular-values", "2", "1", "--times", "0", "1", "20"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "REACHED_END" in out
    assert "largest drift" in out
    picture = tmp_path / "adjacency_view" / "adjacency_view.png"
    assert 10_000 < picture.stat().st_size < 200_000
    data = xr.load_dataset(tmp_path / "adjacency_view" / "data.nc")
    changes = adjacency_view.block_changes(data)
    assert changes[1:-1].max() < 1e-8
    assert changes[[0, -1]].min() > 0.1
    A = data["power"].values[-1, 0]
    for k in data["k"].values:
        power = np.linalg.matrix_power(A, k)
        np.testing.assert_allclose(data["power"].sel(k=k).values[-1], power, atol=1e-13)
    assert main(arguments) == 0
    assert "loaded" in capsys.readouterr().out


def test_modes_follow_the_closed_form_and_are_learnt_one_after_another():
    config = sequential_learning.Config(depths=(2, 3), points=100)
    data = sequential_learning.compute(config)
    assert float(sequential_learning.deviation(data).max()) < 1e-6
    assert np.all(np.diff(data["learning_time"].values, axis=1) > 0)
    sequential_learning.figure(data)
    assert "depth 3: largest deviation" in sequential_learning.summary(data)


def test_modes_are_learnt_in_turn_near_the_origin_and_together_far_from_it():
    data = initialization_scale.compute(initialization_scale.Config(scales=3))
    apart = initialization_scale.spread(data).values
    assert apart[0] > 3.5
    assert apart[-1] < 1.02
    np.testing.assert_allclose(data["learning_time"], data["theory"], rtol=1e-4)
    initialization_scale.figure(data)


def test_broad_distinctions_are_learnt_before_fine_ones():
    data = hierarchy.compute(hierarchy.Config(points=200))
    times, levels = data["learning_time"].values, data["level"].values
    assert levels.tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    for level in range(3):
        assert times[levels == level].max() < times[levels == level + 1].min()
    kingdoms = data["similarity"].values[1]
    assert kingdoms[:4, :4].min() > 0.95
    assert kingdoms[:4, 4:].max() < 0.5
    _, Y = gf.datasets.hierarchy()
    lengths = np.linalg.norm(Y, axis=1)
    cosines = Y @ Y.T / np.outer(lengths, lengths)
    np.testing.assert_allclose(data["similarity"].values[-1], cosines, atol=0.01)
    hierarchy.figure(data)


def test_drift_is_proportional_to_the_tolerance():
    data = conservation.compute(conservation.Config(rtols=(1e-5, 1e-7, 1e-9), points=50))
    assert 0.85 < conservation.slope(data) < 1.25
    largest = data["drift"].max(("time", "law")).values
    assert np.all(largest < 10 * data["rtol"].values)
    assert data.attrs["independent_laws"] == 57
    conservation.figure(data)


@pytest.mark.slow
def test_digits_are_learnt_in_the_order_of_their_singular_values():
    data = digits.compute(digits.Config(points=120, t1_raw=300.0))
    assert digits.rank_correlation(data, "learning_time") > 0.98
    np.testing.assert_allclose(data["learning_time"], data["predicted_time"], rtol=0.02)
    np.testing.assert_allclose(data["believed"][-1], data["class_mean"], atol=1e-3)
    assert data["learnt_modes"].values.tolist() == [1, 5, 10]
    raw = data["raw_learning_time"].values
    assert raw[0] < data["learning_time"].values.min() < raw[1]
    assert set(digits.figure(data)) == {"", "patterns", "whitening"}
    assert "not whitened: learnt order" in digits.summary(data)
