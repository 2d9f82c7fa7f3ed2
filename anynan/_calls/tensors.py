"""The tensor file of a bundle: safetensors, written from bytes so that every dtype survives."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anynan._files.formats import PAIRS  # as not every release of safetensors has complex ones
from anynan._files.safetensors import DTYPES

_CODES = {dtype: code for code, dtype in DTYPES.items() if dtype != "complex64"}
_BITS = {1: "uint8", 2: "uint16"}
_SIZES = {"64": 8, "32": 4, "16": 2}


@dataclass(frozen=True, slots=True)
class HostTensor:
    """Hold a tensor's content.

    Attributes:
        dtype: Short name of its dtype.
        shape: Its shape.
        data: Its bytes, in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, dtype: str, array: np.ndarray[Any, Any]) -> "HostTensor":
        """Take an array of this dtype, or of its bits."""
        return cls(dtype, array.shape, np.ascontiguousarray(array).tobytes())


def keepable(dtype: str) -> bool:
    """Tell whether the file has a place for a dtype."""
    return dtype in _CODES or dtype in PAIRS


def itemsize(dtype: str) -> int:
    """Give the bytes of one element."""
    if dtype in PAIRS:
        return 2 * itemsize(PAIRS[dtype])
    return next((size for digits, size in _SIZES.items() if dtype.endswith(digits)), 1)


def stored(dtype: str, shape: tuple[int, ...], *, bits: bool) -> tuple[str, tuple[int, ...]]:
    """Give the dtype and shape that a tensor has in the file.

    Args:
        dtype: Its own dtype.
        shape: Its own shape.
        bits: Whether what NumPy does not have by itself is kept as unsigned integers.
    """
    if dtype in PAIRS:
        return PAIRS[dtype], (*shape, 2)
    strange = dtype == "bfloat16" or dtype.startswith("float8")
    return (_BITS[itemsize(dtype)] if bits and strange else dtype), shape


def write(path: str, held: Mapping[str, HostTensor], *, bits: bool) -> None:
    """Write a tensor file, the widest elements first so that each lies at a multiple of its size.

    Args:
        path: The file.
        held: The tensors by name.
        bits: As in ``stored``.
    """
    header: dict[str, Any] = {}
    start = 0
    order = sorted(held, key=lambda name: -itemsize(held[name].dtype))
    for name in order:
        item = held[name]
        dtype, shape = stored(item.dtype, item.shape, bits=bits)
        end = start + len(item.data)
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(held[name].data)
        file.flush()
        os.fsync(file.fileno())


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Give the size of a tensor's content."""
    return math.prod(shape) * itemsize(dtype)
