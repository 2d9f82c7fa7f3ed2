"""One event in words: for the terminal, for a log line, and for rich."""

import html
import math
import os
import re
import sys
import textwrap
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from anynan._base.escaping import escaped, printable, prose
from anynan._base.escaping import name as printed
from anynan._base.shell import cell
from anynan._base.summary import Summary
from anynan._diagnosis.causes import UNKNOWN
from anynan._diagnosis.rules.evidence import counts, group, magnitude, seen
from anynan._readings.norms import NORM
from anynan._reports.messages import REPORT_UNWRITTEN
from anynan.errors import reason
from anynan.events import CARRIED, STATE, Cause, Event, Operation, Source, Trial

if TYPE_CHECKING:
    from rich.text import Text

WIDTH, NARROW = 100, 60  # columns: the most, and the least
_INDENT = 2
_LABELS = 8  # the narrowest label column, its gap included
_OPERATION = 24  # where the line of an operation stands beside its name
_CODE = 40  # what of a line of code is shown at least
_WORD = 20  # how far a cut moves to fall between words
_CUTS = len("...  ...")
_SHORT = ("model", "layer", "parameter", "gradient", "batch", "op", "used by", "cause")
_HEAD, _TAIL = 2, 5  # what is kept of a long trail

_KINDS = {"nan": "NaN", "posinf": "+Inf", "neginf": "-Inf"}
_PLACES = {
    "forward": "the forward pass",
    "loss": "the loss",  # where it is one
    "backward": "the backward pass",
    "optimizer": "the optimizer's update",
    "input": "the batch",
    "parameter": "the weights",
    "value": "a checked value",
}
_EXTENTS = {
    "step": "the step is",
    "call": "the call is",
    "forward": "the forward pass is",
    "both": "the forward and the backward pass are",
    "loss": "the loss is",
    "gradients": "the loss and its gradients are",
    "gradient": "the gradient is",
}
_NTH = ("second", "third")
_OF_MODELS = ("__call__", "call", "forward")
_STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance")

Row = tuple[str, tuple[str, ...]]


def render(
    event: Event, *, here: int | None = None, which: bool = False, width: int | None = None
) -> str:
    """Return the report of one event as plain text; a name or path is never broken.

    Args:
        event: What happened.
        here: Rank that prints this. The event of another rank is told in short, since that
            rank prints the whole.
        which: Say which model it is about: several are tracked.
        width: Columns; by default those of the terminal that messages go to, 60 to 100.
    """
    try:
        lines = _lines(printable(event), here, which=which, width=width or columns())
        return "\n".join(line for _, line in lines).rstrip()
    except Exception as error:  # noqa: BLE001  what was found must not be lost
        place = f"{event.kind} in {printed(event.layer or event.tensor)} at step {event.step}"
        return f"{place}\n\n  note  {REPORT_UNWRITTEN(error=prose(reason(error)))}"


def columns() -> int:
    """Give the columns of the terminal that messages go to, 100 where they go to none."""
    try:
        seen = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stderr.fileno()).columns)
    except (AttributeError, OSError, ValueError):
        return WIDTH
    return min(max(seen, NARROW), WIDTH)


def _lines(
    event: Event, here: int | None = None, *, which: bool = False, width: int = WIDTH
) -> list[tuple[str, str]]:
    """Lay the report out: every line of it, with the label that it stands under."""
    title, found = headline(event), list(_rows(event, width))
    if which and event.target:
        what, _, name = event.target.partition(" ")
        found.insert(0, (what, (name,)))
    if event.rank is not None and here is not None and here != event.rank:
        title += f" on rank {event.rank}"
        found = [(label, texts) for label, texts in found if label in _SHORT]
        found.append(("rank", (f"{event.rank}, which has the full report; this is rank {here}",)))
    column = max([_LABELS, *(len(label) + 2 for label, _ in found)])
    lines = [("", title), ("", "")]
    for label, texts in found:
        for i, text in enumerate(texts):
            start = " " * _INDENT + (label if i == 0 else "").ljust(column)
            lines.extend((label, line) for line in _wrap(text, start, width))
    return lines


