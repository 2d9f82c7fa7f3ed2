"""The numbers in what is no plain array: objects, sparse arrays, columns with missing values."""

import contextlib
import numbers
from functools import lru_cache
from typing import Any, Literal

import numpy as np

Kind = Literal["plain", "sparse", "nullable", "nulls"]


def plain(x: Any) -> Any:
    """Return an array that ``x``'s numbers can be read from; mostly ``x`` itself.

    What is missing (None, NA, null) and what is no number is masked. Of a sparse array the stored
    elements are given, in one dimension.

    Args:
        x: Any array, column or number.

    Example:
        >>> import numpy
        >>> from anynan.values import plain
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
    if index is None or isinstance(x, np.ndarray) or _kind_of(x) != "sparse":
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
    if hasattr(kind, "tocoo") and hasattr(kind, "nnz"):
        return "sparse"
    if hasattr(kind, "null_count") and hasattr(kind, "fill_null") and hasattr(kind, "is_null"):
        return "nulls"
    if hasattr(kind, "isna") and hasattr(kind, "to_numpy"):
        return "nullable"
    return "plain"


def _stored(x: Any) -> Any:
    """Return a form of a sparse array whose ``data`` are its elements and nothing else."""
    return x if getattr(x, "format", "") in ("csr", "csc", "coo", "bsr") else x.tocoo()


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
