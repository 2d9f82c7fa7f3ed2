"""From what an adapter knows of an operation to its record: one look for every backend."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anynan._base.summary import Summary
from anynan._diagnosis.lineage import External, Operand, OpRecord
from anynan._diagnosis.messages import OPERATION_BLIND
from anynan._diagnosis.operands import VALUE, at, at_broadcast, constant
from anynan.errors import reason

# Records of one replay whose arrays are measured: the first ones tell the story.
DETAILED = 200
SMALL = 1000  # elements: arrays of so many are measured in any record
# What may be kept of a program's arrays to be measured.
KEPT = 256 * 2**20
# What a gradient was handed that is none of its forward operation's own arrays.
SAVED = "saved"
SOFTMAX = frozenset({"softmax", "log_softmax"})


@dataclass(slots=True)
class Given:
    """Hold what an operation took or gave, before anybody looks at its elements.

    Attributes:
        name: The operation's own name for it.
        array: What it held before the operation ran; None where that was not kept.
        known: What is known of it without a look.
        key: By what the adapter knows it.
        number: The Python number that it is, None for an array.
    """

    name: str
    array: Any = None
    known: Summary | None = None
    key: Any = None
    number: complex | None = None


class Origin(NamedTuple):
    """Say where an operand's bad values came from.

    Attributes:
        parents: Indices of the records that wrote them.
        source: What they came from where no record wrote them.
        label: The name of that source.
    """

    parents: tuple[int, ...] = ()
    source: External | None = None
    label: str | None = None


def _may_be_data(x: Summary) -> bool:
    """Tell whether a bad array in a program may be data.

    A mask and the empty rows that code writes hold Inf of one sign, alone or beside one number.
    """
    numbers = None not in (x.min, x.max) and x.min != x.max
    return bool(x.nan or (x.posinf and (x.neginf or numbers)))


class Builder:
    """Fill in records: made where it is used, and not kept.

    An adapter begins a record with what it alone knows: name, layer, phase, line, plain
    arguments. What the arrays say is the same everywhere, and is added here.

    Args:
        measure: Gives the full summary of an array, pointing at its first NaN if it has one.
        origin: Says where the bad values of an operand of this record came from.
        tell: Is told of what could not be described: one sentence.
        view: Gives the array as its elements are read one by one.
    """

    def __init__(
        self, measure: Callable[[Any], Summary], origin: Callable[[Given, OpRecord], Origin],
        tell: Callable[[str], None], view: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self._measure, self._origin, self._tell, self._view = measure, origin, tell, view

    def fresh(self, record: OpRecord, result: Given, operands: Iterable[Given]) -> bool:
        """Tell whether a record is worth a full look.

        Where a NaN came in that another record wrote, that one was looked at.
        """
        if record.index >= DETAILED and not _are_small((result, *operands)):
            return False
        if result.known is not None and not result.known.nan:
            return True
        return not any(
            given.known is not None and given.known.nan and self._origin(given, record).parents
            for given in operands
        )

    def describe(
        self, record: OpRecord, result: Given, operands: Sequence[Given], *, look: bool = True,
        expected: Mapping[str, str] | None = None, wide: Callable[[Summary], Any] | None = None,
    ) -> OpRecord:  # fmt: skip
        """Look at what went in and what came out, and write it into the record.

        Args:
            record: What the adapter knows; its output, operands and values are filled in.
            result: The bad result.
            operands: What went in.
            look: Measure the arrays; otherwise only what is known of them is told.
            expected: Reason by kind, where it ran inside ``anynan.expect``.
            wide: Runs the operation again in a wider dtype, for a result that is bad as this
                summary says; asked where every operand is finite. None where it has no such form.
        """
        try:
            self._describe(record, result, operands, look)
        except Exception as error:  # noqa: BLE001  its name and line are known all the same
            record.output = record.output or result.known
            record.operands = tuple(self._unseen(given, record) for given in operands)
            what = f"the operands of {record.name}"
            self._tell(OPERATION_BLIND(what=what, error=reason(error)))
        output = record.output
        if output is None:
            return record
        record.expected = (expected or {}).get(output.kind or "")
        if look and wide is not None and output.bad and not _any_bad(record.operands):
            with suppress(Exception):  # then it has no wider form
                record.wide = _largest(wide(output))
        return record

    def _describe(
        self, record: OpRecord, result: Given, operands: Sequence[Given], look: bool
    ) -> None:
        record.output = output = self._summary(result, look)
        first, shape = (None, ()) if output is None else (output.first_bad, output.shape)
        if result.array is not None and look:
            record.value = at(self._seen(result.array), first)
        items = []
        for given in operands:
            if given.number is not None:
                items.append(constant(given.name, given.number))
                continue
            item = Operand(given.name, self._summary(given, look))
            if given.array is not None and look:
                item.value = at_broadcast(self._seen(given.array), first, shape)
            self._trace(item, given, record)
            items.append(item)
        record.operands = tuple(items)

    def _summary(self, given: Given, look: bool) -> Summary | None:
        return self._measure(given.array) if look and given.array is not None else given.known

    def _seen(self, array: Any) -> Any:
        return array if self._view is None else self._view(array)

    def _trace(self, item: Operand, given: Given, record: OpRecord) -> None:
        held = item.summary
        if held is None or not held.bad:
            return
        item.parents, item.source, item.label = self._origin(given, record)
        if item.source == "constant":
            item.label = item.label or VALUE
            if held.size > 1 and _may_be_data(held):
                item.source, item.label = "data", "data"

    def _unseen(self, given: Given, record: OpRecord) -> Operand:
        """Say of an operand that could not be described at least who wrote it."""
        item = Operand(given.name, given.known)
        with suppress(Exception):
            item.parents = self._origin(given, record).parents
        return item


def _largest(found: Any) -> float | None:
    """Give the largest magnitude of a result, None where it is 0 or not finite."""
    sizes = np.abs(np.asarray(() if found is None else found)).astype(np.float64)
    return float(sizes.max()) or None if sizes.size and np.isfinite(sizes).all() else None


def _are_small(given: Iterable[Given]) -> bool:
    """Tell whether a full look at these takes no longer than it took to record them."""
    arrays = (x.array for x in given if x.array is not None)
    return all(math.prod(array.shape) <= SMALL for array in arrays)


def _any_bad(operands: Iterable[Operand]) -> bool:
    return any(item.summary is not None and item.summary.bad for item in operands)


def gradient_operands(
    taken: Iterable[Any], named: Callable[[Any], str | None], other: Callable[[Any], str | None],
    forward: Iterable[tuple[Any, str]],
) -> list[tuple[Any, str]]:  # fmt: skip
    """Name what a gradient's operation works on, incoming gradients first.

    Args:
        taken: What goes into it.
        named: Gives the name that its forward operation has for a value, None if it has none.
        other: Names any other value: ``grad`` if it came in as a gradient; None for one that
            says nothing.
        forward: What the forward operation took and gave: what the slope is at says more than
            the slope.
    """
    found: list[tuple[Any, str]] = []
    known: set[str] = set()
    grads = 0
    for value in taken:
        name = named(value) or other(value)
        if name == "grad":
            name = f"grad{grads}" if grads else name
            grads += 1
        if name is not None and (name not in known or name == SAVED):
            known.add(name)
            found.append((value, name))
    for value, name in forward:
        if name not in known:
            known.add(name)
            found.append((value, name))
    return sorted(found, key=lambda pair: pair[1] != "grad")


def before(item: Any, made: Callable[[Any], Any]) -> Iterator[Any]:
    """Walk back over what made the first operand of each."""
    while (item := made(item)) is not None:
        yield item


def makers(names: Iterable[str]) -> dict[str, Any]:
    """Give the parameters that say what made the first operand of a gradient's operation.

    Args:
        names: The operation that made it, and the one that made the first operand of that.
    """
    return dict(zip(("of", "terms"), names, strict=False))


def called(name: str, operands: Sequence[Any]) -> str:
    """Name what made an operand; a product of something with itself is a square.

    Args:
        name: The operation.
        operands: What it took, as something by which the same one is known again.
    """
    same = len(operands) == 2 and operands[0] == operands[1]
    return "square" if name == "multiply" and same else name


def add_masked_rows(
    record: OpRecord, scores: np.ndarray | None, axes: int | tuple[int, ...]
) -> None:
    """Count the rows of a softmax that are -Inf throughout.

    Args:
        record: The softmax, or its gradient.
        scores: What went in, on the host; None where it was not kept.
        axes: Over which it goes.
    """
    if scores is None or not scores.ndim or not scores.size:
        return
    with np.errstate(all="ignore"):
        rows = int((np.maximum.reduce(scores, axis=axes) == -np.inf).sum())
    if rows:
        record.params["masked_rows"] = rows
