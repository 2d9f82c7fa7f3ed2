"""``level="step"`` of array code: the function's own arrays, and a second run that explains."""

from array import array
from typing import Any

import numpy as np
import pytest

import anynan
from tests.failing import failure
from tests.recording import LEVELS, centre, failing


def test_the_function_gets_its_own_arrays() -> None:
    look = anynan.track(lambda x, more: (x + 1, [x, more["y"]]))
    x, y = np.ones(3), np.ones(3)
    result, seen = look(x, {"y": y})
    assert seen[0] is x and seen[1] is y
    assert type(result) is np.ndarray


def test_an_argument_that_is_written_into_is_read_and_run_again_from_what_it_was() -> None:
    x = np.array([2.0, 2.0])
    event = failing(centre, x)
    assert event.operation.name == "divide"
    assert event.operation.inputs[0].max == 0
    assert np.isnan(x).all()  # as without anynan: written once, by the first run


def test_random_numbers_are_those_of_the_first_run() -> None:
    calls = array("b")  # which is not put back: a second run draws more

    def draw(x: Any) -> Any:
        calls.append(1)
        y = np.sqrt(x - np.random.rand(3).max() - 1)  # noqa: NPY002
        np.random.rand(len(calls))  # noqa: NPY002
        return y

    np.random.seed(3)  # noqa: NPY002
    expected = np.random.rand(3).max()  # noqa: NPY002
    np.random.rand()  # noqa: NPY002
    after = np.random.rand()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    event = failing(draw, np.ones(1))
    assert event.operation.inputs[0].min == pytest.approx(-expected)
    assert np.random.rand() == after  # noqa: NPY002


@LEVELS
@pytest.mark.parametrize("mode", ["raise", "call", "log"])
def test_what_the_user_asked_numpy_for_is_done(mode: Any, level: Any) -> None:
    heard: list[Any] = []

    class Heard:
        def write(self, *said: Any) -> None:
            heard.append(said)

        __call__ = write

    handler: Any = None if mode == "raise" else Heard()
    tracked = anynan.track(lambda x: np.nan_to_num(np.log(x)), level=level)
    with np.errstate(all=mode, call=handler):
        if mode == "raise":
            with pytest.raises(FloatingPointError):
                tracked(np.zeros(2))
        else:
            tracked(np.zeros(2))
            assert len(heard) == 1


@LEVELS
def test_what_the_function_tells_numpy_to_do_about_errors_stays(level: Any) -> None:
    def settle(x: Any, mode: str) -> Any:
        np.seterr(over=mode)  # type: ignore[arg-type]
        return x + 1

    tracked, before = anynan.track(settle, level=level), np.geterr()
    try:
        for mode in ("ignore", "warn", "raise"):
            tracked(np.ones(2), mode)
            assert np.geterr() == {**before, "over": mode}
    finally:
        np.seterr(**before)


def test_what_a_call_hid_is_not_told_of_the_next() -> None:
    def part(x: Any, hide: bool) -> Any:
        if hide:
            return np.maximum(np.log(x * 0), 0)
        x[:] = -1  # too large to be kept, so the error log is asked
        return np.sqrt(x)

    tracked, x = anynan.track(part), np.ones(20_000)
    with np.errstate(all="ignore"):
        for _ in range(3):
            tracked(x, True)
        event = failure(tracked, x, False)
    assert event.operation.name == "sqrt"
    notes = " ".join(event.notes)
    assert "too large to be kept" in notes
    assert "error log of the first run" in notes


def test_a_loader_inside_does_not_accuse_the_data() -> None:
    event = failing(lambda x: [y.sum() for y in anynan.watch([np.log(-x)])], np.ones(2))
    assert (event.phase, event.operation.name) == ("forward", "log")
    event = failing(lambda x: [x.sum() for x in anynan.watch([np.full(2, np.nan)])], np.ones(2))
    assert event.phase == "input"


def test_what_the_program_makes_of_a_bad_result_and_hands_back_is_no_bad_batch() -> None:
    @anynan.track(action="warn")
    def slope(t: float, y: Any) -> Any:
        return np.array([y[1], -np.sqrt(y[0])])

    y = np.array([0.01, -1.0])
    with np.errstate(invalid="ignore"), pytest.warns(anynan.AnynanWarning) as said:
        for i in range(5):
            y = y + 0.1 * slope(0.1 * i, y)
    (event,) = slope.events
    assert event.operation is not None and event.operation.name == "sqrt"
    assert "the input of slope is bad, and came after its own step 1" in str(said[1].message)
