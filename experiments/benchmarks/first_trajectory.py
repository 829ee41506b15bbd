"""Time to the first trajectory in a fresh process, in parts (three layers of width 5).

Run as ``python experiments/benchmarks/first_trajectory.py [RUNS]``; prints the median of each part
over the runs (5 if left out). "process" is the whole, from start to exit, seen from outside.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

_CHILD = """
import json, time
marks = {}
def mark(name, since):
    marks[name] = time.perf_counter() - since
    return time.perf_counter()
now = time.perf_counter()
import jax
jax.config.update("jax_enable_x64", True)
import gradflow as gf
now = mark("import", now)
problem = gf.Problem.from_singular_values([5.0, 4.0, 3.0, 2.0, 1.0])
start = gf.initialize.gaussian(0, (5, 5, 5, 5), 0.1)
flow = gf.GradientFlow(problem)
now = mark("problem and start", now)
first = gf.simulate(flow, start, 20.0)
str(first)
now = mark("first run (compiles)", now)
second = gf.simulate(flow, gf.initialize.gaussian(1, (5, 5, 5, 5), 0.1), 30.0,
                     method=gf.Method(rtol=1e-7))
str(second)
now = mark("second run", now)
print(json.dumps(marks))
"""


def main(runs: int = 5) -> None:
    parts: dict[str, list[float]] = {}
    for _ in range(runs):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True
        )
        whole = time.perf_counter() - began
        for name, seconds in {**json.loads(done.stdout), "process": whole}.items():
            parts.setdefault(name, []).append(seconds)
    print(f"{'part':<22} {'median s':>9} {'min s':>9} {'max s':>9}")
    for name, seconds in parts.items():
        median = statistics.median(seconds)
        print(f"{name:<22} {median:>9.2f} {min(seconds):>9.2f} {max(seconds):>9.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
