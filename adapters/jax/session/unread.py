"""Steps that nobody has read yet."""

import atexit
import threading
from collections.abc import Callable

from anynan.jax.replay.steps import Step

# Kept until they are read, also where the user forgets the tracker.
_waiting: "dict[int, Unread]" = {}


class Unread:
    """Hold a session's steps in the order in which they ran.

    Args:
        at_exit: Reads what is left when the program ends.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self.at_exit = at_exit
        self._steps: list[Step] = []
        self._lock = threading.RLock()

    @property
    def last(self) -> Step | None:
        """Give the newest step, None if all are read."""
        return self._steps[-1] if self._steps else None

    def add(self, step: Step) -> None:
        """Hold one more."""
        self._steps.append(step)

    def take(self, but: int) -> Step | None:
        """Give the oldest step, None if no more than so many are left."""
        with self._lock:  # two threads may read at once, as at the end of a program
            return self._steps.pop(0) if len(self._steps) > but else None

    def note(self) -> None:
        """Have what waits read at the end of the program, and only that."""
        if self._steps:
            _waiting[id(self)] = self
        else:
            _waiting.pop(id(self), None)


@atexit.register
def _at_exit() -> None:
    for unread in list(_waiting.values()):
        unread.at_exit()
