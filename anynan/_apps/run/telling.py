"""Tell what came of a program: its closing lines, and its reports in a file."""

import os
import sys
from collections import Counter
from dataclasses import replace

from anynan._apps.run.ending import Ending
from anynan._apps.run.told import SHOWN
from anynan._apps.run.watching import Asked, Watch
from anynan._base import products
from anynan._base.messages import left
from anynan._everywhere import Found
from anynan._readings.history import Ring
from anynan._reports.report import render, render_markdown
from anynan._runs.run import Run

RANKS = ("RANK", "LOCAL_RANK")


def tell(asked: Asked, watch: Watch, ending: Ending, *, name: str = "") -> list[str]:
    """Write the report that was asked for, and give the closing lines.

    Args:
        asked: What was asked for.
        watch: What watched.
        ending: What came of it.
        name: Of the process, where it is not the program's first.
    """
    if asked.action in ("record", "skip") and not ending.broken:  # nothing was told before
        for event in watch.found.bad()[:1]:
            sys.stderr.write(f"\n{render(event, which=watch.found.several)}\n\n")
    lines = list(left(ending.lines(), asked.ignore))
    if asked.report:
        _write(_of_its_own(asked, name), lines, watch.found, ending)
    return [*lines, *ending.listed()]


def rank() -> str:
    """Name this process among those of a distributed run; "0" is the first, or the only one."""
    return next(filter(None, map(os.environ.get, RANKS)), "0")


def _of_its_own(asked: Asked, name: str) -> str:
    """Name the file of this process: of several only the first one has the name as it was given."""
    stem, end = os.path.splitext(asked.report or "")
    if rank() != "0":
        return f"{stem}-rank{rank()}{end}"
    if asked.within is not None and not any(map(os.environ.get, RANKS)):
        name = name or str(os.getpid())
    return f"{stem}-{name}{end}" if name else stem + end


def _write(path: str, lines: list[str], found: Found, ending: Ending) -> None:
    stem, end = os.path.splitext(path)
    runs = [replace(run, harms=ending.harms) for run in found.runs()[:SHOWN]]
    try:
        if end == ".html" and runs:
            for i, run in enumerate(runs):
                run.to_html(f"{stem}-{i + 1}{end}" if i else path)
            return
        if end == ".jsonl":
            counts = Counter(
                e.severity if e.expected is None else "expected" for e in ending.events
            )
            nothing = Run(
                "the program", Ring(0), events=tuple(ending.events), counts=counts,
                notes=tuple(lines), harms=ending.harms,
            )  # fmt: skip
            writing = products.part("runfile", "writing")
            for i, run in enumerate(runs or [nothing]):
                writing.Writer(f"{stem}-{i + 1}{end}" if i else path).whole(run)
            return
        form = render_markdown if end == ".md" else render
        parts = ["\n".join(lines), *map(form, ending.events)]
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n\n".join(part.rstrip() for part in parts) + "\n")
    except OSError as error:
        sys.stderr.write(f"anynan run: the report could not be written: {error}\n")
