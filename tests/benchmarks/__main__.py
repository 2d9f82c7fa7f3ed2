"""Run the benchmarks: ``python -m tests.benchmarks``, or some, by name: ``... failing torch``.

On the device with ``--device cuda``.
"""

import subprocess
import sys
from pathlib import Path

ON_DEVICE = {"bench_torch", "bench_compiled", "bench_jax"}

if __name__ == "__main__":
    names = {path.stem for path in Path(__file__).parent.glob("bench_*.py")}
    names = names & ON_DEVICE if "cuda" in sys.argv else names
    given = [word for word in sys.argv[1:] if f"bench_{word}" in names]
    names = {f"bench_{word}" for word in given} or names
    options = [word for word in sys.argv[1:] if word not in given]
    for name in sorted(names):
        # Each in a process of its own: what one loads must not slow the next.
        subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}", *options], check=True)
