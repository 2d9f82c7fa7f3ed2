"""An array library's functions, recorded: what ``anynan.arrays.namespace`` gives."""

import inspect
from types import FrameType, ModuleType
from typing import Any

import array_api_compat

from anynan._base.context import running
from anynan.arrays.names import WRITING, asked_by, signature
from anynan.arrays.tracked import strip

_spaces: dict[int, "Namespace"] = {}


class Namespace:
    """Hand out an array library's functions; inside a tracked function they are recorded.

    Outside of one, and for anything that is no function, it is the library itself.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        known = self._functions.get(name)
        if known is not None:
            return known
        value = getattr(self._xp, name)
        if isinstance(value, ModuleType):
            value = Namespace(value)
        elif callable(value) and not isinstance(value, type):
            value = _Question(value) if name in _PLAIN else _Function(value, name)
        else:
            return value
        self._functions[name] = value
        return value

    def __eq__(self, other: object) -> bool:
        return self._xp is (other._xp if isinstance(other, Namespace) else other)

    def __hash__(self) -> int:
        return hash(self._xp)

    def __dir__(self) -> list[str]:
        return dir(self._xp)

    def __repr__(self) -> str:
        return f"<anynan.arrays.namespace of {self._xp.__name__}>"


# Questions about arrays and types, and what changes the library itself.
_PLAIN = frozenset(
    {
        "isdtype", "finfo", "iinfo", "result_type", "can_cast", "promote_types", "shape", "ndim",
        "size", "seterr", "geterr", "errstate", "set_printoptions", "array2string", "array_repr",
        "array_str", "manual_seed", "no_grad", "seed", "dtype", "jit", "vmap", "grad", "compile",
    }
)  # fmt: skip


class _Question:
    """Stand for a function of the library that is not recorded: it is given plain arrays."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _unrecorded(self._function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return repr(self._function)


def _unrecorded(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = tuple(strip(value, []) for value in args)
    return function(*plain, **{key: strip(value, []) for key, value in kwargs.items()})


class _Function:
    """Stand for one function of the library."""

    __slots__ = ("_function", "_name")

    def __init__(self, function: Any, name: str) -> None:
        self._function, self._name = function, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = running.get()
        if tape is None or tape.closed:
            return _unrecorded(self._function, args, kwargs)
        writes = args[0] if self._name in WRITING and args else kwargs.get("out")
        return tape.operate(self._name, self._function, args, kwargs, writes=writes)

    @property
    def __signature__(self) -> inspect.Signature:
        return signature(self._function)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._function, name)
        if callable(value) and name in ("reduce", "accumulate", "outer"):
            return _Function(value, f"{self._name}.{name}")
        return value

    def __repr__(self) -> str:
        return f"<recorded {self._function!r}>"


def recording(xp: Any) -> Namespace:
    """Return the recording namespace of a library, one and the same for each."""
    if isinstance(xp, Namespace):
        return xp
    found = _spaces.get(id(xp))
    if found is None:
        found = _spaces[id(xp)] = Namespace(xp)
    return found


def namespace_of(raw: Any, asking: FrameType) -> Namespace:
    """Return the recording namespace of an array's own library.

    Args:
        raw: The array.
        asking: Who asks. A library may carry a copy of array_api_compat, which compares the
            namespace of one array with what it gives another itself.
    """
    find = array_api_compat.array_namespace
    if asked_by(asking, "array_api_compat.common._helpers"):
        find = asking.f_globals.get("array_namespace", find)
    return recording(find(raw))
