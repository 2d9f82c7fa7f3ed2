"""Run the benchmarks: ``python -m tests.benchmarks``, on the device with ``--device cuda``."""

import subprocess
import sys
from pathlib import Path

ON_DEVICE = {"bench_torch", "bench_compiled", "bench_cupy", "bench_jax"}

if __name__ == "__main__":
    names = {path.stem for path in Path(__file__).parent.glob("bench_*.py")}
    names = names & ON_DEVICE if "cuda" in sys.argv else names - {"bench_cupy"}
    for name in sorted(names):
        # Each in a process of its own: what one loads must not slow the next.
        subprocess.run(
            [sys.executable, "-m", f"tests.benchmarks.{name}", *sys.argv[1:]], check=True
        )
