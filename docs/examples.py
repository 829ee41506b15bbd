"""Run the Python blocks of README.md and docs/*.md, and compare or write what they print.

``python docs/examples.py`` compares; ``python docs/examples.py --write`` puts the printed output
into the ``text`` block that follows each ``python`` block. Blocks of a file share one namespace.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?")


def run(path: Path) -> list[tuple[tuple[int, int], str, str]]:
    """``(span, written, printed)`` for every text block that follows a Python block."""
    text, namespace, found = path.read_text(), {"__name__": "__main__"}, []
    printed = None
    for block in _BLOCK.finditer(text):
        kind, body = block.groups()
        if kind == "python":
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout):
                exec(compile(body, f"{path.name}", "exec"), namespace)
            printed = stdout.getvalue()
        elif printed is not None:
            found.append((block.span(2), body, printed))
            printed = None
    return found


# Run times; and numbers of steps, which follow round-off where stability limits them.
_CHANCE = re.compile(
    r"\d+\.\d+ s\b|\d+ steps \+ \d+ rejected|\d+ evaluations|\d+ of \d+ steps were stiff"
)


def same(written: str, printed: str) -> bool:
    """Equal but for run times, and for numbers that round-off or another machine may change."""
    shapes = [_NUMBER.sub("#", text).split() for text in (written, printed)]
    if shapes[0] != shapes[1]:
        return False
    timeless = [_CHANCE.sub("", text) for text in (written, printed)]
    pairs = zip(*(_NUMBER.findall(text) for text in timeless), strict=True)
    return all(_close(float(a), float(b)) for a, b in pairs)


def _close(a: float, b: float) -> bool:
    # Below 1e-6 stand drifts and final losses: the solver's error, known to its size only.
    small = max(abs(a), abs(b)) < 1e-6
    return small or math.isclose(a, b, rel_tol=0.05)


def write(path: Path) -> None:
    text = path.read_text()
    for (begin, end), _, printed in reversed(run(path)):
        text = text[:begin] + printed + text[end:]
    path.write_text(text)


def main() -> int:
    failures = 0
    for path in FILES:
        if "--write" in sys.argv[1:]:
            write(path)
            continue
        for _, written, printed in run(path):
            if not same(written, printed):
                failures += 1
                print(f"{path.name}: written\n{written}printed\n{printed}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
