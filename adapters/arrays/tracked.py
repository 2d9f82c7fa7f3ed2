"""The array that a tracked function works on: it behaves as the array it holds."""

import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import numpy as np

from anynan._arrays.chunked import is_chunked
from anynan.arrays.names import VIEWS, WRITING, WRITING_METHODS, asked_by, canonical, signature

CLEAN, UNKNOWN = -1, -2

# Protocols that would let a library reach the elements past the recorder unseen.
_CLOSED = frozenset(
    {
        "__array_interface__", "__array_struct__", "__array_priority__", "__array_wrap__",
        "__array_prepare__", "__array_finalize__", "__cuda_array_interface__", "__jax_array__",
        "__torch_function__", "__dask_graph__", "__buffer__",
    }
)  # fmt: skip


# Attributes that reach the elements past the recorder.
_WINDOWS = frozenset({"flat", "data", "ctypes", "base"})


class Cell:
    """Note what was written into memory that several arrays share."""

    __slots__ = ("bad", "handed", "label", "writes", "written")

    def __init__(self, label: str | None = None) -> None:
        self.writes: list[int] = []
        self.written = False
        self.handed = False  # True once a plain array was handed out, which anyone may write into
        self.label = label  # the argument that the memory is of
        self.bad = False  # True if that was bad when the call began


