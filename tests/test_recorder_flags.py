"""What a recorder reads and refuses, and its arrays and functions in the hands of others."""

import copy
import gc
import json
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._steps.tracked import inside
from anynan.arrays.tracked import TrackedArray
from tests.failing import failure
from tests.flat import split
from tests.recording import NAN, ONES, READS, ZEROS, Array, State, caught, recorded, track

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LARGE = np.ones(2**14)
OUTSIDE = LARGE.copy()
OUTSIDE[-1] = NAN


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x + OUTSIDE,  # only passed on
        lambda x: np.where(x > 0, OUTSIDE, x),
        lambda x: np.linalg.inv((x * 0).reshape(128, -1)[:, :128] + np.diag(OUTSIDE[-128:])),
        lambda x: np.einsum("i,i->i", x * 1e300, x * 1e300),
        lambda x: np.multiply(x * 1e200, x * 1e200, out=np.empty(x.shape)),
        # Its options are not taken on trust.
        lambda x: np.concatenate([x * 1e300, x], dtype="f4", casting="unsafe"),
        lambda x: (x * 1e300).sum(dtype="f4"),
        lambda x: np.add(x, x * 1e300, dtype="f4", casting="unsafe"),
    ],
)
def test_an_operation_that_makes_no_number_is_read_too(program: Any) -> None:
    assert caught(program, LARGE).kind in ("nan", "posinf")


@READS
def test_a_number_that_was_taken_out_is_blamed_for_what_it_spoils(read: str) -> None:
    def program(x: Array) -> Any:
        out = np.zeros(3)
        for i in range(3):
            out[i] = x[i] / (x[i] - 1)  # here
        return out

    event = caught(program, ONES, read=read)
    assert event.operation.name == "divide"
    assert event.operation.source.text.endswith("# here")


def test_pause_resume_remove() -> None:
    kinds: list[type] = []

    def program(x: Any) -> Any:
        kinds.append(type(x))
        return x / x

    with track(program, action="record") as tracker:
        tracker.pause()
        tracker(ZEROS)
        tracker.resume()
        tracker(ZEROS)
    tracker(ZEROS)
    assert kinds == [np.ndarray, TrackedArray, np.ndarray]
    assert len(tracker.events) == 1


def test_nested_and_recursive_calls_are_one_step() -> None:
    inner = track(lambda x: x / x, action="record")

    @track(action="record")
    def outer(x: Array, depth: int = 2) -> Any:
        return inner(x) if depth == 0 else outer(x, depth - 1)

    outer(ZEROS)
    assert (len(outer.events), len(outer.history), len(inner.events)) == (1, 1, 0)


def test_threads_have_their_own_steps() -> None:
    tracker = track(lambda x: np.log(x), action="record")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: tracker(np.full(5, 1.0 - 2 * (i % 2))), range(80)))
    assert tracker.count("bad") == 40
    assert len(tracker.history) == 80


@READS
def test_nothing_is_kept_alive(read: Any) -> None:
    refs: list[Any] = []

    def program(x: Any) -> Any:
        with anynan.scope("a"):
            y: Any = np.exp(x)
        refs.append(weakref.ref(y._raw))
        refs.append(weakref.ref(x._raw))
        return float((y / y).sum())

    tracker = track(program, advanced=anynan.Advanced(read=read), action="record")
    gc.disable()
    try:
        for value in (1.0, 1000.0, 1.0):
            tracker(np.full(10, value))
            assert [ref() for ref in refs] == [None] * len(refs)
            refs.clear()
    finally:
        gc.enable()


def test_a_kept_array_keeps_no_other_alive() -> None:
    kept: list[Any] = []
    x = np.ones(10)
    held = weakref.ref(x)
    track(lambda x: kept.append(x * 2))(x)
    del x
    assert held() is None
    assert kept[0].tolist() == [2.0] * 10


def test_patterns_choose_scopes() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("a"), anynan.scope("b"):
            y = x / x
        with anynan.scope("c"):
            return np.nan_to_num(y)

    assert not recorded(program, ZEROS, exclude="a").events
    assert len(recorded(program, ZEROS, layers="a.b").events) == 1
    with pytest.warns(anynan.AnynanWarning, match="matched no scope .* the scopes were: a, a.b, c"):
        recorded(program, ZEROS, layers=["*", "encoder"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"action": "skip"}, "array code does not say what its update is"),
        ({"patience": 2}, r"Advanced\(patience=2\) drops the update"),
        ({"parameters": True}, "which arrays are weights"),
        ({"stats": ["rms"]}, r"'rms'\) is not read from array code"),
    ],
)
def test_wrong_options_are_named(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        track(lambda x: x, **split(options))


def generator(x: Array) -> Any:
    yield x


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (np.ones(3), "takes a function, not numpy.ndarray"),
        (State, "takes a function, not the class State"),
        (track(len), "a tracker already"),
        (generator, "runs after the call; track the function"),
    ],
)
def test_wrong_targets_are_named(target: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        track(target)


def test_namespace() -> None:
    xp = anynan.arrays.namespace(np)
    assert anynan.arrays.namespace(np) is anynan.arrays.namespace(xp) is xp
    assert type(xp.zeros(3)) is np.ndarray
    assert (xp.pi, xp.float32, xp.linalg.norm(np.ones(4))) == (np.pi, np.float32, 2.0)
    assert "exp" in dir(xp)
    event = caught(lambda x: xp.log(xp.zeros(3) - 1) + x, ONES)
    assert (event.operation.name, event.operation.raw) == ("log", "numpy.log")
    for wrong in (np.ones(3), 3, "numpy"):
        with pytest.raises(TypeError, match="takes an array library's module, not a"):
            anynan.arrays.namespace(wrong)


def test_at_writes_where_arrays_cannot_be_written_to() -> None:
    extra = pytest.importorskip("scipy._lib.array_api_extra")
    jnp = pytest.importorskip("jax.numpy")
    plain = track(lambda x: extra.at(x)[0].set(5.0))(jnp.zeros(2))
    assert plain.tolist() == [5.0, 0.0]
    event = failure(track(lambda x: extra.at(x.sum(), x.sum() > 1).set(np.log(-x[0]))), np.ones(2))
    assert event.operation.name == "log"


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
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
    assert "test_recorder_flags.py:" in note


HUGE = np.array([1.0, 1000.0])


def checked(x: Any) -> Any:
    y = np.exp(x) * 2
    anynan.check({"y": y}, "values")
    return np.minimum(y, 1.0)


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
@READS
@pytest.mark.parametrize(
    "program",
    [
        checked,
        lambda x: anynan.check(np.asarray(np.exp(x))),
        lambda x: anynan.check(float(np.exp(x)[1])),
    ],
    ids=["watched", "plain", "number"],
)
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


def test_a_check_of_what_the_tracker_never_saw() -> None:
    event = caught(lambda x: anynan.check(np.array([1.0, NAN]), "table"), np.ones(2))
    assert (event.phase, event.tensor, event.severity) == ("value", "table", "bad")


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
        track(plain)
        if name == "arrays"
        else pytest.importorskip(f"anynan.{name}", exc_type=ImportError).track(plain)
    )
    assert pickle.loads(pickle.dumps(tracker)) is plain
    assert copy.deepcopy([tracker]) == [plain]
    cloudpickle = pytest.importorskip("cloudpickle")
    assert pickle.loads(cloudpickle.dumps(tracker))(4.0) == 2.0
    tracker.remove()
