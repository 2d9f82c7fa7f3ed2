"""What is noted of each operation: its magnitudes in float32, and what a narrow dtype breaks."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from anynan._apps.precision.ranges import Range, finite, measured
from anynan._arrays.containers import attributes, leaves, rebuilt
from anynan._files.formats import Format
from anynan._trace.op import Observed, Observer, Op, RerunError
from anynan._trace.target import Target
from anynan.events import Phase, Source

How = Literal["cast", "autocast"]
# They write a number that is in the code: -Inf in a mask is meant.
PLACING = frozenset(
    {"arange", "constant", "empty", "fill", "full", "full_like", "index_fill", "masked_fill",
     "where", "pad", "tril", "triu", "asarray", "copy"}
)  # fmt: skip
# They add up: their partial sums may be larger than what they give.
SUMMING = frozenset(
    {"matmul", "linear", "convolution", "sum", "mean", "einsum", "cumsum", "vector_norm"}
)

Place = tuple[Any, ...]


class Narrow(Target):
    """Run one target in narrow dtypes: adapters derive ``Narrowed`` from it in ``precision.py``.

    Attributes:
        framework: What it is called where it has no autocast.
        replaces: Whether other results can take the place of an operation's.
        widening: What to write for a line whose operands are to be float32.
        outside: What to write for a line that autocast is to leave alone.
    """

    framework = ""
    replaces = True
    widening = outside = 'x.astype("float32") for each operand'

    def observe(self, observer: Observer) -> Observed:
        """Run as it is, and show each operation."""
        return self.shows(*self.call, observer)

    def run(
        self, observer: Observer, dtype: str, how: How, keep: Mapping[str, bool], *, own: bool
    ) -> Observed:
        """Run in a dtype, and leave no trace: by itself with the arguments in it, and no more.

        Args:
            observer: Sees each operation.
            dtype: The dtype.
            how: ``cast`` or ``autocast``.
            keep: Layers to keep in float32, with whether their results are cast back.
            own: Run the framework's kernels for the dtype, but where float32 tells the same. Else
                compute in float32 where that is possible, and store what comes out in the dtype.

        Raises:
            ValueError: If it cannot be run in this way.
        """
        del keep, own
        refuse(how, self.framework)
        return self.shows(self.call[0], *self.narrowed(dtype), observer)

    def rounded(self, x: Any, dtype: str) -> Any:
        """Round an array to a dtype, and give it in its own again."""
        there = self.numbers(self.cast(x, dtype))
        return x if there is None or there.dtype.kind == "c" else self.like(there, x)

    def memory(self, x: Any) -> tuple[Any, Any, Callable[[], Any] | None]:
        """Give whose memory an array's numbers are in, which of that they are, and who has to live.

        A write to an array of the same memory may change them; what is equal in both has the same
        numbers until then. The last gives the array while that holds; None if it always does.
        """
        with suppress(TypeError):
            return None, id(x), weakref.ref(x)
        return None, id(x), lambda: None  # what cannot be referred to is measured each time

    def bounded(self, x: Any, top: float) -> Any:
        """Put the largest number in the place of Inf, and 0 in that of NaN."""
        there = np.asarray(self.numbers(x), np.float64)
        return self.like(np.nan_to_num(there, posinf=top, neginf=-top), x)

    def narrows(self, x: Any) -> bool:
        """Tell whether an array is one that is cast."""
        there = self.numbers(x)
        return there is not None and there.dtype in (np.float32, np.float64)

    def narrowed(self, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments in a dtype."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = rebuilt(
            self.call[1:], lambda x: self.cast(x, dtype) if self.narrows(x) else x
        )
        return found

    def uncast(self) -> str | None:
        """Name the class of an argument that hides arrays from a cast."""
        others = list[Any]()
        rebuilt(self.call[1:], others.append)
        return next((type(x).__name__ for x in others if self.hides(x)), None)

    def hides(self, x: Any) -> bool:
        """Tell whether an object holds arrays that are cast in others."""
        return any(self.narrows(y) for _, y in attributes(x, ""))

    def given(self) -> list[tuple[str, str | None, Any]]:
        """List what comes in and is cast: name, layer (None for an argument), array."""
        found = [x for _, x in leaves(self.call[1:], "") if self.narrows(x)]
        return [(f"input {i}", None, x) for i, x in enumerate(found)]

    def sizes(self) -> dict[str, int]:
        """Give the layers that can be kept in float32, with the elements of their weights."""
        return {}

    def tied(self, layer: str) -> list[str]:
        """List the other layers that hold a weight of a layer's."""
        del layer
        return []

    def code(self, dtype: str, how: How, keep: Mapping[str, bool], scale: float) -> str:
        """Write the code that keeps layers in float32, and scales the loss."""
        del dtype, how, keep
        return f"loss_scale = {scale:g}  # divide the gradients by it" if scale != 1 else ""


