"""What runs on a device: probes, tracked functions, ``check``, ``errstate``. Not yet run."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._arrays.probe import probe
from tests.failing import failure

cupy: Any = pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.tier(2),
    pytest.mark.gpu,
    pytest.mark.skipif(not cupy.cuda.is_available(), reason="no CUDA device is available"),
]

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "bfloat16"])
@pytest.mark.parametrize("bad", [0.0, NAN, INF, -INF])
@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_003])
def test_the_probe_agrees_with_the_host(dtype: str, bad: float, size: int) -> None:
    kind = np.dtype(getattr(pytest.importorskip("ml_dtypes"), dtype, dtype))
    host = np.random.default_rng(0).normal(size=size).astype(kind)
    for at in {0, size // 2, size - 1}:
        x = host.copy()
        x[at] = bad
        assert str(probe(cupy.asarray(x))) == str(probe(x))
        assert str(probe(cupy.asarray(x)[::-1][::2])) == str(probe(x[::-1][::2]))


@pytest.mark.parametrize(
    "view",
    [lambda x: x[1:, ::3], lambda x: x.transpose(2, 0, 1)[::-2]],
)
def test_views_are_read_without_a_copy(view: Callable[[Any], Any]) -> None:
    host = np.random.default_rng(0).normal(size=(6, 70, 8))
    x = view(cupy.asarray(host))
    probe(x)
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes(), pool.used_bytes()
    assert probe(x) == probe(view(host))
    assert (pool.total_bytes(), pool.used_bytes()) == before


def step(x: Any, weight: Any) -> Any:
    with anynan.scope("layer"):
        y = cupy.exp(x @ weight)
    with anynan.scope("softmax"):
        y = y / y.sum(axis=-1, keepdims=True)
    with anynan.scope("backward"):
        gradient = x.T @ (y - 1.0)
    return y.mean(), gradient


def test_a_tracked_step_gives_the_same_and_keeps_no_memory() -> None:
    x, weight = cupy.ones((64, 8), "f4"), cupy.ones((8, 8), "f4")
    tracker = anynan.cupy.track(step)
    plain = step(x, weight)
    ours = tracker(x, weight)
    assert all(
        type(a) is type(b) and bool((a == b).all()) for a, b in zip(ours, plain, strict=True)
    )
    del ours, plain
    pool = cupy.get_default_memory_pool()
    used = pool.used_bytes()
    for _ in range(3):
        tracker(x, weight)
        assert pool.used_bytes() == used


def test_the_fault_is_named() -> None:
    event = failure(
        anynan.cupy.track(step), cupy.full((4, 8), 100.0, "f4"), cupy.ones((8, 8), "f4")
    )
    assert (event.backend, event.layer, event.kind) == ("cupy", "layer", "posinf")
    assert (event.operation.name, event.cause.tag) == ("exp", "exp_overflow")
    assert event.operation.source.text == "y = cupy.exp(x @ weight)"
    assert event.then.name == "divide"


def test_whichever_stream_wrote_a_value_it_is_waited_for() -> None:
    tracker = anynan.cupy.track(lambda x: (x * 2).sum())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(10_000_000, "f4")
        for _ in range(20):
            x += 1.0
        x[-1] = NAN
        with pytest.raises(anynan.NonFiniteError):
            tracker(x)


def test_check_is_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from anynan.cupy import tracking

    reads: list[int] = []
    really = tracking.CupySlots.numbers

    def counted(self: Any, flags: list[Any]) -> Any:
        reads.append(1)
        return really(self, flags)

    monkeypatch.setattr(tracking.CupySlots, "numbers", counted)
    anynan.cupy.check(**{f"x{i}": cupy.ones(1000) for i in range(50)})
    assert reads == [1]
    event = failure(anynan.cupy.check, a=cupy.ones(3), b=cupy.array([1.0, NAN]))
    assert event.tensor == "b"


def test_errstate() -> None:
    with pytest.raises(anynan.NonFiniteError) as caught, anynan.cupy.errstate() as watch:
        x = watch(cupy.zeros(3))
        y = cupy.log(x) * x
        assert y is not None
    assert caught.value.event.operation is not None
