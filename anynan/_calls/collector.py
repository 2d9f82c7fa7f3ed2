"""What goes into a bundle: taken in a second run, of one operation alone, within a limit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anynan._calls.calls import Call, UnwritableError, encoded
from anynan._calls.tensors import HostTensor, keepable, nbytes
from anynan._diagnosis.lineage import OpRecord
from anynan.errors import reason
from anynan.events import Event, Operation

LIMIT = 256 * 2**20
# Elements around the first bad one that are kept of operands beyond the limit.
AROUND = 512
# Where elements do not mix, a part of the operands fails as the whole does.
ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "asin", "asinh", "astype", "atan", "atan2", "atanh", "cos",
        "cosh", "divide", "exp", "expm1", "log", "log10", "log1p", "log2", "multiply", "negative",
        "pow", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "square", "subtract",
        "tan", "tanh",
    }
)  # fmt: skip
# What is kept first where not all of it fits.
ROLES = ("operation", "layer", "call", "weights", "random")
# The collector of the second run under way, which replays offer their operations to.
collecting: ContextVar["Collector | None"] = ContextVar("anynan_collecting", default=None)

# Brings an array to the host: as NumPy's, or with the bits that NumPy has no dtype for.
Host = Callable[[Any], HostTensor | np.ndarray[Any, Any]]


@dataclass(slots=True)
class Operands:
    """Name an operation's arrays, which are looked at only after its call is known."""

    arrays: dict[str, Any] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def ref(self, name: str, array: Any) -> dict[str, str]:
        """Give the value that stands for an array; one that came before keeps its name."""
        known = self._names.get(id(array))
        if known is not None:
            return {"tensor": known}
        chosen, number = name, 1
        while chosen in self.arrays:
            number += 1
            chosen = f"{name}{number}"
        self.arrays[chosen], self._names[id(array)] = array, chosen
        return {"tensor": chosen}

    def value(
        self, name: str, value: Any, is_array: Callable[[Any], bool], other: Callable[[Any], Any]
    ) -> Any:
        """Give an argument as a value, its arrays by name."""
        return encoded(value, lambda x: self.ref(name, x) if is_array(x) else other(x))

    def values(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], is_array: Callable[[Any], bool],
        other: Callable[[Any], Any],
    ) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
        """Give a call's arguments as values; arrays without a name are ``x``, or ``x1``, ``x2``."""
        labels = ["x"] if len(args) == 1 else [f"x{i + 1}" for i in range(len(args))]
        given = [self.value(name, x, is_array, other) for name, x in zip(labels, args, strict=True)]
        return given, {key: self.value(key, x, is_array, other) for key, x in kwargs.items()}