def render_line(event: Event, *, which: bool = False) -> str:
    """Return one event in one line, for a warning or a log.

    Args:
        event: What happened.
        which: Say which model it is about: several are tracked.
    """
    event = printable(event)
    parts = [headline(event)]
    if which and event.target:
        parts.append(event.target)
    norm = event.tensor == NORM
    if event.layer or (event.layer is not None and not norm and not _outside(event)):
        parts.append(f"layer {_layer(event.layer)}")
    if event.parameter is not None:
        parts.append(event.parameter)
    operation = event.operation
    if operation is not None and event.phase != "value":
        line = "" if operation.source is None else f" at {_file(operation.source)}"
        parts.append(f"{operation.name}{line}")
    text = ", ".join(parts)
    if event.cause is not None:
        # What a norm was and is says more than that it is unusual.
        text += f": {(norm and event.cause.evidence) or event.cause.text}"
    if event.kind == "large" and event.notes and event.cause is None:
        text += f": {event.notes[0]}"
    if event.expected is not None:
        text += f" ({event.expected})"
    if event.times > 1:
        text += f"; {event.times} times"
    return " ".join(text.split())


def folded(events: Iterable[Event], *, which: bool = False) -> list[str]:
    """Give each event a line, and those that differ by their step alone one with a count.

    Args:
        events: What happened, oldest first.
        which: Say which model each is about: several are tracked.
    """
    alike: dict[str, list[Event]] = {}
    for event in events:
        alike.setdefault(render_line(replace(event, step=0), which=which), []).append(event)
    lines = []
    for first, *more in alike.values():
        line = render_line(first, which=which)
        lines.append(f"{line}; {1 + len(more)} times, to step {more[-1].step}" if more else line)
    return lines


def render_rich(event: Event) -> "Text":
    """Return the report as rich text, lightly coloured: print it with ``soft_wrap``."""
    from rich.text import Text

    event = printable(event)
    styles = {"layer": "bold", "op": "bold", "cause": "bold", "fix": "green"}
    alarm = "bold red" if event.severity == "bad" and event.expected is None else "bold yellow"
    text, titled = Text(), False
    for label, line in _lines(event, width=columns()):
        titled = titled or not line
        start = _INDENT + len(label) if label and line[_INDENT:].startswith(label) else 0
        text.append(line[:start], "dim" if label else "")
        text.append(f"{line[start:]}\n", styles.get(label, "") if titled else alarm)
    text.rstrip()
    return text


def render_markdown(event: Event) -> str:
    """Return the report to paste into an issue: the headline, and the rest as a block of code."""
    title, _, rest = render(event, width=WIDTH).partition("\n\n")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", rest)), default=0))
    return f"**{' '.join(title.split())}**\n\n{fence}text\n{rest}\n{fence}\n"


def render_html(event: Event) -> str:
    """Return the report as HTML: static, without scripts, in the colours of the page."""
    title, *lines = _lines(printable(event))
    shown = [f"<b>{html.escape(title[1])}</b>"]
    for label, line in lines:
        start = _INDENT + len(label) if label and line[_INDENT:].startswith(label) else 0
        dim = f'<span style="opacity:.6">{html.escape(line[:start])}</span>' if start else ""
        shown.append(dim + html.escape(line[start:]))
    text = "\n".join(shown)
    return f'<pre style="white-space:pre-wrap">{text}</pre>'


def headline(event: Event) -> str:
    """Say in one sentence what was seen, where and when."""
    event = printable(event)
    text = _expected_headline(event) if event.expected is not None else _headline(event)
    if event.severity == "suspect" and event.expected is None:
        start = text[0] if event.kind in _KINDS else text[0].lower()
        return f"Suspect: {start}{text[1:]}"
    return text


def _expected_headline(event: Event) -> str:
    what = _KINDS.get(event.kind) or _what(event)
    return f"Expected: {what} {_place(event)}"


def when_of(event: Event) -> str:
    """Name the step as the user counts: calls without gradients are no iterations."""
    if event.training_step is None:
        return f"step {event.step}"
    return f"iteration {event.training_step} (call {event.step})"


