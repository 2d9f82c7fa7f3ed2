"""Text from outside (names, code, messages), made safe to print: escaped, and bounded in length."""

from dataclasses import replace

from anynan._base.summary import Summary
from anynan.events import Event, Operation, Source

NAME = 200
PROSE = 800


def name(text: str, limit: int = NAME) -> str:
    r"""Escape what would move, colour or reorder what is printed; shorten what is long.

    Args:
        text: A name that a program chose.
        limit: Longest result; a longer one keeps its beginning and its end.

    Example:
        >>> from anynan._base.escaping import name
        >>> print(name("a\n\x1b[31mb"))
        a\n\x1b[31mb
    """
    return _cut(escaped(_cut(text, limit)), limit)


def prose(text: str, limit: int = PROSE) -> str:
    r"""Put a sentence on one line, and escape what is left in it.

    Example:
        >>> from anynan._base.escaping import prose
        >>> prose("the second run failed:\n  RuntimeError")
        'the second run failed: RuntimeError'
    """
    return name(" ".join(text.split()), limit)


def escaped(text: str) -> str:
    """Escape what repr() escapes: controls, text direction, every space but the usual one."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def printable(event: Event) -> Event:
    """Return the event with every text fit to print; code keeps its length, to be cut to fit."""
    cause = event.cause
    if cause is not None:
        cause = replace(
            cause,
            text=prose(cause.text),
            fix=prose(cause.fix),
            evidence=prose(cause.evidence),
        )
    tried, spread = event.tried, event.spread
    if spread.surfaced is not None:
        spread = replace(spread, surfaced=name(spread.surfaced))
    return replace(
        event,
        layer=_maybe(event.layer),
        tensor=name(event.tensor),
        parameter=_maybe(event.parameter),
        summary=_summary(event.summary),
        operation=_operation(event.operation),
        then=_operation(event.then),
        cause=cause,
        trail=tuple((name(layer), value) for layer, value in event.trail),
        spread=spread,
        expected=None if event.expected is None else prose(event.expected),
        notes=tuple(map(prose, event.notes)),
        target=name(event.target),
        tried=None if tried is None else replace(tried, repair=name(tried.repair)),
        others=tuple(map(printable, event.others)),
    )


def _operation(operation: Operation | None) -> Operation | None:
    if operation is None:
        return None
    return replace(
        operation,
        name=name(operation.name),
        inputs=tuple(item for x in operation.inputs if (item := _summary(x)) is not None),
        output=_summary(operation.output),
        source=_source(operation.source),
        layer=_maybe(operation.layer),
    )


def _source(source: Source | None) -> Source | None:
    if source is None:
        return None
    text, via_text = (code.replace("\t", " ") for code in (source.text, source.via_text))
    start, end = (
        None if column is None else len(escaped(text[:column]))
        for column in (source.column, source.end_column)
    )
    return replace(
        source,
        file=escaped(source.file),  # whole, so that it can be opened
        function=name(source.function),
        text=escaped(text),
        via=_maybe(source.via),
        column=start,
        end_column=end,
        via_text=escaped(via_text),
    )


def _summary(summary: Summary | None) -> Summary | None:
    return None if summary is None else replace(summary, dtype=name(summary.dtype))


def _maybe(text: str | None) -> str | None:
    return None if text is None else name(text)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 3]}...{text[-tail:]}"
