"""What a recorder reads, takes on trust and refuses."""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._steps.tracked import inside
from anynan.arrays.tracked import TrackedArray
from tests.flat import split
from tests.recording import NAN, ONES, ZEROS, Array, State, caught, recorded, track

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


LARGE = 2**14


def test_what_makes_no_number_is_read_too() -> None:
    large = np.ones(LARGE)
    outside = large.copy()
    outside[-1] = NAN
    for program in (
        lambda x: x + outside,  # only passed on
        lambda x: np.where(x > 0, outside, x),
        lambda x: np.linalg.inv((x * 0).reshape(128, -1)[:, :128] + np.diag(outside[-128:])),
        lambda x: np.einsum("i,i->i", x * 1e300, x * 1e300),
        lambda x: np.multiply(x * 1e200, x * 1e200, out=np.empty(x.shape)),
    ):
        with np.errstate(all="ignore"):
            assert caught(program, large).kind in ("nan", "posinf")


# What is out of sight is said.


def test_a_number_that_was_taken_out_is_blamed_for_what_it_spoils() -> None:
    def program(x: Array) -> Any:
        out = np.zeros(3)
        for i in range(3):
            out[i] = x[i] / (x[i] - 1)  # here
        return out

    for read in ("immediate", "end"):
        event = caught(program, ONES, read=read)
        assert event.operation.name == "divide"
        assert event.operation.source.text.endswith("# here")


def test_what_runs_after_the_call_is_refused() -> None:
    def generator(x: Array) -> Any:
        yield x

    async def coroutine(x: Array) -> Any:
        return x

    for target in (generator, coroutine):
        with pytest.raises(TypeError, match="runs after the call; track the function"):
            track(target)


def test_options_of_an_operation_are_not_taken_on_trust() -> None:
    large = np.full(LARGE, 1e300)
    for program in (
        lambda x: np.concatenate([x, x], dtype="f4", casting="unsafe"),
        lambda x: x.sum(dtype="f4"),
        lambda x: np.add(x, x, dtype="f4", casting="unsafe"),
    ):
        assert caught(program, large).kind == "posinf"


# The tracker.


def test_decorator_method_and_metadata() -> None:
    class Model:
        scale = 2.0

        @track(action="record")
        def forward(self, x: Array) -> Any:
            """Do it."""
            return x * self.scale

    assert Model().forward(ONES).tolist() == [2, 2, 2]
    assert Model.forward.__doc__ == "Do it."
    assert inside(Model.forward).fn.__name__ == "forward"


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
    assert len(outer.events) == 1
    assert not inner.events
    assert len(outer.history) == 1


def test_threads_have_their_own_steps() -> None:
    tracker = track(lambda x: np.log(x), action="record")
    barrier = threading.Barrier(4)

    def work(value: float) -> None:
        barrier.wait()
        for _ in range(20):
            tracker(np.full(5, value))

    threads = [threading.Thread(target=work, args=(v,)) for v in (1.0, -1.0, 2.0, -3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.count("bad") == 40
    assert len(tracker.history) == 80


@pytest.mark.parametrize("read", ["immediate", "end"])
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


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (3, "takes a function, not int"),
        (np.ones(3), "takes a function, not numpy.ndarray"),
        (State, "takes a function, not the class State"),
    ],
)
def test_wrong_targets_are_named(target: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        track(target)
    with pytest.raises(TypeError, match="a tracker already"):
        track(track(len))


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
