import os
import subprocess
import sys

os.environ.setdefault("MPLBACKEND", "Agg")

# XLA's older code generator compiles the programs here three times as fast. Asked for where this
# version has it, as XLA aborts a process that names a flag it does not know; workers inherit it.
if "XLA_FLAGS" not in os.environ:
    flag = {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
    probe = [sys.executable, "-c", "import jax; jax.devices()"]
    if subprocess.run(probe, env=os.environ | flag, capture_output=True).returncode == 0:
        os.environ.update(flag)

import jax
import jaxtyping
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Programs here are small and run once: compiling them well takes longer than running them.
jax.config.update("jax_disable_most_optimizations", True)

# Array annotations of the whole library are checked on every call; before its first import.
jaxtyping.install_import_hook("gradflow", "shapecheck.array_annotations_only")


@pytest.fixture(autouse=True, scope="module")
def programs_of_other_files_are_dropped():
    """Thousands of compiled programs exhaust the memory maps of a process, and XLA crashes."""
    yield
    jax.clear_caches()