def _place(event: Event) -> str:
    if event.phase == "value":
        return f"in {event.tensor}"
    if _outside(event):
        place = f"in `{name}`" if (name := _function(event)) else ""
        if event.phase == "loss":
            if not place and _is_loss(event):
                return f"in the loss of {when_of(event)}"
            place = f"{place}, outside every layer" if place else "outside every layer"
        if place:
            return f"{place}, at {when_of(event)}" if event.step else place
    return f"in {_PLACES[event.phase]} of {when_of(event)}"


def _outside(event: Event) -> bool:
    """Tell whether it is code outside every layer: around them, or a function without any."""
    if event.phase == "loss":
        return True
    # In array code a function is its own layer; in a step this is the model in it.
    own = event.phase == "forward" and event.layer == "" and len(event.trail) < 2
    return own and bool(_tracked(event, "function")) and _function(event) not in _OF_MODELS


def _function(event: Event) -> str:
    """Name the function it happened in, as far as it is known and has a name."""
    source = None if event.operation is None else event.operation.source
    if source is not None:
        name = source.function
    elif _is_loss(event):
        return ""
    else:
        name = _tracked(event, "function")
    return "" if name.startswith("<") else name


def _is_loss(event: Event) -> bool:
    """Tell whether what was read is the number that a step returns or differentiates."""
    number = event.tensor == "loss" and (event.summary is None or event.summary.size == 1)
    return number and _tracked(event, "function") != "<module>"  # that is one call, and no step


def _tracked(event: Event, what: str) -> str:
    """Give the name of the tracked function or model, empty if it is the other."""
    kind, _, name = event.target.partition(" ")
    return name if kind == what else ""


def _what(event: Event) -> str:
    """Name a finite anomaly."""
    gradient = event.phase == "backward"
    if event.kind == "large":
        return "a value beyond the limit"
    if event.kind == "spike":
        return "a jump of the gradient norm" if gradient else "a jump of the norm"
    return "a vanishing gradient" if gradient else "vanishing values"


def _headline(event: Event) -> str:
    kind = _KINDS.get(event.kind)
    when = when_of(event)
    if kind is None:
        what = _what(event)
        what = what[0].upper() + what[1:]
        verb = "found" if event.phase == "value" else "appeared"
        return f"{what} {verb} {_place(event)}"
    if event.phase == "value":
        return f"{kind} found in {event.tensor}"
    if event.phase == "input":
        labels = event.cause is not None and event.cause.tag == "bad_label"
        return f"{kind} came in with the {'labels' if labels else 'batch'} of {when}"
    if event.phase == "parameter":
        return f"{kind} was already in {_weight(event)} at {when}"
    kept = event.tensor in (STATE, CARRIED)
    other = event.cause is not None and event.cause.tag == "weight_written"
    if event.phase == "optimizer" and (event.operation is not None or kept or other):
        return f"{kind} was written into {_weight(event)} at {when}"
    if event.phase == "optimizer":
        return f"{kind} was written into {_weight(event)} by the optimizer at {when}"
    return f"{kind} first appeared {_place(event)}"


def _weight(event: Event) -> str:
    name = (event.parameter or "").rpartition(".")[2]
    if event.tensor in (STATE, CARRIED):
        return f"the {event.tensor}"
    if name in _STATISTICS:
        return "a running statistic"
    return "a buffer" if event.severity == "suspect" else "a weight"


# Rows.


