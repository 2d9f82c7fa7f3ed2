"""Time ``anynan.check`` and ``summarize`` on one clean array, and tracked array code.

On the array, beside what else looks at it: medians are divided by that of ``x.min(), x.max()``, two
passes over the array and the least that people write who know that a NaN shows in both. The
contestants take turns in one process. Run it with nothing else on the machine: ``make bench``.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np

import anynan
from tests.benchmarks.timing import machine, options, publish, ratios, rows, table

BYTES = 64 * 2**20
BASE = "x.min(), x.max()"
DTYPES = ("float32", "float64", "float16", "complex64")
GOAL = {"float32": "<= 1.00"}
LEVELS = ("step", "layer", "operation")
COUNTS = (1, 5, 50, 200)


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
    generator = np.random.default_rng(0)
    count = BYTES // np.dtype(dtype).itemsize
    x = generator.standard_normal(count, dtype=np.float32).astype(dtype)
    return ratios(contestants(x), BASE, rounds, warm=1)


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


def over_itself(
    function: Any, args: tuple[Any, ...], levels: tuple[str, ...], calls: int, rounds: int
) -> list[str]:
    """Measure a tracked function beside itself, so many calls in a turn; give a cell by level."""
    runs: dict[str, Any] = {"": function}
    runs |= {level: anynan.track(function, level=cast(Any, level)) for level in levels}
    turns = {name: lambda run=run: [run(*args) for _ in range(calls)] for name, run in runs.items()}
    found = ratios(turns, "", rounds, warm=1)
    return [f"{found[level]:.2f}" for level in levels]


def tracked(rounds: int) -> Iterator[list[str]]:
    """Measure tracked functions at each level; yield the rows of a table."""
    yield ["function", "elements of float64", *(f'`level="{level}"`' for level in LEVELS)]
    yield ["goal for anynan", "1 000", "<= 1.05, of a loop <= 1.02", "", ""]
    sizes = (1_000, 100_000, 4_000_000)
    cases = [("eleven operations", normalise, size, max(1, 100_000 // size)) for size in sizes]
    for name, function, size, calls in [
        *cases,
        ("a loop over its elements", by_element, 1000, 10),
    ]:
        x = np.random.default_rng(0).standard_normal(size)
        cells = over_itself(function, (x,), LEVELS, calls, rounds)
        yield [name, f"{size:,}".replace(",", " "), *cells]


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


def many(rounds: int) -> Iterator[list[str]]:
    """Measure functions of many small arrays; yield the rows of a table."""
    heads = [f"{count} arrays" if count > 1 else "1 array" for count in COUNTS]
    yield ["arrays of 10 x 10, in", *heads]
    yield ["goal for anynan", *[""] * (len(COUNTS) - 1), "<= 3"]
    lines: dict[str, list[str]] = {name: [name] for name in given([])}
    for count in COUNTS:
        arrays = [np.random.default_rng(i).standard_normal((10, 10)) for i in range(count)]
        for name, (function, args) in given(arrays).items():
            lines[name] += over_itself(function, args, ("step",), max(1, 2000 // count), rounds)
    yield from lines.values()


def main() -> None:
    chosen = options(__doc__, rounds=15)
    when = (
        f"{machine('one thread', f'NumPy {np.__version__}')}; medians of {chosen.rounds} "
        "interleaved rounds.\n\n"
    )
    results = {dtype: measure(dtype, chosen.rounds) for dtype in DTYPES}
    publish("check", f"{when}{table(results, 'on 64 MB', GOAL)}\n", chosen.write)
    publish("track", f"{when}{rows(*tracked(chosen.rounds))}\n", chosen.write)
    publish("many", f"{when}{rows(*many(chosen.rounds))}\n", chosen.write)


if __name__ == "__main__":
    main()
