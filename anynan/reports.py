"""Reports as text, HTML and numbers: what they are written from, and how."""

from typing import Any, Literal

from anynan._base import products
from anynan._readings.history import History
from anynan._reports.report import render as render_text
from anynan._reports.report import render_html, render_line, render_markdown
from anynan._runs.narrower import Headroom, headroom
from anynan._runs.run import Run
from anynan.events import Event

__all__ = ["Headroom", "History", "Run", "headroom", "render"]


def render(
    event: Event,
    form: Literal["text", "line", "markdown", "html"] = "text",
    *,
    width: int | None = None,
) -> str:
    """Put an event into words.

    Args:
        event: What happened: ``error.event``, or one of ``tracker.events``.
        form: ``"text"`` is the report, ``"line"`` is one line for a log, ``"markdown"`` is the
            report to paste into an issue, ``"html"`` a piece of a page.
        width: Columns of the report; by default those of the terminal, 60 to 100.

    Raises:
        TypeError: If it is no event.
        ValueError: If the form is unknown.

    Example:
        >>> import anynan, numpy
        >>> try:
        ...     anynan.check(numpy.array([numpy.inf]), "x")
        ... except anynan.NonFiniteError as error:
        ...     anynan.reports.render(error.event, "line")
        '+Inf found in x'
    """
    if not isinstance(event, Event):
        msg = (
            f"render() takes an event, not {type(event).__name__}: give error.event, or one of "
            "tracker.events"
        )
        raise TypeError(msg)
    if form == "text":
        return render_text(event, width=width)
    others = {"line": render_line, "markdown": render_markdown, "html": render_html}
    if form not in others:
        msg = f"form={form!r} is unknown; choose text, line, markdown or html"
        raise ValueError(msg)
    return others[form](event)


# What products return, where they are there.
_PRODUCTS = {"PrecisionReport": "precision", "StressReport": "stress"}


def __getattr__(name: str) -> Any:
    if name in _PRODUCTS:
        return getattr(products.part(_PRODUCTS[name], "report"), name)
    msg = f"module 'anynan.reports' has no attribute {name!r}"
    raise AttributeError(msg)
