"""Flags of CuPy arrays in preallocated device memory: one launch each, one read for all."""

import math
from collections import defaultdict
from functools import lru_cache
from threading import RLock
from typing import Any

import cupy
import numpy as np

from anynan._arrays.access import dtype_name
from anynan._arrays.measures import describe
from anynan._arrays.probe import probe
from anynan._base.summary import Summary
from anynan.cupy.kernels import DIMENSIONS, THREADS, Span, collapse, decode, source

ROWS = 4096  # slots in a block: 64 KiB
_PARTS = {"complex64": "float32", "complex128": "float64"}
_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Block:
    """Hold the slots of one device, and the place on the host that they are copied to."""

    def __init__(self) -> None:
        self.slots = cupy.empty((ROWS, 2), cupy.uint64)
        pinned = cupy.cuda.alloc_pinned_memory(self.slots.nbytes)
        self.host = np.frombuffer(pinned, np.uint64, 2 * ROWS).reshape(ROWS, 2)
        self.used = 0
        reset(self.slots, ROWS)
        # Other streams may write first: this one wait is paid when a block is made.
        cupy.cuda.get_current_stream().synchronize()


class Pool:
    """Keep blocks and compiled kernels, so that a call allocates nothing once it is warm."""

    def __init__(self) -> None:
        self._free: dict[int, list[Block]] = defaultdict(list)
        self._lock = RLock()

    def take(self, device: int) -> Block:
        """Take a block of the current device."""
        with self._lock:
            if self._free[device]:
                return self._free[device].pop()
        return Block()

    def give(self, device: int, block: Block) -> None:
        """Take a block back, emptied."""
        block.used = 0
        with self._lock:
            self._free[device].append(block)


pool = Pool()


@lru_cache(maxsize=256)
def compiled(name: str, size: int, device: int) -> Any:
    """Compile a kernel for elements of so many bytes; ``device`` is the current one."""
    module = cupy.RawModule(code=source(size), options=("--std=c++17",))
    return module.get_function(name)


def kernel(name: str, size: int) -> Any:
    """Return a compiled kernel for the current device."""
    return compiled(name, size, cupy.cuda.runtime.getDevice())


