"""Find the steps of a program: what runs under a tape, and the compiled functions that hold one."""

from collections.abc import Callable

from anynan._everywhere import Found, spoiled
from anynan._steps.tracked import Tracked
from anynan.options import Options
from anynan.tensorflow.session.wide import Wide


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch each loop of the program's own: a gradient that it takes is a step of the program.

    Args:
        options: As for ``track``.
        found: Is given the tracker.

    Returns:
        What undoes it; the tracker stays.
    """
    tracker = Tracked(_the_program, options, "the program")
    found.add(Wide(tracker).start())
    return lambda: spoiled(tracker, found)


def _the_program() -> None:
    """Stand for a program, which is no function."""
