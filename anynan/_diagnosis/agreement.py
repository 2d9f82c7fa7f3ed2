"""Compare a replay with the first run: it is evidence only as far as both saw the same."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any

from anynan._base.tracebacks import last_own
from anynan._readings.policy import reading_kind
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan.events import Kind, Phase

# Magnitudes this much below the largest of the run may be what is left of a cancellation.
_NOISE = 1e-3
# How far finite magnitudes may be apart: kernels need not be deterministic.
_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class CheckedPoint:
    """Hold one place that a replay passed, read as the first run's rows are.

    Attributes:
        layer: Layer path, None outside every watched layer.
        phase: Phase of the reading.
        tensor: Which tensor (``output``, ``grad``, ``result[0]``), named as in the rows.
        call: Which call of the layer in the step.
        lo: Smallest value, NaN if any value is NaN, above ``hi`` if it was not read how large.
        hi: Largest value, likewise.
    """

    layer: str | None
    phase: Phase
    tensor: str
    call: int
    lo: float
    hi: float

    @property
    def key(self) -> tuple[Any, ...]:
        """Name the place."""
        return self.layer, self.phase, self.tensor, self.call

    def unmeasured(self) -> "CheckedPoint":
        """Leave out how large the values are, where they are finite."""
        return self if self.kind is not None else replace(self, lo=math.inf, hi=-math.inf)

    @property
    def kind(self) -> Kind | None:
        """Name the non-finite kind, None if the values are finite."""
        return None if self.lo > self.hi else reading_kind(self.lo, self.hi)


def divergence(
    rows: Step, reading: Reading, passed: list[CheckedPoint], *, ends: bool = False
) -> str | None:
    """Say where a replay parted from the first run, None where it did not.

    Compared are, up to the failing reading, the places that both passed: their kinds exactly,
    finite magnitudes within a factor; and that the replay passed no layer which the first run
    did not. Places that only the first run passed may belong to what is not run again.
    (Where of the first run only the ends were read, those alone are compared.)

    Args:
        rows: The first run's rows.
        reading: The bad one among them.
        passed: What the replay passed, in order; empty where the adapter does not say.
        ends: Whether of the first run only the ends were read (``level="step"``).

    Returns:
        A clause that completes "the second run saw other values than the first: ...".
    """
    if not passed:
        return None
    failing = _as_passed(reading)
    first = _first_run(rows, reading, failing)
    largest = max((_size(row) for group in first.values() for row in group), default=0.0)
    layers = {(layer, phase) for layer, phase, *_ in first}
    seen: Counter[tuple[Any, ...]] = Counter()
    for place in passed:
        at = seen[place.key]
        seen[place.key] += 1
        group = first.get(place.key, [])
        said, last = None, False
        if place.phase == "backward" and len(group) > 1:
            # Several backward passes of a step may be one in the second run, and add up there.
            if all(row.kind != place.kind for row in group):
                said = _changed(group[0], place)
            last = failing in group and place.kind == failing.kind
        elif at < len(group):
            said = _differs(group[at], place, largest)
            last = group[at] is failing
        # Behind the failing reading the first run was not read any more; a second run does not
        # say when it passes a weight's gradient.
        elif place.phase != "backward" or reading.site.parameter is None:
            strange = place.layer and not ends and (place.layer, place.phase) not in layers
            if strange and failing.key not in seen:
                said = f"{_where(place)} was passed in the second run only"
        if said is not None or last:
            return said
    return None


def _first_run(
    rows: Step, reading: Reading, failing: CheckedPoint
) -> dict[tuple[Any, ...], list[CheckedPoint]]:
    """Give what the first run read up to the failing reading, by place."""
    first: dict[tuple[Any, ...], list[CheckedPoint]] = defaultdict(list)
    for order in range(len(rows.lo)):
        row = _as_passed(rows.reading(order)) if order != reading.order else failing
        # Of several backward passes the second run may begin with the last one's gradients.
        if rows.sites[order].parameter is None and (
            order <= reading.order or (row.phase == "backward" and row.key in first)
        ):
            first[row.key].append(row)
    return first


def _differs(row: CheckedPoint, place: CheckedPoint, largest: float) -> str | None:
    """Say how a place was read in two runs, None where both saw the same."""
    if row.kind != place.kind:
        return _changed(row, place)
    if row.kind is None and _apart(_size(row), _size(place), largest):
        return f"{_where(place)} reached {_size(row):.4g} and then {_size(place):.4g}"
    return None


def _changed(row: CheckedPoint, place: CheckedPoint) -> str:
    return f"{_where(place)} was {_said(row)} and then {_said(place)}"


def same_end(first: BaseException, second: BaseException | None) -> bool:
    """Tell whether two runs ended with one exception, at one line of the program."""
    return second is not None and _raised_at(first) == _raised_at(second)


def _raised_at(error: BaseException) -> tuple[Any, ...]:
    """Give the type and the last line of the program's own."""
    last = last_own(error)
    return type(error), last and last.tb_frame.f_code, last and last.tb_lineno


def _as_passed(reading: Reading) -> CheckedPoint:
    lo = math.inf if reading.lo is None else reading.lo
    hi = -math.inf if reading.hi is None else reading.hi
    return CheckedPoint(reading.layer, reading.phase, reading.site.tensor, reading.call, lo, hi)


def _size(place: CheckedPoint) -> float:
    """Give the largest magnitude where it is finite and was read, else 0."""
    size = max(abs(place.lo), abs(place.hi)) if place.lo <= place.hi else 0.0
    return size if math.isfinite(size) else 0.0


def _apart(a: float, b: float, largest: float) -> bool:
    if not a or not b:  # not read, or nothing there
        return False
    small, large = sorted((a, b))
    return large > _FACTOR * small and large > _NOISE * largest


def _said(place: CheckedPoint) -> str:
    return {"nan": "NaN", "posinf": "+Inf", "neginf": "-Inf"}.get(place.kind or "", "finite")


def _where(place: CheckedPoint) -> str:
    what = "the gradient at" if place.phase == "backward" else "the output of"
    if place.layer is None:
        return "what the step returned" if place.phase != "backward" else "a gradient"
    call = f" (call {place.call + 1})" if place.call else ""
    return f"{what} {place.layer or 'the model'}{call}"
