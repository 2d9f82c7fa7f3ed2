"""Run the suites: ``python -m tests.wild [suite ...]``."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from tests.wild.known import KNOWN, NOTES
from tests.wild.proof import page, table
from tests.wild.rows import ROOT, Row, read, reason_for, versions_of, write
from tests.wild.running import Runner
from tests.wild.suites import SUITES


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.wild", description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases to run, a glob")
    parser.add_argument("--sample", action="store_true", help="run each suite's sample only")
    parser.add_argument("--fresh", action="store_true", help="run again what has a row")
    parser.add_argument("--jobs", type=int, default=2, help="how many cases at a time")
    parser.add_argument("--rows", type=Path, default=ROOT / "build" / "wild" / "rows.jsonl")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page from the rows")
    asked = parser.parse_args()
    if unknown := set(asked.suites) - set(SUITES):
        parser.error(f"no suite is called {', '.join(sorted(unknown))}")
    asked.suites = asked.suites or list(SUITES)
    return asked


def done(rows: list[Row], runner: Runner) -> set[str]:
    """Name the cases that have a row; what ended with an error is tried again."""
    mine = [r for r in rows if r.suite == runner.name and (r.versions, r.anynan) == runner.key]
    return {row.case for row in mine} - {row.case for row in mine if row.error}


def unlisted(row: Row) -> Iterator[tuple[str, str]]:
    for what, said in row.differences():
        if reason_for(KNOWN, row, what, said) is None:
            yield what, said


def tell(row: Row, number: int, of: int) -> None:
    words = [f"{row.suite} {number}/{of} {row.case} {row.level}".strip(), f"{row.seconds:.1f} s"]
    words += ["skipped"] * bool(row.skipped) + [what for what, _ in row.differences()]
    print("  ".join(words), flush=True)
    for what, said in unlisted(row):
        print(f"    {what}: {said}", flush=True)


def counted(rows: Path, **more: int) -> dict[str, int]:
    """Keep how many cases a suite has beside the rows: the page says how many were not run."""
    path = rows.with_name("cases.json")
    counts: dict[str, int] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    counts |= more
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(counts, indent=1), encoding="utf-8")
    return counts


def run(name: str, asked: argparse.Namespace) -> list[Row]:
    suite = SUITES[name]
    os.environ.update(suite.environment)
    runner = Runner(name, suite, suite.module or f"tests.wild.suites.{name}")
    cases = runner.cases(sample=asked.sample)
    if not asked.sample:
        counted(asked.rows, **{name: len(cases)})
    cases = [case for case in cases if fnmatchcase(case, asked.only)]
    there = set() if asked.fresh else done(read(asked.rows), runner)
    left = [case for case in cases if case not in there]
    numbers = {case: number for number, case in enumerate(cases, 1)}
    for row in runner.run(left, asked.jobs):
        write(asked.rows, row)
        tell(row, numbers[row.case], len(cases))
    return [row for row in read(asked.rows) if row.suite == name and row.case in numbers]


def main() -> int:
    asked = arguments()
    began = time.monotonic()
    if len(asked.suites) > 1:
        # A suite has a process of its own, which the processes of its cases are forked from.
        rest = [word for word in sys.argv[1:] if word not in SUITES]
        codes = []
        for name in asked.suites:
            if "missing" in versions_of(SUITES[name].packages):
                print(f"{name}: not installed: {versions_of(SUITES[name].packages)}")
                continue
            command = [sys.executable, "-m", "tests.wild", name, *rest]
            codes.append(subprocess.run(command, check=False).returncode)
        return max(codes, default=0)
    rows = run(asked.suites[0], asked)
    print(table(rows))
    print(f"{time.monotonic() - began:.0f} s")
    if asked.write:
        counts = counted(asked.rows)
        old = asked.write.read_text(encoding="utf-8") if asked.write.exists() else ""
        _, own, by_hand = old.partition("\n## Public scripts, unedited\n")  # the page's last part
        new = page(read(asked.rows), counts, KNOWN, NOTES) + own + by_hand
        asked.write.write_text(new, encoding="utf-8")
    wrong = [(row, what, said) for row in rows for what, said in unlisted(row)]
    for row, what, said in wrong:
        print(f"NOT LISTED  {row.suite}  {row.case}  {row.level}  {what}: {said}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
