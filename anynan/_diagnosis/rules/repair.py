"""The part of a fix that is code: shown in the report, and run where the fix is tried.

A rule writes it between backticks into its fix, in the array API's words: ``x`` is what the
operation works on (``A`` of size ``n``, if that is a matrix), ``y`` the second operand, ``p`` the
exponent of a power and else ``x``; ``seen`` are the rows in which a softmax sees anything at all.
What is shown and what is run is therefore the same text.
"""

import ast
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from anynan._base.context import but
from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.rules.situation import OTHER, SELF
from anynan.errors import reason
from anynan.events import Phase, Source

_CODE = re.compile("`([^`]*)`")
# What an expression may stand for without naming it.
_WRITTEN_OUT = frozenset(
    {"divide", "reciprocal", "pow", "vector_norm", "matrix_norm", "hypot", "std"}
)
_FIRST = (*SELF, "A")
_SECOND = (*OTHER, "exponent", "target")


class RepairError(Exception):
    """Raise where an expression cannot stand in an operation's place: then nothing is claimed."""


class Namespace:
    """Give expressions the functions they are run with.

    Args:
        xp: A module with the array API's names.
        device: Where to make arrays, if not where the library makes them by itself.
    """

    def __init__(self, xp: Any, device: Any = None) -> None:
        self._xp, self._at = xp, {} if device is None else {"device": device}

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Choose by a mask; a number takes the other side's dtype."""
        dtype = next((v.dtype for v in (x, y) if hasattr(v, "dtype")), None)
        x, y = (
            v if hasattr(v, "dtype") else self._xp.asarray(float(v), dtype=dtype, **self._at)
            for v in (x, y)
        )
        return self._xp.where(condition, x, y)

    def isfinite(self, x: Any) -> Any:
        """Tell which elements are neither NaN nor Inf."""
        return self._xp.isfinite(x)

    def reduce(self, name: str, x: Any, axis: Any, *, keepdims: bool) -> Any:
        """Give ``sum``, ``max`` or ``any`` over axes; over all where axis is None."""
        axis = tuple(axis) if isinstance(axis, list) else axis
        return getattr(self._xp, name)(x, axis=axis, keepdims=keepdims)

    def eye(self, x: Any) -> Any:
        """Give the unit matrix that goes with a matrix."""
        return self._xp.eye(x.shape[-1], dtype=x.dtype, **self._at)


@dataclass(frozen=True, slots=True)
class Repair:
    """Say what takes the place of an operation at a line of the program.

    Attributes:
        operation: Canonical name.
        source: The user's line; what else runs this operation there is meant, too, unless it is a
            library's layer.
        layer: Where it ran, which counts where no line is known.
        phase: ``backward`` if it is its gradient that is bad.
        expression: The code; empty where 0 takes the place of its bad values.
    """

    operation: str
    source: Source | None
    layer: str | None
    phase: Phase
    expression: str = ""

    @classmethod
    def of(cls, record: OpRecord, expression: str) -> "Repair":
        """Repair the operation of a record."""
        phase = "forward" if record.direct else record.phase
        return cls(record.name, record.source, record.layer, phase, expression)

    def is_of(self, name: str, source: Source | None, layer: str | None) -> bool:
        """Tell whether an operation is meant."""
        if name != self.operation or source != self.source:
            return False
        if source is None:
            return layer == self.layer
        # A line that calls a library's layers says nothing of which of them is meant.
        return source.via is None or None in (layer, self.layer) or layer == self.layer


class BaseFixRunner:
    """Hold the repairs of one second run, and whether each took its place.

    Args:
        repairs: What to repair; one that is named later stands inside of one named before.

    Attributes:
        repairs: The same.
        names: What their operations are called.
        lost: Why nothing can be told of the run, empty if something can.
        busy: Whether a repaired operation is made at this moment: nothing inside of it is repaired.
    """

    def __init__(self, repairs: Sequence[Repair]) -> None:
        self.repairs = list(repairs)
        self.names = frozenset(item.operation for item in repairs)
        self.lost, self.busy = "", False
        self._thread = get_ident()
        self._used: set[Repair] = set()

    @property
    def whole(self) -> bool:
        """Tell whether every repair took its place."""
        return not self.lost and self._used == set(self.repairs)

    @property
    def here(self) -> bool:
        """Tell whether this is the thread whose run it is."""
        return get_ident() == self._thread

    def of(self, name: str, source: Source | None, layer: str | None) -> list[Repair]:
        """Choose the repairs of an operation."""
        return [item for item in self.repairs if item.is_of(name, source, layer)]

    def made(self, found: Iterable[Repair], make: Callable[[], Any]) -> Any:
        """Run a repaired operation; None where that cannot be: nothing is told of the run then.

        Args:
            found: The repairs that take their place so.
            make: Runs it.
        """
        try:
            with but(self, busy=True):
                new = make()
        except Exception as error:  # noqa: BLE001  the second run goes on as the first one did
            self.lost = reason(error)
            return None
        self._used.update(found)
        return new


