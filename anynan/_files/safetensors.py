"""safetensors: a header of JSON with offsets, then the numbers."""

# Not the library's own `safe_open`: for NumPy it refuses bfloat16 and float8, and of a file that is
# cut off it gives nothing.

import json
import os
from typing import Any

from anynan._files.formats import format_of, itemsize
from anynan._files.messages import TYPE_UNREAD
from anynan._files.tensors import Tensor, UnreadableError, numbers_in, stretch

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_LARGEST = 100_000_000  # of a header, as the library has it


def tensors(path: str) -> list[Tensor]:
    """List the tensors of a file.

    Raises:
        UnreadableError: If its header is not one.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _LARGEST:
            msg = f"its header would be {length:,} bytes long: this is no safetensors file"
            raise UnreadableError(msg)
        text = file.read(length)
    if len(text) < length:
        msg = "cut off: the file ends inside of its header"
        raise UnreadableError(msg)
    header = json.loads(text)
    if not isinstance(header, dict):
        msg = "its header is no JSON object"
        raise UnreadableError(msg)
    start, end = 8 + length, os.path.getsize(path)
    return [
        _tensor(path, name, said, start, end)
        for name, said in header.items()
        if name != "__metadata__"
    ]


def _tensor(path: str, name: str, said: dict[str, object], start: int, end: int) -> Tensor:
    dtype = said["dtype"]
    shape: Any = said["shape"]
    offsets: Any = said["data_offsets"]
    known = DTYPES.get(str(dtype), str(dtype))
    whole = [shape, offsets]
    if not all(isinstance(x, list) and all(type(i) is int and i >= 0 for i in x) for x in whole):
        msg = f"{name}: its shape or its place in the file is not given in whole numbers"
        raise UnreadableError(msg)
    sizes = tuple(shape)
    begin, stop = offsets
    if format_of(known) is None:
        note = "" if known != dtype else TYPE_UNREAD(dtype=dtype)
        return Tensor(name, known, sizes, None, note=note)
    count = numbers_in(known, sizes)
    if stop - begin != count * itemsize(known):
        msg = f"{name}: {stop - begin:,} bytes are no {known} of shape {list(sizes)}"
        raise UnreadableError(msg)
    note = "" if start + stop <= end else "cut off: the file ends before it"
    return Tensor(
        name, known, sizes, lambda: stretch(path, start + begin, count, known), stop - begin, note
    )
