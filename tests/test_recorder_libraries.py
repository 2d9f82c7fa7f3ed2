"""``anynan.track`` on arrays of other libraries: the same code, the same report, one read."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._arrays import access as arrays
from anynan.arrays import deferred
from tests.backends import Backend, Space
from tests.failing import failure

# The recorder itself; what the default makes of it is in test_recorder_ends.
track: Any = functools.partial(anynan.track, level="layer")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
LIBRARIES = [Backend.NUMPY, Backend.STRICT, Backend.TORCH_STANDARD, Backend.JAX, Backend.DASK]


@pytest.fixture(params=LIBRARIES, ids=lambda b: b.library)
def library(request: pytest.FixtureRequest) -> Space:
    """One of the libraries that array code is written over."""
    backend: Backend = request.param
    if not backend.installed:
        pytest.skip(f"{backend.library} is not installed")
    return Space(backend, backend.load())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the flags of each copy to the host."""
    counted: list[int] = []
    really = arrays.to_host

    def count(x: Any) -> Any:
        counted.append(int(np.prod(x.shape)))
        return really(x)

    monkeypatch.setattr(deferred, "to_host", count)
    return counted


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat host memory as a device: no element is looked at but by the library's functions."""
    really = arrays.on_host
    monkeypatch.setattr(
        deferred, "on_host", lambda x: really(x) if isinstance(x, np.ndarray | np.generic) else None
    )


def attention(x: Any, scale: float = 1.0) -> Any:
    xp = x.__array_namespace__()
    with anynan.scope("scores"):
        scores = xp.matmul(x, xp.matrix_transpose(x)) * scale
    with anynan.scope("softmax"):
        grown = xp.exp(scores)
        weights = grown / xp.sum(grown, axis=-1, keepdims=True)
    return xp.sum(weights * xp.asarray(2.0, dtype=x.dtype))


def batch() -> Any:
    return np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


def value(x: Any) -> float:
    return float(x)


@pytest.mark.parametrize("read", ["auto", "immediate", "end"])
def test_the_result_is_the_librarys_own(library: Space, read: Any) -> None:
    x = library.array(batch())
    ours = track(attention, advanced=anynan.Advanced(read=read))(x)
    assert type(ours) is type(x) or isinstance(ours, np.generic)
    if hasattr(x, "__array_namespace__") and library.backend is not Backend.NUMPY:
        assert value(ours) == value(attention(x))
    assert abs(value(ours) - 6.0) < 1e-4


def test_the_report_is_the_same(library: Space) -> None:
    event = failure(track(attention), library.array(batch()), scale=100.0)
    assert event.backend == library.backend.library
    assert (event.layer, event.phase, event.kind) == ("softmax", "forward", "posinf")
    assert (event.operation.name, event.then.name) == ("exp", "divide")
    assert event.cause.tag == "exp_overflow"
    assert event.operation.source.text == "grown = xp.exp(scores)"
    assert [layer for layer, _ in event.trail] == ["scores", "softmax"]
    assert event.operation.inputs[0].shape == (3, 3)


@pytest.mark.usefixtures("far")
def test_one_read_for_a_call(library: Space, reads: list[int]) -> None:
    if library.backend is Backend.NUMPY:
        pytest.skip("host memory: there is nothing to bring there")
    tracker = track(attention, advanced=anynan.Advanced(read="end"))
    tracker(library.array(batch()))
    assert len(reads) == 1
    assert reads[0] % 3 == 0
    tracker(library.array(batch()))
    assert len(reads) == 2
    assert [r.layer for r in tracker.history.last()] == [None, "scores", "softmax", None]


def test_reading_every_n_calls_finds_it_later(library: Space) -> None:
    tracker = track(attention, advanced=anynan.Advanced(read=2))
    tracker(library.array(batch()), scale=100.0)
    assert not tracker.events
    event = failure(tracker, library.array(batch()))
    assert (event.step, event.layer) == (0, "softmax")
    assert event.operation.name == "exp"


def test_unread_calls_are_read_at_the_end() -> None:
    tracker = track(attention, advanced=anynan.Advanced(read=5))
    tracker(batch(), scale=100.0)
    with pytest.warns(anynan.AnynanWarning, match="exp"):
        tracker.remove()


