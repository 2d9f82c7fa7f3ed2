"""What is noted of each operation: its magnitudes in float32, and what a narrow dtype breaks."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from anynan._apps.precision.ranges import Range, measured
from anynan._files.formats import Format
from anynan._trace.op import Observed, Observer, Op, RerunError
from anynan.events import Phase, Source

How = Literal["cast", "autocast", "round"]
# Their kernels may add up in the dtype itself.
_ADDING = frozenset({"nll_loss"})
# They write a number that is in the code: -Inf in a mask is meant.
PLACING = frozenset(
    {"arange", "constant", "empty", "fill", "full", "full_like", "index_fill", "masked_fill",
     "where", "pad", "tril", "triu", "asarray", "copy"}
)  # fmt: skip
# They add up: their partial sums may be larger than what they give.
SUMMING = frozenset(
    {"matmul", "linear", "convolution", "sum", "mean", "einsum", "cumsum", "vector_norm"}
)
_WRITTEN = 1e38  # a number in float32 code from which on it stands for the largest there is

Place = tuple[Any, ...]


class Narrow(Protocol):
    """Run one target in narrow dtypes: each adapter has one, ``Narrowed`` in ``precision.py``.

    It is made with a target and what it is called with, by position and by name.
    """

    def observe(self, observer: Observer) -> Observed:
        """Run as it is, and show each operation."""
        ...

    def host(self, x: Any) -> NDArray[Any] | None:
        """Give an array's numbers to NumPy, unchanged; None if it has none with a fraction."""
        ...

    def rounded(self, x: Any, dtype: str) -> Any:
        """Round an array to a dtype, and give it in its own again."""
        ...

    def bounded(self, x: Any) -> Any:
        """Put the largest number in the place of Inf, and 0 in that of NaN."""
        ...

    def given(self) -> list[tuple[str, str | None, Any]]:
        """List what comes in: name, layer (None for an argument), array."""
        ...

    def sizes(self) -> dict[str, int]:
        """Give the layers that can be kept in float32, with the elements of their weights."""
        ...

    def tied(self, layer: str) -> list[str]:
        """List the other layers that hold a weight of a layer's."""
        ...

    def run(self, observer: Observer, dtype: str, how: How, keep: Mapping[str, bool]) -> Observed:
        """Run in a dtype, and leave no trace.

        Layers to keep in float32 come with whether their results are cast back.
        """
        ...

    def code(self, dtype: str, how: How, keep: Mapping[str, bool], scale: float) -> str:
        """Write the code that keeps layers in float32, and scales the loss."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what one operation did in the float32 run.

    Attributes:
        place: What tells it from the others of the run.
        name: What it is called; of a gradient, what the forward operation is.
        kernel: What computes it.
        layer: Path of the layer whose code it is in; None outside of every layer.
        phase: ``forward``, ``loss``, ``backward`` or ``optimizer``; ``parameter`` or ``input``
            for what comes in and is cast.
        source: The user's line.
        operands: Magnitudes of what it works on, by name.
        result: Magnitudes of what it makes.
        partial: The largest that a partial sum can be, for what adds up; None for all else.
        error: How far off it is in the dtype on operands of float32, relative; None if not asked.
        rounding: How far off it is when only its operands are rounded, relative.
    """

    place: Place
    name: str
    kernel: str
    layer: str | None
    phase: Phase
    source: Source | None
    operands: Mapping[str, Range] = field(default_factory=dict)
    result: Range = field(default_factory=lambda: measured(np.zeros(0, np.float32)))
    partial: float | None = None
    error: float | None = None
    rounding: float | None = None


@dataclass(frozen=True, slots=True)
class Break:
    """Hold an operation that makes NaN or Inf of finite numbers.

    Attributes:
        place: What tells it from the others of the run.
        name: What it is called.
        layer: Path of its layer.
        phase: As for a row.
        source: The user's line.
        kind: ``overflow`` for an Inf, else ``nan``.
        bits: Bits by which the float32 run's result is beyond the dtype; None if it is not known.
    """

    place: Place
    name: str
    layer: str | None
    phase: Phase
    source: Source | None
    kind: Literal["overflow", "nan"]
    bits: float | None = None


class Places:
    """Name operations so that those of two runs can be told to be the same."""

    def __init__(self) -> None:
        self._seen: Counter[Place] = Counter()

    def of(self, op: Op, source: Source | None) -> Place:
        """Give the name of the next operation: where it is, and which one of those there."""
        line = None if source is None else (source.file, source.line)
        found = (op.phase, op.layer, op.call, op.name, op.kernel, line)
        self._seen[found] += 1
        return (*found, self._seen[found])


