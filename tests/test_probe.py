"""The probe agrees with a naive reference, whatever the dtype, layout or library."""

import math
import re
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anynan._arrays import access as arrays
from anynan._arrays import probe as probing
from anynan._arrays import registry
from anynan._arrays.measures import measure
from anynan._arrays.probe import is_clean, probe
from tests.backends import Space
from tests.processes import python

NAN, INF = math.nan, math.inf
Array = np.ndarray[Any, Any]

NUMPY_REAL = ["float16", "float32", "float64", "longdouble", ">f2", ">f4", ">f8"]
NUMPY_COMPLEX = ["complex64", "complex128", "clongdouble", ">c8"]
SMALL_REAL = [name for name in vars(ml_dtypes) if re.match(r"bfloat16|float[468]_", name)]
SMALL_COMPLEX = [name for name in ("complex32", "bcomplex32") if hasattr(ml_dtypes, name)]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def reference(x: Array) -> tuple[float, float] | None:
    """Look at every element, one by one."""
    numbers: list[float] = []
    compound = "complex" in x.dtype.name
    for item in x.reshape(-1):
        number = complex(item) if compound else float(item)
        numbers += [number.real, number.imag] if isinstance(number, complex) else [number]
    if not numbers:
        return None
    if any(map(math.isnan, numbers)):
        return NAN, NAN
    if compound and any(map(math.isinf, numbers)):
        return INF, INF
    return min(numbers), max(numbers)


def same(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    return one is other or bool(one and other and np.array_equal(one, other, equal_nan=True))


def _unaligned(x: Array) -> Array:
    raw = np.empty(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "as_is": lambda x: x,
    "fortran": np.asfortranarray,
    "reversed": lambda x: x[(slice(None, None, -1),) * x.ndim],
    "every_other": lambda x: x[..., ::2] if x.ndim else x,
    "transposed": np.transpose,
    "broadcast": lambda x: np.broadcast_to(x, (2, *x.shape)),
    "unaligned": _unaligned,
}

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)
numbers = st.one_of(
    st.floats(width=16, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, INF, -INF, NAN, math.copysign(NAN, -1), 1e-300, 1e300, 5e-324]),
    st.floats(-1e4, 1e4),
)


@st.composite
def float_arrays(draw: st.DrawFn, dtypes: list[str]) -> Array:
    dtype = dtype_of(draw(st.sampled_from(dtypes)))
    # A mostly finite array with one oddity finds more than an array of oddities.
    finite = st.floats(-100, 100, width=16)
    elements = draw(st.sampled_from([numbers, finite, st.floats(0, 9), st.floats(-9, -1)]))
    values = draw(hnp.arrays(np.float64, draw(shapes), elements=elements))
    if "complex" in dtype.name:
        both = np.empty(values.shape, np.complex128)
        both.real = values
        both.imag = draw(hnp.arrays(np.float64, values.shape, elements=elements))
        values = both
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = values.astype(dtype)
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x)


@settings(max_examples=150)
@given(
    x=float_arrays(NUMPY_REAL + NUMPY_COMPLEX + SMALL_REAL + SMALL_COMPLEX),
    piece=st.sampled_from([32, 2**19]),
)
def test_probe_agrees_with_the_reference(x: Array, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="raise"):
        patch.setattr(probing, "PIECE", piece)
        assert same(probe(x), reference(x))


@settings(max_examples=60)
@given(x=float_arrays(["float32", "float64", "complex64"]), block=st.sampled_from([3, 2**18]))
def test_probe_by_the_standard_agrees_with_the_reference(x: Array, block: int) -> None:
    strict = pytest.importorskip("array_api_strict")
    hidden = strict.asarray(x.copy())
    with pytest.MonkeyPatch.context() as patch:
        # As for an array on a device: its memory cannot be shared with the host.
        patch.setattr(arrays, "_shared", lambda _: None)
        patch.setattr(arrays.blocks, "__defaults__", (block,))
        assert same(probe(hidden), reference(x))


@pytest.mark.parametrize("name", NUMPY_REAL + SMALL_REAL)
@pytest.mark.parametrize("at", [0, 1, 150_000, 299_998])
def test_one_nan_anywhere_is_seen(name: str, at: int) -> None:
    x = np.ones(299_999, dtype_of(name))
    if name.startswith(("float4", "float6")):
        assert probe(x) == (1.0, 1.0)
        return
    x[at] = NAN
    assert same(probe(x), (NAN, NAN))
    assert same(probe(x.reshape(-1, 1)[::-1]), (NAN, NAN))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 2**17 - 1, 2**17, -1])
def test_one_reading_misses_nothing(value: float, at: int) -> None:
    for dtype in ("f4", "f8", "c8"):
        x = np.zeros(2**17 + 5, dtype)
        assert is_clean(x)
        x[at] = value
        assert not is_clean(x)


def test_an_infinity_keeps_its_sign(space: Space) -> None:
    assert probe(space.array([1, -INF, 2])) == (-INF, 2.0)
    assert probe(space.array([1, INF, 2])) == (1.0, INF)
    assert probe(space.array([INF, -INF])) == (-INF, INF)


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16", "complex64"])
def test_the_sign_of_a_nan_does_not_matter(name: str) -> None:
    negative = np.copysign(NAN, -1.0)
    for items in ([negative], [negative, 1.0], [-1.0, negative]):
        assert same(probe(np.array(items, dtype_of(name))), (NAN, NAN))


