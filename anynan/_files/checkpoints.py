"""Files of ``torch.save``, read by PyTorch itself and only as far as it runs nothing in them."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

from anynan._files.formats import PAIRS, format_of, itemsize
from anynan._files.messages import WHOLE_STORAGE
from anynan._files.tally import Bits
from anynan._files.tensors import BLOCK, Tensor, UnreadableError, needed, numbers_in


def tensors(path: str) -> list[Tensor]:
    """List the tensors of a file.

    Raises:
        UnreadableError: If PyTorch is not installed, or refuses the file; or it holds no tensors.
    """
    torch = needed("torch", extra="torch")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are for whoever saved the file
            # A file from before PyTorch 1.6 is no archive, and cannot be mapped.
            mapped = zipfile.is_zipfile(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it needs {named[1]}" if named else "it is damaged, or not made of tensors"
        msg = f"PyTorch does not load it with weights_only=True: {what}"
        raise UnreadableError(msg) from None
    found = [_described(torch, name, tensor) for name, tensor in _walk(torch, content)]
    if not found:
        msg = "it holds no tensors"
        raise UnreadableError(msg)
    return found


def _walk(torch: Any, content: Any) -> Iterator[tuple[str, Any]]:
    """Give every tensor with its path, each once."""
    todo, seen = [("", content)], set()
    while todo:
        name, item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield name, item
            continue
        inner: Any = enumerate(item) if isinstance(item, list | tuple) else ()
        inner = item.items() if isinstance(item, dict) else inner
        todo += reversed([(f"{name}.{key}" if name else str(key), value) for key, value in inner])


def _described(torch: Any, name: str, tensor: Any) -> Tensor:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if format_of(dtype) is None:
        return Tensor(name, dtype, shape, None)
    if tensor.device.type != "cpu":
        return Tensor(name, dtype, shape, None, note="unreadable: its numbers are not in the file")
    if tensor.layout is not torch.strided:
        coo = tensor.layout is torch.sparse_coo
        values = tensor._values() if coo else tensor.values()  # noqa: SLF001  as they are stored
        return _described(torch, f"{name}.values" if name else "values", values)
    width, storage = itemsize(dtype), tensor.untyped_storage()
    if tensor.is_contiguous():
        note, count = "", numbers_in(dtype, shape)
        start = tensor.storage_offset() * tensor.element_size()
    else:  # all its numbers, in the order of the file
        note, start = WHOLE_STORAGE(), 0
        count = storage.nbytes() // width
        shape = (count // (2 if dtype in PAIRS else 1),)

    def blocks() -> Iterator[Bits]:
        stored = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        held = stored[start : start + count * width].view(f"u{width}")
        for at in range(0, count, BLOCK // width):
            yield held[at : at + BLOCK // width].copy()

    return Tensor(name, dtype, shape, blocks, count * width, note)
