"""Arrays that hold others: sparse, labelled and Arrow's; their elements are looked at."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._arrays import registry
from tests.failing import failure

pytestmark = pytest.mark.filterwarnings("ignore")
BAD = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, np.nan]])
FINE = np.nan_to_num(BAD)
NAN = float("nan")


need = pytest.importorskip

HOLDERS: dict[str, Callable[[Any], Any]] = {
    "scipy": lambda x: need("scipy.sparse").csr_array(x),
    "torch COO": lambda x: need("torch").tensor(x).to_sparse(),
    "torch CSR": lambda x: need("torch").tensor(x).to_sparse_csr(),
    "torch CSC": lambda x: need("torch").tensor(x).to_sparse_csc(),
    "BCOO": lambda x: need("jax.experimental.sparse").BCOO.fromdense(x),
    "COO": lambda x: need("sparse").COO.from_numpy(x),
    "GCXS": lambda x: need("sparse").GCXS.from_numpy(x),
    "DOK": lambda x: need("sparse").DOK.from_numpy(x),
    "xarray": lambda x: need("xarray").DataArray(x),
    "xarray in chunks": lambda x: need("dask.array") and need("xarray").DataArray(x).chunk(),
}


@pytest.fixture(params=HOLDERS)
def hold(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Return what puts a dense array into another."""
    return HOLDERS[request.param]


def test_check_and_summarize(hold: Callable[[Any], Any]) -> None:
    fine = hold(FINE)
    assert anynan.check(fine) is fine
    assert anynan.summarize(fine).max == 1.0
    event = failure(anynan.check, hold(BAD))
    summary = event.summary
    assert (summary.shape, summary.nan, summary.first_bad) == ((2, 3), 1, (1, 2))
    with pytest.raises(anynan.NonFiniteError):
        list(anynan.watch([hold(BAD)]))


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_what_a_tracked_function_takes_and_gives_is_judged(hold: Any, read: Any) -> None:
    advanced = anynan.Advanced(read=read)
    tracker = anynan.track(lambda x: [x], action="record", advanced=advanced)
    x = hold(FINE)
    assert tracker(x)[0] is x
    assert not tracker.events
    tracker(hold(BAD))
    assert [(event.phase, event.tensor) for event in tracker.events] == [("input", "x")]
    made = anynan.track(lambda x: hold(x * BAD), action="record", advanced=advanced)
    made(np.ones(3))
    assert [(e.phase, e.kind, e.tensor) for e in made.events] == [("forward", "nan", "result")]


@pytest.mark.parametrize("adapter", [False, True], ids=["alone", "beside_the_adapter"])
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_the_parts_of_a_nested_array(
    adapter: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter has a reader of its own."""
    torch = pytest.importorskip("torch")
    if adapter:
        pytest.importorskip("anynan.torch")
    else:
        monkeypatch.setattr(registry, "_readers", [])
    make = partial(torch.nested.nested_tensor, layout=getattr(torch, layout))
    fine, bad = torch.ones(2), torch.tensor([1.0, torch.nan, 2.0])
    x = make([fine, fine[:1]])
    assert anynan.check(x) is x
    assert anynan.summarize(x).max == 1.0
    with pytest.raises(anynan.NonFiniteError):
        anynan.check(make([fine, bad]))
    assert anynan.summarize(make([fine, bad])).nan == 1
    start, length = torch.tensor([0, 0]), torch.tensor([1, 2])
    rows = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    hidden = torch.nested.narrow(rows, 1, start, length, layout=torch.jagged)
    assert anynan.check(hidden) is hidden


@pytest.mark.parametrize(
    ("fine", "bad"),
    [
        ([1.0, None], [None, NAN]),
        ([1, 2], [NAN]),
        (["a"], [1.0, NAN]),
        ([[1.0], None, []], [[1.0], [2.0, NAN]]),
        ([{"a": 1.0, "b": "x"}, None], [{"a": NAN, "b": "x"}]),
    ],
)
def test_columns_of_arrow(fine: list[Any], bad: list[Any]) -> None:
    arrow = pytest.importorskip("pyarrow")
    for make in (arrow.array, lambda x: arrow.chunked_array([x])):
        column = make(fine)
        assert anynan.check(column) is column
        with pytest.raises(anynan.NonFiniteError):
            anynan.check(make(bad))


def test_tables_of_arrow() -> None:
    arrow = pytest.importorskip("pyarrow")
    for make in (arrow.table, arrow.record_batch):
        fine = make({"a": [1.0, None], "b": ["x", "y"]})
        assert anynan.check(fine) is fine
        event = failure(anynan.check, make({"a": [1.0, NAN], "b": ["x", "y"]}), "table")
        assert event.tensor == "table['a']"
