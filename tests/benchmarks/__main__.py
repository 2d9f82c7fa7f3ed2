"""Run the benchmarks: ``python -m tests.benchmarks``, on the device with ``--device cuda``."""

import sys

from tests.benchmarks import bench_check, bench_cupy, bench_torch

if __name__ == "__main__":
    bench_torch.main()
    if "cuda" in sys.argv:
        bench_cupy.main()
    else:
        bench_check.main()
