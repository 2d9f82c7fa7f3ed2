"""Files of ``torch.save``, zipped and older ones: storages are found, nothing is unpickled."""

import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from anynan._files.formats import PAIRS, format_of, itemsize
from anynan._files.pickles import Call, Kept, Name, follow
from anynan._files.tensors import Tensor, UnreadableError, numbers_in, stretch

_MAGIC = 0x1950A86A20F9469CFC6C
_LARGEST = 1 << 28  # of the pickle that names the tensors
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "UntypedStorage": "", "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Storage:
    """Say where a storage lies: its first byte and its bytes, or why it cannot be read."""

    offset: int
    nbytes: int


def zipped(path: str) -> list[Tensor]:
    """List the tensors of a zipped file.

    Raises:
        UnreadableError: If its pickle, or the archive, is damaged.
    """
    with zipfile.ZipFile(path) as file:
        members = {info.filename: info for info in file.infolist()}
        pickled = next(name for name in members if name.endswith("data.pkl"))
        root = pickled.removesuffix("data.pkl")
        if members[pickled].file_size > _LARGEST:
            msg = f"the list of its tensors is {members[pickled].file_size:,} bytes long"
            raise UnreadableError(msg)
        content = follow(file.read(pickled))
        order = file.read(f"{root}byteorder") if f"{root}byteorder" in members else b"little"
        places = {
            name.removeprefix(f"{root}data/"): _stored(path, info)
            for name, info in members.items()
            if name.startswith(f"{root}data/")
        }
    return _listed(path, content, places.get, swapped=order == b"big")


def _stored(path: str, info: zipfile.ZipInfo) -> _Storage | None:
    """Find the bytes of a member that is stored as it is."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return None
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        head = file.read(30)
    start = info.header_offset + 30
    start += int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return _Storage(start, info.file_size)


def older(path: str) -> list[Tensor]:
    """List the tensors of a file from before PyTorch 1.6: pickles, then the storages.

    Raises:
        UnreadableError: If it is a pickle of something else, or damaged.
    """
    with open(path, "rb") as file:
        if follow(file) != _MAGIC:
            msg = "a pickle, but none of torch.save: it is not run, so it is not looked at"
            raise UnreadableError(msg)
        follow(file), follow(file)  # the protocol, and the machine it was written on
        content, keys = follow(file), follow(file)
        end = os.path.getsize(path)
        kinds = {kept.key[2]: kept.key for kept in _kept(content) if isinstance(kept.key, tuple)}
        places: dict[str, _Storage] = {}
        for key in keys if isinstance(keys, list) else []:
            numbers = int.from_bytes(file.read(8), "little")
            dtype = _STORAGES.get(getattr(kinds[key][1], "name", ""), "")
            nbytes = numbers * _width(dtype)
            places[key] = _Storage(file.tell(), nbytes)
            if nbytes > end - file.tell():  # what follows cannot be found
                break
            file.seek(nbytes, os.SEEK_CUR)
    return _listed(path, content, places.get, swapped=False)


def _width(dtype: str) -> int:
    if format_of(dtype) is not None:
        return itemsize(dtype) * (2 if dtype in PAIRS else 1)
    sizes = {"int64": 8, "int32": 4, "qint32": 4, "int16": 2}
    return sizes.get(dtype, 1)


def _children(item: Any) -> list[tuple[str, Any]]:
    if isinstance(item, dict):
        return [(str(key), value) for key, value in item.items()]
    if isinstance(item, list | tuple):
        return [(str(i), value) for i, value in enumerate(item)]
    if isinstance(item, Call):
        args = item.args if isinstance(item.args, tuple) else ()
        return [("", part) for part in (*args, item.state)]
    return []


def _walk(content: Any) -> Iterator[tuple[str, Any]]:
    """Give every part with its path, each once; a tensor's own parts are not entered."""
    todo, seen = [("", content)], {id(content)}
    while todo:
        name, item = todo.pop()
        yield name, item
        if _tensor(item):
            continue
        for key, value in reversed(_children(item)):
            if id(value) not in seen and isinstance(value, dict | list | tuple | Call | Kept):
                seen.add(id(value))
                todo.append((f"{name}.{key}" if name and key else name or key, value))


def _kept(content: Any) -> list[Kept]:
    found = []
    for _, item in _walk(content):
        inside = item.args[0] if _tensor(item) else item
        if isinstance(inside, Kept):
            found.append(inside)
    return found


def _tensor(item: Any) -> bool:
    """Tell whether a call rebuilds a tensor from a storage."""
    return (
        isinstance(item, Call)
        and isinstance(item.function, Name)
        and item.function.name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
        and isinstance(item.args, tuple)
        and len(item.args) >= 4
        and isinstance(item.args[0], Kept)
    )


def _listed(
    path: str, content: Any, place: Callable[[str], _Storage | None], *, swapped: bool
) -> list[Tensor]:
    found = [
        _describe(path, name, item, place, swapped=swapped)
        for name, item in _walk(content)
        if _tensor(item)
    ]
    if found:
        return found
    msg = "it holds no tensors"
    raise UnreadableError(msg)


def _describe(
    path: str, name: str, call: Call, place: Callable[[str], _Storage | None], *, swapped: bool
) -> Tensor:
    kept, offset, shape, strides = call.args[:4]
    key = kept.key
    whole = all(
        isinstance(x, tuple) and all(type(i) is int and i >= 0 for i in x) for x in (shape, strides)
    )
    if not (isinstance(key, tuple) and len(key) >= 5 and whole and type(offset) is int):
        return Tensor(name, "", (), None, note="unreadable: not described as a tensor is")
    dtype = _STORAGES.get(getattr(key[1], "name", ""), "")
    if isinstance(call.function, Name) and call.function.name == "_rebuild_tensor_v3":
        dtype = getattr(call.args[6], "name", "") if len(call.args) > 6 else ""
    if format_of(dtype) is None:
        return Tensor(name, dtype or "unknown", shape, None)
    storage = place(str(key[2]))
    if storage is None:
        return Tensor(name, dtype, shape, None, note="unreadable: its numbers are not in the file")
    width = _width(dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if 0 not in shape and not 0 < last * width <= storage.nbytes:
        return Tensor(name, dtype, shape, None, note="unreadable: it reaches out of its storage")
    count = numbers_in(dtype, shape)
    if _in_order(shape, strides):
        start, note = storage.offset + offset * width, ""
    else:  # all its numbers, in the order of the file
        start, count = storage.offset, storage.nbytes // itemsize(dtype)
        note = "not contiguous: its whole storage was looked at"
        shape = (count // (2 if dtype in PAIRS else 1),)
    nbytes = count * itemsize(dtype)
    return Tensor(
        name,
        dtype,
        shape,
        lambda: stretch(path, start, count, dtype, swapped=swapped),
        nbytes,
        note,
    )


def _in_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    wanted = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != wanted:
            return 0 in shape
        wanted *= max(size, 1)
    return True
