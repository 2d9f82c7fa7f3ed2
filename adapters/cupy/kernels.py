"""The CUDA source of the probe: both ends of an array from its bit patterns, in one pass.

A float's bits, with the sign turned, are in the order of the values as unsigned integers, NaN at
both far ends. So two integer reductions tell NaN, the sign of an Inf and the extremes, exactly
and in every format; no floating point operation is done. (Herf, "Radix Tricks", 2001.)
"""

import math
from functools import lru_cache

import numpy as np

Span = tuple[float, float]

DIMENSIONS = 8
THREADS = 256
# Both ends of nothing: any array moves them.
EMPTY = (0, 2**64 - 1)

# Bytes of an element or of a part of a complex one -> C type, vector type, elements in a vector.
_TYPES = {
    2: ("unsigned short", "uint4", 8),
    4: ("unsigned int", "uint4", 4),
    8: ("unsigned long long", "ulonglong2", 2),
}

_SOURCE = r"""
typedef {element} T;
typedef {vector} V;
typedef {wide} W;
typedef unsigned long long u64;

#define SIGN ((W)1 << {top})

// The order of the values: negative ones turned over, below all others.
__device__ __forceinline__ W key(T bits) {{
    W w = (W)bits;
    return (w & SIGN) ? (W)(~w & {mask}) : (W)(w | SIGN);
}}

__device__ __forceinline__ void put(W lo, W hi, u64* slot) {{
    for (int step = 16; step; step >>= 1) {{
        W other = __shfl_down_sync(0xffffffffu, lo, step);
        lo = other < lo ? other : lo;
        other = __shfl_down_sync(0xffffffffu, hi, step);
        hi = other > hi ? other : hi;
    }}
    __shared__ W los[32], his[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane == 0) {{ los[warp] = lo; his[warp] = hi; }}
    __syncthreads();
    if (threadIdx.x == 0) {{
        for (int i = 1; i < (int)((blockDim.x + 31) >> 5); i++) {{
            lo = los[i] < lo ? los[i] : lo;
            hi = his[i] > hi ? his[i] : hi;
        }}
        atomicMax(slot, (u64)hi);
        atomicMin(slot + 1, (u64)lo);
    }}
}}

// Elements that lie side by side, in any order.
extern "C" __global__ void anynan_dense(const T* x, u64 n, u64* slot) {{
    W lo = {mask}, hi = 0;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, all = (u64)gridDim.x * blockDim.x;
    u64 head = ((16 - (u64)x % 16) % 16) / sizeof(T);
    head = head < n ? head : n;
    u64 vectors = (n - head) / {count};
    const V* body = (const V*)(x + head);
    for (u64 i = thread; i < vectors; i += all) {{
        V v = body[i];
        const T* part = (const T*)&v;
        #pragma unroll
        for (int j = 0; j < {count}; j++) {{
            W k = key(part[j]);
            lo = k < lo ? k : lo;
            hi = k > hi ? k : hi;
        }}
    }}
    u64 rest = n - vectors * {count};
    for (u64 i = thread; i < rest; i += all) {{
        W k = key(x[i < head ? i : i + vectors * {count}]);
        lo = k < lo ? k : lo;
        hi = k > hi ? k : hi;
    }}
    put(lo, hi, slot);
}}

// Any strides, in elements; the last of the {dimensions} dimensions runs fastest.
extern "C" __global__ void anynan_strided(const T* x, u64 n, u64* slot, {shape}, {strides}) {{
    const u64 shape[{dimensions}] = {{{shape_names}}};
    const long long strides[{dimensions}] = {{{stride_names}}};
    W lo = {mask}, hi = 0;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, all = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread; i < n; i += all) {{
        u64 left = i;
        long long at = 0;
        #pragma unroll
        for (int d = {dimensions} - 1; d >= 0; d--) {{
            at += (long long)(left % shape[d]) * strides[d];
            left /= shape[d];
        }}
        W k = key(x[at]);
        lo = k < lo ? k : lo;
        hi = k > hi ? k : hi;
    }}
    put(lo, hi, slot);
}}

extern "C" __global__ void anynan_reset(u64* slots, u64 n) {{
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {{ slots[2 * i] = 0; slots[2 * i + 1] = ~(u64)0; }}
}}
"""


@lru_cache(maxsize=8)
def source(size: int) -> str:
    """Write the kernels for elements of so many bytes.

    Args:
        size: 2, 4 or 8; the parts of a complex number are elements of their own.
    """
    element, vector, count = _TYPES[size]
    names = [f"n{d}" for d in range(DIMENSIONS)], [f"t{d}" for d in range(DIMENSIONS)]
    return _SOURCE.format(
        element=element,
        vector=vector,
        count=count,
        wide="unsigned int" if size < 8 else "unsigned long long",
        top=8 * size - 1,
        mask=f"{2 ** (8 * size) - 1}u" + ("ll" if size == 8 else ""),
        dimensions=DIMENSIONS,
        shape=", ".join(f"u64 {name}" for name in names[0]),
        strides=", ".join(f"long long {name}" for name in names[1]),
        shape_names=", ".join(names[0]),
        stride_names=", ".join(names[1]),
    )


def decode(high: int, low: int, dtype: np.dtype[np.generic]) -> Span | None:
    """Turn a slot into both ends, NaN in both if there is one; None if nothing was written.

    Args:
        high: The largest key.
        low: The smallest key.
        dtype: Real dtype of the elements or of their parts.
    """
    if (high, low) == EMPTY:
        return None
    size = dtype.itemsize
    sign, mask = 1 << (8 * size - 1), (1 << (8 * size)) - 1
    bits = [key ^ sign if key & sign else ~key & mask for key in (low, high)]
    lo, hi = (float(x) for x in np.array(bits, f"u{size}").view(dtype))
    return (math.nan, math.nan) if lo != lo or hi != hi else (lo, hi)


def collapse(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drop and join dimensions, the order of the elements not minded.

    Args:
        shape: Lengths.
        strides: Steps, in any unit.

    Returns:
        The fewest dimensions that visit the same elements, the smallest step last. One with
        step 0 visits the same elements again, and goes.
    """
    pairs = sorted(
        ((n, abs(t)) for n, t in zip(shape, strides, strict=True) if n != 1 and t),
        key=lambda pair: -pair[1],
    )
    joined: list[tuple[int, int]] = []
    for length, step in pairs:
        if joined and joined[-1][1] == length * step:
            joined[-1] = (joined[-1][0] * length, step)
        else:
            joined.append((length, step))
    return tuple(n for n, _ in joined), tuple(t for _, t in joined)
