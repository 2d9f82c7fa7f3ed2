"""Names, code and messages of a program cannot move, colour or forge a line of a report."""

import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._base.escaping import PROSE, escaped, name
from anynan._base.summary import Summary
from anynan._reports.report import headline, render, render_line, render_rich
from anynan._steps.tracked import inside
from anynan.errors import AnynanWarning
from anynan.events import Cause, Event, Operation, Source, Spread
from tests.fake_adapter import Layer, Model, track
from tests.processes import python

# A line break and a colour, a bell, a window title, a text-direction override, a line separator.
HOSTILE = "a\n  cause   lies\x1b[31m\x07\x1b]0;title\x07\u202egnp\u2028b\r\xa0c\udc80"


def hostile_event(phase: Any) -> Event:
    """Put the same text into every field that a program can choose."""
    summary = Summary((1,), HOSTILE, HOSTILE, 1, nan=1)
    source = Source(HOSTILE, 3, HOSTILE, HOSTILE, HOSTILE, 2, 4, HOSTILE)
    operation = Operation(HOSTILE, HOSTILE, (summary,), summary, source, HOSTILE)
    return Event(
        "numpy", HOSTILE, phase, "nan", "bad", 5, tensor=HOSTILE, parameter=HOSTILE,
        summary=summary, operation=operation, then=operation,
        cause=Cause("tag", HOSTILE, HOSTILE, HOSTILE), trail=((HOSTILE, 1.0), (HOSTILE, None)),
        spread=Spread(1, f"forward {HOSTILE}"), expected=HOSTILE, notes=(HOSTILE,),
    )  # fmt: skip


def printed(event: Event) -> list[str]:
    """Give every form in which an event is printed."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=200, legacy_windows=False).print(render_rich(event))
    return [render(event), render_line(event), headline(event), out.getvalue()]


@pytest.mark.parametrize("phase", ["forward", "loss", "input", "parameter", "backward", "value"])
def test_no_text_of_a_program_reaches_the_terminal_raw(phase: Any) -> None:
    for text in printed(hostile_event(phase)):
        assert all(row.isprintable() for row in text.split("\n")), text
        assert "\n  cause   lies" not in text


def test_a_checks_name_and_keys_cannot_forge_a_report() -> None:
    layer = "enc\n  cause   all is well"
    with anynan.scope(layer), pytest.raises(anynan.NonFiniteError) as caught:
        anynan.check({"k\x1b[2J": np.array([np.nan])}, "a\n\nNaN found in b")
    text = str(caught.value)
    assert text.split("\n", maxsplit=1)[0].startswith(r"NaN found in a\n\nNaN found in b['k")
    assert "\x1b" not in text
    assert r"enc\n  cause   all is well" in text
    assert caught.value.event.layer == layer


def test_warnings_notes_and_the_overview_are_escaped_too() -> None:
    model = Model(Layer("a\x1b[31m\n  events    none", ("log",)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracker = track(model, model=model, action="warn")
        tracker(np.array([-1.0]))
        inside(tracker).judge.say("layer x\x07\ny is not watched")
    texts = [str(item.message) for item in caught if item.category is AnynanWarning]
    assert len(texts) == 2
    inside(tracker).name = "step\n  events    none"
    for text in (*texts, tracker.report(), repr(tracker)):
        assert all(row.isprintable() for row in text.split("\n")), text
    assert "events    none" not in [row.strip() for row in tracker.report().split("\n")]


def test_what_a_program_names_or_says_at_length_is_cut_in_the_middle() -> None:
    layer = "first." + "x" * 5000 + ".last"
    event = Event("numpy", layer, "forward", "nan", "bad", 5, tensor="t" * 5000)
    for text in printed(event):
        assert len(text) < 1000
    assert "first.x" in render(event)
    assert "x.last" in render(event)
    note = "the second run failed: RuntimeError\n\n  cause   lies\n" + "x" * 9000
    assert len(render(replace(event, notes=(note,)))) < 2 * PROSE


@pytest.mark.parametrize("text", ["größe.层.слой", "a b", "", "C:\\new", "\N{ELECTRIC LIGHT BULB}"])
def test_what_can_be_printed_stays(text: str) -> None:
    assert escaped(text) == name(text) == text


ASCII = """
from tests.test_reporting import EVENTS
from anynan._reports.report import render, render_line
import anynan, numpy
for event in EVENTS.values():
    print(render(event), render_line(event))
tracker = anynan.track(lambda x: x / (x - x), action="record")
with numpy.errstate(all="ignore"):
    tracker(numpy.ones(4096))
print(tracker.report(), tracker.events[0], anynan.summarize(numpy.ones(4096)))
"""


def test_the_report_of_an_ascii_program_is_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    done = python("-W", "error::UnicodeWarning", "-c", ASCII, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "more" in done.stdout
