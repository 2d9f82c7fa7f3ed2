"""Text from outside (names, code, messages), made safe to print: escaped, and bounded in length."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anynan.events import Cause, Event, Source

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


# What is told in sentences; everything else is a name.
_SENTENCES: dict[type, tuple[str, ...]] = {
    Event: ("expected", "notes"), Cause: ("text", "fix", "evidence"),
}  # fmt: skip


def printable(event: Event) -> Event:
    """Return the event with every text fit to print; code keeps its length, to be cut to fit."""
    safe: Event = _safe(event, name)
    return safe


def _safe(value: Any, escape: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, tuple):
        return tuple(_safe(item, escape) for item in value)
    if isinstance(value, Source):
        return _source(value)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    sentences, changed = _SENTENCES.get(type(value), ()), {}
    for key in value.__dataclass_fields__:
        x = getattr(value, key)
        new = _safe(x, prose if key in sentences else name)
        if new is not x and new != x:
            changed[key] = new
    return replace(value, **changed) if changed else value


def _source(source: Source) -> Source:
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
        via=_safe(source.via, name),
        column=start,
        end_column=end,
        via_text=escaped(via_text),
    )


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 3]}...{text[-tail:]}"
