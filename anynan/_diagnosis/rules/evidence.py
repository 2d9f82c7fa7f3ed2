"""Look at operands and quote them: the words that every rule shares."""

import math
import re
from collections.abc import Callable

from anynan._base.summary import Summary
from anynan._diagnosis.lineage import Operand
from anynan._diagnosis.rules.advice import floored, guarded, trapless
from anynan._diagnosis.rules.situation import Situation
from anynan._files.formats import FORMATS, format_of

HALF = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})


def limits(dtype: str) -> tuple[float, float, float]:
    """Return the largest finite number, the smallest above 0 and the distance from 1 to the next.

    Those of float32 if the dtype is unknown.
    """
    form = format_of(dtype) or FORMATS["float32"]
    return form.max, form.value(1), 2 * form.unit


def small(dtype: str) -> str:
    """Return an epsilon that is safe to write in this dtype."""
    return "1e-4" if limits(dtype)[1] > 1e-12 else "1e-8"


def margin(dtype: str) -> str:
    """Return how far from 1 a bound must be for this dtype to tell them apart."""
    resolution = limits(dtype)[2]
    return "1e-6" if resolution < 1e-6 else "1e-3" if resolution < 2e-3 else "0.01"


def vanishes(eps: float, dtype: str) -> bool:
    """Tell whether a positive number rounds to 0 in this dtype."""
    return 0 < eps <= limits(dtype)[1] / 2


def group(number: int) -> str:
    """Print a count with its thousands apart."""
    return f"{number:,}"


def literal(value: complex | None) -> str:
    """Print a number as code would: ``0.0``, ``-inf``, ``3.142``."""
    if value is None:
        return "?"
    if not isinstance(value, float | int):
        return f"({literal(value.real)}{value.imag:+.4g}j)"
    text = f"{value:.4g}"
    if abs(float(text)) in (0.0, 1.0) and float(text) != value:
        text = f"{value:.9g}"  # the least bit beside 0 or 1 is what matters
    return text if any(c in text for c in ".einf") else f"{text}.0"


def magnitude(value: float) -> str:
    """Print a magnitude for people: ``65,504``, ``3.4e+38``."""
    if not math.isfinite(value):
        return literal(value)
    if 1000 <= abs(value) < 1e6:
        return group(round(value))
    return f"{value:.4g}"


# What operations call their arguments; to a reader these are no names.
_GENERIC = frozenset(
    {"self", "other", "input", "tensor", "x", "y", "a", "b", "x1", "x2", "lhs", "rhs"}
)
_PLACES = ("first", "second", "third")


def called(s: Situation, item: Operand) -> str:
    """Name an operand as a reader knows it, or by its role; empty if it has neither."""
    if item.label:
        return item.label
    if item.name.startswith("grad"):
        return "incoming gradient"
    if item.name in _GENERIC:
        alike = [other for other in s.operands if other.name in _GENERIC]
        place = next(i for i, other in enumerate(alike) if other is item)
        if len(alike) == 1:
            return "input"
        return f"{_PLACES[place]} input" if place < len(_PLACES) else ""
    return item.name if item.name.isidentifier() else ""


def at(s: Situation) -> str:
    """Say where the first bad element is: `` at [3, 7]``."""
    first = None if s.output is None else s.output.first_bad
    return f" at {list(first)}" if first else ""


def times(count: int, what: str) -> str:
    """Say ``, 12 zeros in all`` where more than one makes it worth saying."""
    return f", {group(count)} {what} in all" if count > 1 else ""


def plural(count: int, one: str, many: str | None = None) -> str:
    """Say ``1 row`` or ``3 rows``."""
    return f"{group(count)} {one if count == 1 else many or one + 's'}"


def real(value: complex | None) -> float | None:
    """Return a number that can be compared: None for a complex one."""
    return float(value) if isinstance(value, float | int) else None


def same(value: complex | None, wanted: float) -> bool:
    """Tell whether an element is known and equals a number."""
    return value is not None and value == wanted


def holds(
    s: Situation, names: tuple[str, ...], element: Callable[[float], bool],
    anywhere: Callable[[Summary], bool],
) -> bool:  # fmt: skip
    """Look at the element under the first bad index, else at the operand's summary."""
    value = s.value(*names)
    if value is not None:
        number = real(value)
        return number is not None and element(number)
    summary = s.summary_of(*names)
    return summary is not None and anywhere(summary)


def is_zero(s: Situation, names: tuple[str, ...]) -> bool:
    """Tell whether the deciding element of an operand is 0, or may be."""
    value = s.value(*names)
    if value is not None:
        return value == 0
    summary = s.summary_of(*names)
    return summary is not None and summary.zero > 0


def below(s: Situation, names: tuple[str, ...], bound: float) -> float | None:
    """Return an operand's element or smallest number that is below a bound."""
    value = real(s.value(*names))
    if value is not None and value < bound:
        return value
    summary = s.summary_of(*names)
    low = None if summary is None else summary.low
    return low if low is not None and low < bound else None


def above(s: Situation, names: tuple[str, ...], bound: float) -> float | None:
    """Return an operand's element or largest number that is above a bound."""
    value = real(s.value(*names))
    if value is not None and value > bound:
        return value
    summary = s.summary_of(*names)
    high = None if summary is None else summary.high
    return high if high is not None and high > bound else None