def _rows(event: Event, width: int) -> Iterator[Row]:
    cause = event.cause
    in_layer = event.layer or not (_outside(event) or event.phase in ("value", "input"))
    if in_layer:
        yield "layer", (_layer(event.layer) + _call(event),)
    yield from _subject(event, width)
    evidence = yield from _made_by(event, width, "" if in_layer else _call(event))
    if event.then is not None:
        yield "then", _operation(event.then, event, width, note="turned it into NaN")
    # What the tensor's own row says is not said twice.
    if evidence and evidence != seen(event.summary):
        yield "seen", (evidence,)
    if cause is not None:
        yield "cause", (cause.text + _tag(cause),)
        yield "fix", (cause.fix,)
    if event.tried is not None and not event.others:
        yield "tried", (_trial(event, event.tried),)
    if event.expected is not None:
        yield "expected", (event.expected,)
    if len(event.trail) > 1:  # one would only repeat the layer
        yield "trail", (_trail(event),)
    if spread := _spread(event):
        yield "spread", (spread,)
    if ranks := _ranks(event):
        yield "rank", (ranks,)
    yield from (("note", (note,)) for note in event.notes)
    if event.tried is not None and event.others:
        yield "tried", (_trial(event, event.tried, more=True),)
        for nth, fault in zip(_NTH, event.others, strict=False):
            yield from _further(nth, fault, width, more=fault is not event.others[-1])


def _ranks(event: Event) -> str:
    shard = None if event.shard is None else f"shard {event.shard}"
    return ", ".join(str(part) for part in (event.rank, shard) if part is not None)


def _made_by(event: Event, width: int, where: str) -> Generator[Row, None, str]:
    """Tell of the operation; return the evidence that is not told beside an operand."""
    operation, evidence = event.operation, "" if event.cause is None else event.cause.evidence
    if operation is None:
        return evidence
    if event.phase == "value":
        if operation.source is not None:
            yield "at", _source(operation.source, 0, width)
        return evidence
    # What came in bad was made by no operation: this one only met it first.
    met = event.phase in ("input", "parameter") and operation.phase != event.phase
    label = "used by" if met else "op"
    yield label, _operation(operation, event, width, where=where)
    held = [describe(summary) for summary in operation.inputs]
    if operation.operands:
        pairs = zip(operation.operands, held, strict=True)
        held = [f"{word}: {x}" if word else x for word, x in pairs]
    bad = [i for i, summary in enumerate(operation.inputs) if summary.bad]
    # Evidence about the one operand that is not finite reads best beside its counts.
    if len(bad) == 1 and evidence and len(held[bad[0]]) + len(evidence) < width - _LABELS - 4:
        held[bad[0]] += f": {evidence}"
        evidence = ""
    yield from (("input", (text,)) for text in held)
    if operation.output is not None:
        yield "output", (describe(operation.output),)
    return evidence


def _tag(cause: Cause) -> str:
    """Give the name under which the table of causes has it; none where no cause is known."""
    return "" if cause.tag == UNKNOWN else f" [{printed(cause.tag)}]"


def _further(nth: str, fault: Event, width: int, *, more: bool) -> Iterator[Row]:
    """Tell of a fault that was left when those before it were repaired."""
    yield nth, (f"{_KINDS.get(fault.kind, fault.kind)} {_place(fault)}",)
    tried = fault.tried
    rows = _rows(fault, width)
    yield from ((label, texts) for label, texts in rows if label != "tried")
    if tried is not None:
        yield "tried", (_trial(fault, tried, nth, more=more),)


def _trial(event: Event, trial: Trial, nth: str = "first", *, more: bool = False) -> str:
    """Say what came of the fix, and whether a fault that it left is told ``more`` of."""
    also = "" if nth == "first" else " as well"
    what = f"with {trial.repair or '0 in place of its bad values'}{also}"
    if trial.outcome == "insufficient":
        name = "it" if event.operation is None else event.operation.name
        return f"{what} {name} still makes bad values"
    if trial.outcome == "another":
        after = {"first": "second", "second": "third"}.get(nth)
        left = f"but a {after} fault remains:" if more else "but the step is not finite yet"
        return f"{what} the {_KINDS.get(event.kind, event.kind)} is gone, {left}"
    numbers = [
        f"{name} {magnitude(value)}"
        for name, value in (("loss", trial.loss), ("gradient norm", trial.gradient_norm))
        if value is not None
    ]
    return f"{what} {_EXTENTS[trial.extent]} finite" + (
        f": {', '.join(numbers)}" if numbers else ""
    )


