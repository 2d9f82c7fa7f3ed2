"""What array functions are called in reports, and what their arguments are."""

import inspect
from functools import lru_cache
from types import FrameType
from typing import Any

# Names of NumPy, of Python's operators and of older libraries -> the array API's, or the field's.
_WORDS = {
    "true_divide": "divide", "truediv": "divide", "div": "divide", "rdiv": "divide",
    "sub": "subtract", "mul": "multiply", "power": "pow", "float_power": "pow",
    "mod": "remainder", "fmod": "remainder", "floordiv": "floor_divide", "neg": "negative",
    "pos": "positive", "absolute": "abs", "fabs": "abs", "arccos": "acos", "arcsin": "asin",
    "arctan": "atan", "arctan2": "atan2", "arccosh": "acosh", "arcsinh": "asinh",
    "arctanh": "atanh", "add.reduce": "sum", "multiply.reduce": "prod", "maximum.reduce": "max",
    "minimum.reduce": "min", "logical_and.reduce": "all", "logical_or.reduce": "any",
    "add.accumulate": "cumsum", "multiply.accumulate": "cumprod", "amax": "max", "amin": "min",
    "cumulative_sum": "cumsum", "cumulative_prod": "cumprod", "around": "round", "rint": "round",
    "concatenate": "concat", "conjugate": "conj", "dot": "matmul", "inner": "matmul",
    "vdot": "matmul", "tensordot": "matmul", "vecdot": "matmul", "outer": "multiply",
    "multiply.outer": "multiply", "add.outer": "add", "matvec": "matmul", "vecmat": "matmul",
    "norm": "vector_norm", "power.outer": "pow", "subtract.outer": "subtract",
    "true_divide.outer": "divide", "divide.outer": "divide", "putmask": "setitem",
    "copyto": "setitem", "place": "setitem", "put": "setitem", "fill_diagonal": "setitem",
    "cholesky_ex": "cholesky", "eigvalsh": "eigh", "inv_ex": "inv", "to": "astype",
    "gammaln": "lgamma", "psi": "digamma", "gammainc": "igamma", "gammaincc": "igammac",
    "y0": "bessel_y0", "y1": "bessel_y1", "k0": "modified_bessel_k0", "k1": "modified_bessel_k1",
    "k0e": "scaled_modified_bessel_k0", "k1e": "scaled_modified_bessel_k1",
    "type": "astype", "clone": "copy", "linalg_norm": "vector_norm", "special_softmax": "softmax",
}  # fmt: skip
# Their results hold whatever was in memory.
UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
VIEWS = frozenset(
    {
        "getitem", "reshape", "ravel", "transpose", "permute_dims", "squeeze", "expand_dims",
        "swapaxes", "moveaxis", "view", "T", "mT", "real", "imag", "broadcast_to", "diagonal",
        "matrix_transpose", "flip", "atleast_1d", "atleast_2d", "atleast_3d", "split", "unstack",
        "asarray", "H", "mH", "unbind", "permute", "narrow", "select", "expand", "view_as",
    }
)  # fmt: skip
# What a call of these writes into its first operand.
WRITING = frozenset({"copyto", "putmask", "place", "put", "fill_diagonal", "put_along_axis"})
WRITING_METHODS = frozenset({"fill", "sort", "put", "partition", "itemset", "resize", "setfield"})

_NAMES: dict[str, tuple[str, ...]] = {
    "pow": ("self", "exponent"),
    "where": ("condition", "self", "other"),
    "clip": ("self", "min", "max"),
    "setitem": ("self", "value"),
}
_PARAMS = {
    "axis": "dim", "dim": "dim", "ddof": "correction", "correction": "correction", "ord": "ord",
    "eps": "eps", "keepdims": "keepdim", "exponent": "exponent",
}  # fmt: skip


@lru_cache(maxsize=4096)
def canonical(name: str) -> str:
    """Return the canonical name of a function, method, operator or ufunc.

    Args:
        name: Such as ``true_divide``, ``add.reduce`` or ``linalg.inv``.

    Example:
        >>> from anynan.arrays.names import canonical
        >>> canonical("arccos"), canonical("add.reduce"), canonical("linalg.norm")
        ('acos', 'sum', 'vector_norm')
    """
    known = _WORDS.get(name)
    if known is not None:
        return known
    bare = name.rpartition(".")[2].strip("_") if not name.endswith(".outer") else name
    for mark in ("i", "r"):  # the in-place and reflected operators: iadd, rtruediv
        if bare.startswith(mark) and bare[1:] in _OPERATORS:
            bare = bare[1:]
    return _WORDS.get(bare, bare)


def asked_by(frame: FrameType, module: str) -> bool:
    """Tell whether a frame is in a module, or in a copy that another package carries of it."""
    name = str(frame.f_globals.get("__name__", ""))
    return name == module or name.endswith("." + module)


def signature(function: Any) -> inspect.Signature:
    """Give what stands for a function the function's own signature.

    Raises:
        AttributeError: If it has none.
    """
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise AttributeError(str(error)) from error


_OPERATORS = frozenset(
    {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
     "lshift", "rshift", "divmod"}
)  # fmt: skip


def named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """List what went into an operation under the names that the rules of causes know.

    Args:
        name: The canonical name.
        args: Positional arguments, as the user gave them.
        kwargs: Arguments by name.
    """
    labels = _NAMES.get(name, ("self", "other"))
    found: list[tuple[str, Any]] = []
    count = 0
    for value in args:
        kind: Any = type(value)  # isinstance would ask a proxy for its class
        if issubclass(kind, str | slice | type) or value is None or value is Ellipsis:
            continue
        label = labels[count] if count < len(labels) else f"arg{count}"
        count += 1
        if issubclass(kind, list | tuple):
            found += [(f"{label}[{i}]", item) for i, item in enumerate(value)]
        else:
            found.append((label, value))
    found += [(key, value) for key, value in kwargs.items() if key not in ("out", *_PARAMS)]
    return [(label, value) for label, value in found if label != "condition"]


def is_number(value: Any) -> bool:
    """Tell whether a value is a Python number that an operation can take as an operand."""
    kind: Any = type(value)
    return issubclass(kind, float | int | complex) and kind is not bool


def params(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the plain arguments that a rule of causes may need."""
    found: dict[str, Any] = {}
    for key, value in kwargs.items():
        word = _PARAMS.get(key)
        if word is not None and type(value) in (int, float, bool, list, tuple):
            found[word] = list(value) if isinstance(value, tuple) else value
    if name in ("var", "std") and "correction" not in found:
        found["correction"] = 0  # NumPy's and the standard's default; PyTorch is told otherwise
    if name in ("softmax", "log_softmax") and len(args) > 1 and type(args[1]) is int:
        found.setdefault("dim", args[1])
    if name == "pow" and len(args) > 1 and is_number(args[1]) and not isinstance(args[1], complex):
        found["exponent"] = args[1]
    return found
