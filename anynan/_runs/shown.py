"""What a notebook shows of a result: static, without scripts, in the colours of the page."""

import html
from functools import singledispatch
from typing import Any

from anynan._base.escaping import name as printed
from anynan._base.summary import Summary
from anynan._diagnosis.rules.evidence import group, magnitude
from anynan._readings.history import History
from anynan._reports.report import describe, render_html
from anynan._runs.overview import LINE, kept, numbers
from anynan.events import Event


@singledispatch
def shown(thing: Any) -> str:
    """Give what stands for it on a notebook's page."""
    return _framed(repr(thing))


@shown.register
def _(event: Event) -> str:
    return render_html(event)


@shown.register
def _(history: History) -> str:
    layers = {site.layer for entry in history.entries() for site in entry.sites}
    lines = [kept(history, len(layers - {None})), *numbers(history)]
    return _framed("\n".join(printed(line, LINE) for line in lines))


@shown.register
def _(summary: Summary) -> str:
    rows = [
        ("on", printed(summary.device)),
        ("first bad", "" if summary.first_bad is None else f"at {list(summary.first_bad)}"),
        ("mean", _number(summary.mean)),
        ("rms", _number(summary.rms)),
        ("zero", group(summary.zero) if summary.zero else ""),
        ("subnormal", group(summary.subnormal) if summary.subnormal else ""),
        ("headroom", "" if summary.headroom is None else f"{summary.headroom:.1f} bits"),
    ]
    told = [f"  {label:<10}{text}" for label, text in rows if text]
    return _framed("\n".join([describe(summary), *told]))


def _number(value: float | None) -> str:
    return "" if value is None else magnitude(value)


def _framed(text: str) -> str:
    """Put text as it is laid out on a page."""
    return f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>'
