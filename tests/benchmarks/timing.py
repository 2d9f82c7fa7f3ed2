"""What every benchmark does: let variants take turns, compare medians, write a table down."""

import argparse
import datetime as dt
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from types import MappingProxyType

PAGE = Path("docs/benchmarks.md")


def ratios(
    runs: Mapping[str, Callable[[], object]],
    base: str,
    rounds: int,
    *,
    warm: int = 3,
    turn: int = 1,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] = MappingProxyType({}),
    wait: Callable[[], object] = lambda: None,
    seldom: Collection[str] = (),
) -> dict[str, float]:
    """Return each run's median time over that of the base.

    Args:
        runs: What is timed, by name; they take turns, in an order of each round's own: what runs
            right after something heavy must not be the same each time.
        base: The one that the others are divided by.
        rounds: Turns of each that count.
        warm: Turns of each before that.
        turn: Calls in one turn. The first quarter does not count: a program does not change its
            tools at every step, and finds its own code in the processor's caches.
        around: What is entered for each turn of a run, by name.
        wait: Wait for the device before the clock is read.
        seldom: The slowest ones, which take part in one round of eight.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, random = list(runs), Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(rounds + warm):
            random.shuffle(order)
            for name in order:
                if name in seldom and i % 8 != warm:
                    continue
                run = runs[name]
                with around.get(name, nullcontext)():
                    for call in range(turn):
                        wait()
                        start = time.perf_counter()
                        run()
                        wait()
                        if i >= warm and call >= turn // 4:
                            times[name].append(time.perf_counter() - start)
    middle = statistics.median(times[base])
    return {name: statistics.median(values) / middle for name, values in times.items()}


def table(results: Mapping[str, Mapping[str, float]], corner: str, goals: Mapping[str, str]) -> str:
    """Return results by column and row as a Markdown table; what is missing was refused."""
    columns = list(results)
    lines = [
        f"| {corner} | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
        "| goal for anynan | " + " | ".join(goals.get(c, "") for c in columns) + " |",
    ]
    for name in next(iter(results.values())):
        cells = [f"{results[c][name]:.2f}" if name in results[c] else "refused" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(*software: str) -> str:
    """Say when and on what something was measured."""
    return (
        f"Measured {dt.datetime.now(dt.UTC):%Y-%m-%d} on {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, {', '.join(software)}"
    )


def options(description: str | None, **defaults: int) -> argparse.Namespace:
    """Read what every benchmark takes: rounds, threads, the device and the page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=defaults.get("rounds", 40))
    parser.add_argument("--threads", type=int, default=defaults.get("threads", 0))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, default=PAGE, help="page to write into")
    return parser.parse_args()


def publish(mark: str, text: str, page: Path) -> None:
    """Print a result, and write it between its marks, on the page or on one beside it."""
    print(text)
    begin, end = f"<!-- {mark} begin -->\n", f"<!-- {mark} end -->"
    for each in page.parent.glob(f"{page.stem}*{page.suffix}"):
        content = each.read_text()
        if begin in content:
            before, _, rest = content.partition(begin)
            each.write_text(before + begin + text + end + rest.partition(end)[2])
