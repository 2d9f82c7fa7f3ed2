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
from tests.wild.rows import LEVELS, LEVELS_WANTED, ROOT, Row, read, reason_for, versions_of, write
from tests.wild.running import Runner
from tests.wild.suites import SUITES


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.wild", description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases to run, a glob")
    parser.add_argument("--sample", action="store_true", help="run each suite's sample only")
    parser.add_argument("--fresh", action="store_true", help="run again what has a row")
    parser.add_argument(
        "--older", action="store_true", help="a row of another state of anynan is a row too"
    )
    parser.add_argument("--levels", default=",".join(LEVELS), help="all by default")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no case of a suite later"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many cases at a time")
    parser.add_argument("--rows", type=Path, default=ROOT / "build" / "wild" / "rows.jsonl")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page from the rows")
    parser.add_argument("--show", action="store_true", help="run nothing, show the rows there are")
    asked = parser.parse_args()
    if unknown := set(asked.suites) - set(SUITES):
        parser.error(f"no suite is called {', '.join(sorted(unknown))}")
    asked.suites = asked.suites or list(SUITES)
    os.environ[LEVELS_WANTED] = asked.levels
    return asked


def done(rows: list[Row], runner: Runner, levels: set[str], *, older: bool) -> set[str]:
    """Name the cases that have a row of these levels; what ended with an error is tried again."""
    versions, anynan = runner.key
    mine = [row for row in rows if row.suite == runner.name and row.versions == versions]
    mine = [row for row in mine if older or row.anynan == anynan]
    found: dict[str, set[str]] = {}
    for row in mine:
        found.setdefault(row.case, set()).update(levels if row.skipped else {row.level})
    failed = {row.case for row in mine if row.error}
    return {case for case, there in found.items() if there & levels} - failed


def unlisted(row: Row) -> Iterator[tuple[str, str]]:
    for what, said in row.differences():
        if reason_for(KNOWN, row, what, said) is None:
            yield what, said


def tell(row: Row, number: int, of: int) -> None:
    words = [f"{row.suite} {number}/{of} {row.case} {row.level}".strip(), f"{row.seconds:.1f} s"]
    words += ["skipped"] if row.skipped else []
    differences = list(row.differences())
    words += [what for what, _ in differences]
    print("  ".join(words), flush=True)
    for what, said in unlisted(row):
        print(f"    {what}: {said}", flush=True)


def count_cases(path: Path, suite: str, cases: int) -> None:
    """Keep how many cases a suite has: the page says how many were not run."""
    counts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    counts[suite] = cases
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(counts, indent=1), encoding="utf-8")


def run(name: str, asked: argparse.Namespace) -> list[Row]:
    """Run one suite and give the rows of the cases that were asked for."""
    suite = SUITES[name]
    os.environ.update(suite.environment)
    runner = Runner(name, suite, suite.module or f"tests.wild.suites.{name}")
    cases = runner.cases(sample=asked.sample)
    if not asked.sample:
        count_cases(asked.rows.with_name("cases.json"), name, len(cases))
    cases = [case for case in cases if fnmatchcase(case, asked.only)]
    there = (
        set()
        if asked.fresh
        else done(read(asked.rows), runner, set(asked.levels.split(",")), older=asked.older)
    )
    left = [case for case in cases if case not in there]
    numbers = {case: number for number, case in enumerate(cases, 1)}
    for row in runner.run(left, asked.jobs, asked.minutes):
        write(asked.rows, row)
        tell(row, numbers[row.case], len(cases))
    return [row for row in read(asked.rows) if row.suite == name and row.case in numbers]


def main() -> int:
    asked = arguments()
    began = time.monotonic()
    if len(asked.suites) > 1 and not asked.show:
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
    rows: list[Row] = []
    if asked.show:
        rows = [row for row in read(asked.rows) if row.suite in asked.suites]
    else:
        rows = run(asked.suites[0], asked)
    print(table(rows))
    print(f"{time.monotonic() - began:.0f} s")
    if asked.write:
        counts = asked.rows.with_name("cases.json")
        known = json.loads(counts.read_text(encoding="utf-8")) if counts.exists() else {}
        old = asked.write.read_text(encoding="utf-8") if asked.write.exists() else ""
        _, own, by_hand = old.partition("\n## Public scripts, unedited\n")  # the page's last part
        new = page(read(asked.rows), known, KNOWN, NOTES) + own + by_hand
        asked.write.write_text(new, encoding="utf-8")
    wrong = [(row, what, said) for row in rows for what, said in unlisted(row)]
    for row, what, said in wrong:
        print(f"NOT LISTED  {row.suite}  {row.case}  {row.level}  {what}: {said}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
