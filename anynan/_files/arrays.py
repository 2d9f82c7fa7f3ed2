"""NumPy's ``.npy``, and ``.npz``, which is a zip file of them; nothing is unpickled."""

import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from anynan._files.formats import format_of
from anynan._files.messages import TAKEN_FOR, TRANSPOSED
from anynan._files.tally import Bits
from anynan._files.tensors import Tensor, UnreadableError, numbers_in, passed_over, stream

_LONGEST = 1 << 16  # of a header


def tensors(path: str) -> list[Tensor]:
    """List the one array of a ``.npy``."""
    return [_array(path, None, os.path.basename(path).removesuffix(".npy"))]


def archived(path: str) -> list[Tensor]:
    """List the arrays of a ``.npz``."""
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
    return [_array(path, name, name.removesuffix(".npy")) for name in names if name[-1:] != "/"]


def _array(path: str, member: str | None, name: str) -> Tensor:
    with _opened(path, member) as file:
        try:
            shape, fortran, dtype = _header(file)
        except (ValueError, EOFError, SyntaxError, TypeError) as error:
            msg = f"{name + ': ' if name else ''}no array of NumPy's: {error}"
            raise UnreadableError(msg) from None
    known = "bfloat16" if dtype.descr == [("", "|V2")] else dtype.name
    if format_of(known) is None:
        return Tensor(name, known, shape, None, note=passed_over(dtype))
    turned = fortran and len(shape) > 1
    notes = [TRANSPOSED()] * turned
    notes += [TAKEN_FOR(dtype="bfloat16")] * (known == "bfloat16")

    def blocks() -> Iterator[Bits]:
        with _opened(path, member) as file:
            _header(file)
            swapped = dtype.byteorder == ">"
            yield from stream(file, numbers_in(known, shape), known, swapped=swapped)

    nbytes = math.prod(shape) * dtype.itemsize
    return Tensor(name, known, shape[::-1] if turned else shape, blocks, nbytes, "; ".join(notes))


@contextmanager
def _opened(path: str, member: str | None) -> Iterator[Any]:
    """Open a file, or a member of a zip file."""
    if member is None:
        with open(path, "rb") as file:
            yield file
    else:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            yield file


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    width = 2 if version == (1, 0) else 4
    length = file.read(width)
    text = file.read(min(int.from_bytes(length, "little"), _LONGEST))
    held = io.BytesIO(length + text)
    formats = np.lib.format
    read = formats.read_array_header_1_0 if width == 2 else formats.read_array_header_2_0
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(held)
    return found
