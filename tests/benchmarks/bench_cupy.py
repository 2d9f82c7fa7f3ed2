"""Time the CuPy probe beside what people write: ``make bench-gpu``. Not yet run.

Everything is divided by the time that a copy of the same gigabyte takes on the device.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

GOALS = "goal: no slower than the naive check in two passes"
BYTES = 2**30


def contestants(cupy: Any, x: Any) -> dict[str, Callable[[], object]]:
    """Return what is timed on this array, by name; nothing waits for the device."""
    from anynan.cupy.tracking import CupySlots

    copied, slots = cupy.empty_like(x), CupySlots()
    return {
        "copy": lambda: cupy.copyto(copied, x),
        "anynan probe": lambda: slots.put(x),
        "cupy.isfinite(x).all()": lambda: cupy.isfinite(x).all(),
        "isnan(x).any() | isinf(x).any()": lambda: cupy.isnan(x).any() | cupy.isinf(x).any(),
    }


def measure(cupy: Any, dtype: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Return each contestant's time over the copy's, and its share of the copy's bandwidth."""
    x = cupy.ones(BYTES // cupy.dtype(dtype).itemsize, dtype)
    runs = contestants(cupy, x)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 3):
        for name, run in runs.items():
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            run()
            end.record()
            end.synchronize()
            if i >= 3:
                times[name].append(cupy.cuda.get_elapsed_time(begin, end))
    base = statistics.median(times["copy"])
    found = {}
    for name, values in times.items():
        ratio = statistics.median(values) / base
        # A copy reads and writes; a check only reads.
        found[name] = ratio, (1.0 if name == "copy" else 0.5) / ratio
    return found


def main() -> None:
    """Measure and print; skip with a line where there is no device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    options, _ = parser.parse_known_args()
    try:
        import cupy
    except ImportError:
        print("CuPy is not installed: its benchmark is left out")
        return
    if not cupy.cuda.is_available():
        print("no CUDA device is available: CuPy's benchmark is left out")
        return
    print(GOALS)
    print("| 1 GiB | time / copy | bandwidth / copy's |\n|---|---|---|")
    for dtype in ("float16", "float32", "float64"):
        for name, (ratio, share) in measure(cupy, dtype, options.rounds).items():
            print(f"| {dtype}: {name} | {ratio:.2f} | {share:.2f} |")


if __name__ == "__main__":
    main()
