"""Time ``anynan.check`` and ``summarize`` on one clean array beside what else looks at it.

The contestants take turns in one process; medians of their times are divided by that of
``x.min(), x.max()``, two passes over the array and the least that people write who know that a
NaN shows in both. Run it with nothing else on the machine: ``make bench``.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

import anynan
from tests.benchmarks.timing import machine, options, publish, ratios, table

BYTES = 64 * 2**20
BASE = "x.min(), x.max()"
DTYPES = ("float32", "float64", "float16", "complex64")
GOAL = {"float32": "<= 1.00"}


def contestants(x: np.ndarray[Any, Any]) -> dict[str, Callable[[], object]]:
    """Return what is timed on this array, by name; what a library refuses is left out."""
    import pandas as pd
    import torch
    from sklearn.utils import assert_all_finite

    torch.set_num_threads(1)  # the others have one thread too
    tensor, frame = torch.from_numpy(x), pd.Series(x)
    found: dict[str, Callable[[], object]] = {
        BASE: lambda: (x.min(), x.max()),
        "anynan.check(x)": lambda: anynan.check(x),
        "anynan.check(torch tensor)": lambda: anynan.check(tensor),
        "np.isfinite(x).all()": lambda: np.isfinite(x).all(),
        "scikit-learn assert_all_finite(x)": lambda: assert_all_finite(x),
        "torch.isfinite(x).all()": lambda: torch.isfinite(tensor).all(),
        "pandas isna().any() (NaN only)": lambda: frame.isna().any(),
        "anynan.summarize(x)": lambda: anynan.summarize(x),
    }
    if x.dtype.kind == "c":
        del found["scikit-learn assert_all_finite(x)"]
    return found


def measure(dtype: str, rounds: int) -> dict[str, float]:
    """Return each contestant's median time over that of the smallest and largest value."""
    generator = np.random.default_rng(0)
    count = BYTES // np.dtype(dtype).itemsize
    x = generator.standard_normal(count, dtype=np.float32).astype(dtype)
    return ratios(contestants(x), BASE, rounds, warm=1)


SIZES = (1_000, 100_000, 4_000_000)


def normalise(x: np.ndarray[Any, Any]) -> Any:
    """Stand for array code: eleven operations."""
    y = np.exp(-x * x)
    z = np.log1p(y / (1 + y)) * x
    return (z - z.mean()) / z.std()


def by_element(x: np.ndarray[Any, Any]) -> Any:
    """Stand for code that goes element by element."""
    total = 0.0
    for value in x[:1000]:
        total += float(value) * 0.5
    return np.float64(total)


LEVELS = ("step", "layer", "operation")


def tracked(rounds: int) -> str:
    """Measure tracked functions beside the functions themselves; return a Markdown table."""
    lines = [
        "| function | elements of float64 | " + " | ".join(f'`level="{x}"`' for x in LEVELS) + " |",
        "|---|---|---|---|---|",
        "| goal for anynan | 1 000 | <= 1.05, of a loop <= 1.02 | | |",
    ]
    cases = [("eleven operations", normalise, size) for size in SIZES]
    for name, function, size in [*cases, ("a loop over its elements", by_element, 1000)]:
        x = np.random.default_rng(0).standard_normal(size)
        runs: Any = function, *(anynan.track(function, level=cast(Any, level)) for level in LEVELS)
        repeat = max(1, 100_000 // size) if function is normalise else 10
        times: list[list[float]] = []
        for _ in range(rounds + 1):
            took = []
            for number, run in enumerate(runs):
                # A recorder takes its time: it need not do so as often.
                calls = repeat if number < 2 else max(1, repeat // 10)
                start = time.perf_counter()
                for _ in range(calls):
                    run(x)
                took.append((time.perf_counter() - start) / calls)
            times.append(took)
        plain, *ours = (statistics.median(column) for column in zip(*times[1:], strict=True))
        cells = " | ".join(f"{each / plain:.2f}" for each in ours)
        lines.append(f"| {name} | {size:,} | {cells} |".replace(",", " "))
    return "\n".join(lines)


COUNTS = (1, 5, 50, 200)
SHAPE = (10, 10)


def mix(arrays: Iterable[Any]) -> Any:
    """Stand for array code on many small arrays: three operations on each."""
    total: Any = 0.0
    for x in arrays:
        total = total + np.tanh(x) * 0.5
    return total


class Holder:
    """Stand for an object whose method works on its arrays."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays

    def mix(self) -> Any:
        """Work on them."""
        return mix(self.arrays)


def given(arrays: list[Any]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return ways to give arrays to a function: the function, and what it is called with."""
    named = {f"x{i}": x for i, x in enumerate(arrays)}
    return {
        "arguments": (lambda *xs: mix(xs), tuple(arrays)),
        "a dict": (lambda xs: mix(xs.values()), (named,)),
        "a list": (lambda xs: mix(xs), (arrays,)),
        "attributes of the method's object": (Holder(arrays).mix, ()),
    }


def many(rounds: int) -> str:
    """Measure functions of many small arrays beside themselves; return a Markdown table."""
    heads = " | ".join(f"{count} arrays" if count > 1 else "1 array" for count in COUNTS)
    rows = dict.fromkeys(given([]), "")
    for count in COUNTS:
        arrays = [np.random.default_rng(i).standard_normal(SHAPE) for i in range(count)]
        for name, (function, args) in given(arrays).items():
            runs = function, anynan.track(function)
            repeat = max(1, 2000 // count)
            times: list[list[float]] = []
            for _ in range(rounds + 1):
                took = []
                for run in runs:
                    start = time.process_time()
                    for _ in range(repeat):
                        run(*args)
                    took.append(time.process_time() - start)
                times.append(took)
            plain, ours = (statistics.median(column) for column in zip(*times[1:], strict=True))
            rows[name] += f" {ours / plain:.2f} |"
    goal = "| goal for anynan |" + " |" * (len(COUNTS) - 1) + " <= 3 |"
    lines = [f"| arrays of 10 x 10, in | {heads} |", "|---|" + "---|" * len(COUNTS), goal]
    return "\n".join([*lines, *(f"| {name} |{cells}" for name, cells in rows.items())])


def main() -> None:
    """Measure and print the tables, and write them into the documentation."""
    chosen = options(__doc__, rounds=15)
    when = (
        f"{machine('one thread', f'NumPy {np.__version__}')}; medians of {chosen.rounds} "
        "interleaved rounds.\n\n"
    )
    results = {dtype: measure(dtype, chosen.rounds) for dtype in DTYPES}
    publish("check", f"{when}{table(results, 'on 64 MB', GOAL)}\n", chosen.write)
    publish("track", f"{when}{tracked(chosen.rounds)}\n", chosen.write)
    publish("many", f"{when}{many(chosen.rounds)}\n", chosen.write)


if __name__ == "__main__":
    main()
