"""Arrays larger than one machine: one graph, any scheduler, and a worker that dies is no matter."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._arrays.measures import measure
from anynan._arrays.probe import probe

da: Any = pytest.importorskip("dask.array")
callbacks: Any = pytest.importorskip("dask.callbacks")

pytestmark = pytest.mark.tier(2)

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def graphs() -> Iterator[list[int]]:
    """Count what is given to the scheduler."""
    started: list[int] = []
    with callbacks.Callback(start=lambda dsk: started.append(len(dsk))):
        yield started


def values() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(30, 14))


# Every dtype in some chunks, every way of cutting with each kind of value.
@pytest.mark.parametrize(
    ("chunks", "dtype", "bad"),
    [
        ((7, 5), "f2", NAN),
        ((30, 14), ">f4", None),
        ((1, 14), "c8", -INF),
        (((3, 27), (14,)), "f8", -INF),
    ],
)
def test_the_summary_is_numpys(
    graphs: list[int], chunks: Any, dtype: str, bad: float | None
) -> None:
    x = values().astype(dtype)
    x[0, 3], x[4] = 0.0, x[4] * 1e-40
    if bad is not None:
        x[29, 2] = x[17, 9] = bad
    ours, plain = anynan.summarize(da.from_array(x, chunks=chunks)), anynan.summarize(x)
    assert len(graphs) == 1
    for name in ("mean", "rms"):
        one, other = getattr(ours, name), getattr(plain, name)
        assert (one is None) == (other is None)
        assert one is None or abs(one - other) <= 1e-12 * max(1, abs(other))
    assert replace(ours, mean=None, rms=None) == replace(plain, mean=None, rms=None)
    assert str(probe(da.from_array(x, chunks=chunks))) == str(probe(x)) or dtype[0] == "c"


def test_a_check_is_one_graph_and_none_where_nothing_can_be_bad(graphs: list[int]) -> None:
    for dtype in (int, bool):
        anynan.check(da.ones((4, 4), dtype=dtype, chunks=2))
    assert not graphs
    x = values()
    clean = da.from_array(x, chunks=(10, 7))
    assert anynan.check(clean) is clean
    assert len(graphs) == 1
    x[25, 3] = NAN
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.check({"a": clean, "b": da.from_array(x, chunks=(10, 7))}, "batch")
    assert len(graphs) == 3
    event = caught.value.event
    assert (event.backend, event.tensor, event.kind) == ("dask", "batch['b']", "nan")
    assert event.summary.first_bad == (25, 3)


def test_edges() -> None:
    assert measure(da.zeros((0, 3))).size == 0
    assert measure(da.asarray(np.float64(3.0))).max == 3.0
    with pytest.raises(anynan.NonFiniteError):
        anynan.check(da.asarray(np.float64(NAN)))
    x = np.array([1.0, NAN, -5.0, INF, 2.0])
    unknown = da.from_array(x, chunks=2)
    unknown = unknown[unknown != -5.0]
    assert anynan.summarize(unknown) == anynan.summarize(x[x != -5.0])
    huge = np.full(100, 1.5e308)
    assert measure(da.from_array(huge, chunks=10)).rms == pytest.approx(1.5e308)
    masked = da.from_array(np.ma.masked_invalid([1.0, NAN]), chunks=1)
    assert measure(masked).bad == 0


def test_only_counts_travel() -> None:
    """No chunk leaves its worker: what tasks hand on is small."""
    sizes: list[int] = []
    with callbacks.Callback(
        posttask=lambda _, result, *__: sizes.append(len(pickle.dumps(result)))
    ):
        anynan.summarize(da.random.random((1000, 1000), chunks=(100, 1000)))
    assert len(sizes) >= 10
    assert max(sizes) < 10_000  # a chunk has 800 000 bytes


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_dasks_own_functions_take_an_array_out_of_sight_and_that_is_said() -> None:
    def shifted(x: Any) -> Any:
        masked = da.where(x > 0, -INF, x)
        return masked - masked.max(axis=-1, keepdims=True)

    tracked = anynan.track(shifted, action="record")
    with pytest.warns(anynan.AnynanWarning, match=r"taken out of a tracked one at test_dask\.py"):
        tracked(da.from_array(np.ones((2, 2)), chunks=(1, 2)))
    (event,) = tracked.events
    assert event.operation is None
    line = shifted.__code__.co_firstlineno + 1
    assert f"left anynan's sight at test_dask.py:{line} (" in " ".join(event.notes)
