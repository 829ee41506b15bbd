"""Who may import what, and what importing gradflow must not do."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradflow

PACKAGE = Path(gradflow.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def names_called(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).split(".")[-1]


def bases(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield from (ast.unparse(base) for base in node.bases)


def test_the_rules_below_see_the_whole_package():
    assert {"simulate.py", "network.py", "flows/gradient.py"} <= set(map(relative, FILES))


def test_only_plotting_imports_matplotlib():
    guilty = {
        relative(path)
        for path in FILES
        if any(name.partition(".")[0] == "matplotlib" for name in imported_modules(path))
    }
    assert all(path.startswith("plotting/") for path in guilty)


def test_only_simulate_calls_diffeqsolve():
    assert {relative(p) for p in FILES if "diffeqsolve" in names_called(p)} == {"simulate.py"}


def test_only_solvers_subclass_diffrax():
    guilty = {relative(p) for p in FILES if any("diffrax" in base for base in bases(p))}
    assert guilty
    assert all(path.startswith("solvers/") for path in guilty)


def test_only_public_modules_are_imported_by_name_from_jax():
    for path in FILES:
        private = [name for name in imported_modules(path) if name.startswith("jax._src")]
        assert not private, f"{relative(path)} imports {private}"


# A file may import from its own folder and from lower floors, never from above.
FLOORS = {
    "errors": 0,
    "_checks": 0,
    "_products": 0,
    "network": 1,
    "problem": 1,
    "datasets": 1,
    "provenance": 0,
    "initialize": 2,
    "flows": 2,
    "reduction": 2,
    "landscape": 2,
    "delta": 2,
    "lyapunov": 2,
    "solvers": 3,
    "method": 3,
    "choice": 3,
}


@pytest.mark.parametrize("room", [room for room, floor in FLOORS.items() if floor < 4])
def test_lower_floors_import_nothing_from_above(room):
    for path in FILES:
        if relative(path).split("/")[0].removesuffix(".py") != room:
            continue
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[0] != "gradflow" or len(parts) == 1 or parts[1] == room:
                continue
            floor = FLOORS.get(parts[1], 4)
            assert floor <= FLOORS[room], f"{relative(path)} imports {name}"


IMPORT = """
import sys
import jax
before = dict(jax.config.values)
import gradflow
assert dict(jax.config.values) == before, "importing gradflow changed JAX's configuration"
assert not jax.config.jax_enable_x64
for name in ("matplotlib", "sklearn", "xarray", "netCDF4"):
    assert name not in sys.modules, f"importing gradflow imports {name}"
gradflow.plot
assert "matplotlib" in sys.modules
"""


def test_importing_gradflow_changes_no_jax_flag_and_loads_nothing_heavy(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


CONTRACT = (
    "LinearNetwork",
    "adjacency_flow",
    "Problem",
    "datasets.digits",
    "datasets.hierarchy",
    "initialize.gaussian",
    "initialize.orthogonal",
    "initialize.balanced",
    "initialize.from_product",
    "initialize.lambda_balanced",
    "initialize.delta_balanced",
    "initialize.decoupled",
    "initialize.identity",
    "GradientFlow",
    "EndToEndFlow",
    "ModeFlow",
    "DeltaModulatedFlow",
    "DeltaNetworkFlow",
    "ResidualFlow",
    "ParameterFlow",
    "RewriteFlow",
    "delta.operator",
    "delta.spectrum",
    "delta.regime",
    "delta.rewrite",
    "delta.DeltaBlock",
    "delta.DeltaNetwork",
    "delta.rewrite_flow",
    "compress",
    "heteroclinic",
    "landscape.critical_values",
    "landscape.critical_point",
    "landscape.hessian_form",
    "landscape.hessian_product",
    "landscape.spectrum",
    "landscape.inertia",
    "landscape.classify",
    "landscape.escape_direction",
    "landscape.same_fiber",
    "landscape.move_in_fiber",
    "landscape.rank_pattern",
    "landscape.orbit_codimension",
    "landscape.arc",
    "landscape.saddle_passages",
    "descend",
    "ensemble",
    "lyapunov.Gaussian",
    "lyapunov.Finite",
    "lyapunov.DeltaProduct",
    "lyapunov.Layers",
    "lyapunov.residual",
    "lyapunov.delta",
    "lyapunov.exponents",
    "lyapunov.top_exponent",
    "lyapunov.stationary_measure",
    "lyapunov.determinant",
    "lyapunov.filtration",
    "lyapunov.residual_effect",
    "lyapunov.gradient_norms",
    "simulate",
    "Method",
    "Status",
    "load",
    "sweep",
    "observables.imbalance",
    "observables.balancedness",
    "observables.conservation_drift",
    "observables.independent_laws",
    "observables.singular_values",
    "observables.layer_singular_values",
    "observables.alignment",
    "observables.effective_rank",
    "observables.learning_times",
    "observables.tangent_kernel",
    "observables.kernel_distance",
    "observables.nonnormality",
    "testing.assert_conserved",
    "testing.assert_loss_decreases",
    "testing.assert_nilpotent",
    "testing.assert_critical",
    "errors.ArgumentError",
)


def test_public_names_of_the_contract_are_there():
    for name in CONTRACT:
        found = gradflow
        for part in name.split("."):
            found = getattr(found, part)
        assert found.__doc__
