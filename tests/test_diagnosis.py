"""What a bad reading may be: the table's order, and one case for each of its rows."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from anynan._base.summary import Summary
from anynan._diagnosis.diagnosis import TABLE, choose, diagnose
from anynan._diagnosis.evidence import BadParameter, Evidence
from anynan._diagnosis.investigation import BadInput, Investigation
from anynan._diagnosis.lineage import Operand, OpRecord, Replay, Sink
from anynan._readings.monitor import Monitor
from anynan._readings.policy import Policy
from anynan._readings.readings import Site
from tests.steps import step_of

NAN = Summary((2,), "float32", "cpu", 2, nan=1, first_bad=(0,))
MASK = Summary((2,), "float32", "cpu", 2, neginf=1, zero=1, first_bad=(0,))
GOOD = (-1.0, 1.0)
BAD = (math.nan, math.nan)

Place = tuple[Any, str | None, str, tuple[float, float]]
IN: Place = ("input", None, "args[0]", BAD)
OUT: Place = ("forward", "", "output", GOOD)
LAYER: Place = ("forward", "a", "output", BAD)
LOSS: Place = ("loss", None, "loss", BAD)
GRADIENT: Place = ("backward", "a", "grad", BAD)


def case(*read: Place, came_in: bool = False, **known: Any) -> Investigation:
    """Investigate the last of some readings; ``came_in`` says that the first is bad input."""
    site = partial(Site, -1, dtype="float32", dtype_max=None, limit=math.inf)
    rows = step_of(0, *((site(layer, phase, tensor), *ends) for phase, layer, tensor, ends in read))
    reading = rows.reading(len(read) - 1)
    found = Investigation(
        reading, reading.kind or "large", rows, Evidence("toy"), Monitor(Policy(), 8), **known
    )
    if came_in:
        found.came_in = [BadInput(rows.reading(0), "nan", Evidence("toy", summary=NAN))]
    return found


def replay(
    source: Any = None, *, phase: Any = "forward", made: Summary = NAN, **more: Any
) -> Replay:
    """Give a second run whose one operation took bad values from a source, or made them."""
    taken = Operand("x", None if source is None else NAN, source=source, label="its name")
    record = OpRecord(0, more.pop("name", "log"), "log", "a", "forward", made, (taken,))
    return Replay([record], [Sink(phase, "a", "output", (0,), made.kind or "nan")], **more)


def handed_on() -> Investigation:
    found = case(IN, LAYER, came_in=True)
    found.rows.carried = True
    return found


def given() -> Investigation:
    found = case(LAYER)
    found.rows.given = lambda: (NAN, None)
    return found


def weight() -> Investigation:
    found = case(LAYER)
    found.evidence = Evidence("toy", weights=lambda: [BadParameter("a.weight", "a", NAN)])
    return found


# By the name of its row. What comes later in the table holds for many of them too.
CASES: dict[str, Callable[[], Investigation]] = {
    "an input beyond its limit": lambda: case(IN),
    "a mask": lambda: case(
        ("forward", "a", "output", (-math.inf, 0.0)), replayed=replay(name="where", made=MASK)
    ),
    "an input that a layer handed on": handed_on,
    "an input behind a bad loss": lambda: case(
        IN, LOSS, came_in=True, replayed=Replay(incoming=True)
    ),
    "a loss or gradient from outside": lambda: case(OUT, LOSS, replayed=Replay(incoming=True)),
    "an input that an operation took": lambda: case(
        IN, OUT, LOSS, came_in=True, replayed=replay("input", phase="loss")
    ),
    "an input that was converted first": lambda: case(
        IN, LAYER, came_in=True, replayed=replay("constant", name="add")
    ),
    "an input and nothing else": lambda: case(IN, LAYER, came_in=True),
    "code between layers, as seen": lambda: case(LAYER, replayed=replay("handed")),
    "a weight or buffer": weight,
    "code between layers, as read": given,
    "a loss or gradient that nothing explains": lambda: case(GRADIENT, in_order=True),
    "an operation, or what was read": lambda: case(LAYER, replayed=replay()),
}


def test_the_order_of_the_table_is_what_it_was() -> None:
    assert [row.name for row in TABLE] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_each_row_has_a_case_that_no_row_before_it_takes(name: str) -> None:
    found = CASES[name]()
    diagnose(found)
    assert choose(found)[0].name == name


def test_an_input_that_came_to_nothing_before_is_not_to_blame() -> None:
    found = case(IN, LAYER, came_in=True)
    found.came_in = [BadInput(found.rows.reading(0), "nan", Evidence("toy"), harmless=True)]
    event = diagnose(found)
    assert event.phase == "forward"
    assert "args[0] came in bad, too; whether it matters is not known" in event.notes[0]