def _subject(event: Event, width: int) -> Iterator[Row]:
    """Describe the bad tensor, where the operation's own rows do not."""
    held = "" if event.summary is None else describe(event.summary)
    if event.phase in ("parameter", "optimizer") and event.parameter is not None:
        label = "state" if event.tensor in (STATE, CARRIED) else "parameter"
        yield label, _two(event.parameter, held, width)
        if event.since is not None and event.phase == "parameter":
            yield "bad since", (_since(*event.since),)
    elif event.phase == "input":
        yield "batch", _two(event.tensor, held, width)
    elif event.phase == "value":
        yield "value", (held or "not measured",)
    elif event.phase == "backward" and event.parameter is not None:
        yield "gradient", _two(f"of {event.parameter}", held, width)
    elif event.operation is None or event.kind not in _KINDS:
        yield "tensor", _two(event.tensor, held, width)
    if event.phase in ("input", "value") and event.summary is not None and event.summary.first_bad:
        yield "first", (f"at {list(event.summary.first_bad)}",)


def _two(name: str, held: str, width: int) -> tuple[str, ...]:
    """Put a name and a description on one line where both fit."""
    if not held:
        return (name,)
    one = f"{name}  {held}"
    return (one,) if len(one) < width - _LABELS - 8 else (name, held)


def _layer(layer: str | None) -> str:
    if layer is None:
        return "(outside every watched layer)"
    return layer or "(the model itself)"


def _call(event: Event) -> str:
    parts = [f"call {event.call + 1}"] if event.call and event.layer is not None else []
    if event.iteration is not None:
        parts.append(f"iteration {event.iteration}")
    return f"  ({', '.join(parts)})" if parts else ""


def _since(good: int, bad: int) -> str:
    if good < 0:
        return f"step {bad} at the latest: it was not read before"
    return f"step {bad}" if bad - good <= 1 else f"between steps {good} and {bad}"


def _operation(
    operation: Operation, event: Event, width: int, *, note: str = "", where: str = ""
) -> tuple[str, ...]:
    name = operation.name
    if operation.phase == "backward":
        name = f"gradient of {name}"
    elif event.phase == "backward" and not operation.direct and not note:
        name = f"{name} (forward)"
    if note:
        name = f"{name} {note}"
    name += where[1:]
    gap = max(_OPERATION, len(name) + 2)
    aside = gap if gap <= width // 2 else _OPERATION
    room = width - _INDENT - _LABELS - aside
    if room < _CODE:
        aside = _INDENT  # below the name there is more room
    source = operation.source
    code = "" if source is None else max(source.text or "", source.via_text or "", key=len)
    below = aside if len(code.rstrip()) <= room else _INDENT
    lines = [] if source is None else list(_source(source, below, width))
    if note and operation.layer not in (None, event.layer):
        lines.append(f"in layer {_layer(operation.layer)}")
    if not lines:
        return (name,)
    if aside < gap:  # too long to have its line beside it
        return (name, *(" " * below + text for text in lines))
    first, *rest = lines
    return (name.ljust(gap) + first, *(" " * below + text for text in rest))


def _source(source: Source, gap: int, width: int) -> tuple[str, ...]:
    width = max(_CODE, width - _INDENT - _LABELS - gap)
    function = "" if source.function.startswith("<") else f" in {source.function}"
    lines = [f"{_file(source)}{function}"]
    if source.changed:
        lines.append("(not quoted: the file was changed since it was imported)")
    elif source.text:
        lines.append(_window(source.text, width, source.column, source.end_column))
    if source.via:
        lines.append(f"via {source.via}")
        if source.via_text:
            lines.append(_window(source.via_text, width))
    return tuple(lines)


