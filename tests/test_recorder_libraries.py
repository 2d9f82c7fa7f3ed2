"""``anynan.track`` on arrays of other libraries: the same code, the same report, one read."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import anynan
from anynan._arrays import access as arrays
from anynan.arrays import deferred
from tests.backends import Backend, Space
from tests.failing import failure
from tests.recording import attention, caught, recorded, track

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
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


def batch() -> Any:
    return np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("read", ["auto", "immediate", "end"])
def test_the_result_is_the_librarys_own(library: Space, read: Any) -> None:
    x = library.array(batch())
    ours = track(attention, advanced=anynan.Advanced(read=read))(x)
    assert type(ours) is type(x) or isinstance(ours, np.generic)
    assert float(ours) == pytest.approx(6.0, abs=1e-4)
    if library.backend in (Backend.STRICT, Backend.JAX):  # whose arrays know their namespace
        assert float(ours) == float(attention(x))


def test_the_report_is_the_same(library: Space) -> None:
    event = failure(track(attention), library.array(batch()), scale=100.0)
    assert (event.backend, event.layer) == (library.backend.library, "softmax")
    assert (event.phase, event.kind, event.cause.tag) == ("forward", "posinf", "exp_overflow")
    assert (event.operation.name, event.then.name) == ("exp", "divide")
    assert event.operation.source.text == "grown = xp.exp(scores)"
    assert [layer for layer, _ in event.trail] == ["scores", "softmax"]
    assert event.operation.inputs[0].shape == (3, 3)


@pytest.mark.usefixtures("far")
def test_one_read_for_a_call(library: Space, reads: list[int]) -> None:
    if library.backend is Backend.NUMPY:
        pytest.skip("host memory: there is nothing to bring there")
    tracker = track(attention, advanced=anynan.Advanced(read="end"))
    for calls in (1, 2):
        tracker(library.array(batch()))
        assert len(reads) == calls
    assert reads[0] % 3 == 0
    assert [r.layer for r in tracker.history.last()] == [None, "scores", "softmax", None]


def test_reading_every_n_calls_finds_it_later(library: Space) -> None:
    tracker = track(attention, advanced=anynan.Advanced(read=2))
    tracker(library.array(batch()), scale=100.0)
    assert not tracker.events
    event = failure(tracker, library.array(batch()))
    assert (event.step, event.layer) == (0, "softmax")
    assert event.operation.name == "exp"


@pytest.mark.usefixtures("far")
def test_arguments_that_were_overwritten_are_not_used_again() -> None:
    torch = pytest.importorskip("torch")
    calls: list[int] = []

    def program(x: Any) -> Any:
        calls.append(1)
        x[0] = -1.0
        return x.__array_namespace__().log(x)

    event = caught(program, torch.ones(2), read="end")
    assert (calls, event.operation.name) == ([1], "log")
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
    event = caught(lambda x: x.sub_(x.max()).log_().mul(x), torch.arange(3.0))
    assert event.operation.name in ("log", "multiply", "mul")


def test_jax_functional_updates() -> None:
    x = pytest.importorskip("jax.numpy").asarray([1.0, 2.0, 3.0])

    def program(x: Any) -> Any:
        y = x.at[0].set(x[1] * 2).at[1:].add(1.0)
        y += 1.0
        return y

    assert track(program)(x).tolist() == program(x).tolist()
    event = caught(lambda x: x.at[0].set((x / (x - x))[0]) * 2, x)
    assert event.operation.name == "divide"


def test_jax_tracers_are_passed_on_and_said() -> None:
    jax = pytest.importorskip("jax")
    with pytest.warns(anynan.AnynanWarning, match="outside of a traced function"):
        assert jax.jit(track(lambda x: x + 1))(np.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_a_clean_call_of_dask_computes_nothing_but_the_flags() -> None:
    noted = Mock(side_effect=lambda block: block)
    x = pytest.importorskip("dask.array").ones(100, chunks=50)
    track(lambda x: (x * 2).sum())(x.map_blocks(lambda block: noted(block), meta=np.empty(0)))
    assert noted.call_count == 2


def test_chunks_of_unknown_size() -> None:
    x = pytest.importorskip("dask.array").from_array(np.array([1.0, -1.0, -2.0, 3.0]), chunks=2)
    assert track(lambda x: x[x > 5] + 1)(x).compute().tolist() == []
    assert caught(lambda x: np.sqrt(x[x < 0]), x).operation.name == "sqrt"


def test_writing_into_a_lazy_array() -> None:
    def program(x: Any) -> Any:
        y = 1 / x
        y[np.isinf(y)] = 0.0
        return y

    tracker = track(program)
    x = pytest.importorskip("dask.array").from_array(np.array([0.0, 2.0]), chunks=1)
    assert tracker(x).compute().tolist() == [0.0, 0.5]
    assert not tracker.events


def test_a_nan_in_a_dtype_of_an_extension_package_is_seen_in_another_librarys_arrays() -> None:
    dask, ml_dtypes = pytest.importorskip("dask.array"), pytest.importorskip("ml_dtypes")
    x = dask.from_array(np.array([1.0, np.nan, 3.0]).astype(ml_dtypes.bfloat16), chunks=2)
    (event,) = recorded(lambda x: x + x, x).events
    assert (event.phase, event.kind) == ("input", "nan")
