"""One operation as data: which functions of the framework, with which tensors and arguments.

Values are JSON. What JSON has not is an object of one key: ``{"tensor": name}`` is an operand,
``{"value": name}`` the result of a line before, ``{"dtype": ...}``, ``{"float": "nan"}``,
``{"complex": [re, im]}``, ``{"tuple": [...]}``, ``{"name": ...}`` a constant of the framework's,
``{"object": ..., "fields": {...}}`` something small that it makes.
"""

import keyword
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

# No path, no URL and no code is made of these.
_WORD = re.compile(r"[A-Za-z0-9_,.=> -]{0,64}")
_RESULT = re.compile(r"result|v[0-9]{1,9}")
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,60}")
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,4}")
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DEEP = 8


class BundleError(ValueError):
    """Say in one line why a folder is no bundle that can be run."""


class UnwritableError(Exception):
    """Say why an operation's call cannot be written as code."""


@dataclass(frozen=True, slots=True)
class Line:
    """Hold one call of a function of the framework's.

    Attributes:
        gives: The name of what it returns.
        function: The function, as the framework names it.
        arguments: Positional arguments, as values.
        keywords: Arguments by name, as values.
    """

    gives: str
    function: str
    arguments: list[Any]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gradient:
    """Say of which operands the gradient is taken, and what arrives at the results.

    Attributes:
        of: Names of operands.
        incoming: The name of each result's gradient, None where none arrives.
    """

    of: list[str]
    incoming: list[str | None]


@dataclass(frozen=True, slots=True)
class Call:
    """Hold an operation.

    Attributes:
        lines: Its calls, in order.
        result: Name of the line whose result is bad.
        gradient: Set where it is its gradient that is bad.
        expected: Counts of NaN, Inf and -Inf in the result and its first bad index, as the event
            has them; None where only the kind can be compared.
        cut: What was cut from larger operands; empty where they are whole.
        unwritable: Why its call cannot be written as code; empty where it can.
        text: What the framework calls it, where it cannot.
    """

    lines: list[Line] = field(default_factory=list)
    result: str = ""
    gradient: Gradient | None = None
    expected: dict[str, Any] | None = None
    cut: str = ""
    unwritable: str = ""
    text: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def encoded(value: Any, other: Callable[[Any], Any]) -> Any:
    """Give an argument as a value.

    Args:
        value: The argument.
        other: Gives what is none of Python's own: operands, dtypes, constants; None for all else.

    Raises:
        UnwritableError: If there is no such form.
    """
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is complex:
        return {"complex": [encoded(value.real, other), encoded(value.imag, other)]}
    if type(value) is str and _WORD.fullmatch(value):
        return value
    if type(value) is list:
        return [encoded(item, other) for item in value]
    if type(value) is tuple:
        return {"tuple": [encoded(item, other) for item in value]}
    found = other(value)
    if found is None:
        msg = f"an argument is a {type(value).__name__}"
        raise UnwritableError(msg)
    return found


@dataclass(frozen=True)
class Words:
    """Name what a framework's values are in code.

    Attributes:
        dtypes: What names of dtypes are like.
        dtype: Code of one, with ``{}`` for its name.
        names: Code of constants.
        objects: Code of what makes small objects.
    """

    dtypes: re.Pattern[str]
    dtype: str
    names: dict[str, str] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)


