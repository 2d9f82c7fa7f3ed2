"""Run the benchmarks: ``python -m tests.benchmarks``."""

from tests.benchmarks.bench_torch import main

if __name__ == "__main__":
    main()
