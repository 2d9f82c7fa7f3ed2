"""A tensor in a file: where its numbers are, and how they are read block by block."""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from anynan._files.formats import PAIRS, itemsize
from anynan._files.messages import TYPE_UNREAD
from anynan._files.tally import Bits

BLOCK = 1 << 19  # numbers are read so many bytes at a time, and looked at while in the cache


class UnreadableError(Exception):
    """Say in one line why a file, or a tensor of it, cannot be read."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Name a tensor, and say how to come to its numbers.

    Attributes:
        name: Its name in the file.
        dtype: Short name of its data type.
        shape: Its shape.
        blocks: Read the numbers as unsigned integers, in order; None if it holds no floats.
        nbytes: What will be read.
        note: What has to be known about it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Bits]] | None
    nbytes: int = 0
    note: str = ""


def numbers_in(dtype: str, shape: tuple[int, ...]) -> int:
    """Count the numbers of a tensor; a complex element is two."""
    return math.prod(shape) * (2 if dtype in PAIRS else 1)


def stretch(path: str, offset: int, count: int, dtype: str) -> Iterator[Bits]:
    """Read numbers that lie one after the other in a file.

    Args:
        path: The file.
        offset: Where they begin.
        count: How many there are.
        dtype: What they are.

    Raises:
        UnreadableError: If the file ends before.
    """
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        yield from stream(file, count, dtype)


def stream(file: Any, count: int, dtype: str, *, swapped: bool = False) -> Iterator[Bits]:
    """Read the next numbers of an open file.

    Raises:
        UnreadableError: If it ends before.
    """
    width = itemsize(dtype)
    kind = np.dtype(f"{'>' if swapped else '<'}u{width}")
    buffer = np.empty(min(BLOCK // width, count), kind)
    while count:
        part = buffer[: min(count, buffer.size)]
        if _fill(file, part.data.cast("B")) != part.nbytes:
            msg = "cut off: the file ends inside of it"
            raise UnreadableError(msg)
        count -= part.size
        yield part if kind.isnative else part.astype(kind.newbyteorder("="))


def _fill(file: Any, into: memoryview) -> int:
    held = 0
    while held < len(into):
        read = file.readinto(into[held:])
        if not read:
            break
        held += read
    return held


def needed(package: str, extra: str = "scan") -> Any:
    """Import what reads a format; an extra of anynan brings it.

    Raises:
        UnreadableError: If it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        msg = f'{package} is needed to read it: pip install "anynan[{extra}]"'
        raise UnreadableError(msg) from None


def passed_over(dtype: "np.dtype[Any]") -> str:
    """Say that numbers of a type could be bad, and are not looked at; empty if they cannot be."""
    return TYPE_UNREAD(dtype=dtype) if dtype.kind in "OVfc" else ""
