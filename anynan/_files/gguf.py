"""GGUF: numbers as they are, and of quantised blocks the scales, which alone can be bad."""

# Not the package `gguf`: of a vocabulary of 150,000 words its reader makes an object each (391 MiB
# and 10 s), and a list that is longer than the file keeps it going without end.

import math
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from anynan._files.formats import itemsize
from anynan._files.messages import SCALES_ONLY, TYPE_UNREAD
from anynan._files.tally import Bits
from anynan._files.tensors import BLOCK, Tensor, UnreadableError, stretch

_PLAIN = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}
_INTEGERS = {24: "int8", 25: "int16", 26: "int32", 27: "int64"}
# type -> name, numbers and bytes of a block, and where its scales of float16 are.
_BLOCKS: dict[int, tuple[str, int, int, tuple[int, ...]]] = {
    2: ("q4_0", 32, 18, (0,)),
    3: ("q4_1", 32, 20, (0, 2)),
    6: ("q5_0", 32, 22, (0,)),
    7: ("q5_1", 32, 24, (0, 2)),
    8: ("q8_0", 32, 34, (0,)),
    10: ("q2_K", 256, 84, (80, 82)),
    11: ("q3_K", 256, 110, (108,)),
    12: ("q4_K", 256, 144, (0, 2)),
    13: ("q5_K", 256, 176, (0, 2)),
    14: ("q6_K", 256, 210, (208,)),
    20: ("iq4_nl", 32, 18, (0,)),
    23: ("iq4_xs", 256, 136, (0,)),
}
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def tensors(path: str) -> list[Tensor]:
    """List the tensors of a file.

    Raises:
        UnreadableError: If its header is damaged, or of a version that is not known.
    """
    end = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(4)
        version = _number(file, 4)
        if version not in (2, 3):
            msg = f"GGUF of version {version}; 2 and 3 are known"
            raise UnreadableError(msg)
        count, entries = _number(file, 8), _number(file, 8)
        alignment = 32
        for _ in range(entries):
            key, value = _text(file, end), _value(file, _number(file, 4), end)
            if key == b"general.alignment" and isinstance(value, int) and value > 0:
                alignment = value
        held = [_entry(file, end) for _ in range(count)]
        start = -(-file.tell() // alignment) * alignment
    return [_tensor(path, start, end, *entry) for entry in held]


def _entry(file: BinaryIO, end: int) -> tuple[str, tuple[int, ...], int, int]:
    name = _text(file, end).decode("utf-8", "replace")
    dimensions = _number(file, 4)
    if dimensions > 8:
        msg = f"{name} would have {dimensions} dimensions"
        raise UnreadableError(msg)
    # The file gives the fastest index first.
    shape = tuple(_number(file, 8) for _ in range(dimensions))[::-1]
    return name, shape, _number(file, 4), _number(file, 8)


def _tensor(
    path: str, start: int, end: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> Tensor:
    begin, size = start + offset, math.prod(shape)
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        nbytes = size * itemsize(dtype)
        note = "cut off: the file ends inside of it" if begin + nbytes > end else ""
        return Tensor(name, dtype, shape, lambda: stretch(path, begin, size, dtype), nbytes, note)
    if kind in _INTEGERS:
        return Tensor(name, _INTEGERS[kind], shape, None)
    if kind not in _BLOCKS:
        return Tensor(name, f"type {kind}", shape, None, note=TYPE_UNREAD(dtype=kind))
    quantised, numbers, width, places = _BLOCKS[kind]
    count = size // numbers
    note = SCALES_ONLY(kind=quantised)
    return Tensor(
        name,
        "float16",
        (count, len(places)),
        lambda: _scales(path, begin, count, width, places),
        count * width,
        note,
    )


def _scales(
    path: str, begin: int, count: int, width: int, places: tuple[int, ...]
) -> Iterator[Bits]:
    """Read the scales of blocks, in order."""
    columns = np.asarray([place + half for place in places for half in (0, 1)])
    with open(path, "rb") as file:
        file.seek(begin)
        while count:
            wanted = min(count, max(1, BLOCK // width))
            held = np.frombuffer(file.read(wanted * width), np.uint8)
            if held.size != wanted * width:
                msg = "cut off: the file ends inside of it"
                raise UnreadableError(msg)
            count -= wanted
            yield held.reshape(wanted, width)[:, columns].reshape(-1).view("<u2")


def _number(file: BinaryIO, width: int) -> int:
    held = file.read(width)
    if len(held) < width:
        msg = "cut off: the file ends inside of its header"
        raise UnreadableError(msg)
    return int.from_bytes(held, "little")


def _text(file: BinaryIO, end: int) -> bytes:
    length = _number(file, 8)
    if length > end - file.tell():
        msg = "its header is damaged: a name is longer than the file"
        raise UnreadableError(msg)
    return file.read(length)


def _value(file: BinaryIO, kind: int, end: int) -> Any:
    """Pass over a value; give it if it is a whole number."""
    if kind in _SIZES:
        return _number(file, _SIZES[kind])
    if kind == _STRING:
        return _text(file, end)
    if kind != _ARRAY:
        msg = f"its header is damaged: there is no type {kind}"
        raise UnreadableError(msg)
    inner, length = _number(file, 4), _number(file, 8)
    if length * _SIZES.get(inner, 8) > end - file.tell():
        msg = "its header is damaged: a list is longer than the file"
        raise UnreadableError(msg)
    if inner in _SIZES:
        file.seek(length * _SIZES[inner], os.SEEK_CUR)
    else:
        for _ in range(length):
            _value(file, inner, end)
    return None
