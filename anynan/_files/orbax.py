"""Checkpoints of Orbax, and other folders of Zarr arrays in OCDBT; read by tensorstore."""

import math
import os
from collections.abc import Iterator
from typing import Any

from anynan._files.formats import format_of
from anynan._files.hdf5 import bits, parts
from anynan._files.tally import Bits
from anynan._files.tensors import Tensor, needed

MANIFEST = "manifest.ocdbt"
_DRIVERS = {b"/.zarray": "zarr", b"/zarr.json": "zarr3"}


def tensors(path: str) -> list[Tensor]:
    """List the arrays of a folder."""
    tensorstore = needed("tensorstore")
    base = {"driver": "ocdbt", "base": f"file://{os.path.abspath(path)}"}
    found = []
    for key in tensorstore.KvStore.open(base).result().list().result():
        for end, driver in _DRIVERS.items():
            if key.endswith(end):
                name = key.removesuffix(end).decode("utf-8", "replace")
                spec = {"driver": driver, "kvstore": {**base, "path": f"{name}/"}}
                found.append(_array(tensorstore, name, spec))
    return found


def _array(tensorstore: Any, name: str, spec: dict[str, Any]) -> Tensor:
    array = tensorstore.open(spec, read=True, open=True).result()
    dtype, shape = array.dtype.name, tuple(array.shape)
    if format_of(dtype) is None:
        return Tensor(name, dtype, shape, None)
    width = array.dtype.numpy_dtype.itemsize

    def blocks() -> Iterator[Bits]:
        for part in parts(shape, width):
            yield bits(array[part].read().result() if part else array.read().result(), dtype)

    return Tensor(name, dtype, shape, blocks, math.prod(shape) * width)
