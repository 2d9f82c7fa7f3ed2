"""What every benchmark does: let variants take turns, compare medians, write a table down."""

import argparse
import datetime as dt
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from types import MappingProxyType

PAGE = Path("docs/benchmarks.md")


def seconds(run: Callable[..., object], *args: object) -> float:
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def over(base: str, times: Mapping[str, list[float]]) -> dict[str, float]:
    middle = statistics.median(times[base])
    return {name: statistics.median(values) / middle for name, values in times.items()}


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
                        took = seconds(lambda run=run: (run(), wait()))
                        if i >= warm and call >= turn // 4:
                            times[name].append(took)
    return over(base, times)


def rows(head: Iterable[str], *lines: Iterable[str]) -> str:
    """Return cells as a Markdown table."""
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def table(results: Mapping[str, Mapping[str, float]], corner: str, goals: Mapping[str, str]) -> str:
    """Return results by column and row as a Markdown table; what is missing was refused."""
    lines = [["goal for anynan", *(goals.get(column, "") for column in results)]]
    for name in next(iter(results.values())):
        found = [column.get(name) for column in results.values()]
        lines.append([name, *("refused" if x is None else f"{x:.2f}" for x in found)])
    return rows([corner, *results], *lines)


def machine(*software: str) -> str:
    return (
        f"Measured {dt.datetime.now(dt.UTC):%Y-%m-%d} on {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}"
    ) + "".join(f", {name}" for name in software)


def options(description: str | None, rounds: int = 40) -> argparse.Namespace:
    """Read what every benchmark takes: rounds, threads, the device and the page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, default=PAGE, help="page to write into")
    parser.add_argument("--part", help="of a step that fails: one framework alone")
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