class Ranges:
    """Measure each operation of the float32 run.

    Args:
        narrow: The framework's part.
        dtype: What errors are measured in, None for none.
    """

    def __init__(self, narrow: Narrow, dtype: str | None = None) -> None:
        self.rows: list[Row] = []
        self._narrow, self._dtype, self._places = narrow, dtype, Places()
        self._known: dict[int, tuple[weakref.ref[Any], Range]] = {}

    def __call__(self, op: Op) -> None:
        """Take one operation down."""
        made = [x for x in op.outputs if self._narrow.host(x) is not None]
        if not made or op.blank:
            return
        if op.written:  # what was measured may have changed
            self._known.clear()
        source = op.source
        inputs = list(op.inputs)
        partial = error = rounding = None
        if op.kernel in SUMMING:
            partial = self._partial(op, inputs)
        if self._dtype is not None and op.kernel not in PLACING:
            error, rounding = self._errors(op, inputs, made[0], self._dtype)
        operands = {name: self._range(x) for name, x in inputs if self._narrow.host(x) is not None}
        self.rows.append(
            Row(
                self._places.of(op, source), op.name, op.kernel, op.layer, op.phase, source,
                operands, widest([self._range(x) for x in made]), partial, error, rounding,
            )
        )  # fmt: skip

    def _range(self, x: Any) -> Range:
        held = self._known.get(id(x))
        if held is not None and held[0]() is x:
            return held[1]
        numbers = self._narrow.host(x)
        assert numbers is not None
        found = measured(numbers)
        with suppress(TypeError):  # what cannot be referred to is measured each time
            self._known[id(x)] = (weakref.ref(x), found)
        return found

    def _partial(self, op: Op, inputs: Sequence[tuple[str, Any]]) -> float | None:
        """Bound the partial sums: what comes of the operands' magnitudes."""
        try:
            found = op.rerun({name: abs(x) for name, x in inputs if name != "bias"})
        except (RerunError, TypeError):
            return None
        sizes = [x for x in map(self._narrow.host, found) if x is not None and x.size]
        if not sizes:
            return None
        largest = float(np.abs(sizes[0]).max())
        if op.kernel == "mean" and inputs:
            whole = self._narrow.host(inputs[0][1])
            largest *= 1 if whole is None else whole.size / sizes[0].size
        return largest

    def _errors(
        self, op: Op, inputs: Sequence[tuple[str, Any]], exact: Any, dtype: str
    ) -> tuple[float | None, float | None]:
        moved = {name: self._narrow.rounded(x, dtype) for name, x in inputs}
        tries: tuple[Callable[[], Sequence[Any]], ...] = (
            lambda: op.rerun(dtype=dtype),
            lambda: op.rerun(moved),
        )
        return _distance(tries[0], exact, self._narrow), _distance(tries[1], exact, self._narrow)


