"""The kernels' source compiles for every architecture, and its code does what it says.

Nothing here needs a device. NVRTC comes as a package of its own; a host compiler runs the same
source as one thread, which shows the arithmetic and the walk over the elements, not the speed.
"""

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cupy: Any = pytest.importorskip("cupy")
from anynan.cupy import kernels  # noqa: E402

pytestmark = pytest.mark.tier(2)

ARCHITECTURES = ("sm_60", "sm_70", "sm_80", "sm_90", "sm_100", "compute_75")
SIZES = (2, 4, 8)
NAN, INF = float("nan"), float("inf")

_SHIM = r"""
#include <cstddef>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __syncthreads()
#define __shfl_down_sync(mask, value, step) (value)
struct Index { unsigned x; };
static Index blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
template <class T> void atomicMax(T* at, T value) { if (value > *at) *at = value; }
template <class T> void atomicMin(T* at, T value) { if (value < *at) *at = value; }
"""


def compiler() -> tuple[Any, tuple[int, int]]:
    nvrtc = cupy.cuda.nvrtc
    try:
        return nvrtc, nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"the NVRTC library is not installed: {error}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", SIZES)
def test_it_compiles_for(architecture: str, size: int) -> None:
    nvrtc, version = compiler()
    if architecture == "sm_100" and version < (12, 8):
        pytest.skip(f"NVRTC {version} does not know {architecture}")
    program = nvrtc.createProgram(kernels.source(size), "anynan.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={architecture}", "--std=c++17"))
        code = (nvrtc.getPTX if architecture.startswith("compute") else nvrtc.getCUBIN)(program)
        assert b"anynan_dense" in code
        assert b"anynan_strided" in code
        assert b"anynan_reset" in code
    finally:
        nvrtc.destroyProgram(program)


def test_wrong_source_does_not_compile() -> None:
    nvrtc, _ = compiler()
    program = nvrtc.createProgram("__global__ void f() { wrong }", "f.cu", (), ())
    with pytest.raises(Exception, match="COMPILATION"):
        nvrtc.compileProgram(program, ())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The kernels as host functions of one thread."""
    host = shutil.which("g++")
    if host is None:
        pytest.skip("there is no host compiler")
    folder: Path = tmp_path_factory.mktemp("kernels")
    found = {}
    for size in SIZES:
        code, library = folder / f"k{size}.cpp", folder / f"k{size}.so"
        code.write_text(_SHIM + kernels.source(size))
        subprocess.run(
            [host, "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w", "-o",
             str(library), str(code)],
            check=True,
        )  # fmt: skip
        found[size] = ctypes.CDLL(str(library))
    return found


def run_dense(library: Any, x: Any) -> tuple[int, int]:
    slot = (ctypes.c_uint64 * 2)(*kernels.EMPTY)
    library.anynan_dense(ctypes.c_void_p(x.ctypes.data), ctypes.c_uint64(x.size), slot)
    return int(slot[0]), int(slot[1])


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "bfloat16"])
@pytest.mark.parametrize("bad", [0.0, NAN, -NAN, INF, -INF])
def test_ends_are_found_at_every_place(libraries: Any, dtype: str, bad: float) -> None:
    from anynan._arrays.probe import probe

    kind = np.dtype(getattr(pytest.importorskip("ml_dtypes"), dtype, dtype))
    whole = np.linspace(-3, 5, 64).astype(kind)
    for start, length in itertools.product((0, 1, 3, 7), (1, 2, 7, 8, 9, 33, 50)):
        x = whole[start : start + length].copy() if start == 0 else whole[start : start + length]
        for at in {0, length // 2, length - 1}:
            before = x[at]
            x[at] = bad
            found = kernels.decode(*run_dense(libraries[kind.itemsize], x), kind)
            assert str(found) == str(probe(x)), (start, length, at)
            x[at] = before


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2], lambda x: x[:, ::-1], lambda x: x.T[1:, ::3], lambda x: x[1:, 2:5, ::2],
        lambda x: x.transpose(2, 0, 1)[::-2], lambda x: np.broadcast_to(x[:1], x.shape),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_any_strides_are_walked(libraries: Any, view: Any, dtype: str) -> None:
    x = view(np.random.default_rng(0).normal(size=(6, 7, 8)).astype(dtype))
    item = x.itemsize
    shape, strides = kernels.collapse(x.shape, tuple(step // item for step in x.strides))
    assert len(shape) <= x.ndim
    steps = [s // item for s in x.strides]
    first = x.ctypes.data + item * sum(
        (n - 1) * t for n, t in zip(x.shape, steps, strict=True) if t < 0
    )
    padded = (1,) * (kernels.DIMENSIONS - len(shape)) + shape
    slot = (ctypes.c_uint64 * 2)(*kernels.EMPTY)
    moves = (0,) * (kernels.DIMENSIONS - len(strides)) + strides
    libraries[item].anynan_strided(
        ctypes.c_void_p(first), ctypes.c_uint64(int(np.prod(shape))), slot,
        *map(ctypes.c_uint64, padded), *map(ctypes.c_int64, moves),
    )  # fmt: skip
    found = kernels.decode(int(slot[0]), int(slot[1]), np.dtype(dtype))
    assert found == (float(x.min()), float(x.max()))


def test_nothing_written_is_nothing_found() -> None:
    assert kernels.decode(*kernels.EMPTY, np.dtype("f4")) is None


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3, 4), (12, 4, 1), ((24,), (1,))),
        ((4, 3, 2), (1, 4, 12), ((24,), (1,))),
        ((2, 3), (-3, 1), ((6,), (1,))),
        ((2, 3), (8, 2), ((2, 3), (8, 2))),
        ((5, 3), (0, 1), ((3,), (1,))),
        ((1, 1), (7, 7), ((), ())),
    ],
)
def test_dimensions_are_joined(shape: Any, strides: Any, expected: Any) -> None:
    assert kernels.collapse(shape, strides) == expected
