"""Which operations have an edge, and how far their operands are from it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from anynan._arrays.access import dtype_max
from anynan._diagnosis.rules.situation import SELF
from anynan._diagnosis.vocabulary import WORDS
from anynan._files.formats import FORMATS, format_of
from anynan._trace.op import Op
from anynan.events import Source

Way = Literal["above", "below", "away"]
Measured = Literal["operand", "result", "row", "count"]

# Their divisor, or what is divided by, is the last operand.
_DIVIDING = frozenset(
    {"divide", "floor_divide", "remainder", "reciprocal", "addcdiv", "weight_norm"}
)
_GROWING = {"exp": 1.0, "expm1": 1.0, "exp2": math.log(2), "sinh": 1.0, "cosh": 1.0}
# The gradient is infinite, or NaN, where the result is 0.
_SLOPES = frozenset({"std", "vector_norm", "matrix_norm", "cdist", "hypot"})
# What outgrows a narrow dtype.
_SUMS = frozenset(
    {"sum", "mean", "matmul", "linear", "convolution", "einsum", "multiply", "square", "astype",
     "cumsum", "add"}
)  # fmt: skip
_NARROW = 1e6
_ROWS = frozenset({"softmax", "log_softmax"})
_CORRECTED = frozenset({"std", "var"})
FEW = 8  # elements up to which a variance is one of few
_EDGED = _DIVIDING | _GROWING.keys() | _SLOPES | _SUMS | _ROWS | _CORRECTED | {"pow"}
_PHASES = ("forward", "loss", "value")


@dataclass(frozen=True, slots=True)
class Edge:
    """Say where an operation stops being finite.

    Attributes:
        what: What is measured, as ``smallest argument``.
        side: Whether it has to stay ``above`` or ``below`` the bound, or ``away`` from it.
        bound: The number.
        of: What is measured: the last operand, the ``result``, the numbers in a ``row`` of the
            operand that are not masked, or the ``count`` of elements that are made one.
    """

    what: str
    side: Way
    bound: float
    of: Measured = "operand"

    @property
    def has_slope(self) -> bool:
        """Tell whether it is numbers that are measured, not how many there are."""
        return self.of in ("operand", "result")

    def array(self, op: Op) -> Any:
        """Give the array that is looked at."""
        return op.outputs[0] if self.of == "result" else op.inputs[-1][1]

    def numbers(self, op: Op, x: np.ndarray) -> np.ndarray:
        """Give the numbers that have to keep a distance; none where it is out of sight.

        Args:
            op: The operation.
            x: Its array, on the host.
        """
        axis = op.params.get("dim")
        axis = (tuple(axis) or None) if isinstance(axis, list | tuple) else axis
        if self.of == "row":
            left = np.asarray((x != -np.inf).sum(axis=axis))
            return left if (x == -np.inf).any() else np.empty(0)
        if self.of == "count":
            many = np.asarray(np.ones(x.shape).sum(axis=axis))
            return many if many.size and many.max() <= FEW else np.empty(0)
        return np.asarray(x[np.isfinite(x)])

    def distance(self, x: np.ndarray) -> float:
        """Give the smallest distance of an array's finite numbers from the edge."""
        x = np.abs(x) if np.iscomplexobj(x) else x
        return float(self.distances(x.astype(np.float64)).min())

    def distances(self, x: Any) -> Any:
        """Give the distance of each number of any framework's array; below 0 beyond the edge."""
        if self.side == "away":
            return abs(x - self.bound)
        if self.side == "above":
            return x - self.bound
        return self.bound - (abs(x) if self.of == "result" else x)

    def bits(self, distance: float, dtype: str) -> float:
        """Say how often a distance can be halved until it is no longer there."""
        if distance <= 0:
            return 0.0
        if not self.has_slope:
            return math.log2(max(distance, 1.0))
        form = format_of(dtype) or FORMATS["float64"]
        step = form.value(1) if self.bound == 0 else 2 * form.unit * abs(self.bound)
        return max(math.log2(distance) - math.log2(step), 0.0)


