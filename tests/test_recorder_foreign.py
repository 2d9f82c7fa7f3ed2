"""Tracked arrays and functions in the hands of others: what asks for a class, copies or checks."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._steps.tracked import inside
from tests.failing import failure
from tests.processes import python
from tests.recording import READS, recorded, track

pytestmark = pytest.mark.filterwarnings("ignore::anynan.AnynanWarning", "ignore::RuntimeWarning")

# SciPy reads its switch when it is imported.
SCIPY = """
import numpy as np, scipy.signal as sg, scipy.stats as st, scipy.linalg as la
import anynan
x = np.random.default_rng(0).normal(size=50)
programs = [
    lambda s: sg.convolve(s, np.ones(5)),
    lambda s: sg.convolve(np.ones(5), s),
    lambda s: sg.lfilter([1.0, 0.5], [1.0, 0.2], s),
    lambda s: la.solve_banded((0, 0), np.ones((1, 50)), s),
    lambda s: st.pearsonr(s, s**2 + np.arange(50)).statistic,
]
for i, program in enumerate(programs):
    assert np.array_equal(anynan.track(program, level="layer")(x), program(x)), i
"""


@pytest.mark.tier(2)
def test_beside_a_plain_array_under_a_vendored_array_api_compat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")
    done = python("-W", "ignore", "-c", SCIPY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_at_writes_where_arrays_cannot_be_written_to() -> None:
    extra = pytest.importorskip("scipy._lib.array_api_extra")
    jnp = pytest.importorskip("jax.numpy")
    plain = track(lambda x: extra.at(x)[0].set(5.0))(jnp.zeros(2))
    assert plain.tolist() == [5.0, 0.0]
    event = failure(track(lambda x: extra.at(x.sum(), x.sum() > 1).set(np.log(-x[0]))), np.ones(2))
    assert event.operation.name == "log"


def test_code_that_takes_no_other_class_is_not_watched_closely() -> None:
    """As libraries do that look a class up: what the second run met would end the program."""

    def takes(x: Any) -> Any:
        return {np.ndarray: np.log}[type(x)](x) * np.sqrt(x)

    step = anynan.track(takes, action="warn")
    for _ in range(3):
        assert np.isnan(step(np.full(2, -1.0))).all()
    (event,) = step.events
    assert event.times == 3
    assert any("the second run failed: KeyError" in note for note in event.notes)


@pytest.mark.parametrize("program", [json.dumps, lambda x: memoryview(x)])
def test_an_exception_of_code_that_refused_it_says_so(program: Any) -> None:
    with pytest.raises(TypeError) as error:
        track(program)(np.ones(3))
    (note,) = error.value.__notes__
    assert "a stand-in (TrackedArray), which this code did not take" in note
    assert "test_recorder_foreign.py:" in note


HUGE = np.array([1.0, 1000.0])


def checked(x: Any) -> Any:
    y = np.exp(x) * 2
    anynan.check({"y": y}, "values")
    return np.minimum(y, 1.0)


def checked_plain(x: Any) -> None:
    anynan.check(np.asarray(np.exp(x)))


def checked_number(x: Any) -> None:
    anynan.check(float(np.exp(x)[1]))


@READS
@pytest.mark.parametrize("program", [checked, checked_plain, checked_number])
def test_a_check_tells_what_the_tracker_knows(program: Any, read: Any) -> None:
    (event,) = recorded(program, HUGE, read=read).events
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

    (event,) = recorded(program, np.ones(2), read=read).events
    assert (event.phase, event.tensor, event.severity) == ("value", "table", "bad")
    with pytest.raises(anynan.NonFiniteError, match="NaN found in table"):
        track(program, advanced=anynan.Advanced(read=read))(np.ones(2))


def plain(x: Any) -> Any:
    return np.sqrt(x)


@track
def decorated(x: Any) -> Any:
    return np.sqrt(x)


@pytest.mark.parametrize("name", ["arrays", "torch", "jax", "tensorflow", "cupy"])
def test_a_tracked_function_is_sent_as_what_it_wraps(name: str) -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy([decorated])[0] is inside(decorated).fn
    tracker = (
        track(plain) if name == "arrays" else pytest.importorskip(f"anynan.{name}").track(plain)
    )
    assert pickle.loads(pickle.dumps(tracker)) is plain
    assert copy.deepcopy([tracker]) == [plain]
    cloudpickle = pytest.importorskip("cloudpickle")
    assert pickle.loads(cloudpickle.dumps(tracker))(4.0) == 2.0
    tracker.remove()