def refuse(how: str, framework: str) -> None:
    """Refuse autocast where there is none.

    Raises:
        ValueError: If it is asked for.
    """
    if how == "autocast":
        msg = f"{framework} has no autocast: choose how='cast'"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class At:
    """Tell which operation of a run it is.

    Attributes:
        place: What tells it from the others of the run.
        name: What it is called; of a gradient, what the forward operation is.
        layer: Path of the layer whose code it is in; None outside of every layer.
        phase: ``forward``, ``loss``, ``backward`` or ``optimizer``; ``parameter`` or ``input``
            for what comes in and is cast.
        source: The user's line.
    """

    place: Place
    name: str
    layer: str | None
    phase: Phase
    source: Source | None


@dataclass(frozen=True, slots=True)
class Row(At):
    """Hold what one operation did in the float32 run.

    Attributes:
        kernel: What computes it.
        operands: Magnitudes of what it works on, by name.
        result: Magnitudes of what it makes.
        partial: The largest that a partial sum can be, for what adds up; None for all else.
        error: How far off it is in the dtype on operands of float32, relative; None if not asked.
        rounding: How far off it is when only its operands are rounded, relative.
    """

    kernel: str
    operands: Mapping[str, Range]
    result: Range
    partial: float | None = None
    error: float | None = None
    rounding: float | None = None


@dataclass(frozen=True, slots=True)
class Break(At):
    """Hold an operation that makes NaN or Inf of finite numbers.

    Attributes:
        kind: ``overflow`` for an Inf, else ``nan``.
        bits: Bits by which the float32 run's result is beyond the dtype; None if it is not known.
    """

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
        form: The format asked about.
        errors: Measure errors, too.
    """

    def __init__(self, narrow: Narrow, form: Format, *, errors: bool = False) -> None:
        self.rows: list[Row] = []
        self._narrow, self._form, self._wrong, self._places = narrow, form, errors, Places()
        # By whose memory they are in, and which of that they are: None for no numbers.
        self._known: dict[Any, dict[Any, tuple[Any, Range | None]]] = {}

    def __call__(self, op: Op) -> None:
        """Take one operation down."""
        if op.blank:
            return
        if op.written:  # what was measured may have changed
            for x in op.outputs:
                if self._narrow.is_array(x):
                    self._known.pop(self._narrow.memory(x)[0], None)
        made = [(x, found) for x in op.outputs if (found := self.range(x)) is not None]
        if not made:
            return
        source, inputs, operands = op.source, list[tuple[str, Any]](), dict[str, Range]()
        for name, x in op.inputs:
            if (found := self.range(x)) is not None:
                inputs.append((name, x))
                operands[name] = found
        result = widest([found for _, found in made])
        partial = error = rounding = None
        if op.kernel in SUMMING:
            partial = self._partial(op, inputs, operands, result)
        if self._wrong and op.kernel not in PLACING:
            error, rounding = self._errors(op, inputs, made[0][0], self._form.name)
        self.rows.append(
            Row(
                self._places.of(op, source), op.name, op.layer, op.phase, source, op.kernel,
                operands, result, partial, error, rounding,
            )
        )  # fmt: skip

    def range(self, x: Any) -> Range | None:
        """Measure an array, if that was not done yet; None for what has no numbers."""
        if not self._narrow.is_array(x):
            return None
        whose, part, lives = self._narrow.memory(x)
        known = self._known.setdefault(whose, {})
        lived, found = known.get(part, (x, None))
        if part not in known or (lived is not None and lived() is not x):
            numbers = self._narrow.numbers(x)
            found = None if numbers is None else measured(numbers)
            known[part] = lives, found
        return found

    def _partial(
        self, op: Op, inputs: Sequence[tuple[str, Any]], operands: Mapping[str, Range],
        result: Range,
    ) -> float | None:  # fmt: skip
        """Bound the partial sums by sizes; where only that bound is beyond, run with magnitudes."""
        if op.kernel == "vector_norm":
            return result.largest**2
        sizes = {name: (each.size, each.largest) for name, each in operands.items()}
        bound = bound_of(op.kernel, sizes, result.size)
        if result.largest < self._form.overflows <= bound:
            try:
                found = op.rerun({name: abs(x) for name, x in inputs if name != "bias"})
            except (RerunError, TypeError):
                return None
            made = [x for x in map(self._narrow.numbers, found) if x is not None and x.size]
            return float(np.abs(made[0]).max()) if made else None
        return bound

    def _errors(
        self, op: Op, inputs: Sequence[tuple[str, Any]], exact: Any, dtype: str
    ) -> tuple[float | None, float | None]:
        moved = {name: self._narrow.rounded(x, dtype) for name, x in inputs}
        tries: tuple[Callable[[], Sequence[Any]], ...] = (
            lambda: op.rerun(dtype=dtype),
            lambda: op.rerun(moved),
        )
        return _distance(tries[0], exact, self._narrow), _distance(tries[1], exact, self._narrow)


def factors_of(names: Sequence[str]) -> list[str]:
    """Give which of a product's operands are multiplied: no bias."""
    added = "self" if {"mat1", "batch1", "mat", "vec1"} & {*names} else "bias"
    return [name for name in names if name != added]


