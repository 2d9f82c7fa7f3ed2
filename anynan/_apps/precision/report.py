"""What ``anynan.precision`` returns: rows, what breaks, the plan, and all of it in words."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anynan._apps.precision.plan import Plan
from anynan._apps.precision.ranges import Range
from anynan._apps.precision.watch import SUMMING, Break, How, Row, factors_of
from anynan._base.escaping import name as printed
from anynan._base.escaping import prose
from anynan._base.tables import table
from anynan._files.formats import FORMATS, Format
from anynan._runs.narrower import Headroom
from anynan.events import Source

SHOWN = 10
EDGE = 1.0  # bits: a narrow run's numbers are not float32's, so less room than this may be none
_COPYING = frozenset(
    {"view", "reshape", "transpose", "permute", "expand", "squeeze", "expand_dims", "slice",
     "getitem", "copy", "split", "concat", "stack", "full", "astype", "empty", "full_like", "t",
     "detach", "unsqueeze", "alias", "clone", "unsafe_view"}
)  # fmt: skip
_HOW = {
    "cast": "weights and inputs cast",
    "autocast": "under autocast",
    "operands": "operands of products, each with a scale of its own",
}
_PHASES = ("forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """Say how a target runs in a narrow dtype.

    Attributes:
        dtype: The dtype asked about.
        how: How it was run in it: ``cast`` or ``autocast``; ``operands`` for a float8, of which
            only the operands of products are made.
        rows: Every operation of the float32 run, in order, behind the weights and inputs.
        breaks: What makes NaN or Inf in the dtype and not in float32, in order. What follows
            after the first of them was found with the largest number of the dtype in its place.
        plan: What to keep in float32; None where nothing breaks, or no plan was asked for.
        notes: What was not seen, in sentences.
        code: The plan as code.
        ran: Whether it ran in the dtype to its end.
        unknown: Why it is not known whether it fits; empty where it is.
    """

    dtype: str
    how: How | str
    rows: tuple[Row, ...]
    breaks: tuple[Break, ...] = ()
    plan: Plan | None = None
    notes: tuple[str, ...] = ()
    code: str = ""
    ran: bool = True
    unknown: str = ""

    @property
    def form(self) -> Format:
        """Give the format of the dtype."""
        return FORMATS[self.dtype]

    @property
    def fits(self) -> bool:
        """Tell whether nothing breaks; with these inputs and weights, and no others."""
        return not (self.unknown or self.breaks)

    def first(self, *phases: str) -> Break | None:
        """Return what breaks first, of some phases or of all."""
        return next((x for x in self.breaks if not phases or x.phase in phases), None)

    @property
    def near(self) -> tuple[Row, ...]:
        """Return the operations that do not break and have less than a bit left."""
        broken = {each.place for each in self.breaks}
        return tuple(
            row
            for row in self.rows
            if row.place not in broken
            and 0 < row.result.bits(self.form) < EDGE  # with less than none it ran in float32
            and self.runs(row)
        )

    def runs(self, row: Row) -> bool:
        """Tell whether a row is an operation, and no copy."""
        return row.kernel not in _COPYING and row.name != "accumulate_grad"

    def worst(self) -> tuple[Row, ...]:
        """Return the operations with the least room first; what broke stands before the rest."""
        place = {each.place: i for i, each in enumerate(reversed(self.breaks))}
        given = ("parameter", "input")
        rows = [
            row
            for row in self.rows
            if row.place in place
            or (self.runs(row) and (row.phase not in given or row.result.bits(self.form) < EDGE))
        ]
        return tuple(
            sorted(rows, key=lambda row: (-place.get(row.place, -1), row.result.bits(self.form)))
        )

    def flushed(self) -> Row | None:
        """Return the gradient of which the largest share becomes zero; None if none loses 1 %."""
        mine = [row for row in self.rows if row.phase == "backward" and self.runs(row)]
        found = max(mine, key=lambda row: row.result.flushed(self.form), default=None)
        return None if found is None or found.result.flushed(self.form) < 0.01 else found

    def sentence(self) -> str:
        """Return the answer in a sentence."""
        if self.how == "operands":
            return self._scaled()
        parts = []
        forward = self.first("parameter", "input", "forward", "loss")
        backward, update = self.first("backward"), self.first("optimizer")
        for found, word in (
            (forward, "forward pass"),
            (backward, "backward pass"),
            (update, "update"),
        ):
            if found is not None:
                parts.append(f"in the {word} it {_verb(found)} at {_where(found)}")
        text = "; ".join(parts) or "fits"
        if not parts and self.unknown:
            text = f"not known: {self.unknown}"
        elif not parts and self.near:
            tight = min(self.near, key=lambda row: row.result.bits(self.form))
            bits = tight.result.bits(self.form)
            text = f"fits, with {bits:.1f} bits left at {_where(tight)}"
        lost = self.flushed()
        if lost is not None:
            share = lost.result.flushed(self.form)
            text += f"; flushes {share:.0%} of the gradient of {_where(lost)} to zero"
        return text

    def _scaled(self) -> str:
        """Answer for a dtype that is only made of operands, each with its scale."""
        worst: tuple[float, Row, str] | None = None
        bare = 0
        for row in self.rows:
            for name, found in _factors(row):
                bare += found.bits(self.form) < 0
                share = found.flushed(self.form, scaled(found, self.form))
                if worst is None or share > worst[0]:
                    worst = share, row, name
        text = f"fits with a scale for each operand; without one {bare} operands overflow"
        if worst is not None and worst[0] >= 0.01:
            text += f"; flushes {worst[0]:.0%} of {worst[2]} of {_where(worst[1])} to zero"
        return text

    def headroom(self, target: Format) -> list[Headroom]:
        """Return the room of each layer by its operations, the least first."""
        broken = {each.place for each in self.breaks} if target == self.form else set()
        found: dict[str, list[tuple[float, float, Row]]] = {}
        for row in self.rows:
            if row.layer is None or not row.result.largest:
                continue
            if row.phase in ("forward", "backward", "parameter"):
                over = row.result.bits(target)
                over = min(over, 0.0) if row.place in broken else over
                under = math.log2(row.result.largest) - math.log2(target.flushes)
                found.setdefault(row.layer, []).append((over, under, row))
        lines = []
        for layer, held in found.items():
            over, _, top = min(held, key=lambda each: each[0])
            _, under, low = min(held, key=lambda each: each[1])
            lines.append(
                Headroom(layer, target.name, over, top.phase, 0, under, low.phase, 0, whole=True)
            )
        return sorted(lines, key=lambda each: each.bits or 0.0)

    def report(self) -> str:
        """Return all of it in words, worst first."""
        count = sum(row.phase in _PHASES for row in self.rows)
        lines = [f"{self.dtype} ({_HOW[self.how]}), {count} operations: {self.sentence()}", ""]
        if self.how == "operands":
            lines += _table(self._operands())
        else:
            lines += _table(self._shown())
        lines += ["", *self._planned()] if self.plan is not None else []
        lines += [f"note: {prose(note)}" for note in dict.fromkeys(self.notes)]
        return "\n".join(lines).rstrip()

    def __str__(self) -> str:
        return self.report()

    def _shown(self) -> Iterable[tuple[str, ...]]:
        errors = any(row.error is not None for row in self.rows)
        head = (
            "phase", "layer", "operation", "bits", "largest", "smallest", "partial", "flushed",
            "subnormal",
        )  # fmt: skip
        yield (*head, *(("error", "rounding") if errors else ()), "line")
        for row in _unlike(self.worst())[:SHOWN]:
            partial = row.partial if row.kernel in SUMMING else None
            yield (
                row.phase, _layer(row.layer), _named(row), _bits(row.result.bits(self.form)),
                f"{row.result.largest:.3g}", f"{row.result.smallest:.3g}",
                "" if partial is None else f"{partial:.3g}",
                _share(row.result.flushed(self.form)), _share(row.result.subnormal(self.form)),
                *((_error(row.error), _error(row.rounding)) if errors else ()),
                _line(row.source),
            )  # fmt: skip

    def _operands(self) -> Iterable[tuple[str, ...]]:
        yield ("phase", "layer", "operation", "operand", "bits", "flushed, scaled", "line")
        found = [(row, name, x) for row in self.rows for name, x in _factors(row)]
        found.sort(key=lambda each: -each[2].flushed(self.form, scaled(each[2], self.form)))
        for row, name, x in found[:SHOWN]:
            share = x.flushed(self.form, scaled(x, self.form))
            yield (
                row.phase, _layer(row.layer), _named(row), name, _bits(x.bits(self.form)),
                _share(share), _line(row.source),
            )  # fmt: skip

    def _planned(self) -> Iterable[str]:
        plan = self.plan
        assert plan is not None
        more = 4 - self.form.width // 8
        kept = [
            f"{printed(k) or 'the whole model: no part of it alone is enough'} "
            f"({plan.sizes[k] * more:,} bytes more)"
            for k in plan.layers
        ]
        kept += [f"line {line} of {printed(file)}" for file, line in plan.lines]
        yield f"plan: keep in float32 {', '.join(kept) or 'nothing'}"
        if plan.scales is not None and self.form.name == "float16":
            low, high = plan.scales
            spread = f"{_power(low)} to {_power(high)}" if low <= high else "none serves"
            yield f"loss scale: {spread}"
        if plan.finite:
            far = "" if plan.distance is None else f", {plan.distance:.1e} from float32's result"
            at = "" if plan.scale == 1 else f" at loss scale {_power(plan.scale)}"
            yield f"tried: finite{at}{far} ({plan.runs} runs)"
        else:
            left = f" at {_where(plan.left[0])}" if plan.left else ""
            yield f"tried: still not finite{left} ({plan.runs} runs)"
        if self.first("optimizer") is not None:
            yield "update: keep weights of its own in float32 for the optimizer, as autocast does"
        if self.code and plan.finite:
            yield ""
            yield from ("    " + line if line else "" for line in self.code.splitlines())


def _unlike(rows: Iterable[Row]) -> list[Row]:
    """Take the first of the rows that differ in nothing but which time it was."""
    found: dict[object, Row] = {}
    for row in rows:
        where = None if row.source is None else (row.source.file, row.source.line, row.source.via)
        found.setdefault((row.phase, row.layer, row.name, row.kernel, where), row)
    return list(found.values())


def scaled(found: Range, form: Format) -> float:
    """Give the scale that brings an array's largest number to the format's."""
    return form.max / found.largest if found.largest else 1.0


def _factors(row: Row) -> Iterable[tuple[str, Range]]:
    """Walk the operands that are multiplied."""
    return ((name, row.operands[name]) for name in factors_of(list(row.operands)))


def _verb(found: Break) -> str:
    if found.kind == "nan":
        return "makes NaN first"
    became = found.bits is not None and found.bits > EDGE  # far from the edge in float32
    return "makes Inf first (of a number that became 0)" if became else "overflows first"


def _where(found: Break | Row) -> str:
    text = f"{printed(found.name)} in {_layer(found.layer)}"
    source = found.source
    return text if source is None else f"{text} ({_line(source)})"


def _layer(layer: str | None) -> str:
    return "no layer" if layer is None else printed(layer) or "(the model itself)"


def _named(row: Row) -> str:
    return printed(row.name if row.name == row.kernel else f"{row.name} ({row.kernel})")


def _line(source: Source | None) -> str:
    if source is None:
        return ""
    here = f"{source.file.replace(chr(92), '/').rpartition('/')[2]}:{source.line}"
    return printed(f"{here}, {source.via}" if source.via else here)


def _bits(bits: float) -> str:
    return "all 0" if math.isinf(bits) else f"{bits:.1f}"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else ""


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _power(scale: float) -> str:
    return f"2**{math.log2(scale):.0f}"


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Leave out the columns that say nothing."""
    head, *held = rows
    kept = [i for i in range(len(head)) if any(row[i] for row in held)]
    return [f"  {line}" for line in table([[row[i] for i in kept] for row in (head, *held)])]