@lru_cache(maxsize=64)
def processors(device: int) -> int:
    """Count a device's multiprocessors."""
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def reset(slots: Any, rows: int) -> None:
    """Empty the first slots of a block, on the current stream."""
    grid = ((rows + THREADS - 1) // THREADS,)
    kernel("anynan_reset", 4)(grid, (THREADS,), (slots, np.uint64(rows)))


def part_of(raw: Any) -> str | None:
    """Name the float dtype of an array's elements or of their parts, None if it has none."""
    name = dtype_name(raw)
    name = _PARTS.get(name, name)
    return name if name in _SIZES and raw.size else None


def launch(raw: Any, part: str, address: int) -> None:
    """Reduce an array into the slot at this address, on the current stream of its device."""
    size = _SIZES[part]
    shape, strides = raw.shape, [step // size for step in raw.strides]
    first = raw.data.ptr + size * sum(
        (n - 1) * t for n, t in zip(shape, strides, strict=True) if t < 0
    )
    if raw.dtype.kind == "c":
        shape, strides = (*shape, 2), [*strides, 1]
    lengths, steps = collapse(tuple(shape), tuple(strides))
    count = math.prod(lengths)
    enough = -(-count // (4 * THREADS * (16 // size)))
    grid = (max(1, min(8 * processors(int(raw.device.id)), enough)),)
    head = (np.uint64(first), np.uint64(count), np.uint64(address))
    if steps in ((), (1,)):
        kernel("anynan_dense", size)(grid, (THREADS,), head)
        return
    if len(lengths) > DIMENSIONS:  # the last resort: no array of daily work gets here
        dense = cupy.ascontiguousarray(raw)
        launch(dense, part, address)
        return
    missing = DIMENSIONS - len(lengths)
    tail = (
        *map(np.uint64, (1,) * missing + lengths),
        *map(np.int64, (0,) * missing + steps),
    )
    kernel("anynan_strided", size)(grid, (THREADS,), (*head, *tail))


class DeviceSlots:
    """Collect the flags of one call; ``anynan.arrays.lazy.Slots`` says what that means."""

    def __init__(self) -> None:
        self._places: list[Span | tuple[int, int, int, str, bool]] = []
        self._blocks: dict[int, list[Block]] = defaultdict(list)
        self._streams: dict[int, dict[int, Any]] = defaultdict(dict)

    def put(self, raw: Any) -> int | None:
        """Launch the reduction of one array: no read, no wait, no memory taken."""
        if not isinstance(raw, cupy.ndarray):  # an operand in host memory
            span = probe(raw)
            if span is None:
                return None
            self._places.append(span)
            return len(self._places) - 1
        part = part_of(raw)
        if part is None:
            return None
        device = int(raw.device.id)
        with raw.device:
            stream = cupy.cuda.get_current_stream()
            blocks = self._blocks[device]
            if not blocks or blocks[-1].used == ROWS:
                blocks.append(pool.take(device))
            block = blocks[-1]
            row, block.used = block.used, block.used + 1
            self._streams[device][stream.ptr] = stream
            launch(raw, part, block.slots.data.ptr + 16 * row)
        self._places.append((device, len(blocks) - 1, row, part, raw.dtype.kind == "c"))
        return len(self._places) - 1

    def read(self) -> list[Span]:
        """Copy the flags of each device to the host, after every stream that wrote some."""
        for device, blocks in self._blocks.items():
            with cupy.cuda.Device(device):
                here = cupy.cuda.get_current_stream()
                for stream in self._streams[device].values():
                    if stream.ptr != here.ptr:
                        here.wait_event(stream.record())
                for block in blocks:
                    block.slots[: block.used].get(stream=here, out=block.host[: block.used])
                    reset(block.slots, block.used)
                here.synchronize()
        spans = []
        for place in self._places:
            if len(place) == 2:
                spans.append(place)
                continue
            device, index, row, part, compound = place
            high, low = (int(x) for x in self._blocks[device][index].host[row])
            dtype = np.dtype(np.float32 if part == "bfloat16" else part)
            # NumPy has no bfloat16: its bits are the upper half of float32's.
            span = _brain(high, low) if part == "bfloat16" else decode(high, low, dtype)
            spans.append(_unsigned(span) if compound else span or (0.0, 0.0))
        for device, blocks in self._blocks.items():
            for block in blocks:
                pool.give(device, block)
        self._blocks.clear()
        self._places = list(spans)  # what is known now, if it is asked for again
        return spans


def _brain(high: int, low: int) -> Span | None:
    found = []
    for key in (low, high):
        bits = key ^ 0x8000 if key & 0x8000 else ~key & 0xFFFF
        found.append(float(np.array([bits << 16], np.uint32).view(np.float32)[0]))
    lo, hi = found
    return (math.nan, math.nan) if lo != lo or hi != hi else (lo, hi)


def _unsigned(span: Span | None) -> Span:
    if span is not None and (math.isinf(span[0]) or math.isinf(span[1])):
        return math.inf, math.inf
    return span or (0.0, 0.0)


class Reader:
    """Read CuPy arrays for ``anynan.check`` and ``anynan.summarize``."""

    def owns(self, x: Any, /) -> bool:
        """Tell whether this is a CuPy array."""
        return isinstance(x, cupy.ndarray)

    def probe(self, x: Any, /) -> Span | None:
        """Reduce one array and read its two ends."""
        slots = DeviceSlots()
        if slots.put(x) is None:
            return None
        return slots.read()[0]

    def summarize(self, x: Any, /) -> Summary:
        """Describe an array; it is brought to the host in pieces."""
        return describe(x)
