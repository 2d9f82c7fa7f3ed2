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

NAN, INF = float("nan"), float("inf")


def bad(x: Any) -> tuple[str, tuple[int, ...] | None]:
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.check(x, "x")
    event = caught.value.event
    return event.tensor, event.summary.first_bad


@pytest.mark.parametrize(
    ("x", "path", "index"),
    [
        (np.array([1.0, "a", None, NAN], object), "x", (3,)),
        (np.array([[1, np.float32(INF)]], object), "x", (0, 1)),
        (np.array([Fraction(1, 2), Decimal("NaN")], object), "x", (1,)),
        (np.array([np.ones(3), np.array([0.0, INF])], object), "x[1]", (1,)),
        (np.array([{"a": [NAN]}, None], object), "x[0]['a'][0]", ()),
        (np.array([(1.0, 2), (NAN, 3)], [("a", "f4"), ("b", "i4")]), "x['a']", (1,)),
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


class TestSparse:
    """Only what is stored is looked at; the place is that in the whole array."""

    DENSE = np.array([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, NAN, 0.0], [INF, 0.0, 0.0, 1.0]])

    @pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"])
    @pytest.mark.parametrize("api", ["array", "matrix"])
    def test_every_format(self, kind: str, api: str) -> None:
        sparse = pytest.importorskip("scipy.sparse")
        x = getattr(sparse, f"{kind}_{api}")(self.DENSE)
        path, index = bad(x)
        assert path == "x"
        assert index is not None
        assert not np.isfinite(self.DENSE[index])
        summary = anynan.summarize(x)
        assert (summary.shape, summary.nan, summary.posinf) == ((3, 4), 1, 1)
        assert (summary.min, summary.max) in ((1.0, 2.0), (0.0, 2.0))
        clean = getattr(sparse, f"{kind}_{api}")(np.nan_to_num(self.DENSE, posinf=0.0))
        assert anynan.check(clean) is clean


class TestTables:
    """Columns go by their names; nulls are no NaN."""

    def test_pandas(self) -> None:
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

    def test_polars(self) -> None:
        pl: Any = pytest.importorskip("polars")
        frame = pl.DataFrame({"a": [1.0, None], "b": ["x", None], "c": [1, None]})
        assert anynan.check(frame) is frame
        assert bad(frame.with_columns(d=pl.Series([NAN, 1.0]))) == ("x['d']", (0,))
        assert bad(pl.Series([None, INF])) == ("x", (1,))
        with pytest.raises(TypeError, match=r"cannot find an array in a polars.*LazyFrame"):
            anynan.check(frame.lazy())


@pytest.mark.parametrize("kind", ["plain", "object", "masked", "structured", "column"])
def test_no_copy_is_kept(kind: str) -> None:
    def make() -> Any:
        values = np.ones(20_000)
        values[-1] = NAN
        if kind == "object":
            return values.astype(object)
        if kind == "masked":
            return np.ma.array(values, mask=values == 1.0)
        if kind == "structured":
            return values.view([("a", "f8")])
        if kind == "column":
            return pytest.importorskip("pandas").Series(values)
        return values

    x = make()
    held = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        tracemalloc.start()
        with pytest.raises(anynan.NonFiniteError) as caught:
            anynan.check(x)
        event = caught.value.event
        del caught
        watched = anynan.watch([x], action="record")
        list(watched)
        found = anynan.summarize(x)
        del watched
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 80_000  # a copy has 160 000 bytes
        del x
        assert held() is None
        assert event.summary.nan == found.nan
    finally:
        tracemalloc.stop()
        gc.enable()
