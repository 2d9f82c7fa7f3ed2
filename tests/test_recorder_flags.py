"""What a recorder reads, takes on trust and refuses."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import anynan
from anynan.arrays.tracked import TrackedArray
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


def test_pause_resume_remove(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setenv("ANYNAN", "off")
    track(program)(ZEROS)
    assert kinds[-1] is np.ndarray


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
    assert anynan.arrays.namespace(np) is xp
    assert anynan.arrays.namespace(xp) is xp
    assert type(xp.zeros(3)) is np.ndarray
    assert xp.pi == np.pi
    assert xp.float32 is np.float32
    assert xp.linalg.norm(np.ones(4)) == 2.0
    assert "exp" in dir(xp)
    event = caught(lambda x: xp.log(xp.zeros(3) - 1) + x, ONES)
    assert (event.operation.name, event.operation.raw) == ("log", "numpy.log")
    for wrong in (np.ones(3), 3, "numpy"):
        with pytest.raises(TypeError, match="takes an array library's module, not a"):
            anynan.arrays.namespace(wrong)
