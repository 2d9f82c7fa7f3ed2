"""One record of Python's logging for each event, to the logger ``anynan``."""

import logging

from anynan._reports.report import render_line
from anynan.errors import reason
from anynan.events import Event

_logger = logging.getLogger("anynan")
_logger.addHandler(logging.NullHandler())  # nothing is printed where nobody asked for it


def log(event: Event) -> None:
    """Log an event: its line is the message, its facts are ``record.anynan``.

    Bad is an error, suspect a warning, expected an information.

    Args:
        event: What happened.
    """
    level = logging.ERROR if event.severity == "bad" else logging.WARNING
    if event.expected is not None:
        level = logging.INFO
    if _logger.isEnabledFor(level) and _logger.hasHandlers():
        try:
            line, facts = render_line(event), event.to_dict()
        except Exception as error:  # noqa: BLE001  what was found must not be lost
            line, facts = f"an event could not be told: {reason(error)}", {}
        _logger.log(level, "%s", line, extra={"anynan": facts})
