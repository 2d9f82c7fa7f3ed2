"""Tell what a file of weights is, and how it is read."""

import zipfile
from collections.abc import Callable
from functools import partial

from anynan._files import arrays, checkpoints, gguf, hdf5, safetensors
from anynan._files.tensors import Tensor, UnreadableError


def reader(path: str) -> tuple[str, Callable[[], list[Tensor]]]:
    """Tell what a file is by how it begins, and how it is read."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
        kind, read = _recognised(path, head)
    except Exception as error:  # noqa: BLE001  the line that is printed says it
        return "", partial(_refuse, error)
    return kind, read


def _recognised(path: str, head: bytes) -> tuple[str, Callable[[], list[Tensor]]]:
    if not head:
        msg = "empty"
        raise UnreadableError(msg)
    if head.startswith(b"\x93NUMPY"):
        return "npy", partial(arrays.tensors, path)
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "hdf5", partial(hdf5.tensors, path)
    if head.startswith(b"GGUF"):
        return "gguf", partial(gguf.tensors, path)
    if head.startswith(b"PK"):
        return _zipped(path)
    if head.startswith(b"\x80") and head[1:2] <= b"\x05":
        return "torch", partial(checkpoints.tensors, path)
    if head.startswith(b"version https://git-lfs"):
        msg = "a pointer of Git LFS, not the file itself: git lfs pull brings it"
        raise UnreadableError(msg)
    if head[8:9] == b"{":
        return "safetensors", partial(safetensors.tensors, path)
    msg = "of no known format (safetensors, torch.save, npy, npz, HDF5, keras, GGUF, Orbax)"
    raise UnreadableError(msg)


def _zipped(path: str) -> tuple[str, Callable[[], list[Tensor]]]:
    with zipfile.ZipFile(path) as file:
        members = file.infolist()
    weights = next((x for x in members if x.filename.endswith(".weights.h5")), None)
    if weights is not None:
        return "keras", partial(hdf5.tensors, path, weights)
    if any(x.filename.endswith("data.pkl") for x in members):
        return "torch", partial(checkpoints.tensors, path)
    if any(x.filename.endswith(".npy") for x in members):
        return "npz", partial(arrays.archived, path)
    msg = "a zip file, but none of arrays or weights"
    raise UnreadableError(msg)


def _refuse(error: Exception) -> list[Tensor]:
    raise error
