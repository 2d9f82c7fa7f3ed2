"""Find files, tell what they are, and count what their tensors hold."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from anynan._files import orbax
from anynan._files.formats import Format, format_of
from anynan._files.reader import reader
from anynan._files.tally import Tally, tally
from anynan._files.tensors import Tensor, UnreadableError
from anynan.errors import reason

# What is looked at in a folder; a file that is named is looked at whatever its name.
ENDINGS = (
    ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npy", ".npz", ".h5", ".hdf5", ".keras",
    ".gguf",
)  # fmt: skip
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Scanned:
    """Say what one tensor of a file holds.

    Attributes:
        tensor: Which one.
        tally: What was counted; None if it holds no floats, or could not be read.
        error: Why it could not be read, empty if it could.
    """

    tensor: Tensor
    tally: Tally | None
    error: str = ""

    @property
    def headroom(self) -> float | None:
        """Give the bits left before its dtype overflows, None where that means nothing."""
        kind = format_of(self.tensor.dtype)
        absmax = None if self.tally is None else self.tally.absmax
        return None if kind is None or not absmax else math.log2(kind.max) - math.log2(absmax)

    @property
    def first(self) -> tuple[int, ...] | None:
        """Give the index of the first number that is not finite."""
        place = None if self.tally is None else self.tally.first
        if place is None:
            return None
        index = []
        for size in reversed(self.tensor.shape):
            place, rest = divmod(place, size)
            index.append(rest)
        return tuple(reversed(index))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        found, headroom = self.tally, self.headroom
        said: dict[str, Any] = {
            "name": self.tensor.name,
            "dtype": self.tensor.dtype,
            "shape": list(self.tensor.shape),
        }
        if found is not None:
            first = self.first
            said |= {
                "nan": found.nan,
                "posinf": found.posinf,
                "neginf": found.neginf,
                "first_bad": None if first is None else list(first),
                "min": found.min,
                "max": found.max,
                "headroom": None if headroom is None else round(headroom, 3),
                "overflow": found.overflow,
                "flushed": found.flushed,
            }
        return said | {"note": self.tensor.note, "error": self.error}


@dataclass(frozen=True, slots=True)
class File:
    """Hold what one file, or folder, is found to be.

    Attributes:
        path: Where it is.
        format: What it is, empty if that is not known.
        tensors: What its tensors hold.
        error: Why it could not be read, empty if it could.
    """

    path: str
    format: str
    tensors: tuple[Scanned, ...] = ()
    error: str = ""

    @property
    def bad(self) -> int:
        """Count the numbers that are not finite."""
        return sum(x.tally.bad for x in self.tensors if x.tally is not None)

    @property
    def unread(self) -> bool:
        """Tell whether it, or a tensor of it, could not be read."""
        return bool(self.error) or any(x.error for x in self.tensors)


def scan(
    paths: Iterable[str],
    target: Format | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Iterator[File]:
    """Look at files and folders, one after the other.

    Args:
        paths: Files and folders; of a folder, the files with known endings.
        target: A format that the numbers may be converted to.
        progress: Is told a path, the bytes just read and the bytes of its tensors.
    """
    for path in paths:
        for file, kind, read in _files(path):
            yield _scanned(file, kind, read, target, progress)


def _files(path: str) -> Iterator[tuple[str, str, Callable[[], list[Tensor]]]]:
    if not os.path.isdir(path):
        yield (path, *reader(path))
        return
    if os.path.exists(os.path.join(path, orbax.MANIFEST)):
        yield path, "orbax", partial(orbax.tensors, path)
        return
    for name in sorted(os.listdir(path)):
        inner = os.path.join(path, name)
        if (os.path.isdir(inner) and not os.path.islink(inner)) or name.endswith(ENDINGS):
            yield from _files(inner)


def _scanned(
    path: str, kind: str, read: Callable[[], list[Tensor]], target: Format | None,
    progress: Callable[[str, int, int], object] | None,
) -> File:  # fmt: skip
    try:
        tensors = read()
    except Exception as error:  # noqa: BLE001  whatever a damaged file does to its reader
        return File(path, kind, error=_says(error))
    total = sum(tensor.nbytes for tensor in tensors)

    def look(tensor: Tensor) -> Scanned:
        if tensor.blocks is None or tensor.note.startswith("cut off"):
            broken = tensor.note.startswith(("cut off", "unreadable"))
            return Scanned(tensor, None, tensor.note if broken else "")
        try:
            found = tally(_told(tensor, path, total, progress), tensor.dtype, target)
        except Exception as error:  # noqa: BLE001  as above
            return Scanned(tensor, None, _says(error))
        return Scanned(tensor, found)

    with ThreadPoolExecutor(_THREADS) as pool:
        return File(path, kind, tuple(pool.map(look, tensors)))


def _told(
    tensor: Tensor, path: str, total: int, progress: Callable[[str, int, int], object] | None
) -> Iterator[Any]:
    assert tensor.blocks is not None
    for block in tensor.blocks():
        if progress is not None:
            progress(path, block.nbytes, total)
        yield block


def _says(error: Exception) -> str:
    """Say in one line why a file cannot be read."""
    if isinstance(error, UnreadableError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"damaged: {reason(error)}"