def bound_of(kernel: str, operands: Mapping[str, tuple[int, float]], size: int) -> float:
    """Bound what a sum can reach on its way, in whatever order it is added.

    Args:
        kernel: What adds up.
        operands: Size and largest magnitude of what it works on, by name.
        size: How many elements it makes.
    """
    factors = factors_of(list(operands))
    sizes = [operands[name][0] for name in factors]
    if kernel in ("matmul", "linear") and len(factors) == 2:
        terms = math.sqrt(math.prod(sizes) / max(size, 1))
    elif kernel == "convolution" and len(factors) == 2:  # none is taken twice
        terms = min(sizes)
    elif kernel in ("sum", "mean"):
        terms = max(sizes, default=0) / max(size, 1)
    else:
        terms = math.prod(sizes)
    added = sum(largest for name, (_, largest) in operands.items() if name not in factors)
    return math.prod(operands[name][1] for name in factors) * terms + added


def _distance(run: Callable[[], Sequence[Any]], exact: Any, narrow: Narrow) -> float | None:
    """Give how far a result is from the exact one, as a share of that: root mean squares."""
    try:
        found, right = narrow.numbers(run()[0]), narrow.numbers(exact)
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
        top: What to put in the place of what broke, so that the run shows more; None to leave it.
        bad: Places that make NaN or Inf in float32, too: they are meant.
        rerun: Whether an operation is to be computed in float32.
        scale: Factor of the gradient that the backward pass begins with.
    """

    def __init__(
        self, narrow: Narrow, *, top: float | None = None, bad: Collection[Place] = (),
        rerun: Callable[[Op, Source | None], bool] = lambda *_: False, scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.found: list[Break] = []
        self._narrow, self._top, self._bad, self._scale = narrow, top, bad, scale
        self._rerun, self._places = rerun, Places()

    def __call__(self, op: Op) -> Sequence[Any] | None:
        """Look at one operation."""
        made = list(op.outputs)
        numbers = [self._narrow.numbers(x) for x in made]
        if op.blank or all(x is None for x in numbers):
            return None
        source = op.source
        place, outs = self._places.of(op, source), self._changed(op, source, made)
        if outs is not made:
            numbers = [self._narrow.numbers(x) for x in outs]
        broken = [x is not None and not finite(x) for x in numbers]
        kind = self._kind(op, outs) if any(broken) and place not in self._bad else None
        if kind is not None:
            self.found.append(Break(place, op.name, op.layer, op.phase, source, kind))
            if self._top is not None:
                pairs = zip(outs, broken, strict=True)
                outs = [self._narrow.bounded(x, self._top) if bad else x for x, bad in pairs]
        changed = any(a is not b for a, b in zip(outs, made, strict=True))
        return outs if changed else None

    def _changed(self, op: Op, source: Source | None, made: list[Any]) -> list[Any]:
        """Give the results of an operation as the run shall go on with them."""
        outs = made
        if self._scale != 1 and op.phase == "backward":
            outs = [x if self._narrow.numbers(x) is None else x * self._scale for x in outs]
            self._scale = 1.0
        if self._rerun(op, source):
            with suppress(RerunError):
                outs = list(op.rerun(dtype="float32"))
        return outs

    def _kind(self, op: Op, outs: Sequence[Any]) -> Literal["overflow", "nan"] | None:
        """Tell what an operation broke: None where what it was given was bad, or it was meant."""
        if op.kernel in PLACING:
            return None
        given = [x for x in (self._narrow.numbers(x) for _, x in op.inputs) if x is not None]
        made = [x for x in map(self._narrow.numbers, outs) if x is not None]
        nan = any(np.isnan(x).any() for x in made)
        if all(map(finite, given)):
            return "nan" if nan and not any(np.isinf(x).any() for x in made) else "overflow"
        return "nan" if nan and not any(np.isnan(x).any() for x in given) else None


def bits_of(found: Sequence[Break], rows: Sequence[Row], form: Format) -> list[Break]:
    """Add to what broke how far the float32 run is beyond the format."""
    known = {row.place: row.result.bits(form) for row in rows}
    known = {place: bits for place, bits in known.items() if not math.isinf(bits)}
    return [replace(each, bits=known.get(each.place)) for each in found]
