"""Slots, readings, the ring of past steps, and the trail: plain numbers on the host."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from anynan import Policy
from anynan._readings import history as room
from anynan._readings.monitor import Monitor
from anynan._readings.readings import Site
from anynan._readings.step import Step
from tests.steps import step_of as filled

NAN, INF = math.nan, math.inf
MAX = 65504.0


def monitor(policy: Policy | None = None, history: int = 10) -> Monitor:
    return Monitor(policy or Policy(), history)


def slot(m: Monitor, layer: str | None = "a", phase: Any = "forward", **more: Any) -> Site:
    return m.site(layer, phase, more.pop("tensor", "output"), "float16", MAX, **more)


def test_what_is_known_of_a_row_stays_with_it_when_one_is_put_in_before() -> None:
    m = monitor()
    rows = filled(0, (slot(m, "a"), -1, 1), (slot(m, "b"), -2, INF))
    rows.suspect.add(1)
    rows.norms[1], rows.expected[1] = 2.0, {"posinf": "a test"}
    rows.insert(1, slot(m, "c"), 0, -3, 3)
    assert [rows.reading(i).layer for i in range(3)] == ["a", "c", "b"]
    assert (rows.suspect, rows.norms, list(rows.expected)) == ({2}, {2: 2.0}, [2])


@pytest.mark.parametrize(
    ("lo", "hi", "kind", "absmax", "headroom"),
    [
        (-2.0, 1.0, None, 2.0, math.log2(MAX / 2)),
        (-MAX, 0.0, None, MAX, 0.0),
        (0.0, 0.0, None, 0.0, None),
        (NAN, NAN, "nan", NAN, None),
        (-INF, 2.0, "neginf", INF, None),
        (1.0, INF, "posinf", INF, None),
    ],
)
def test_a_reading_gives_kind_magnitude_and_headroom(
    lo: float, hi: float, kind: str | None, absmax: float, headroom: float | None
) -> None:
    reading = filled(7, (slot(monitor()), lo, hi)).reading(0)
    assert (reading.step, reading.layer, reading.phase, reading.kind) == (7, "a", "forward", kind)
    assert reading.absmax == pytest.approx(absmax, nan_ok=True)
    assert reading.headroom == (None if headroom is None else pytest.approx(headroom))


def test_rows_that_leave_their_limits_are_flagged_in_order() -> None:
    m = monitor(Policy(large=10))
    values = [(0.0, 1.0), (NAN, NAN), (-10.0, 10.0), (-11.0, 0.0), (0.0, INF), (-INF, 0.0)]
    rows = filled(0, *((slot(m), lo, hi) for lo, hi in values))
    assert m.flagged(rows) == [1, 3, 4, 5]


def test_a_row_that_is_known_to_be_finite_has_no_magnitude() -> None:
    m = monitor()
    a, b = slot(m, "a"), slot(m, "b")
    rows = filled(0, (a, INF, -INF), (b, -1.0, 1.0))
    assert m.flagged(rows) == []
    m.history.append(rows)
    found = m.history.last()[0]
    assert (found.kind, found.lo, found.hi, found.absmax, found.headroom) == (None,) * 5
    assert m.history.curve(a) == ()
    assert m.trail(rows, 1, "b") == (("b", 1.0),)


def test_memory_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    m = monitor(history=1000)
    readings = [(slot(m, str(i)), 0.0, 1.0) for i in range(100)]
    m.history.append(filled(0, *readings))
    size = m.history.nbytes
    assert size >= 100 * 16
    monkeypatch.setattr(room, "HISTORY_BYTES", 5 * size)
    for step in range(1, 20):
        m.history.append(filled(step, *readings))
    assert m.history.steps() == [15, 16, 17, 18, 19]
    assert m.history.nbytes == 5 * size
    m.history.clear()
    assert (m.history.nbytes, len(m.history), m.history.last(), m.history.steps()) == (0, 0, [], [])


def test_a_gradient_read_by_its_norm_and_then_by_its_ends_is_one_curve() -> None:
    m = monitor()
    norm = slot(m, "a", "backward", parameter="a.weight", bound=True)
    ends = slot(m, "a", "backward", parameter="a.weight")
    m.history.append(filled(0, (norm, -1.0, 1.0)))
    m.history.append(filled(1, (norm, -30.0, 30.0)))
    assert m.history.curve(ends) == ((0, 1.0), (1, 30.0))


DEEP = (
    "embed", "encoder.layers.0.attn", "encoder.layers.0.norm", "encoder.layers.0",
    "encoder.layers.1.attn", "encoder.layers.1.norm", "encoder.layers.1",
    "encoder.layers.2.attn.proj", "encoder.layers.2.attn", "encoder.layers.2", "encoder", "",
)  # fmt: skip


def in_turn(m: Monitor, *layers: str, calls: Sequence[int] = ()) -> Step:
    ends = ((slot(m, layer), 0.0, float(i)) for i, layer in enumerate(layers))
    return filled(0, *ends, calls=calls)


def test_a_trail_shows_what_leads_to_the_failure_at_the_depth_that_tells() -> None:
    m = monitor()
    shown = [name for name, _ in m.trail(in_turn(m, *DEEP), 8, "encoder.layers.2.attn")]
    assert shown == ["embed", "encoder.layers.0", "encoder.layers.1", "encoder.layers.2.attn"]


def test_a_trail_shows_the_call_that_failed_and_no_earlier_one() -> None:
    once = ("embed", "block.attn", "block.mlp", "block", "head", "")
    m = monitor()
    calls = [0] * 6 + [1] * 6 + [2] * 3
    rows = in_turn(m, *once, *once, "embed", "block.attn", "block", calls=calls)
    assert m.trail(rows, 13, "block.attn", call=2) == (("embed", 12.0), ("block.attn", 13.0))
    # Nothing was read of this call of it: the reading that failed is of the layer around.
    assert m.trail(rows, 14, "block.mlp", call=2) == (
        ("embed", 12.0), ("block.attn", 13.0), ("block.mlp", None),
    )  # fmt: skip
    # What was read last is not where it began.
    assert m.trail(rows, 11, "block.attn", call=1) == (("embed", 6.0), ("block.attn", 7.0))


def test_a_trail_of_a_backward_pass_is_that_of_the_gradients() -> None:
    m = monitor()
    rows = filled(
        0,
        *((slot(m, layer), 0.0, 1.0) for layer in ("0", "1", "2", "")),
        *((slot(m, layer, "backward"), 0.0, 9.0) for layer in ("", "2", "1")),
        (slot(m, "1", "backward", parameter="1.weight"), 0.0, 5.0),
        (slot(m, "0", "backward"), NAN, NAN),
    )
    assert m.trail(rows, 7, "1", "backward") == (("2", 9.0), ("1", 9.0))
    assert m.trail(rows, 8, "0", "backward") == (("2", 9.0), ("1", 9.0), ("0", None))
