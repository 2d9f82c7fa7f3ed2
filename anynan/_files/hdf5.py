"""HDF5 files, and ``.keras``, which is a zip file with one inside; read by h5py."""

import io
import math
import os
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._files.formats import format_of, itemsize
from anynan._files.tally import Bits
from anynan._files.tensors import Tensor, UnreadableError, needed, passed_over

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FREE, _DENSEST = 1 << 26, 1100  # no compression packs more; what was never written is not read
_PART = 1 << 24  # bytes that are read at a time, and decompressed


def tensors(path: str, member: zipfile.ZipInfo | None = None) -> list[Tensor]:
    """List the datasets of a file, or of one inside a zip file.

    Raises:
        UnreadableError: If h5py is missing, or refuses it.
    """
    h5py = needed("h5py")
    found: list[Tensor] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found.append(_dataset(h5py, path, member, name, item))

    with h5py.File(_opened(path, member), "r") as file:
        file.visititems(visit)
    return found


def _dataset(h5py: Any, path: str, member: zipfile.ZipInfo | None, name: str, item: Any) -> Tensor:
    dtype, shape = item.dtype, item.shape
    if shape is None or format_of(dtype.name) is None:
        return Tensor(name, dtype.name, shape or (), None, note=passed_over(dtype))
    if item.external or item.is_virtual:
        return Tensor(name, dtype.name, shape, None, note="unreadable: it is kept in another file")
    nbytes, held = math.prod(shape) * dtype.itemsize, item.id.get_storage_size()
    if nbytes > _FREE and nbytes > _DENSEST * held:
        note = f"unreadable: it would be {nbytes:,} bytes, of which {held:,} are in the file"
        return Tensor(name, dtype.name, shape, None, note=note)

    def blocks() -> Iterator[Bits]:
        with h5py.File(_opened(path, member), "r") as file:
            for part in parts(shape, dtype.itemsize):
                yield bits(file[name][part], dtype.name)

    return Tensor(name, dtype.name, shape, blocks, nbytes)


def bits(values: Any, dtype: str) -> Bits:
    """Return an array's numbers as unsigned integers, in order."""
    held: NDArray[Any] = np.ascontiguousarray(values)
    held = held.astype(held.dtype.newbyteorder("="), copy=False).reshape(-1)
    return held.view(np.dtype(f"u{itemsize(dtype)}"))


def parts(shape: tuple[int, ...], width: int) -> Iterator[tuple[Any, ...]]:
    """Cut an array into parts that are small enough, in order.

    Example:
        >>> from anynan._files.hdf5 import parts
        >>> list(parts((5, 2**20), 8))
        [(slice(0, 2, None),), (slice(2, 4, None),), (slice(4, 6, None),)]
    """
    if 0 in shape:
        return
    row = math.prod(shape[1:]) * width
    if not shape or math.prod(shape) * width <= _PART:
        yield ()
    elif row <= _PART:
        rows = _PART // row
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows),)
    else:
        for i in range(shape[0]):
            for part in parts(shape[1:], width):
                yield (i, *part)


def _opened(path: str, member: zipfile.ZipInfo | None) -> Any:
    if member is None:
        return path
    if member.compress_type != zipfile.ZIP_STORED:
        msg = f"{member.filename} is compressed inside of it: unpack it first"
        raise UnreadableError(msg)
    return _Window(path, member)


class _Window(io.RawIOBase):
    """Read a stored member of a zip file as a file of its own."""

    def __init__(self, path: str, member: zipfile.ZipInfo) -> None:
        super().__init__()
        self._file = open(path, "rb")  # noqa: SIM115
        self._file.seek(member.header_offset)
        head = self._file.read(30)
        names = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        self._start, self._size = member.header_offset + 30 + names, member.file_size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        wanted = max(0, min(len(into), self._size - self._at))
        self._file.seek(self._start + self._at)
        held = self._file.read(wanted)
        into[: len(held)] = held
        self._at += len(held)
        return len(held)

    def close(self) -> None:
        self._file.close()
        super().close()