def infinite(summary: Summary | None) -> bool:
    """Tell whether a tensor holds an Inf of either sign."""
    return summary is not None and summary.posinf + summary.neginf > 0


def finite_operands(s: Situation) -> bool:
    """Tell whether every operand is known to be finite, and there is one."""
    known = [item.summary for item in s.operands if item.summary is not None]
    return bool(known) and not any(summary.bad for summary in known)


def largest(s: Situation) -> float | None:
    """Return the largest finite magnitude among the operands."""
    known = [
        item.summary.absmax
        for item in s.operands
        if item.summary is not None and item.summary.absmax is not None
    ]
    return max(known, default=None)


def counts(summary: Summary) -> list[str]:
    """Say how many elements are bad, and how: ``2 x NaN``."""
    kinds = {"NaN": summary.nan, "inf": summary.posinf, "-inf": summary.neginf}
    return [f"{group(count)} x {name}" for name, count in kinds.items() if count]


def seen(summary: Summary | None) -> str:
    """Say what a tensor holds in a few words."""
    if summary is None:
        return "nothing could be read"
    parts = counts(summary)
    if not parts:
        size = "" if summary.absmax is None else f", largest magnitude {magnitude(summary.absmax)}"
        return f"{plural(summary.size, 'finite element')}{size}"
    return f"{', '.join(parts)} of {plural(summary.size, 'element')}"


def curve(growth: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    """Keep the finite points of a growth curve."""
    return [(step, value) for step, value in growth if math.isfinite(value) and value > 0]


# Decades that an operation's result may be above the reading that is made of it, and growth may
# come to in one step, as a multiple of what it came to in the last.
_ABOVE, _FASTER = 8.0, 8.0


def rising(growth: tuple[tuple[int, float], ...], limit: float = math.inf) -> bool:
    """Tell whether a reading grew tenfold or more and was still growing at the end.

    Args:
        growth: Its sizes by step.
        limit: What it is beyond now: one more step of such growth must have been able to take it
            there. Infinite where that is not asked.
    """
    points = [value for _, value in curve(growth)][-20:]
    if len(points) < 3:
        return False
    a, b, c = points[-3:]
    if not a < b < c or c < 10 * min(points):
        return False
    before, last = math.log10(b / a), math.log10(c / b)
    reach = last * max(1.0, last / before) * _FASTER + _ABOVE
    return math.isinf(limit) or math.log10(limit / c) <= reach


def told(growth: tuple[tuple[int, float], ...], what: str = "size") -> str:
    """Print a growth curve: ``size 0.9 at step 396, 3.1, 48, 7,200 at step 399``."""
    points = curve(growth)
    if not points:
        return ""
    if len(points) > 5:
        # The climb is the story: start where it starts, then show its end.
        tail = points[-20:]
        points = [min(tail, key=lambda point: point[1]), *points[-4:]]
        points = list(dict.fromkeys(points))
    shown = [
        f"{magnitude(value)} at step {step}" if i in (0, len(points) - 1) else magnitude(value)
        for i, (step, value) in enumerate(points)
    ]
    return f"{what} {', '.join(shown)}"


# A small constant in the user's own line (1e-8, 1.0e-12, 10**-8) that may have rounded away.
_EPSILON = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?[eE]-\d+)|10(?:\.0?)?\s*\*\*\s*\(?-(\d+)")
_ONE_MINUS = re.compile(r"(?<![\w.])1(?:\.0*)?\s*-\s*(\d+(?:\.\d*)?[eE]-\d+)")


def lost_epsilon(s: Situation) -> float | None:
    """Return a constant of the user's line, or an eps argument, that rounds to 0 in the dtype."""
    given = s.param("eps")
    found = [] if given is None else [given]
    found += [float(a) if a else 10.0 ** -int(b) for a, b in _EPSILON.findall(s.line)]
    return next((eps for eps in found if vanishes(eps, s.dtype)), None)


def lost_in_one(s: Situation) -> float | None:
    """Return an epsilon of the user's line that ``1 - eps`` loses in the dtype."""
    found = (float(text) for text in _ONE_MINUS.findall(s.line))
    return next((eps for eps in found if eps <= limits(s.dtype)[2] / 4), None)


def facts(s: Situation, operation: str = "") -> dict[str, str]:
    """Return the names that a rule's text and fix may use.

    Args:
        s: What is known.
        operation: What stands for the operation where none is known.
    """
    dtype = s.dtype or "float32"
    limit = limits(dtype)[0]
    operation = s.operation or operation or "the operation"
    cap = str(math.floor(0.9 * math.log(limit)))  # room for a sum or a product of what comes out
    return {
        "op": operation,
        "guarded": guarded(operation, small(dtype), margin(dtype)),
        "floored": floored(operation, small(dtype), margin(dtype)),
        "trapless": trapless(operation, cap),
        "dtype": dtype,
        "limit": magnitude(limit),
        "eps": small(dtype),
        "margin": margin(dtype),
        "cap": cap,
        "mask": "-1e4" if limit < 1e9 else "-1e9",
        "parameter": s.parameter or "the parameter",
        "kind": {"nan": "NaN", "posinf": "+Inf", "neginf": "-Inf"}.get(s.kind, "a bad value"),
        "good": str(max(s.since[0], 0)) if s.since is not None else "the last good step",
    }