def test_a_library_whose_max_drops_nan_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = pytest.importorskip("array_api_strict")
    x = strict.asarray([1.0, NAN, 3.0])
    monkeypatch.setattr(arrays, "_shared", lambda _: None)
    for name, value in (("min", 1.0), ("max", 3.0)):
        monkeypatch.setattr(strict, name, lambda _, value=value: strict.asarray(value))
    assert same(probe(x), (NAN, NAN))


def test_there_is_nothing_to_look_at_in_an_empty_array(space: Space) -> None:
    assert probe(space.array(np.zeros((0, 3)))) is None
    assert measure(space.array(np.zeros((0, 3)))).size == 0


def test_what_is_never_bad_gives_no_reading() -> None:
    never = (np.arange(3), np.array(["nan", None, 3], object), np.array(["NaT"], "datetime64[s]"))
    for x in (*never, np.array([1, 2], ml_dtypes.int4)):
        assert probe(x) is None, x.dtype


def test_only_unmasked_values_count() -> None:
    x = np.ma.array([[1.0, NAN], [INF, -2.0]], mask=[[False, True], [True, False]])
    assert probe(x) == (-2.0, 1.0)
    assert probe(x.T) == (-2.0, 1.0)
    assert probe(np.ma.array([NAN], mask=[True])) is None
    assert probe(np.ma.array([1.0, INF])) == (1.0, INF)
    assert probe(np.ma.array([1j, complex(0, NAN)], mask=[False, True])) == (0.0, 1.0)


def test_every_float_field_of_a_structured_array_counts() -> None:
    kinds = [("a", "i4"), ("b", "f4", (2,)), ("c", [("d", "f8"), ("e", "U3")])]
    x = np.zeros(3, kinds)
    assert probe(x) == (0.0, 0.0)
    x["c"]["d"][1] = INF
    assert probe(x) == (0.0, INF)
    x["b"][2, 1] = NAN
    assert same(probe(x), (NAN, NAN))
    assert probe(np.zeros(3, [("a", "i4")])) is None


def test_a_subclass_is_read_by_its_values() -> None:
    assert probe(np.array([1.0, 2.0]).view(np.recarray)) == (1.0, 2.0)
    assert probe(np.float32(2)) == probe(2.0) == (2.0, 2.0)
    assert same(probe(np.float16(NAN)), (NAN, NAN))
    assert same(probe(complex(0, NAN)), (NAN, NAN))


def test_an_object_without_elements_is_refused_by_name() -> None:
    class Opaque:
        shape, dtype = (3,), "float32"

    with pytest.raises(TypeError, match=r"Opaque.*neither the array API.*pass its values"):
        probe(Opaque())


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones(2**24, np.float32),
        lambda: np.ones(2**24, np.float32)[::-1],
        lambda: np.ones(2**24, ">f4"),
        lambda: np.ones(2**23, np.complex64),
        lambda: np.ones(2**25, ml_dtypes.bfloat16),
        lambda: np.ma.array(np.ones(2**22), mask=np.zeros(2**22, bool)),
    ],
    ids=["plain", "reversed", "swapped", "complex", "brain", "ma"],
)
def test_no_array_sized_temporary(make: Callable[[], Array]) -> None:
    x = make()
    probe(x[:1])
    tracemalloc.start()
    assert probe(x) is not None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_what_numpy_has_no_dtype_or_memory_for_is_read_by_torchs_own_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(registry, "_readers", [])
    for name in (name for name in SMALL_REAL if hasattr(torch, name) and "float4" not in name):
        for values in ([1.0, 2.0, 4.0], [1.0, NAN]):
            x = torch.tensor(values).to(getattr(torch, name))
            assert same(probe(x), reference(np.array(values, dtype_of(name)))), name
        found = measure(x)
        assert (found.nan, found.first_bad, found.dtype) == (1, (1,), name)
    conjugate = torch.tensor([1 + 2j, -3j]).conj()  # a lazy one
    assert probe(conjugate) == (-2.0, 3.0)
    assert measure(conjugate).absmax == 3.0
    without_data = torch.empty(3, device="meta")
    assert probe(without_data) is None
    assert measure(without_data).device == "meta"


THREADS = """
import os, time, numpy, anynan
from anynan._arrays.probe import is_clean
from anynan.arrays.fast import squares

def turns():
    tasks = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    return {task: open(f"/proc/self/task/{task}/schedstat").read().split()[2] for task in tasks}

arrays = [numpy.ones(n, dtype) for n in (9_999, 10_001, 300_000) for dtype in ("f4", "f8", "c16")]
time.sleep(0.5)  # the pool settles down once it is made
before = turns()
for x in arrays:
    assert is_clean(x)
    anynan.check(x)
    anynan.summarize(x)
    if x.dtype.kind == "f":
        squares(x)
after = turns()
big = numpy.ones(300_000)
big.dot(big)
print(before == after, after == turns())
"""


@pytest.mark.tier(2)
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="nobody counts turns here")
def test_no_pool_of_threads_wakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How often each other thread had its turn is counted: none has one while anynan looks."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    done = python("-c", THREADS, cwd=tmp_path)
    ours, numpys = done.stdout.split()
    assert ours == "True"
    if numpys == "True":
        pytest.skip("this NumPy has no pool of threads")
