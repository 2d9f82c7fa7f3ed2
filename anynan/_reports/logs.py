"""One record of Python's logging for each event, to the logger ``anynan``."""

import itertools
import logging
from collections.abc import Callable
from contextvars import ContextVar

from anynan._reports.report import render_line
from anynan.errors import reason
from anynan.events import Event

_logger = logging.getLogger("anynan")
_logger.addHandler(logging.NullHandler())  # nothing is printed where nobody asked for it

_turns = itertools.count()
# True while events are somebody's own business, as those of inputs that were made up.
private: ContextVar[bool] = ContextVar("anynan_private_events", default=False)
listeners: list[Callable[[int, Event], object]] = []  # what hears of every event of this process


def log(event: Event, *, again: bool = False) -> int:
    """Log an event: its line is the message, its facts are ``record.anynan``.

    Bad is an error, suspect a warning, expected an information.

    Args:
        event: What happened.
        again: True for the repetition of an event that was heard of: it is only logged.

    Returns:
        Its number among all events of this process, in the order in which they came.
    """
    if private.get():
        return next(_turns)
    level = logging.ERROR if event.severity == "bad" else logging.WARNING
    if event.expected is not None:
        level = logging.INFO
    if _logger.isEnabledFor(level) and _logger.hasHandlers():
        try:
            line, facts = render_line(event), event.to_dict()
        except Exception as error:  # noqa: BLE001  what was found must not be lost
            line, facts = f"an event could not be written: {reason(error)}", {}
        _logger.log(level, "%s", line, extra={"anynan": facts})
    turn = next(_turns)
    if again:
        return turn
    for listen in listeners:
        listen(turn, event)
    return turn
