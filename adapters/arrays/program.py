"""What ``anynan run`` says of NumPy in a program's own code, which no tracker watches."""

import sys
from contextvars import copy_context
from typing import Any

import numpy as np

from anynan._base.escaping import name as printed
from anynan.arrays.errorlog import ErrorLog
from anynan.arrays.messages import NUMPY_HARM, NUMPY_UNWATCHED

NAMED = 5
LOOKED_AT = 2**26  # bytes: a larger array is left alone as the program ends


def listen() -> ErrorLog:
    """Give the context in which NumPy's errors are noted."""
    return ErrorLog(copy_context())


def closing(errors: ErrorLog, *, told: bool) -> list[str]:
    """Say what NumPy met, and what is NaN as the program ends.

    Args:
        errors: What NumPy met.
        told: Whether the program was told of something bad, which all of it may come from.
    """
    made = told or any(error.makes("nan") for error in errors.lines)
    return [*_met(errors), *_left(told=told, made=made)]


def _met(errors: ErrorLog) -> list[str]:
    if not errors.lines:
        return []
    return [f"anynan: NumPy met: {errors}", f"  note      {NUMPY_HARM()}"]


def _left(*, told: bool, made: bool) -> list[str]:
    """Say which of NumPy's arrays and numbers that the program names are NaN as it ends.

    Where nothing made a NaN, arrays that are NaN in part have missing values.
    """
    main = dict(vars(sys.modules["__main__"]))
    names = [name for name, x in main.items() if not name.startswith("_") and _is_nan(x)]
    if not names or not (made or any(np.isnan(main[name]).all() for name in names)):
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    found = f"anynan: NaN as the program ended: {printed(', '.join(names[:NAMED]))}{more}"
    return [found] if told else [found, f"  note      {NUMPY_UNWATCHED()}"]


def _is_nan(x: Any) -> bool:
    kind: Any = type(x)
    if not (kind is float or kind is np.ndarray or issubclass(kind, np.floating)):
        return False
    if kind is np.ndarray and (x.dtype.kind not in "fc" or x.nbytes > LOOKED_AT):
        return False
    return bool(np.isnan(x).any())
