"""What a tracker says of itself: what it does not watch, and what watching changes."""

import threading

from anynan._base.escaping import prose
from anynan._base.notices import warn
from anynan._steps.subject import Subject


class Notes:
    """Say each thing once, and list it for the report."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._warnings: dict[str, None] = {}
        self._remarks: dict[str, None] = {}
        self._lock = threading.Lock()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what could not be watched, each said once."""
        return tuple(self._warnings)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what watching changes, such as a fused path that it turns off."""
        return tuple(self._remarks)

    def remark(self, note: str) -> None:
        """List what watching changes in the report; nothing goes unwatched, so no warning."""
        with self._lock:
            if not self._subject.ignores(note):
                self._remarks[note] = None

    def say(self, note: str) -> None:
        """Warn once of something that is not watched, and list it in the report.

        A program that was only found is not warned: it did not ask.
        """
        with self._lock:
            if note in self._warnings or self._subject.ignores(note):
                return
            self._warnings[note] = None
        if not self._subject.found:
            warn(f"anynan: {prose(note)}")

    def mention(self, note: str) -> None:
        """Warn of it where the user asked for warnings, else list it."""
        (self.say if self._subject.options.action == "warn" else self.remark)(note)
