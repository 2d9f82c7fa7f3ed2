"""The numbers in what is no plain array: objects, sparse arrays, columns with missing values."""

import contextlib
import numbers
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import numpy as np

Kind = Literal[
    "plain", "sparse", "coordinates", "stored", "layout", "labelled", "arrow", "nullable", "nulls"
]


def plain(x: Any) -> Any:
    """Return an array that ``x``'s numbers can be read from; mostly ``x`` itself.

    What is missing (None, NA, null) and what is no number is masked. Of a sparse array the stored
    elements are given, in one dimension.

    Args:
        x: Any array, column or number.

    Example:
        >>> import numpy
        >>> from anynan._arrays.values import plain
        >>> plain(numpy.array([1.5, None, "text"], object)).mask.tolist()
        [False, True, True]
    """
    if isinstance(x, np.ndarray):
        if x.dtype != object:
            return x
        found = _numbers(np.asarray(x))
        if isinstance(x, np.ma.MaskedArray):
            found.mask |= np.ma.getmaskarray(x)
        return found
    kind = _kind_of(x)
    if kind == "plain":
        return x
    if kind == "sparse":
        return plain(_stored(x).data)
    if kind == "labelled":
        return plain(x.data)
    if kind in ("coordinates", "stored"):
        return _with_fill(x)
    if kind == "layout":
        if getattr(x, "is_nested", False):  # what a narrowed one leaves out is not its own
            return x.detach().contiguous().values()
        return x if _is_dense(x) else _sparse_values(x)
    if kind == "arrow":
        return _arrow(x)
    if kind == "nulls":
        if not x.null_count():
            return x
        return np.ma.MaskedArray(x.fill_null(0).to_numpy(), x.is_null().to_numpy())
    if not hasattr(x.dtype, "na_value") or getattr(x.dtype, "kind", "O") not in "fc":
        return _column(x)
    # Only what is missing changes with what stands for it.
    first, second = (x.to_numpy(dtype=x.dtype.numpy_dtype, na_value=fill) for fill in (0.0, 1.0))
    return np.ma.MaskedArray(first, (first == 0.0) & (second == 1.0))