class Coder:
    """Turn values into code, and refuse what is none.

    Args:
        words: The framework's.
        tensors: Names of the operands that are there.
    """

    def __init__(self, words: Words, tensors: set[str]) -> None:
        self._words, self._tensors = words, tensors
        self.made: set[str] = set()

    def value(self, value: Any, deep: int = 0) -> str:
        """Give the code of a value.

        Raises:
            BundleError: If it is none.
        """
        if deep > _DEEP:
            refuse("an argument is nested too deep")
        if value is None or type(value) in (bool, int):
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        if type(value) is str and _WORD.fullmatch(value):
            return repr(value)
        if type(value) is list:
            return f"[{', '.join(self.value(item, deep + 1) for item in value)}]"
        if type(value) is dict and len(value) == 1:
            ((kind, inner),) = value.items()
            return self._special(kind, inner, deep)
        if type(value) is dict and set(value) == {"object", "fields"}:
            return self._object(value["object"], value["fields"], deep)
        if type(value) is dict and set(value) == {"value", "item"} and type(value["item"]) is int:
            return f"{self._special('value', value['value'], deep)}[{value['item']!r}]"
        msg = "an argument is of no known kind"
        raise BundleError(msg)

    def _special(self, kind: str, inner: Any, deep: int) -> str:
        if kind == "tuple" and type(inner) is list:
            items = [self.value(item, deep + 1) for item in inner]
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        if kind == "complex" and type(inner) is list and len(inner) == 2:
            return f"complex({', '.join(self.value(item, deep + 1) for item in inner)})"
        if type(inner) is not str:
            refuse("an argument is of no known kind")
        if kind == "tensor" and inner in self._tensors:
            return f"tensors[{inner!r}]"
        if kind == "value" and inner in self.made:
            return inner
        if kind == "float" and inner in _SPECIAL:
            return f"float({inner!r})"
        if kind == "dtype" and self._words.dtypes.fullmatch(inner):
            return self._words.dtype.format(inner)
        if kind == "name" and inner in self._words.names:
            return self._words.names[inner]
        msg = f"an argument names {_short(inner)}, which is not known"
        raise BundleError(msg)

    def _object(self, name: Any, fields: Any, deep: int) -> str:
        if type(name) is not str or name not in self._words.objects or type(fields) is not dict:
            refuse("an argument is of no known kind")
        given = [f"{identifier(key)}={self.value(x, deep + 1)}" for key, x in fields.items()]
        return f"{self._words.objects[name]}({', '.join(given)})"


def refuse(what: str) -> NoReturn:
    """Raise a BundleError."""
    raise BundleError(what)


def identifier(name: Any) -> str:
    """Give a name that a variable or an argument may have.

    Raises:
        BundleError: If it may not.
    """
    fits = type(name) is str and _NAME.fullmatch(name.lower()) and not keyword.iskeyword(name)
    if not fits or not name.isascii():
        refuse(f"{_short(name)} is no name")
    return str(name)


def dotted(name: Any) -> str:
    """Give the dotted name of a function.

    Raises:
        BundleError: If it is none.
    """
    fits = type(name) is str and name.isascii() and _DOTTED.fullmatch(name)
    private = fits and any(part.startswith("__") for part in name.split("."))
    if private or not fits:
        refuse(f"{_short(name)} is no function")
    return str(name)


def _short(value: Any) -> str:
    return repr(value)[:40]


def call_of(data: Any) -> Call:
    """Rebuild a call from JSON values.

    Raises:
        BundleError: If they are none.
    """
    if type(data) is not dict or set(data) != set(Call.__dataclass_fields__):
        refuse("its operation has other fields than expected")
    for name in ("result", "cut", "unwritable", "text"):
        if type(data[name]) is not str:
            refuse(f"its operation's {name} is no text")
    if type(data["lines"]) is not list or len(data["lines"]) > 1000:
        refuse("its operation is no list of calls")
    return Call(
        **{
            **data,
            "lines": [_line(item) for item in data["lines"]],
            "gradient": None if data["gradient"] is None else _gradient(data["gradient"]),
            "expected": None if data["expected"] is None else _expected(data["expected"]),
        }
    )


def _line(data: Any) -> Line:
    whole = type(data) is dict and set(data) == set(Line.__dataclass_fields__)
    if not whole or type(data["arguments"]) is not list or type(data["keywords"]) is not dict:
        refuse("a call of its operation has other fields than expected")
    if type(data["gives"]) is not str or not _RESULT.fullmatch(data["gives"]):
        refuse("a call of its operation gives what has no name")
    dotted(data["function"])
    return Line(**data)


def _gradient(data: Any) -> Gradient:
    whole = type(data) is dict and set(data) == {"of", "incoming"}
    lists = whole and all(type(data[key]) is list for key in data)
    if not lists or not all(type(x) is str or x is None for x in [*data["of"], *data["incoming"]]):
        refuse("its gradient has other fields than expected")
    return Gradient(**data)


def _expected(data: Any) -> dict[str, Any]:
    whole = type(data) is dict and set(data) == {"nan", "posinf", "neginf", "first"}
    counts = whole and all(type(data[key]) is int for key in ("nan", "posinf", "neginf"))
    if (
        not counts
        or type(data["first"]) is not list
        or any(type(i) is not int for i in data["first"])
    ):
        refuse("what its operation gave is not said in whole numbers")
    return dict(data)
