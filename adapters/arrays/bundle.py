"""Bundles of array code: functions of NumPy's."""

import operator
import re
from typing import Any

import numpy as np

from anynan._arrays.access import to_host
from anynan._arrays.measures import measure
from anynan._base.summary import Summary
from anynan._calls.calls import Call, Line, UnwritableError, Words, refuse
from anynan._calls.collector import Operands
from anynan._calls.dialect import Dialect

SHOW = """
def show(when, name, x):
    values = np.asarray(x)
    if values.dtype.kind not in "fc":
        values = values.astype(np.float32)
    nan, inf = np.isnan(values), np.isinf(values)
    below = inf & (values.real < 0)
    counts = f"{nan.sum()} NaN, {(inf & ~below).sum()} Inf, {below.sum()} -Inf"
    bad = np.argwhere(nan if nan.any() else inf)
    first = f", first at {bad[0].tolist()}" if len(bad) else ""
    print(f"{when:6} {name}: {tuple(values.shape)} {x.dtype}: {counts}{first}")
"""
_HEAD = f"""
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

loaded = load_file(Path(__file__).with_name("tensors.safetensors"))

{SHOW}
np.seterr(all="ignore")
"""
# Functions of arrays, and nothing that reads, writes or calls.
_UFUNCS = frozenset(name for name in dir(np) if isinstance(getattr(np, name), np.ufunc))
_FUNCTIONS = _UFUNCS | {
    "all", "any", "argmax", "argmin", "astype", "average", "clip", "concatenate", "convolve",
    "corrcoef", "cov", "cross", "cumprod", "cumsum", "diff", "dot", "gradient", "inner", "interp",
    "kron",
    "linalg.cholesky", "linalg.det", "linalg.eig", "linalg.eigh", "linalg.inv", "linalg.lstsq",
    "linalg.norm", "linalg.pinv", "linalg.qr", "linalg.slogdet", "linalg.solve", "linalg.svd",
    "max", "mean", "median", "min", "nanmax", "nanmean", "nanmin", "nanstd", "nansum", "nanvar",
    "outer", "percentile", "prod", "quantile", "std", "sum", "tensordot", "trace", "trapezoid",
    "unwrap", "var", "vdot",
}  # fmt: skip
# The array API's names of what NumPy calls otherwise.
_NUMPYS = {"pow": "power", "concat": "concatenate", "matrix_norm": "linalg.norm",
           "vector_norm": "linalg.norm"}  # fmt: skip
_DTYPE = re.compile(r"(float|int|uint|complex)(8|16|32|64|128)|bool")


def _function(name: str) -> str:
    if name not in _FUNCTIONS:
        refuse(f"{name[:40]!r} is not run")
    return f"np.{name}"


def _ready(dtype: str) -> str | None:
    if dtype.startswith("complex"):
        return f"x.view(np.{dtype})[..., 0]"
    return None


DIALECT = Dialect("numpy", _HEAD, Words(_DTYPE, "np.dtype({!r})"), _function, _ready)


def host(x: Any) -> np.ndarray[Any, Any]:
    """Bring an array of any library to the host."""
    return np.asarray(x) if isinstance(x, np.ndarray | np.generic) else to_host(x)


def call_of(
    name: str, raw: str, seen: Summary | None, args: Any, kwargs: Any, operands: Operands
) -> Call:
    """Describe an operation on arrays.

    Args:
        name: Its canonical name.
        raw: The name it was called by.
        seen: What it gave.
        args: Its positional arguments, on plain arrays.
        kwargs: Its arguments by name.
        operands: Takes the arrays' names.

    Raises:
        UnwritableError: If no function of NumPy's gives the same.
    """
    named = {key: given for key, given in kwargs.items() if given is not None}
    arguments, keywords = operands.values(
        args, named, lambda x: isinstance(x, np.ndarray | np.generic), _other
    )
    short = raw.rpartition(".")[2]
    for known in dict.fromkeys((short, f"linalg.{short}", name, _NUMPYS.get(name, name))):
        if known in _FUNCTIONS and _gives(known, args, kwargs, seen):
            return Call([Line("result", known, arguments, keywords)], "result")
    msg = "no function of NumPy's gives the same"
    raise UnwritableError(msg)


def _gives(name: str, args: Any, kwargs: Any, seen: Summary | None) -> bool:
    """Tell whether a function of NumPy's gives as many bad values, in the same places."""
    try:
        with np.errstate(all="ignore"):
            out = measure(operator.attrgetter(name)(np)(*args, **kwargs))
    except Exception:  # noqa: BLE001  then it is another
        return False
    return seen is not None and (out.shape, out.dtype, out.nan, out.posinf, out.neginf) == (
        seen.shape, seen.dtype, seen.nan, seen.posinf, seen.neginf,
    )  # fmt: skip


def _other(x: Any) -> Any:
    if isinstance(x, np.dtype) or (isinstance(x, type) and issubclass(x, np.generic)):
        return {"dtype": np.dtype(x).name}
    return None
