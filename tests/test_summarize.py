"""A summary's counts are exact and its statistics are those of a naive float64 reference."""

import math
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import anynan
from anynan._arrays import tally as measuring
from tests.backends import Space

NAN, INF = math.nan, math.inf
Array = np.ndarray[Any, Any]

DTYPES = ["float16", "float32", "float64", ">f4", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _limits(name: str) -> tuple[float, float]:
    info = ml_dtypes.finfo(_dtype(name))  # type: ignore[no-untyped-call]
    return float(info.max), float(info.smallest_normal)


@st.composite
def _arrays(draw: st.DrawFn) -> tuple[str, Array]:
    name = draw(st.sampled_from(DTYPES))
    special = [0.0, -0.0, INF, -INF, NAN, 1e-40, 2e-5, 1e300, -1e300, 1e-300]
    elements = st.one_of(st.floats(-100, 100, width=16), st.sampled_from(special))
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)
    values = draw(hnp.arrays(np.float64, shapes, elements=elements))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = values.astype(_dtype(name))
    return name, draw(st.sampled_from([x, x.T, x[..., ::-1] if x.ndim else x]))


@settings(max_examples=150)
@given(made=_arrays(), piece=st.sampled_from([5, 2**14]))
def test_summary_agrees_with_the_reference(made: tuple[str, Array], piece: int) -> None:
    name, x = made
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="raise"):
        patch.setattr(measuring, "PIECE", piece)
        found = anynan.summarize(x)
    numbers = [float(item) for item in x.reshape(-1)]
    finite = [number for number in numbers if math.isfinite(number)]
    largest, tiny = _limits(name)
    assert (found.shape, found.size) == (x.shape, len(numbers))
    assert found.nan == sum(map(math.isnan, numbers))
    assert (found.posinf, found.neginf) == (numbers.count(INF), numbers.count(-INF))
    assert found.zero == numbers.count(0.0)
    assert found.subnormal == sum(0 < abs(number) < tiny for number in numbers)
    bad = [i for i, number in enumerate(numbers) if not math.isfinite(number)]
    first = tuple(int(i) for i in np.unravel_index(bad[0], x.shape)) if bad else None
    assert found.first_bad == first
    if not finite:
        assert found.min is found.max is found.absmax is found.mean is found.rms is None
        assert found.headroom is None
        return
    absmax = max(map(abs, finite))
    assert (found.min, found.max, found.absmax) == (min(finite), max(finite), absmax)
    assert found.mean == pytest.approx(
        math.fsum(number / len(finite) for number in finite), rel=1e-9, abs=1e-9 * absmax
    )
    scaled = [number / (absmax or 1) for number in finite]
    rms = math.sqrt(math.fsum(number**2 for number in scaled) / len(scaled)) * absmax
    assert found.rms == pytest.approx(rms, rel=1e-9)
    headroom = math.log2(largest) - math.log2(absmax) if absmax else None
    assert found.headroom == pytest.approx(headroom, abs=1e-6)


def test_summary_of_any_library(space: Space) -> None:
    found = anynan.summarize(space.array([[1, NAN, -3], [0, INF, -INF]]))
    assert (found.dtype, found.shape) == ("float32", (2, 3))
    assert (found.nan, found.posinf, found.neginf, found.zero, found.bad) == (1, 1, 1, 1, 3)
    assert (found.min, found.max, found.absmax) == (-3, 1, 3)
    assert found.mean == pytest.approx(-2 / 3)
    assert found.first_bad == (0, 1)
    assert (found.kind, found.low, found.high) == ("nan", -INF, INF)
    assert found.device.partition(":")[0] in ("cpu", "cuda")


def test_integers_have_statistics_but_no_headroom(space: Space) -> None:
    found = anynan.summarize(space.array([-4, 0, 1], "int32"))
    assert (found.min, found.max, found.absmax, found.mean) == (-4, 1, 4, -1)
    assert (found.zero, found.bad, found.headroom) == (1, 0, None)
    assert found.dtype == "int32"
    assert anynan.summarize(space.array([True, False], "bool")).mean == 0.5


def test_pieces_of_very_different_size_add_up() -> None:
    x = np.concatenate([np.full(20_000, 1e200), np.full(20_000, 1e-200), np.ones(20_000)])
    found = anynan.summarize(x)
    assert found.rms == pytest.approx(1e200 / math.sqrt(3), rel=1e-12)
    assert found.mean == pytest.approx(1e200 / 3, rel=1e-12)


def test_complex_numbers_have_magnitude_but_no_order() -> None:
    x = np.array([3 + 4j, complex(NAN, INF), complex(1, -INF), 0])
    found = anynan.summarize(x)
    assert (found.nan, found.posinf, found.neginf, found.zero) == (1, 1, 0, 1)
    assert (found.min, found.max, found.mean) == (None, None, None)
    assert found.absmax == 5
    assert found.rms == pytest.approx(5 / math.sqrt(2))
    assert found.first_bad == (1,)
    huge = anynan.summarize(np.array([complex(1e308, 1e308)] * 4))
    assert huge.headroom == pytest.approx(0.0, abs=1)
    assert anynan.summarize(np.array([1e-310 + 1j])).subnormal == 1


def test_the_first_bad_index_is_in_c_order_whatever_the_memory_order() -> None:
    x = np.zeros((300, 400), order="F")
    x[200, 1] = x[7, 399] = NAN
    assert anynan.summarize(x).first_bad == (7, 399)
    assert anynan.summarize(x.T).first_bad == (1, 200)
    assert anynan.summarize(x[::-1]).first_bad == (99, 1)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([np.ones(1)], "one array, not a list; call it on each array inside"),
        ("text", "cannot find an array in a str"),
        (None, "given None"),
        (iter([1.0]), "would use up a list_iterator"),
    ],
)
def test_what_is_no_array_is_refused(x: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        anynan.summarize(x)