@pytest.mark.usefixtures("far")
def test_arguments_that_were_overwritten_are_not_used_again() -> None:
    pytest.importorskip("torch")
    torch = Space(Backend.TORCH_STANDARD, Backend.TORCH_STANDARD.load())
    calls: list[int] = []

    def program(x: Any) -> Any:
        calls.append(1)
        x[0] = -1.0
        return x.__array_namespace__().log(x)

    event = failure(track(program, advanced=anynan.Advanced(read="end")), torch.array([1.0, 2.0]))
    assert calls == [1]
    assert event.operation.name == "log"
    assert "wrote into its own arguments" in event.notes[0]


def test_torch_in_place_and_methods() -> None:
    torch = pytest.importorskip("torch")

    def program(x: Any) -> Any:
        y = x.clone()
        y.add_(1.0)
        y[0].fill_(7.0)
        y *= 2
        return y.T.contiguous(), y.softmax(-1), y.max(dim=0), y.mean().item(), torch.ones(3) + y[0]

    x = torch.arange(6.0).reshape(2, 3)
    for read in ("immediate", "end"):
        ours, plain = track(program, advanced=anynan.Advanced(read=read))(x), program(x)
        assert all(torch.equal(ours[i], plain[i]) for i in (0, 1, 4))
        assert torch.equal(ours[2].values, plain[2].values)
        assert ours[3] == plain[3]
    event = failure(track(lambda x: x.sub_(x.max()).log_().mul(x)), torch.arange(3.0))
    assert event.operation.name in ("log", "multiply", "mul")


def test_jax_functional_updates() -> None:
    pytest.importorskip("jax")
    space = Space(Backend.JAX, Backend.JAX.load())

    def program(x: Any) -> Any:
        y = x.at[0].set(x[1] * 2)
        y = y.at[1:].add(1.0)
        y += 1.0
        return y

    x = space.array([1.0, 2.0, 3.0])
    assert track(program)(x).tolist() == program(x).tolist()
    event = failure(track(lambda x: x.at[0].set((x / (x - x))[0]) * 2), x)
    assert event.operation.name == "divide"


def test_jax_tracers_are_passed_on_and_said() -> None:
    jax = pytest.importorskip("jax")
    with pytest.warns(anynan.AnynanWarning, match="outside of a traced function"):
        assert jax.jit(track(lambda x: x + 1))(np.ones(3)).tolist() == [2.0, 2.0, 2.0]


class TestDask:
    """Nothing is computed but the flags, together, and what the report quotes."""

    @pytest.fixture(autouse=True)
    def _count(self) -> Iterator[None]:
        self.da: Any = pytest.importorskip("dask.array")
        callbacks = pytest.importorskip("dask.callbacks")
        self.graphs: list[int] = []
        with callbacks.Callback(start=lambda dsk: self.graphs.append(len(dsk))):
            yield

    def test_a_clean_call_computes_nothing_else(self) -> None:
        computed: list[int] = []

        def noted(block: Any) -> Any:
            computed.append(block.size)
            return block

        x = self.da.ones(100, chunks=50).map_blocks(noted, meta=np.empty(0))
        track(lambda x: (x * 2).sum())(x)
        assert computed == [50, 50]

    def test_chunks_of_unknown_size(self) -> None:
        x = self.da.from_array(np.array([1.0, -1.0, -2.0, 3.0]), chunks=2)
        result = track(lambda x: x[x > 5] + 1)(x)
        assert result.compute().tolist() == []
        event = failure(track(lambda x: np.sqrt(x[x < 0])), x)
        assert event.operation.name == "sqrt"

    def test_writing_into_a_lazy_array(self) -> None:
        def program(x: Any) -> Any:
            y = 1 / x
            y[np.isinf(y)] = 0.0
            return y

        x = self.da.from_array(np.array([0.0, 2.0]), chunks=1)
        tracker = track(program)
        assert tracker(x).compute().tolist() == [0.0, 0.5]
        assert not tracker.events


def test_a_nan_in_a_dtype_of_an_extension_package_is_seen_in_another_librarys_arrays() -> None:
    dask, ml_dtypes = pytest.importorskip("dask.array"), pytest.importorskip("ml_dtypes")
    x = dask.from_array(np.array([1.0, np.nan, 3.0]).astype(ml_dtypes.bfloat16), chunks=2)
    tracker = track(lambda x: x + x, action="record")
    tracker(x)
    assert [(event.phase, event.kind) for event in tracker.events] == [("input", "nan")]