class TrackedArray:
    """Stand for an array inside a tracked function; operations on it are recorded.

    Indexing, operators, methods and attributes are those of the array it holds, which
    ``anynan.track`` gives back in its place when the function returns. It is no instance of the
    array's class: ``isinstance(x, numpy.ndarray)`` is False.
    """

    __slots__ = ("__weakref__", "_cell", "_made", "_node", "_raw", "_tape")

    def __init__(self, raw: Any, tape: Any, made: str | None, node: int, cell: Cell) -> None:
        self._raw, self._tape, self._made, self._node, self._cell = raw, tape, made, node, cell

    # What it is.

    shape: Any

    @property
    def dtype(self) -> Any:
        """Give the array's data type."""
        return self._raw.dtype

    def __getattr__(self, name: str) -> Any:
        if name in _CLOSED:
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        if name == "to_dask_array" and is_chunked(self._raw):
            return self._to_dask_array
        value = getattr(self._raw, name)
        if callable(value) and not self._tape.is_array(value):
            return _Method(self, name)
        if self._tape.is_array(value):
            return self._tape.operate(name, lambda x: getattr(x, name), (self,), {})
        if name in _WINDOWS:
            self._tape.escaped(self, f".{name}", said=False)
        return _At(self) if name == "at" else value

    def _to_dask_array(self) -> Any:
        """Hand the plain array to Dask's own functions, which have no way to hand it on."""
        self._tape.escaped(self, "to_dask_array")
        return self._raw

    def __iter__(self) -> Iterator[Any]:
        if not getattr(self._raw, "shape", ()):
            iter(self._raw)  # the library's own error
        # Not every library counts its rows for len().
        count = len(self._raw) if hasattr(self._raw, "__len__") else self._raw.shape[0]
        return (self[i] for i in range(count))

    def __float__(self) -> float:
        self._tape.slipped(self)
        return float(self._raw)

    def __complex__(self) -> complex:
        self._tape.slipped(self)
        return complex(self._raw)

    def __contains__(self, item: Any) -> bool:
        return (item._raw if is_tracked(item) else item) in self._raw

    def __reduce__(self) -> Any:
        # What crosses a process is the plain array.
        return _plain, (self._raw,)

    def __copy__(self) -> Any:
        return self._tape.operate("copy", _copied, (self,), {})

    def __deepcopy__(self, memo: Any) -> Any:
        return self._tape.operate("copy", _copied, (self,), {})

    def __getitem__(self, key: Any) -> Any:
        return self._tape.operate("getitem", operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        if asked_by(sys._getframe(1), "array_api_extra._lib._at") and not _writable(self._raw):
            # It takes every array but its own for one that can be written to.
            out = self._tape.operate("setitem", _with, (self, value), {"key": key})
            self._raw, self._node, self._made, self._cell = _parts(out)
            return
        self._tape.operate("setitem", _setitem, (self, value), {"key": key}, writes=self)

    # What other libraries ask for.

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return self._tape.namespace_of(self._raw, sys._getframe(1))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._tape.escape(self, dtype, copy)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any:  # fmt: skip
        self._tape.escaped(self, "__dlpack__")
        asked = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        # A library of an older standard knows only some of these.
        given = {name: value for name, value in asked.items() if value is not None}
        return self._raw.__dlpack__(**given)

    def __dlpack_device__(self) -> Any:
        return self._raw.__dlpack_device__()

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if method == "at":
            return self._tape.operate(ufunc.__name__, ufunc.at, args, kwargs, writes=args[0])
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return self._tape.operate(name, function, args, kwargs, writes=_out(kwargs))

    def __array_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = func.__name__
        writes = args[0] if name in WRITING and args else _out(kwargs)
        return self._tape.operate(name, func, args, kwargs, writes=writes)


def is_tracked(x: Any) -> TypeGuard[TrackedArray]:
    """Tell whether a value is one of these; nothing of the value's own is asked."""
    kind: Any = type(x)  # isinstance would ask x.__class__, and a proxy may raise there
    return issubclass(kind, TrackedArray)


def strip(value: Any, found: list[TrackedArray]) -> Any:
    """Put plain arrays in the place of tracked ones, and note those."""
    if is_tracked(value):
        found.append(value)
        return value._raw
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([strip(item, found) for item in value])
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return slice(*[strip(item, found) for item in parts])
    if kind is dict:
        return {key: strip(item, found) for key, item in value.items()}
    return value


class _Method:
    """Stand for a method of the array."""

    __slots__ = ("_array", "_name")

    def __init__(self, array: TrackedArray, name: str) -> None:
        self._array, self._name = array, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._name

        def call(x: Any, *rest: Any, **options: Any) -> Any:
            return getattr(x, name)(*rest, **options)

        array = self._array
        if name in ("item", "tolist"):
            array._tape.slipped(array)
        inplace = name in WRITING_METHODS or (name.endswith("_") and not name.startswith("_"))
        writes = array if inplace else _out(kwargs)
        return array._tape.operate(name, call, (array, *args), kwargs, writes=writes)

    @property
    def __signature__(self) -> inspect.Signature:
        return signature(getattr(self._array._raw, self._name))

    def __repr__(self) -> str:
        return f"<{self._name} of a tracked array>"


class _At:
    """Stand for ``x.at``, where arrays cannot be written to: ``x.at[key].set(value)``."""

    __slots__ = ("_array", "_key")

    def __init__(self, array: TrackedArray, key: Any = None) -> None:
        self._array, self._key = array, key

    def __getitem__(self, key: Any) -> "_At":
        return _At(self._array, key)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(x: Any, *given: Any, key: Any, **options: Any) -> Any:
            return getattr(x.at[key], name)(*given, **options)

        def changed(*given: Any, **options: Any) -> Any:
            array, word = self._array, "setitem" if name == "set" else name
            return array._tape.operate(word, call, (array, *given), {"key": self._key, **options})

        return changed


def _out(kwargs: dict[str, Any]) -> Any:
    out = kwargs.get("out")
    return out[0] if isinstance(out, tuple) and out else out


def _setitem(x: Any, value: Any, *, key: Any) -> None:
    x[key] = value


def _writable(raw: Any) -> bool:
    return hasattr(raw, "__setitem__") and not hasattr(raw, "at")


def _with(x: Any, value: Any, *, key: Any) -> Any:
    """Give what ``x`` would be after a write, where it cannot be written to."""
    if hasattr(x, "at"):
        return x.at[key].set(value)
    y = np.array(x)
    y[key] = value
    return y


def _parts(x: Any) -> tuple[Any, int, str | None, Cell]:
    return (x._raw, x._node, x._made, x._cell) if is_tracked(x) else (x, CLEAN, None, Cell())


def _plain(raw: Any) -> Any:
    return raw


def _copied(x: Any) -> Any:
    import copy

    return copy.deepcopy(x)


def is_view(name: str) -> bool:
    """Tell whether an operation's result may share its operand's memory."""
    return canonical(name) in VIEWS


def _install(name: str, function: Callable[..., Any]) -> None:
    """Give the class one operator, its reflected form and its in-place form."""
    word = canonical(name)

    def forward(self: TrackedArray, other: Any) -> Any:
        return self._tape.operate(word, function, (self, other), {})

    def reflected(self: TrackedArray, other: Any) -> Any:
        return self._tape.operate(word, function, (other, self), {})

    def inplace(self: TrackedArray, other: Any) -> Any:
        change = getattr(operator, f"i{name}", function)
        return self._tape.operate(word, change, (self, other), {}, writes=self)

    for mark, method in (("", forward), ("r", reflected), ("i", inplace)):
        if name == "divmod" and mark == "i":
            continue
        method.__name__ = f"__{mark}{name}__"
        setattr(TrackedArray, method.__name__, method)


def _install_unary(name: str, function: Callable[..., Any]) -> None:
    def method(self: TrackedArray, *args: Any) -> Any:
        return self._tape.operate(name, function, (self, *args), {})

    setattr(TrackedArray, f"__{name}__", method)


def _install_answer(name: str, ask: Callable[..., Any]) -> None:
    """Give the class a method that answers as the array does."""

    def method(self: TrackedArray, *args: Any) -> Any:
        return ask(self._raw, *args)

    setattr(TrackedArray, f"__{name}__", method)


def _attribute(name: str) -> property:
    """Make an attribute of the array that can be assigned to."""

    def read(self: TrackedArray) -> Any:
        return self._raw.shape if name == "shape" else self.__getattr__(name)

    def write(self: TrackedArray, value: Any) -> None:
        def change(x: Any, given: Any) -> None:
            setattr(x, name, given)

        self._tape.operate("setitem", change, (self, value), {}, writes=self)

    return property(read, write, doc=f"Give the array's ``{name}``.")


# An attribute that is not listed here is read only: a tracked array has none of its own.
for _name in ("shape", "real", "imag", "flat", "strides", "data", "grad", "requires_grad"):
    setattr(TrackedArray, _name, _attribute(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift",
              "rshift"):  # fmt: skip
    _install(_name, getattr(operator, _name))
_install("and", operator.and_)
_install("or", operator.or_)
_install("xor", operator.xor)
_install("divmod", divmod)
for _name in ("neg", "pos", "abs", "invert"):
    _install_unary(_name, getattr(operator, _name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _install_unary(_name, getattr(operator, _name))
_install_unary("round", round)
for _ask in (len, bool, int, hash, repr, str, format, operator.index):
    _install_answer(_ask.__name__, _ask)
