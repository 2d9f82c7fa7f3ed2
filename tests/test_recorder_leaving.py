"""What leaves a tracked function is judged, whichever way it goes out, and is what it was."""

import os
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import anynan
from tests.recording import LEVELS, NAN, ONES, READS, bad, failing, recorded, track

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::anynan.AnynanWarning", "ignore::PendingDeprecationWarning"
)


def event_of(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return bad(recorded(function, *args, **options))


def notes_with(event: anynan.Event, words: str) -> list[str]:
    return [note for note in event.notes if words in note]


@contextmanager
def pipe(content: bytes) -> Iterator[Callable[[], float]]:
    """Hold numbers that no second run can have again."""
    source, sink = os.pipe()
    os.write(sink, content)
    yield lambda: float(os.read(source, 1))
    os.close(source)
    os.close(sink)


def item(x: Any) -> None:
    x[0] = np.nan


def out(x: Any) -> None:
    np.log(-x, out=x)


@READS
@pytest.mark.parametrize(
    ("program", "name"),
    [(item, "setitem"), (out, "log"), (lambda x: np.add.at(x, [0], np.nan), "add")],
)
def test_a_nan_written_into_an_argument(program: Any, name: str, read: str) -> None:
    event = event_of(program, np.array([1.0, 2.0]), read=read)
    assert (event.phase, event.kind, event.tensor) == ("forward", "nan", "x")
    assert event.operation.name == name
    assert event.operation.source.function == program.__name__


@READS
def test_a_result_put_into_a_container_or_an_object_of_the_caller(read: str) -> None:
    def program(x: Any, into: Any, held: Any) -> None:
        if into is not None:
            into["y"] = np.log(-x)
        else:
            held.y = np.log(-x)

    held, places = SimpleNamespace(), [({"": ONES}, "into['y']"), (None, "held.y")]
    for into, tensor in places:
        event = event_of(program, np.ones(2), into, held, read=read)
        assert (event.tensor, event.operation.name) == (tensor, "log")
        assert type(held.y if into is None else into["y"]) is np.ndarray


class Model:
    def __init__(self) -> None:
        self.weight, self.best, self.unset = np.ones(2), np.full(2, np.inf), np.full(2, np.nan)

    def update(self, x: Any) -> None:
        self.weight = self.weight - np.log(-x)


def test_an_object_that_a_method_is_bound_to() -> None:
    model = Model()
    event = event_of(model.update, np.ones(2))
    assert (event.kind, event.tensor) == ("nan", "self.weight")
    assert type(model.weight) is np.ndarray


@READS
@pytest.mark.parametrize(
    "program",
    [
        lambda x: np.matrix(np.asarray(x) * NAN),
        lambda x: pytest.importorskip("pandas").Series(np.log(-x)),
        lambda x: SimpleNamespace(v=np.log(-x)),
        lambda x: deque([np.log(-x)]),
    ],
)
def test_a_result_of_any_class_is_judged(program: Any, read: str) -> None:
    event = event_of(program, np.ones(2), read=read)
    assert (event.phase, event.kind) == ("forward", "nan")


def test_an_argument_of_another_class_is_judged_and_named() -> None:
    with pytest.warns(anynan.AnynanWarning, match=r"the argument pair\[0\] is a .*matrix"):
        event = event_of(lambda pair: pair[0].sum(), [np.matrix([[NAN]])])
    assert (event.phase, event.tensor) == ("input", "pair[0]")
    event = event_of(lambda x: x * 0 / (x * 0), np.matrix([[1.0]]))
    assert (event.phase, event.kind) == ("forward", "nan")
    assert notes_with(event, "operations on x (a numpy.matrix) are not watched")


def test_no_tracked_array_is_left_in_a_result() -> None:
    def program(x: Any) -> Any:
        cells = np.empty(1, object)
        cells[0] = x * 2
        return SimpleNamespace(v=[x * 2]), deque([x * 2]), UserDict(v=x * 2), cells, {1: (x * 2,)}

    held, queued, mapped, cells, nested = track(program)(np.ones(2))
    found = [held.v[0], queued[0], mapped["v"], cells[0], nested[1][0]]
    assert [type(x) for x in found] == [np.ndarray] * 5


def test_no_tracked_array_is_left_in_an_argument() -> None:
    @dataclass
    class Node:
        x: Any
        inner: Any = None

    tree = Node(np.ones(1), Node(np.ones(1), Node(np.ones(1), {"list": [np.ones(1)] * 2})))

    def program(tree: Any) -> Any:
        tree.inner.inner.x = tree.inner.inner.x * 2
        return tree.x.sum()

    track(program)(tree)
    found = [tree.x, tree.inner.x, tree.inner.inner.x, *tree.inner.inner.inner["list"]]
    assert [type(x) for x in found] == [np.ndarray] * 5
    assert tree.inner.inner.x.tolist() == [2.0]


def through_asarray(x: Any) -> Any:
    y = np.asarray(x)
    y[0] = np.log(-1.0)
    return x * 2


def through_flat(x: Any) -> Any:
    x.flat[0] = np.nan
    return x * 1


@READS
@pytest.mark.parametrize(
    ("program", "word"), [(through_asarray, "np.asarray"), (through_flat, ".flat")]
)
def test_a_value_that_the_function_overwrote_is_no_fault_of_the_data(
    program: Any, word: str, read: str
) -> None:
    event = event_of(program, np.array([1.0, 2.0]), read=read)
    assert event.phase == "forward"
    # What NumPy itself says of it is better: it has the line.
    is_heard = program is through_asarray and read == "immediate"
    assert event.cause.tag == ("unknown" if is_heard else "overwritten_input")
    assert event.operation is not None or not is_heard
    assert "data set" not in str(event.cause)
    assert notes_with(event, f"test_recorder_leaving.py:{program.__code__.co_firstlineno + 1} (")
    assert notes_with(event, f"({word})")


def by_library_quietly(x: Any) -> Any:
    interpolate = pytest.importorskip("scipy.interpolate")
    y = interpolate.CubicSpline(x, x)(np.array([0.5]))
    return np.where(y > 0, NAN, y)


@READS
@pytest.mark.parametrize("level", ["layer", "operation"])
def test_what_no_operation_made_is_not_put_down_to_chance(read: str, level: str) -> None:
    x = np.arange(4.0)
    event = event_of(by_library_quietly, x, read=read, level=level)
    assert event.operation is None
    assert not notes_with(event, "random")
    assert "level=" not in event.cause.fix
    (note,) = notes_with(event, "left anynan's sight")
    line = by_library_quietly.__code__.co_firstlineno + 2
    assert f"test_recorder_leaving.py:{line} (np.asarray in scipy/" in note
    assert note in anynan._reports.report.render(event).replace("\n          ", " ")


def test_a_second_run_that_takes_another_branch_is_not_believed() -> None:
    with pipe(b"01") as number:
        event = event_of(lambda x: np.sqrt(x) if number() else np.log(x), -np.ones(1), read="end")
    assert (event.operation.name, event.cause.tag) == ("log", "log_of_negative")
    assert notes_with(event, "the second run took another path, sqrt (line")


def test_a_second_run_with_other_values_is_not_believed() -> None:
    with pipe(b"15") as number:
        event = event_of(lambda x: np.log(x * -number()), np.ones(1), read="end")
    assert event.operation.inputs[0].min == -1.0
    assert notes_with(event, "the second run had other values, at log")


@pytest.mark.parametrize(
    ("make", "name", "tag", "said"),
    [
        (lambda x: x * x, "multiply", "overflow_in_dtype", "overflow"),
        (lambda x: 1 / (x - x), "divide", "divide_by_zero", "divide by zero"),
        (lambda x: (x - x) / (x - x), "divide", "unknown", "invalid value"),
    ],
)
def test_where_no_second_run_can_be_believed_the_library_itself_is_quoted(
    make: Any, name: str, tag: str, said: str
) -> None:
    left: SimpleQueue[float] = SimpleQueue()
    left.put(1e200)
    event = failing(lambda x: make(x * left.get()), np.ones(2))
    assert (event.operation.name, event.cause.tag) == (name, tag)
    assert event.cause.text.endswith(f"the library itself reported: {said}")


@pytest.mark.parametrize("action", ["raise", "record"])
@pytest.mark.parametrize("level", ["step", "layer"])
@pytest.mark.parametrize("way", ["solver", "assert"])
def test_an_exception_over_a_bad_value_takes_the_report_along(
    way: str, action: Any, level: Any
) -> None:
    def step(x: Any) -> Any:
        y = np.log(x - 2)
        if way == "solver":
            return np.linalg.eigvals(y)
        assert np.isfinite(y).all()
        return y

    tracker = track(step, action=action, level=level)
    with pytest.raises(Exception, match=r"finite|nan|NaN|assert|isfinite") as caught:
        tracker(np.ones((2, 2)))
    (event,) = tracker.events
    assert event.operation.name == "log"
    broke = caught.value.__cause__ if action == "raise" else caught.value
    assert isinstance(broke, np.linalg.LinAlgError if way == "solver" else AssertionError)
    if action == "record":
        assert "log(-1.0)" in caught.value.__notes__[0]


def test_an_exception_over_something_else_says_nothing() -> None:
    def step(x: Any) -> Any:
        y = np.nan_to_num(np.log(x - 2))
        raise KeyError(float(y.sum() + x.sum()))

    tracker = track(step)
    with pytest.raises(KeyError) as caught:
        tracker(np.ones(2))
    assert not tracker.events
    assert not hasattr(caught.value, "__notes__")


@READS
@LEVELS
def test_an_operand_that_was_made_out_of_sight_is_found_in_the_error_log(
    read: str, level: str
) -> None:
    def mixed(x: Any) -> Any:
        hidden = np.asarray(x) - 1
        with np.errstate(all="ignore"):
            np.sqrt(x - 2)  # in sight, and of no consequence
        return x + hidden / hidden

    event = event_of(mixed, np.ones(3), read=read, level=level)
    assert event.operation.name == "divide"
    assert event.operation.source.text == "return x + hidden / hidden"
    assert notes_with(event, "NumPy's error log has: invalid value in divide")


@READS
def test_of_two_errors_out_of_sight_none_is_named_and_both_are_told(read: str) -> None:
    def mixed(x: Any) -> Any:
        hidden = np.asarray(x) - 1
        unused = np.log(hidden - 1)
        return x + hidden / hidden + unused * 0

    event = event_of(mixed, np.ones(3), read=read, level="layer")
    assert event.operation.name == "add", "where the value came into sight"
    assert any("log at" in note and "divide at" in note for note in event.notes)


HOLED = np.array([1.0, NAN, 1.0])


@READS
@LEVELS
def test_what_was_bad_before_is_not_put_down_to_an_error_out_of_sight(
    read: str, level: str
) -> None:
    def mixed(x: Any) -> Any:
        hidden = np.asarray(x) - 1
        masked = np.nan_to_num(hidden / hidden)
        return x + masked + HOLED

    event = event_of(mixed, np.ones(3), read=read, level=level)
    assert (event.operation.name, event.cause.tag) == ("add", "bad_input")


@READS
@LEVELS
def test_an_error_that_makes_no_such_value_is_not_blamed(read: str, level: str) -> None:
    def mixed(x: Any) -> Any:
        hidden = np.asarray(x) - 1
        np.maximum(np.log(hidden), 0)  # made -Inf, which is gone
        hidden[0] = NAN
        return x + hidden

    event = event_of(mixed, np.ones(3), read=read, level=level)
    # At the level of steps a second run watches what the code makes itself, too.
    assert event.operation.name == ("setitem" if level == "step" else "add")
    assert level == "step" or notes_with(event, "log at test_recorder_leaving.py")
