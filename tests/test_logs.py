"""What a program's own logging, and a traceback, show of an event."""

import logging
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import anynan

BAD = np.array([1.0, np.nan])


def divide(x: np.ndarray) -> np.ndarray:
    with anynan.scope("head"):
        return x / x


def test_an_event_is_one_record_with_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    step = anynan.track(divide, action="record")
    with caplog.at_level(logging.INFO), np.errstate(all="ignore"):
        step(np.zeros(2))
    (record,) = caplog.records
    (event,) = step.events
    assert (record.name, record.levelname) == ("anynan", "ERROR")
    assert record.getMessage() == anynan.reports.render(event, "line")
    logged = anynan.Event.from_dict(vars(record)["anynan"])
    # What it spread to is known at the step's end.
    assert replace(logged, spread=event.spread) == event


def test_a_direct_check_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(anynan.NonFiniteError):
        anynan.check(BAD)
    with pytest.warns(anynan.AnynanWarning):
        anynan.check(np.array([2.0]), policy=anynan.Policy(large=1.0))
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_nothing_is_printed_where_nobody_asked(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import anynan, numpy as np\nlist(anynan.watch([np.array([np.nan])], action='record'))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_traceback_of_a_tracked_step_is_the_users_alone() -> None:
    with pytest.raises(anynan.NonFiniteError) as caught, np.errstate(all="ignore"):
        anynan.track(divide)(np.zeros(2))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}


def test_the_traceback_of_a_check_ends_in_the_users_line() -> None:
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.check(BAD, "x")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.line for frame in frames] == ['anynan.check(BAD, "x")']
