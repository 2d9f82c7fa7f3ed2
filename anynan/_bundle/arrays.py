"""Bundles of array code: functions of NumPy's."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from anynan._arrays.access import dtype_name, on_host
from anynan._bundle.calls import Call, Line, UnwritableError, Words, refuse
from anynan._bundle.collector import Operands
from anynan._bundle.script import Dialect
from anynan._bundle.tensors import Held

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
_FUNCTIONS = frozenset(name for name in dir(np) if isinstance(getattr(np, name), np.ufunc)) | {
    "all", "any", "argmax", "argmin", "average", "clip", "concatenate", "convolve", "corrcoef",
    "cov", "cross", "cumprod", "cumsum", "diff", "dot", "gradient", "inner", "interp", "kron",
    "linalg.cholesky", "linalg.det", "linalg.eig", "linalg.eigh", "linalg.inv", "linalg.lstsq",
    "linalg.norm", "linalg.pinv", "linalg.qr", "linalg.slogdet", "linalg.solve", "linalg.svd",
    "max", "mean", "median", "min", "nanmax", "nanmean", "nanmin", "nanstd", "nansum", "nanvar",
    "outer", "percentile", "prod", "quantile", "std", "sum", "tensordot", "trace", "trapezoid",
    "unwrap", "var", "vdot",
}  # fmt: skip
_DTYPE = re.compile(r"(float|int|uint|complex)(8|16|32|64|128)|bool")


def _function(name: str) -> str:
    return f"np.{name}" if name in _FUNCTIONS else str(refuse(f"{name[:40]!r} is not run"))


def _dtype(name: str) -> str:
    return f"np.dtype({name!r})" if _DTYPE.fullmatch(name) else str(refuse("no dtype of NumPy's"))


def _ready(dtype: str) -> str | None:
    if dtype.startswith("complex"):
        return f"x.view(np.{dtype})[..., 0]"
    return None


DIALECT = Dialect("numpy", _HEAD, Words(_dtype), _function, _ready)


def host(x: Any) -> Held:
    """Bring an array of any library to the host."""
    return Held.of(dtype_name(x), np.asarray(on_host(x)))


def call_of(
    raw: str, function: Callable[..., Any], args: Any, kwargs: Any, operands: Operands
) -> Call:
    """Describe an operation on arrays.

    Args:
        raw: The name it was called by.
        function: What was called.
        args: Its positional arguments, on plain arrays.
        kwargs: Its arguments by name.
        operands: Takes the arrays' names.

    Raises:
        UnwritableError: If it is no function of NumPy's.
    """

    def value(name: str, given: Any) -> Any:
        return operands.value(name, given, lambda x: isinstance(x, np.ndarray | np.generic), _other)

    arguments = [value(f"x{i + 1}" if len(args) > 1 else "x", given) for i, given in enumerate(args)]
    keywords = {name: value(name, given) for name, given in kwargs.items() if given is not None}
    name = _known_as(raw, function)
    if name is None:
        msg = "it is no function of NumPy's that a script can call"
        raise UnwritableError(msg)
    return Call([Line("result", name, arguments, keywords)], "result")


def _known_as(raw: str, function: Any) -> str | None:
    """Give the name by which NumPy has a function, None if it is another's."""
    short = getattr(function, "__name__", raw)
    candidates = [short, raw, f"linalg.{short}"]
    for name in candidates:
        found: Any = np
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is function and name in _FUNCTIONS:
            return name
    return None


def _other(x: Any) -> Any:
    if isinstance(x, np.dtype) or (isinstance(x, type) and issubclass(x, np.generic)):
        return {"dtype": np.dtype(x).name}
    msg = f"an argument is a {type(x).__name__}"
    raise UnwritableError(msg)