def _window(text: str, width: int, start: int | None = None, end: int | None = None) -> str:
    """Show a line of code whole where it fits, else what is around the part that ran."""
    text = text.rstrip()
    if len(text) <= width:
        return text
    start, end = min(start or 0, len(text) - 1), min(end or 0, len(text))
    # Of ``a.chain.of.calls(x)`` the last one ran.
    if text[:end].endswith(")") and end - width // 2 < text.rfind("(", start, end):
        start = max(start, end - (width - _CUTS))
    end = min(max(end, start + 1), start + width - _CUTS)
    spare = width - _CUTS - (end - start)
    # Before it stands what it is a part of, which says more than what comes after.
    left = max(0, min(start - spare * 2 // 3, len(text) - width + _CUTS // 2))
    right = left + width - _CUTS // 2
    if left and right < len(text):
        right -= _CUTS // 2
    if left:
        left = next((i for i in range(left, min(start, left + _WORD)) if text[i] == " "), left)
    if right < len(text):
        right = next(
            (i for i in range(right, max(right - _WORD, end - 1), -1) if text[i] == " "), right
        )
    return (
        f"{'... ' if left else ''}{text[left:right].strip()}{' ...' if right < len(text) else ''}"
    )


def _file(source: Source) -> str:
    """Shorten a path below the working directory; another stays whole, so it can be opened."""
    path = source.file
    if name := cell(path):
        return f"{name}, line {source.line}"
    try:
        here = escaped(os.path.join(os.getcwd(), ""))
    except OSError:  # the working directory is gone
        here = "\0"
    return f"{path.removeprefix(here)}:{source.line}"


def describe(summary: Summary) -> str:
    """Describe an array in one line: dtype, shape, range, and what in it is not finite."""
    head = f"{summary.dtype} {_shape(summary.shape)}"
    if not summary.size:
        return f"{head}  empty"
    low, high = summary.low, summary.high
    if summary.size == 1 and low is not None:
        return f"{head}  value {_number(low)}"
    ranged = ""
    if low is not None and high is not None:
        ranged = f"  min {_number(low)}  max {_number(high)}"
    elif summary.absmax is not None:
        ranged = f"  absmax {_number(summary.absmax)}"
    bad = counts(summary)
    if summary.bad == summary.size and len(bad) == 1:
        what = "value" if summary.size == 1 else "every element"
        return f"{head}  {what} {bad[0].rpartition(' ')[2]}"
    return f"{head}{ranged}" + (f"   {', '.join(bad)}" if bad else "")


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    return magnitude(value) if math.isfinite(value) else str(float(value))


def _trail(event: Event) -> str:
    names = [name or "(the model itself)" for name, _ in event.trail]
    last = len(names) - 1
    steps = []
    for i, (name, (_, value)) in enumerate(zip(names, event.trail, strict=True)):
        if value is not None:
            size = magnitude(value)
        else:
            size = _KINDS.get(event.kind, "not finite") if i == last else "not finite"
        steps.append(f"{name}: {size}")
    if len(steps) > _HEAD + _TAIL + 1:
        hidden = len(steps) - _HEAD - _TAIL
        steps[_HEAD:-_TAIL] = [f"... {hidden} more ..."]
    # Kept together while wrapping: a layer and its number.
    return " > ".join(step.replace(" ", "\N{NO-BREAK SPACE}") for step in steps)


def _repeats(event: Event, surfaced: str) -> bool:
    """Tell whether it surfaced in what the function returns, where the headline has it already."""
    result = ("forward", "forward (the model itself)")
    return _outside(event) and surfaced in (*result, *(["the loss"] if _is_loss(event) else []))


def _spread(event: Event) -> str:
    count, surfaced = event.spread.count, event.spread.surfaced
    later = f"{group(count)} later reading{' is' if count == 1 else 's are'}"
    texts = [f"{later} bad because of it"] if count else []
    if surfaced and not _repeats(event, surfaced):
        phase, _, where = surfaced.partition(" ")
        if phase in ("forward", "backward"):
            at = f" at {where.strip('()')}" if where else ""
            surfaced = f"in the {phase} pass{at}"
        else:
            surfaced = f"at {surfaced}"
        texts.append(f"it surfaced {surfaced}")
    return "; ".join(texts)


# Wrapping.


def _wrap(text: str, start: str, width: int) -> list[str]:
    """Wrap one line under its label; code and aligned text keep their own indent."""
    kept = text.lstrip(" ")
    start += " " * (len(text) - len(kept))
    lines = textwrap.wrap(
        kept,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines or [start.rstrip()]]