class Collector:
    """Take what belongs in the bundle of one event.

    Args:
        event: The event.
        limit: So many bytes are kept at most.

    Attributes:
        event: The event.
        layer: Path of the layer that it is about.
        wanted: The operation that it names, None if it names none.
        call: The operation, once it was met.
        notes: What could not be had.
    """

    def __init__(self, event: Event, limit: int) -> None:
        self.event, self.limit = event, limit
        self.wanted: Operation | None = event.operation
        self.layer = event.layer if self.wanted is None else self.wanted.layer
        self.call: Call | None = None
        self.notes: list[str] = []
        self._held: dict[tuple[str, str], HostTensor] = {}
        self._left_out: dict[tuple[str, str], dict[str, Any]] = {}

    def wants(self, record: OpRecord) -> bool:
        """Tell whether a record is the event's operation."""
        wanted = self.wanted
        if wanted is None or self.call is not None or record.source != wanted.source:
            return False
        if (record.name, record.raw) != (wanted.name, wanted.raw):
            return False
        if (record.layer or "") != (wanted.layer or ""):  # a function itself is no layer of its own
            return False
        seen, known = record.output, wanted.output
        if seen is None or known is None:
            return seen is known
        return (seen.nan, seen.posinf, seen.neginf, seen.first_bad) == (
            known.nan, known.posinf, known.neginf, known.first_bad,
        )  # fmt: skip

    def take(self, record: OpRecord, describe: Callable[[Operands], Call], host: Host) -> None:
        """Take the operation.

        Args:
            record: Its record.
            describe: Names its arrays, and gives its call.
            host: Brings an array to the host.
        """
        operands = Operands()
        try:
            call = describe(operands)
        except UnwritableError as error:
            call = Call(unwritable=str(error), text=record.raw)
        except Exception as error:  # noqa: BLE001  its operands may be had all the same
            call = Call(unwritable=f"its call was not understood: {reason(error)}", text=record.raw)
        sizes = [nbytes(_dtype(x), tuple(x.shape)) for x in operands.arrays.values()]
        window = None
        if sum(sizes) > self.limit:
            window = _window(record, operands.arrays.values())
            if window is None:
                why = f"its operands are larger than the limit of {_mib(self.limit)}"
                call = replace(call, unwritable=call.unwritable or why, text=record.raw)
            else:
                call = replace(call, cut="operands are cut to the part around the first bad index")
        seen = record.output
        if (
            window is None
            and call.gradient is None
            and seen is not None
            and seen.first_bad is not None
        ):
            counts = {"nan": seen.nan, "posinf": seen.posinf, "neginf": seen.neginf}
            call = replace(call, expected={**counts, "first": list(seen.first_bad)})
        for name, array in operands.arrays.items():
            part = array if window is None else array[_own(window, tuple(array.shape))]
            kept = self.add("operation", name, part, host)
            if not kept and not call.unwritable:
                call = replace(call, unwritable=f"{name} could not be kept", text=record.raw)
        self.call = call

    def add(self, role: str, name: str, array: Any, host: Host) -> bool:
        """Take an array, if it is not too large.

        Args:
            role: One of ``ROLES``.
            name: Its name.
            array: The array.
            host: Brings it to the host.

        Returns:
            Whether it was taken.
        """
        key, dtype, shape = (role, name), _dtype(array), tuple(int(n) for n in array.shape)
        if not keepable(dtype):
            return self._leave_out(key, dtype, shape, "its dtype has no place in the file")
        if nbytes(dtype, shape) > self.limit:
            return self._leave_out(key, dtype, shape, f"larger than {_mib(self.limit)}")
        try:
            held = host(array)
            if not isinstance(held, HostTensor):
                held = HostTensor.of(held.dtype.name, held)
            self._held.setdefault(key, held)
        except Exception as error:  # noqa: BLE001  the rest is kept all the same
            return self._leave_out(key, dtype, shape, reason(error))
        return True

    def put(self, role: str, name: str, held: HostTensor) -> None:
        """Take what is on the host already."""
        self._held.setdefault((role, name), held)

    def _leave_out(self, key: tuple[str, str], dtype: str, shape: Any, why: str) -> bool:
        said = {"name": ".".join(key), "dtype": dtype, "shape": list(shape), "why": why}
        self._left_out.setdefault(key, said)
        return False

    def finish(self) -> tuple[dict[str, HostTensor], list[dict[str, Any]]]:
        """Give what is kept, the most telling first until the limit, and what is left out."""
        kept: dict[str, HostTensor] = {}
        room = self.limit
        for role in ROLES:
            for (own, name), held in self._held.items():
                if own != role:
                    continue
                if len(held.data) > room:
                    why = f"beyond the limit of {_mib(self.limit)} in all"
                    self._leave_out((own, name), held.dtype, held.shape, why)
                    continue
                room -= len(held.data)
                kept[f"{role}.{name}"] = held
        return kept, list(self._left_out.values())


def offer(record: OpRecord, describe: Callable[[Operands], Call], host: Host) -> None:
    """Offer an operation to the collector of the second run under way, if there is one."""
    into = collecting.get()
    if into is not None and into.wants(record):
        into.take(record, describe, host)


def _dtype(array: Any) -> str:
    return str(getattr(array.dtype, "name", array.dtype)).rpartition(".")[2]


def _mib(size: int) -> str:
    return f"{size / 2**20:g} MiB"


def _window(record: OpRecord, arrays: Iterable[Any]) -> tuple[slice, ...] | None:
    """Give the part of an elementwise result around its first bad element."""
    output = record.output
    if record.name not in ELEMENTWISE or output is None or output.first_bad is None:
        return None
    for array in arrays:
        shape = tuple(array.shape)
        pairs = zip(shape[::-1], output.shape[::-1], strict=False)
        if len(shape) > len(output.shape) or any(n not in (1, whole) for n, whole in pairs):
            return None
    found = [slice(i, i + 1) for i in output.first_bad]
    if found:
        last = output.first_bad[-1]
        found[-1] = slice(max(last - AROUND, 0), last + AROUND)
    return tuple(found)


def _own(window: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Give an operand's part of it, which may be repeated along some dimensions."""
    mine = window[len(window) - len(shape) :]
    return tuple(slice(None) if n == 1 else part for n, part in zip(shape, mine, strict=True))