def _distance(run: Callable[[], Sequence[Any]], exact: Any, narrow: Narrow) -> float | None:
    """Give how far a result is from the exact one, as a share of that: root mean squares."""
    try:
        found, right = narrow.host(run()[0]), narrow.host(exact)
    except (RerunError, IndexError):
        return None
    if found is None or right is None or found.shape != right.shape:
        return None
    a, b = np.asarray(found, np.float64), np.asarray(right, np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    norm = float(np.linalg.norm(b[finite]))
    return float(np.linalg.norm(a[finite] - b[finite])) / norm if norm else None


def widest(found: Sequence[Range]) -> Range:
    """Join the magnitudes of several arrays."""
    if len(found) == 1:
        return found[0]
    return Range(
        sum(each.size for each in found), max(each.largest for each in found),
        min(each.smallest for each in found), any(each.bad for each in found),
        sum((each.powers for each in found), np.zeros(256, np.int64)),
    )  # fmt: skip


class Breaks:
    """Find what makes NaN or Inf of finite numbers.

    Args:
        narrow: The framework's part.
        going: Put the largest number in the place of what broke, so that the run shows more.
        rounding: Round each result to this format, for a run that is float32 otherwise.
        dtype: The name of it.
        kept: Whether an operation is kept in float32.
        scale: Factor of the gradient that the backward pass begins with.
    """

    def __init__(
        self, narrow: Narrow, *, going: bool = False, rounding: Format | None = None,
        dtype: str = "", kept: Callable[[Op, Source | None], bool] = lambda *_: False,
        rerun: Callable[[Op, Source | None], bool] = lambda *_: False, scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.found: list[Break] = []
        self.seen = 0
        self._narrow, self._going, self._form, self._dtype = narrow, going, rounding, dtype
        self._kept, self._rerun, self._places, self._scale = kept, rerun, Places(), scale

    def __call__(self, op: Op) -> Sequence[Any] | None:
        """Look at one operation."""
        made = list(op.outputs)
        if op.blank or all(self._narrow.host(x) is None for x in made):
            return None
        self.seen += 1
        source = op.source
        place, outs = self._places.of(op, source), self._changed(op, source, made)
        broken = [not self._finite(x) for x in outs]
        kind = self._kind(op, outs) if any(broken) else None
        if kind is not None:
            self.found.append(Break(place, op.name, op.layer, op.phase, source, kind))
            if self._going:
                pairs = zip(outs, broken, strict=True)
                outs = [self._bounded(x) if bad else x for x, bad in pairs]
        changed = any(a is not b for a, b in zip(outs, made, strict=True))
        return outs if changed else None

    def _changed(self, op: Op, source: Source | None, made: list[Any]) -> list[Any]:
        """Give the results of an operation as the run shall go on with them."""
        outs = made
        if self._scale != 1 and op.phase == "backward":
            outs = [x if self._narrow.host(x) is None else x * self._scale for x in outs]
            self._scale = 1.0
        if self._rerun(op, source):
            outs = self._wide(op, outs)
        if self._form is not None and not self._kept(op, source):
            outs = [self._round(op, x, self._form) for x in self._from_rounded(op, outs)]
            if op.kernel in _ADDING and not op.written:
                outs = self._own(op, outs)
        return outs

    def _own(self, op: Op, outs: list[Any]) -> list[Any]:
        """Take Inf where the framework's kernel for the dtype has it."""
        with suppress(RerunError):
            found = op.rerun(dtype=self._dtype)
            return [x if self._finite(y) else y for x, y in zip(outs, found, strict=True)]
        return outs

    def _wide(self, op: Op, outs: list[Any]) -> list[Any]:
        try:
            return list(op.rerun(dtype="float32"))
        except RerunError:
            return outs

    def _from_rounded(self, op: Op, outs: list[Any]) -> list[Any]:
        """Give the results from rounded operands: one of a layer in float32 was not rounded."""
        moved = {}
        for name, x in op.inputs:
            there = self._narrow.host(x)
            if there is not None:
                narrow = self._narrow.rounded(x, self._dtype)
                if not _same(self._narrow.host(narrow), there):
                    moved[name] = narrow
        if not moved or op.written:
            return outs
        try:
            return list(op.rerun(moved))
        except RerunError:
            return outs

    def _round(self, op: Op, x: Any, form: Format) -> Any:
        """Round a result; what a mask has as its smallest number is the dtype's smallest."""
        before = self._narrow.host(x)
        if before is None:
            return x
        made = self._narrow.rounded(x, self._dtype)
        if op.kernel in PLACING and before.size and np.abs(before).max() >= _WRITTEN:
            made = self._narrow.bounded(made) if np.isfinite(before).all() else made
            made = self._narrow.rounded(_within(made, form), self._dtype)
        return x if _same(self._narrow.host(made), before) else made

    def _bounded(self, x: Any) -> Any:
        made = self._narrow.bounded(x)
        return made if self._form is None else _within(made, self._form)

    def _finite(self, x: Any) -> bool:
        numbers = self._narrow.host(x)
        return numbers is None or bool(np.isfinite(numbers).all())

    def _kind(self, op: Op, outs: Sequence[Any]) -> Literal["overflow", "nan"] | None:
        """Tell what an operation broke: None where what it was given was bad, or it was meant."""
        if op.kernel in PLACING:
            return None
        given = [x for x in (self._narrow.host(x) for _, x in op.inputs) if x is not None]
        made = [x for x in map(self._narrow.host, outs) if x is not None]
        nan = any(np.isnan(x).any() for x in made)
        if all(np.isfinite(x).all() for x in given):
            return "nan" if nan and not any(np.isinf(x).any() for x in made) else "overflow"
        return "nan" if nan and not any(np.isnan(x).any() for x in given) else None


def _within(x: Any, form: Format) -> Any:
    return x.clip(-form.max, form.max)


def _same(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    return a is not None and b is not None and np.array_equal(a, b, equal_nan=True)


def bits_of(found: Sequence[Break], rows: Sequence[Row], form: Format) -> list[Break]:
    """Add to what broke how far the float32 run is beyond the format."""
    known = {row.place: row.result.bits(form) for row in rows}
    known = {place: bits for place, bits in known.items() if not math.isinf(bits)}
    return [replace(each, bits=known.get(each.place)) for each in found]
