"""Run the benchmarks: ``python -m tests.benchmarks``."""

from tests.benchmarks import bench_check, bench_torch

if __name__ == "__main__":
    bench_torch.main()
    bench_check.main()