def place(x: Any, index: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Give the index in ``x`` of an element of ``plain(x)``."""
    kind = "plain" if index is None or isinstance(x, np.ndarray) else _kind_of(x)
    if kind in ("coordinates", "stored", "layout"):
        with contextlib.suppress(Exception):  # where it is no list of coordinates
            return None if index is None else _coordinates(x, kind, index)
        return None
    if kind == "arrow" and x.type.num_fields:
        return None  # it is an index into what the column's lists or structs hold
    if index is None or kind != "sparse":
        return index
    whole = _stored(x)
    if whole.format == "bsr":  # blocks are stored as they are: find the element by its kind
        whole = x.tocoo()
        (bad,) = np.nonzero(~np.isfinite(whole.data))
        index = (int(bad[0]),)
    whole = whole.tocoo(copy=False)
    coords = getattr(whole, "coords", None) or (whole.row, whole.col)
    return tuple(int(axis[index[0]]) for axis in coords)


def _kind_of(x: Any) -> Kind:
    kind: Any = type(x)
    return _kind(kind)


@lru_cache(maxsize=1024)
def _kind(kind: type) -> Kind:
    if hasattr(kind, "nnz") and hasattr(kind, "__array_namespace__"):
        return "coordinates"
    if hasattr(kind, "tocoo") and hasattr(kind, "nnz"):
        return "sparse"
    if hasattr(kind, "nse") and hasattr(kind, "todense"):
        return "stored"
    if hasattr(kind, "layout") and hasattr(kind, "to_sparse"):
        return "layout"
    if hasattr(kind, "dims") and hasattr(kind, "sizes") and hasattr(kind, "data"):
        return "labelled"
    if hasattr(kind, "null_count") and not callable(kind.null_count):
        return "arrow"
    if hasattr(kind, "null_count") and hasattr(kind, "fill_null") and hasattr(kind, "is_null"):
        return "nulls"
    if hasattr(kind, "isna") and hasattr(kind, "to_numpy"):
        return "nullable"
    return "plain"


def _stored(x: Any) -> Any:
    """Return a form of a sparse array whose ``data`` are its elements and nothing else."""
    return x if getattr(x, "format", "") in ("csr", "csc", "coo", "bsr") else x.tocoo()


def _with_fill(x: Any) -> Any:
    """Give the stored elements, and what the others are where that is bad itself."""
    held = getattr(x, "data", None)
    whole = x if hasattr(held, "dtype") else x.to_coo()  # one is a dict of its elements
    fill = getattr(whole, "fill_value", 0)
    if fill - fill == 0 or whole.size == whole.nnz:
        return plain(whole.data)
    return np.append(np.asarray(whole.data), fill)


def _is_dense(x: Any) -> bool:
    return str(x.layout).endswith("strided")


def _sparse_values(x: Any) -> Any:
    """Give the stored elements of a library whose one class is dense and sparse."""
    x = x.detach()
    if "_mkldnn" in str(x.layout):
        return x.to_dense()
    return x.coalesce().values() if getattr(x, "is_sparse", False) else x.values()


def _coordinates(x: Any, kind: Kind, index: tuple[int, ...]) -> tuple[int, ...] | None:
    """Give the place of a stored element."""
    if kind == "layout":
        if getattr(x, "is_nested", False):
            return None
        if _is_dense(x) or "_mkldnn" in str(x.layout):
            return index
        coords = x.detach().to_sparse().coalesce().indices()
        if len(index) != 1:  # blocks, or dense rows in a sparse array
            return None
        return tuple(int(axis[index[0]]) for axis in coords)
    if kind == "stored":
        place = tuple(int(i) for i in x.indices[index[0]])
        return place if len(place) == len(x.shape) else None
    whole = x if hasattr(x, "coords") else x.tocoo() if hasattr(x, "tocoo") else x.to_coo()
    # The elements of a compressed array lie in another order than its coordinates.
    if whole is not x and index[0] < whole.nnz:
        index = (int(np.flatnonzero(~np.isfinite(whole.data))[0]),)
    if index[0] >= whole.nnz:  # the fill value: the first place that is not stored
        stored = set(zip(*(axis.tolist() for axis in whole.coords), strict=True))
        return next((place for place in np.ndindex(whole.shape) if place not in stored), None)
    return tuple(int(axis[index[0]]) for axis in whole.coords)


def _arrow(x: Any) -> Any:
    """Read a column of Arrow's; nulls are masked, of lists and structs what they hold is read."""
    if x.type.num_fields:
        parts = [part for part in map(_arrow, _inner(x)) if part.dtype.kind in "fc"]
        return np.ma.concatenate(parts) if parts else np.empty(0, "U1")  # type: ignore[no-untyped-call]
    found = x.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "fc":
        return np.empty(0, "U1")
    return np.ma.MaskedArray(found, x.is_null().to_numpy(zero_copy_only=False))


def _inner(x: Any) -> Iterator[Any]:
    """Yield the columns that a column of Arrow's is made of."""
    if hasattr(x, "chunks"):
        held = x.chunks
    elif hasattr(x, "keys"):  # maps, whose values are the items' second field
        held = [x.items]
    else:
        inside = x.flatten()
        held = inside if isinstance(inside, list) else [inside]
    for part in held:
        yield from _inner(part) if part.type.num_fields else (part,)


def _column(x: Any) -> Any:
    """Read a column that is no float column: only one of objects may hold floats."""
    if getattr(x.dtype, "kind", "O") != "O" or not isinstance(x.dtype, np.dtype):
        held = getattr(x.dtype, "kind", "O")
        return np.empty(0, "U1") if held in "iubOMmS" and hasattr(x.dtype, "na_value") else x
    return _numbers(np.asarray(x))


def _numbers(x: np.ndarray[Any, Any]) -> Any:
    """Read the numbers in an array of objects; all else is masked."""
    values = np.zeros(x.size, np.complex128 if _any_complex(x) else np.float64)
    mask = np.ones(x.size, bool)
    for i, item in enumerate(x.reshape(-1)):
        if isinstance(item, bool | int | str) or item is None:
            continue
        if isinstance(item, np.ndarray) and item.ndim:
            continue
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            values[i] = complex(item) if values.dtype.kind == "c" else float(item)
            mask[i] = False
    return np.ma.MaskedArray(values.reshape(x.shape), mask.reshape(x.shape))


def _any_complex(x: np.ndarray[Any, Any]) -> bool:
    return any(
        isinstance(item, numbers.Complex) and not isinstance(item, numbers.Real)
        for item in x.reshape(-1)
    )
