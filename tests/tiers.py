"""Which tests `make test` runs, and how long each took.

A test's tier is 0 in `tests/` itself and 1 in a folder of it. `@pytest.mark.tier(n)` raises it: to
2 for a variant of what a lower tier holds already, for a process of its own beyond the first of its
kind, and for whatever takes more than three seconds. Several marks count as the highest.
Where tier 0 runs alone no framework can be imported: a test that needs one is skipped.
"""

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"
DOCS = TESTS.parent / "docs"
FRAMEWORKS = ("jax", "keras", "mlx", "tensorflow", "torch")
ASKED = pytest.StashKey[range]()
_SHOWN = 20
# What marks each test of a file as one of tier 2.
_ALL_LATE = re.compile(r"^pytestmark = \[?[^\]]*?pytest\.mark\.tier\(2\)", re.MULTILINE)


def tier(item: pytest.Item) -> int:
    """Give the tier of a test."""
    least = 0 if item.path.parent == TESTS else 1
    return max([least, *(mark.args[0] for mark in item.iter_markers("tier"))])


def least(path: Path) -> int:
    """Give the lowest tier that a test in a file or a folder can have, without importing it."""
    inside = int(TESTS in path.parents[path.is_file() :])
    whole = path.suffix == ".py" and _ALL_LATE.search(path.read_text("utf-8"))
    return 2 if whole else inside


def chosen(text: str) -> range:
    """Read the tiers that are asked for: `1`, or `0-1`."""
    found = re.fullmatch(r"([0-2])(?:-([0-2]))?", text)
    if found is None:
        msg = f"--tiers: give a tier from 0 to 2, or a range of them such as 0-1, not {text!r}"
        raise ValueError(msg)
    first, last = found[1], found[2] or found[1]
    return range(int(first), int(last) + 1)


def installed(name: str) -> bool:
    """Tell whether a library can be imported here, without importing it."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # hidden
        return False


def first(few: int, cases: Iterable[Any]) -> list[Any]:
    """Give the cases of a test, all but the first few of them for tier 2."""
    return [
        case if at < few else pytest.param(case, marks=pytest.mark.tier(2))
        for at, case in enumerate(cases)
    ]


def seconds(asked: range) -> dict[str, float]:
    """Give what the tests of some tiers took in each file, as it was measured last."""
    known = json.loads(DURATIONS.read_text("utf-8"))
    return {
        file: sum(took for tier, took in entry["tiers"].items() if int(tier) in asked)
        for file, entry in known.items()
    }


class Hidden:
    """Hide the frameworks from an interpreter: importing one fails as if it were missing."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in FRAMEWORKS:
            msg = f"No module named {name!r} where tier 0 runs alone"
            raise ModuleNotFoundError(msg, name=name)


class Durations:
    """Add up what each test took, set-up and tear-down included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._took: dict[str, float] = defaultdict(float)
        self._tiers: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] += report.duration
        found: dict[str, Any] = dict(report.user_properties)
        self._tiers[report.nodeid] = found.get("tier", 1)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        known = json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}
        self._path.write_text(json.dumps(merged(known, self._took, self._tiers), indent=1) + "\n")


def merged(known: dict[str, Any], took: dict[str, float], tiers: dict[str, int]) -> dict[str, Any]:
    """Put what the tests of some files took into what is known of all.

    A file has the seconds of its tiers, and of each test that took 0.1 s or more.
    """
    files: dict[str, Any] = {}
    for name, seconds in sorted(took.items()):
        file, _, test = name.partition("::")
        entry = files.setdefault(file, {"tiers": Counter(), "tests": {}})
        entry["tiers"][str(tiers[name])] += seconds
        if round(seconds, 1):
            entry["tests"][test] = round(seconds, 1)
    for file, entry in files.items():
        before = known.get(file, {"tiers": {}, "tests": {}})
        entry["tiers"] = {
            key: round(entry["tiers"].get(key, before["tiers"].get(key, 0)), 1)
            for key in sorted({*entry["tiers"], *before["tiers"]})
        }
        entry["tests"] = {**before["tests"], **entry["tests"]}
        entry["tests"] = dict(sorted(entry["tests"].items(), key=lambda one: (-one[1], one[0])))
    return dict(sorted({**known, **files}.items()))


def table(known: dict[str, Any]) -> str:
    """Give what the tests take as the tables of a page: by tier, and the slowest files."""
    tiers: Counter[str] = Counter()
    for entry in known.values():
        tiers.update(entry["tiers"])
    slowest = sorted(known, key=lambda file: -sum(known[file]["tiers"].values()))[:_SHOWN]
    lines = ["| tier | seconds |", "|---|---|"]
    lines += [f"| {key} | {tiers[key]:.0f} |" for key in sorted(tiers)]
    lines += ["", "| file | seconds in tiers 0 and 1 | in tier 2 |", "|---|---|---|"]
    for file in slowest:
        own = known[file]["tiers"]
        early, late = own.get("0", 0) + own.get("1", 0), own.get("2", 0)
        lines.append(f"| `{file}` | {early:.1f} | {late:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the tables into `docs/contributing.md`, or print them."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiers", description=main.__doc__)
    parser.add_argument("--print", action="store_true", help="print them alone")
    words = parser.parse_args()
    text = table(json.loads(DURATIONS.read_text("utf-8")))
    if words.print:
        print(text)
        return
    write("durations", text, "contributing.md")


def write(name: str, text: str, page: str) -> None:
    """Put a table in its place on a page of the docs."""
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    path = DOCS / page
    old = path.read_text("utf-8")
    path.write_text(place.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", old), "utf-8")


if __name__ == "__main__":
    main()