def around(
    found: Sequence[Repair], own: Callable[..., Any], expression: Callable[..., Any],
    filled: Callable[..., Any],
) -> Callable[..., Any]:  # fmt: skip
    """Put repairs around an operation, each around those that are named after it.

    Args:
        found: The repairs.
        own: Runs the operation itself.
        expression: Runs a repair's code around what is inside: ``expression(repair, inside)``.
        filled: Puts 0 in the place of bad values of what is inside, likewise.
    """
    for item in reversed(found):
        own = functools.partial(expression if item.expression else filled, item, own)
    return own


def split(fix: str, operation: str) -> tuple[str, str]:
    """Give a fix as it is printed, and the code in it that stands for an operation, if any."""
    found = _CODE.search(fix)
    code = "" if found is None else found[1]
    stands = f"{operation}(" in code or operation in _WRITTEN_OUT
    return fix.replace("`", ""), code if stands else ""


def neutral(words: Namespace, x: Any) -> Any:
    """Put 0 in the place of what is not finite."""
    return words.where(words.isfinite(x), x, 0.0)


def run(
    repair: Repair, words: Namespace, own: Callable[..., Any], operands: Mapping[str, Any],
    params: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Run an expression in an operation's place.

    Args:
        repair: What it is.
        words: What the backend gives.
        own: The operation itself, called with what stands for its first operands.
        operands: What it works on, by the operation's own names.
        params: Its plain arguments, by the names that records give them: ``dim``, ``keepdim``.

    Raises:
        RepairError: If the operation is not what the expression is about.
    """
    code = ast.parse(repair.expression, mode="eval")
    if not all(isinstance(part, _PARTS) for part in ast.walk(code)):
        raise RepairError(repair.expression)
    names = _Names(repair.operation, words, own, operands, params)
    try:
        # In a file of ours: what runs in it has no line of its own.
        return eval(compile(code, __file__, "eval"), {"__builtins__": _IMPORTS}, names)  # noqa: S307  _PARTS
    finally:
        names.clear()  # its methods are among them: it would hold the arrays until a collection


# What an expression may be made of.
_PARTS = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip


# The first call of a library's function may import something, by what its caller imports with.
_IMPORTS = {"__import__": __import__}


class _Names(dict[str, Any]):
    """Hold what an expression may name: functions, and operands as they are asked for."""

    def __init__(
        self, operation: str, words: Namespace, own: Callable[..., Any],
        operands: Mapping[str, Any], params: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._operation, self._words = operation, words
        self._operands, self._params = operands, params
        where = words.where
        super().__init__(
            where=where,
            isfinite=words.isfinite,
            maximum=lambda x, y: where(x < y, y, x),  # a NaN stays
            minimum=lambda x, y: where(x > y, y, x),
            clip=lambda x, low, high: where(x < low, low, where(x > high, high, x)),
            abs=lambda x: where(x < 0, -x, x),
            sign=lambda x: where(x > 0, 1.0, where(x < 0, -1.0, 0.0 * x)),
            sqrt=lambda x: x**0.5,
            eye=lambda _: words.eye(self["A"]),
            var=self._var,
            sum=functools.partial(self._reduced, "sum"),
            max=functools.partial(self._reduced, "max"),
        )
        self[operation] = own

    def __missing__(self, name: str) -> Any:
        second = name == "y" or (name == "p" and self._operation == "pow")
        match name:
            case "x" | "y" | "p" | "A":
                for known in _SECOND if second else _FIRST:
                    if known in self._operands:
                        return self._operands[known]
            case "n":
                return self["A"].shape[-1]
            case "seen":
                anything = self["x"] > -math.inf
                return self._words.reduce("any", anything, self._params.get("dim"), keepdims=True)
        raise RepairError(name)

    def _reduced(
        self, name: str, x: Any, *, axis: int | None = None, keepdims: bool = False
    ) -> Any:
        """Reduce as the operation does, where no axis is given."""
        if axis is None:
            axis, keepdims = self._params.get("dim"), bool(self._params.get("keepdim", False))
        return self._words.reduce(name, x, axis, keepdims=keepdims)

    def _var(self, x: Any) -> Any:
        """Give the variance as the operation takes it."""
        axis, correction = self._params.get("dim"), self._params.get("correction")
        total = self._words.reduce("sum", x, axis, keepdims=True)
        count = math.prod(x.shape) / math.prod(total.shape)
        apart = x - total / count
        return self._reduced("sum", apart * apart) / (
            count - (1 if correction is None else correction)
        )
