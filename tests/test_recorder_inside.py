"""``anynan.check`` in a tracked function, and tracked functions that go to other processes."""

import copy
import functools
import pickle
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._steps.tracked import inside

# The recorder itself; what the default makes of it is in test_recorder_ends.
track: Any = functools.partial(anynan.track, level="layer")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::anynan.AnynanWarning")
READS = pytest.mark.parametrize("read", ["immediate", "end"])
HUGE = np.array([1.0, 1000.0])


def checked(x: Any) -> Any:
    z = np.exp(x)
    y = z * 2
    anynan.check({"y": y}, "values")
    return np.minimum(y, 1.0)


def checked_plain(x: Any) -> Any:
    z = np.exp(x)
    anynan.check(np.asarray(z))
    return 1.0


def checked_number(x: Any) -> Any:
    anynan.check(float(np.exp(x)[1]))
    return 1.0


@READS
@pytest.mark.parametrize("program", [checked, checked_plain, checked_number])
def test_a_check_tells_what_the_tracker_knows(program: Any, read: Any) -> None:
    tracker = track(program, action="record", advanced=anynan.Advanced(read=read))
    tracker(HUGE)
    (event,) = tracker.events
    assert (event.operation.name, event.cause.tag) == ("exp", "exp_overflow")
    assert event.operation.source.function == program.__name__
    assert event.spread.surfaced.startswith("the check of ")


@READS
def test_a_check_obeys_the_trackers_action(read: Any) -> None:
    with pytest.raises(anynan.NonFiniteError, match="surfaced at the check of values") as error:
        track(checked, advanced=anynan.Advanced(read=read))(HUGE)
    assert error.value.tracker.events == (error.value.event,)
    with pytest.warns(anynan.AnynanWarning, match="exp_overflow|exp of a number") as seen:
        track(checked, advanced=anynan.Advanced(read=read), action="warn")(HUGE)
    assert {item.filename for item in seen} == {__file__}


@READS
def test_a_check_of_what_the_tracker_never_saw(read: Any) -> None:
    def program(x: Any) -> Any:
        anynan.check(np.array([1.0, np.nan]), "table")
        return x

    tracker = track(program, action="record", advanced=anynan.Advanced(read=read))
    tracker(np.ones(2))
    (event,) = tracker.events
    assert (event.phase, event.tensor, event.severity) == ("value", "table", "bad")
    with pytest.raises(anynan.NonFiniteError, match="NaN found in table"):
        track(program, advanced=anynan.Advanced(read=read))(np.ones(2))


@track
def decorated(x: Any) -> Any:
    return np.sqrt(x)


def plain(x: Any) -> Any:
    return np.sqrt(x)


def test_a_tracked_function_is_sent_as_what_it_wraps() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    tracker = track(plain)
    assert pickle.loads(pickle.dumps(tracker)) is plain
    assert copy.deepcopy(tracker) is plain
    assert copy.deepcopy([decorated])[0] is inside(decorated).fn


@pytest.mark.parametrize("name", ["torch", "jax", "tensorflow", "cupy"])
def test_a_function_tracked_by_any_backend_is_sent_as_what_it_wraps(name: str) -> None:
    pytest.importorskip(name)
    tracker = getattr(anynan, name).track(plain)
    assert pickle.loads(pickle.dumps(tracker)) is plain
    assert copy.deepcopy([tracker]) == [plain]
    cloudpickle = pytest.importorskip("cloudpickle")
    assert pickle.loads(cloudpickle.dumps(tracker))(4.0) == 2.0
    tracker.remove()