def edges(op: Op) -> Iterator[Edge]:
    """Give the edges of an operation."""
    if _has_edge(op.name) and op.phase in _PHASES and op.inputs:  # what costs is asked last
        yield from _edges(op)


def _has_edge(name: str) -> bool:
    word = WORDS.get(name)
    return name in _EDGED or (word is not None and word.bounds is not None)


def _edges(op: Op) -> Iterator[Edge]:
    name, word = op.name, WORDS.get(op.name)
    operand, x = op.inputs[-1]
    if name in _DIVIDING:
        if operand not in SELF or name == "reciprocal":  # else it is divided by a number
            yield Edge("divisor nearest 0", "away", 0.0)
    elif name in _GROWING:
        top = dtype_max(x) or float(np.finfo(np.float64).max)
        yield Edge("largest argument", "below", round(math.log(top) / _GROWING[name], 4))
    elif name == "pow":
        yield from _of_power(op)
    elif name in _ROWS:
        yield Edge("fewest numbers in a row that are not -Inf", "above", 0.0, "row")
    elif name in _SLOPES or name in _CORRECTED:
        yield from _of_spread(op)
    elif word is not None and word.bounds is not None:
        low, high = word.bounds
        if math.isfinite(low):
            yield Edge("smallest argument", "above", low)
        if math.isfinite(high):
            yield Edge("largest argument", "below", high)
    elif name in _SUMS and op.outputs:
        largest = dtype_max(op.outputs[0])
        if largest is not None and largest < _NARROW:
            yield Edge("largest result", "below", largest, "result")


def _of_spread(op: Op) -> Iterator[Edge]:
    if op.name in _SLOPES:
        yield Edge("smallest result (its gradient)", "above", 0.0, "result")
    correction = op.params.get("correction", op.params.get("unbiased", 1))
    if op.name in _CORRECTED and (correction is None or correction > 0):
        yield Edge(
            "fewest elements", "above", float(1 if correction is None else correction), "count"
        )


def _of_power(op: Op) -> Iterator[Edge]:
    exponent = op.params.get("exponent")
    if exponent is None and len(op.inputs) > 1:
        return
    if exponent is None or exponent != int(exponent):
        yield Edge("smallest base", "above", 0.0)
    elif exponent < 0:
        yield Edge("base nearest 0", "away", 0.0)


@dataclass(frozen=True, slots=True)
class Site:
    """Name one edge in the program.

    Attributes:
        operation: What it is called.
        edge: Which of its edges.
        layer: Where it ran.
        source: The user's line.
    """

    operation: str
    edge: Edge
    layer: str | None
    source: Source | None

    def __str__(self) -> str:
        return f"{self.operation}{told(self.source, self.layer)}: {self.edge.what}"

    @property
    def key(self) -> tuple[object, ...]:
        """Say what makes two edges belong to one operation, as ``Finding.key`` does."""
        return self.operation, place(self.source, self.layer), False


@dataclass(frozen=True, slots=True)
class Margin:
    """Say how far the example's run stays from an edge.

    Attributes:
        site: The edge.
        distance: In the operand's own units.
        bits: How often it can be halved until nothing is left of it.
    """

    site: Site
    distance: float
    bits: float

    def __str__(self) -> str:
        return f"{self.site} {self.number:.4g} ({self.bits:.0f} bits from the edge)"

    @property
    def number(self) -> float:
        """Give what was measured, of which the distance is known."""
        edge = self.site.edge
        if edge.side == "below":
            return edge.bound - self.distance
        return edge.bound + self.distance


def place(source: Source | None, layer: str | None) -> object:
    """Say where something is, so that the same place is the same again."""
    if source is None:
        return layer
    return source.file, source.line, source.column


def told(source: Source | None, layer: str | None) -> str:
    """Say where something is, as far as it is known."""
    if source is not None:
        return f" at {source.place}"
    return f" in {layer}" if layer else ""
