"""The Python blocks of the README and the docs run, and print what stands below them."""

import importlib.util
from pathlib import Path

import pytest

from experiments import _runner

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("docs_examples", ROOT / "docs" / "examples.py")
examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(examples)


@pytest.mark.parametrize("path", examples.FILES, ids=lambda path: path.name)
def test_blocks_print_what_stands_below_them(path):
    for _, written, printed in examples.run(path):
        assert examples.same(written, printed), f"written:\n{written}\nprinted:\n{printed}"


def test_a_changed_number_is_seen():
    assert examples.same("loss 6.999 in 1.20 s", "loss 6.999 in 0.01 s")
    assert not examples.same("loss 6.999", "loss 5.2")
    assert not examples.same("status REACHED_END", "status DIVERGED")


def test_readme_and_docs_name_every_experiment():
    for page in ("README.md", "docs/experiments.md"):
        text = (ROOT / page).read_text()
        missing = [name for name in _runner.names() if f"`{name}`" not in text]
        assert not missing, f"{page} does not name {missing}"
