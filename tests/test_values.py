"""What is no plain array: its numbers are read, what is missing is not bad, nothing is kept."""

import gc
import tracemalloc
import weakref
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import anynan
from tests.failing import failure

NAN, INF = float("nan"), float("inf")
NESTED = [("pose", [("angle", "f4")]), ("id", "i4")]


def bad(x: Any) -> tuple[str, tuple[int, ...] | None]:
    event = failure(anynan.check, x, "x")
    return event.tensor, event.summary.first_bad


@pytest.mark.parametrize(
    ("x", "path", "index"),
    [
        (np.array([1.0, "a", None, NAN], object), "x", (3,)),
        (np.array([[1, np.float32(INF)]], object), "x", (0, 1)),
        (np.array([Fraction(1, 2), Decimal("NaN")], object), "x", (1,)),
        (np.array([np.ones(3), np.array([0.0, INF])], object), "x[1]", (1,)),
        (np.array([{"a": [NAN]}, None], object), "x[0]['a'][0]", ()),
        (np.array([((1.0,), 2), ((NAN,), 3)], NESTED), "x['pose']['angle']", (1,)),
        (np.ma.array([1.0, NAN, INF], mask=[False, True, False]), "x", (2,)),
    ],
    ids=["mixed", "matrix", "exact", "arrays", "containers", "structured", "masked"],
)
def test_bad_numbers_are_found(x: Any, path: str, index: tuple[int, ...]) -> None:
    assert bad(x) == (path, index)


@pytest.mark.parametrize(
    "x",
    [
        np.array([None, "nan", 3, 10**400, True, b"x", object()], object),
        np.array([], object),
        np.ma.masked_invalid([1.0, NAN]),
        np.array([("nan", 3)], [("a", "U3"), ("b", "i4")]),
        np.array(["NaT"], "M8[D]"),
    ],
    ids=["objects", "empty", "masked", "structured", "times"],
)
def test_what_is_missing_or_no_number_is_not_bad(x: Any) -> None:
    assert anynan.check(x) is x


DENSE = np.array([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, NAN, 0.0], [INF, 0.0, 0.0, 1.0]])


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"])
@pytest.mark.parametrize("api", ["array", "matrix"])
def test_of_sparse_arrays_what_is_stored_is_read_at_its_place_in_the_whole(
    kind: str, api: str
) -> None:
    make = getattr(pytest.importorskip("scipy.sparse"), f"{kind}_{api}")
    path, index = bad(make(DENSE))
    assert path == "x"
    assert index and not np.isfinite(DENSE[index])
    summary = anynan.summarize(make(DENSE))
    assert (summary.shape, summary.nan, summary.posinf) == ((3, 4), 1, 1)
    assert (summary.min, summary.max) in ((1.0, 2.0), (0.0, 2.0))
    clean = make(np.nan_to_num(DENSE, posinf=0.0))
    assert anynan.check(clean) is clean


def test_columns_of_pandas_go_by_their_names_and_nulls_are_no_nan() -> None:
    pd: Any = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", None], "c": [1, 2]})
    assert anynan.check(frame) is frame
    frame["d"] = [0.5, INF]
    assert bad(frame) == ("x['d']", (1,))
    assert bad(frame["d"]) == ("x", (1,))
    assert bad(pd.Index([1.0, NAN])) == ("x", (1,))
    for kind, values in {
        "Float64": [1.0, None], "Int64": [1, None], "boolean": [True, None],
        "string": ["a", None], "category": ["a", "b"], "datetime64[ns]": [0, None],
    }.items():  # fmt: skip
        column = pd.Series(values, dtype=kind)
        assert anynan.check(column) is column, kind
    infinite = pd.Series([None, INF], dtype="Float64")
    assert bad(infinite) == ("x", (1,))
    assert anynan.summarize(infinite).dtype == "Float64"


def test_columns_of_polars_go_by_their_names_and_nulls_are_no_nan() -> None:
    pl: Any = pytest.importorskip("polars")
    frame = pl.DataFrame({"a": [1.0, None], "b": ["x", None], "c": [1, None]})
    assert anynan.check(frame) is frame
    assert bad(frame.with_columns(d=pl.Series([NAN, 1.0]))) == ("x['d']", (0,))
    assert bad(pl.Series([None, INF])) == ("x", (1,))
    with pytest.raises(TypeError, match=r"cannot find an array in a polars.*LazyFrame"):
        anynan.check(frame.lazy())


@pytest.mark.parametrize("kind", ["plain", "object", "masked", "structured", "column"])
def test_no_copy_is_kept(kind: str) -> None:
    x: Any = np.ones(20_000)
    x[-1] = NAN
    if kind == "object":
        x = x.astype(object)
    elif kind == "masked":
        x = np.ma.array(x, mask=x == 1.0)
    elif kind == "structured":
        x = x.view([("a", "f8")])
    elif kind == "column":
        x = pytest.importorskip("pandas").Series(x)
    held = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        tracemalloc.start()
        event = failure(anynan.check, x)
        list(anynan.watch([x], action="record"))
        found = anynan.summarize(x)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 80_000  # a copy has 160 000 bytes
        del x
        assert held() is None
        assert event.summary.nan == found.nan
    finally:
        tracemalloc.stop()
        gc.enable()
