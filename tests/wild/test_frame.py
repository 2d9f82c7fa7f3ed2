"""What the frame promises a suite: no end of a case goes unseen, and no difference is lost."""

import sys
from pathlib import Path

import pytest

from tests.wild.proof import page, table
from tests.wild.rows import ROOT, Fault, Known, Row, read, reason_for, write
from tests.wild.running import Runner
from tests.wild.suites import Suite

pytestmark = pytest.mark.tier(2)


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_every_end_of_a_case_is_a_row() -> None:
    suite = Suite(("numpy",), fork=True, seconds=4, gigabytes=0.5)
    runner = Runner("ends", suite, "tests.wild.ends")
    assert runner.cases(sample=True) == ["good"]
    ends = {
        "raises": "ValueError: its own",
        "dies": "SIGABRT",
        "grows": "held",
        "hangs": "stood still for 4 s",
        "spins": "longer than 4 s of the processor",
    }
    rows = list(runner.run(["good", *ends], jobs=2))
    assert {row.case for row in rows if row.level == "layer"} == {"good", *ends}
    assert {row.case for row in rows if row.level == "operation"} == {"good"}
    errors = {row.case: row.error for row in rows if row.error}
    assert errors.keys() == ends.keys()
    assert all(words in errors[case] for case, words in ends.items())
    assert {row.versions for row in rows} == {runner.key[0]}


def broken(anynan: str = "", date: str = "") -> Row:
    fault = Fault("divide", "a.b", detected=True, layer=False, cause=True, said="bad nan a.c")
    row = Row("s", "net", "layer", "within 1e-7", "yes", "left: a hook", [fault])
    row.anynan, row.date = anynan, date
    return row


def test_what_differs_is_named() -> None:
    assert dict(broken().differences()) == {
        "clean": "left: a hook",
        "divide.layer": "a.b: bad nan a.c",
    }
    missed = Row("s", "net", faults=[Fault("root", "a"), Fault("scale", "a", left_out="no harm")])
    assert [what for what, _ in missed.differences()] == ["root.detected"]


def test_a_difference_is_listed_by_suite_case_level_and_words() -> None:
    entry = Known("s", "n*", "divide.*", "why", level="layer", said="*a.c")
    row = broken()
    assert reason_for([entry], row, "divide.layer", "a.b: bad nan a.c") == "why"
    assert reason_for([entry], row, "clean", "left: a hook") is None
    assert reason_for([entry], row, "divide.layer", "something else") is None
    row.level = "operation"
    assert reason_for([entry], row, "divide.layer", "a.b: bad nan a.c") is None


def test_rows_outlive_the_run_and_the_newest_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, broken(anynan="old"))
    write(path, Row("s", "net", error="died", anynan="new"))
    write(path, Row("s", "net", "layer", identical="yes", anynan="new"))
    with path.open("a") as file:
        file.write('{"suite": "s", "case": "cut of')
    (row,) = read(path)
    assert (row.anynan, row.identical, row.faults) == ("new", "yes", [])


def test_the_page_says_what_is_listed_and_what_is_not() -> None:
    known = [Known("s", "*", "clean", "it is meant")]
    text = page([broken(date="2026-01-01")], {"s": 3}, known, {"s": "as asked", "t": "not run"})
    for words in ("it is meant", "not listed", "1 of 3", "*s*: as asked"):
        assert words in text
    assert "*t*" not in text
    assert "within" not in table([broken()])


def test_the_readme_quotes_the_page() -> None:
    page, readme = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("docs/proof.md", "README.md")
    )
    (said,) = [line for line in page.splitlines() if line.startswith("Of ")]
    assert said.removesuffix(".") in " ".join(readme.split())
