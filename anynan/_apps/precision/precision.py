"""``anynan.precision``: one run in float32, one in the narrow dtype, and a plan."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from anynan._apps.precision.messages import DOES_NOT_RUN, NOT_CAST
from anynan._apps.precision.plan import Line, Plan, Search, Trial, inside
from anynan._apps.precision.report import PrecisionReport
from anynan._apps.precision.watch import PLACING, Break, Breaks, How, Narrow, Ranges, Row, bits_of
from anynan._arrays.containers import leaves
from anynan._base import products
from anynan._base.messages import left
from anynan._files.formats import Format, target_of
from anynan._trace.op import Observed
from anynan.errors import reason
from anynan.events import Phase, Source
from anynan.options import CHECKS, Names

_PRODUCTS = frozenset({"matmul", "linear", "convolution", "einsum", "attention"})
_NEAR = 1.0  # bits


def precision(
    target: Any,
    *example: Any,
    inputs: Mapping[str, Any] | None = None,
    dtype: Any = "float16",
    how: How = "cast",
    plan: bool = True,
    errors: bool = False,
    vanishing: float = 0.05,
    ignore: Names = (),
) -> PrecisionReport:
    """Find what breaks first in a narrow dtype, and what to keep in float32.

    It runs the target once as it is and measures each operation: its magnitudes, the bits left
    before it overflows, the share that becomes zero. Then it runs the target with weights and
    inputs in the dtype, and lists what turns finite numbers into NaN or Inf. Each operation is
    computed in float32 and stored in the dtype, or by the framework's own kernels. The report says
    that it fits only after a run with these. If something breaks, it looks for a plan and tries it
    with these: the layers to keep in float32, and the loss scale. Weights, gradients, optimizer and
    random state are put back. The answer holds for these inputs and these weights.

    Args:
        target: A model, a training step, or a function. To measure the backward pass, give a step
            that runs it.
        *example: What it is called with.
        inputs: What it is called with by name.
        dtype: ``float16``, ``bfloat16``, ``float8_e4m3fn``, ``float8_e5m2``, or a framework's own.
            With a float8, only the operands of products are rounded, each with its own scale.
        how: ``cast`` has weights and inputs in the dtype, as ``.half()`` does; ``autocast`` keeps
            weights in float32 and computes in the dtype what the framework's own autocast does.
        plan: Look for a plan if something breaks; it takes up to 40 runs more.
        errors: Measure how far off each operation is, too; each runs twice more.
        vanishing: The share of gradients other than 0 that a loss scale may let become 0.
        ignore: Names of notes that you do not want to see, such as ``"closed-over"``.

    Returns:
        A PrecisionReport; ``print`` it.

    Raises:
        TypeError: If no adapter knows how to run the target.
        ValueError: If the dtype, ``how`` or a note's name is unknown.

    Example:
        >>> import torch, anynan
        >>> class Gated(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (400 * x) * (400 * x) / 1000
        >>> report = anynan.precision(Gated(), torch.ones(2), plan=False)
        >>> report.fits, report.first().name
        (False, 'multiply')
    """
    form, ignored = target_of(dtype), CHECKS["ignore"]("ignore", ignore)
    if how not in ("cast", "autocast"):
        msg = f"how={how!r} is unknown; choose from cast, autocast"
        raise ValueError(msg)
    asking = _Asking(target, example, dict(inputs or {}), form, how, vanishing)
    report = asking.answer(plan=plan, errors=errors)
    return replace(report, notes=left(report.notes, ignored))


class _Asking:
    """Hold one question.

    Attributes:
        kernels: Whether to run the framework's own, of each run that the answer may need.
    """

    kernels = (False, True)

    def __init__(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], form: Format,
        how: How, vanishing: float,
    ) -> None:  # fmt: skip
        self.call = (target, args, kwargs)
        self.form, self.how, self.vanishing = form, how, vanishing
        self.narrow = _narrowed(*self.call)
        self.notes: list[str] = []
        self.exact: Observed
        self.bad: set[Any] = set()
        self.cast: list[Break] = []
        self.ran = True
        self.hides = self.narrow.uncast() if how == "cast" else None
        if self.hides is not None:
            self.notes.append(NOT_CAST(kind=self.hides, dtype=form.name))

    def answer(self, *, plan: bool, errors: bool) -> PrecisionReport:
        """Run, judge, plan."""
        name = self.form.name
        ranges = Ranges(self.narrow, self.form, errors=errors)
        given = list(self._given(ranges))
        self.exact = self._whole(self.narrow.observe(ranges))
        rows = [*given, *ranges.rows]
        if self.form.width == 8:
            products = tuple(row for row in rows if row.kernel in _PRODUCTS)
            return PrecisionReport(name, "operands", products, notes=tuple(self.notes))
        self.bad = {
            row.place
            for row in rows
            if row.result.bad and not any(x.bad for x in row.operands.values())
        }
        # The weights and inputs that overflow as they are cast.
        cast = [] if self.how == "autocast" else [row for row in rows if row.kernel == "cast"]
        self.cast = [_broken(row) for row in cast if row.result.bits(self.form) <= 0]
        breaks = bits_of([*self.cast, *self._first(rows)], rows, self.form)
        runs = self.ran and self.hides is None
        found = self._plan(breaks, rows) if plan and breaks and runs else None
        code, unknown = "" if found is None else self._code(found), self._unknown(ranges)
        return PrecisionReport(
            name, self.how, tuple(rows), tuple(breaks), found, tuple(self.notes), code, self.ran,
            unknown,
        )  # fmt: skip

    def _unknown(self, ranges: Ranges) -> str:
        """Say why it is not known whether it fits where nothing breaks."""
        if self.ran and self.hides is None:
            return "" if ranges.rows else "no operation of it was seen"
        why = "not all of its inputs were cast" if self.ran else "it did not run in it"
        return f"nothing is beyond {self.form.name} in float32, but {why}"

    def _whole(self, seen: Observed) -> Observed:
        self.notes += seen.notes
        if seen.error is not None:
            raise seen.error
        return seen

    def _given(self, ranges: Ranges) -> Iterator[Row]:
        """Walk what comes in and is cast."""
        for name, layer, x in self.narrow.given():
            found = ranges.range(x)
            if found is not None and found.size:
                phase: Phase = "input" if layer is None else "parameter"
                yield Row((phase, name), name, layer, phase, None, "cast", {}, found)

    def _first(self, rows: list[Row]) -> list[Break]:
        """Run in the dtype, past what breaks.

        What breaks in float32 arithmetic is the answer, and else what breaks in the kernels. Where
        nothing is near the edge these run first: if they hold, no other run is needed.
        """
        if self.hides is not None:
            return list(self._beyond(rows))
        found: list[Break] = []
        near = any(row.result.bits(self.form) < _NEAR for row in rows)
        for own in self.kernels if near else self.kernels[::-1]:
            broke, seen = self._run({}, (), 1.0, going=True, own=own)
            self.notes += seen.notes
            if seen.error is not None:
                self.ran = False
                self.notes.append(DOES_NOT_RUN(dtype=self.form.name, why=reason(seen.error)))
                return broke or found or list(self._beyond(rows))
            found = broke or found
            if self.cast or own != bool(broke):
                break
        return found

    def _beyond(self, rows: list[Row]) -> Iterator[Break]:
        """Walk what is beyond the dtype in float32 itself, and is made of what is not."""
        for row in rows:
            made = row.kernel not in {*PLACING, "cast"} and row.result.bits(self.form) <= 0
            if made and all(x.bits(self.form) > 0 for x in row.operands.values()):
                yield _broken(row)

    def _plan(self, breaks: list[Break], rows: list[Row]) -> Plan:
        """Look for a plan; where the framework's kernels refute it, look with those."""
        sizes = self.narrow.sizes()
        for own in (False, True):
            found = Search(
                self._try, sizes, self.narrow.tied, rows, self.form, self.vanishing, own,
                self.narrow.replaces,
            )(breaks)  # fmt: skip
            if found.finite:
                break
        return found

    def _run(
        self, layers: Mapping[str, bool], lines: Collection[Line], scale: float, *,
        going: bool, own: bool,
    ) -> tuple[list[Break], Observed]:  # fmt: skip
        breaks = Breaks(
            self.narrow, top=self.form.max if going and self.narrow.replaces else None,
            bad=self.bad, scale=scale,
            rerun=lambda op, source: (
                op.phase in ("forward", "loss") and op.kernel != "astype" and _at(source, lines)
            ),
        )  # fmt: skip
        seen = self.narrow.run(breaks, self.form.name, self.how, layers, own=own)
        found = breaks.found
        if not found and seen.error is None and self._distance(seen.value) == math.inf:
            where: Any = ("result",)
            found = [Break(where, "what it returns", None, "forward", None, "nan")]
        return found, seen

    def _try(
        self, layers: Mapping[str, bool], lines: Collection[Line], scale: float, *,
        going: bool, own: bool,
    ) -> Trial:  # fmt: skip
        found, seen = self._run(layers, lines, scale, going=going, own=own)
        found = [each for each in found if each.phase != "optimizer"]
        found += [each for each in self.cast if inside(each.layer, layers) is None]
        if seen.error is not None:
            where: Any = ("run",)
            found.append(Break(where, reason(seen.error), None, "forward", None, "nan"))
        return Trial(found, self._distance(seen.value), seen.error is not None)

    def _distance(self, value: Any) -> float | None:
        """Give how far what a run returned is from what the float32 run did, Inf for no number."""
        pairs = zip(self._numbers(value), self._numbers(self.exact.value), strict=False)
        held = [(a, b) for a, b in pairs if a.shape == b.shape]
        if not held:
            return None
        if any((np.isfinite(b) & ~np.isfinite(a)).any() for a, b in held):
            return math.inf
        finite = [(a[np.isfinite(b)], b[np.isfinite(b)]) for a, b in held]
        sizes = [(np.square(a - b).sum(), np.square(b).sum()) for a, b in finite]
        far, size = np.sum(sizes, 0)
        return float(np.sqrt(far / size)) if size else None

    def _numbers(self, value: Any) -> Iterator[Any]:
        for _, leaf in leaves(value, "result"):
            x = self.narrow.numbers(leaf)
            if x is not None:
                yield np.asarray(x, np.float64)

    def _code(self, found: Plan) -> str:
        text = self.narrow.code(self.form.name, self.how, found.layers, found.scale)
        how = self.narrow.widening if self.how == "cast" else self.narrow.outside
        lines = [f"# {file}:{line} in float32: {how}" for file, line in found.lines]
        return "\n".join([text, *lines]).strip()


def _broken(row: Row) -> Break:
    return Break(row.place, row.name, row.layer, row.phase, row.source, "overflow")


def _at(source: Source | None, lines: Collection[Line]) -> bool:
    return source is not None and (source.file, source.line) in lines


def _narrowed(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Narrow:
    """Find the adapter that runs a target."""
    refused = (
        f"precision() cannot run a {type(target).__name__}: give a model, a training step or a "
        "function, with the arrays it is called with"
    )
    found: Narrow = products.side("precision", "narrowed_of", target, args, kwargs, refused=refused)
    return found
