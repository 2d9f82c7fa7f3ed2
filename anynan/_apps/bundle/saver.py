"""Save the failing call: the first one where ``save=`` asks for it, or the last one by hand."""

import os

from anynan._apps.bundle.messages import BUNDLE_UNSAVED, OPERATION_NOT_MET
from anynan._base.folders import free, refuse_full
from anynan._calls.collector import LIMIT, Collector
from anynan._diagnosis.evidence import ReplayError
from anynan._readings.readings import Reading
from anynan._steps.subject import Subject
from anynan.errors import reason
from anynan.events import Event


class Saver:
    """Listen to what is found, and keep the last of it for a bundle."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._last: tuple[Reading, Event] | None = None
        self._saved = False

    def __call__(self, reading: Reading, event: Event) -> tuple[str, ...]:
        """Save the first event, if ``save=`` asks for it; note where, or why not."""
        self._last = reading, event
        folder = self._subject.options.save
        if folder is None or self._saved:
            return ()
        self._saved = True
        return (self._save_first(os.fspath(folder), reading, event),)

    def _save_first(self, folder: str, reading: Reading, event: Event) -> str:
        rank = self._subject.adapter.rank()
        folder = free(folder + (f".rank{rank}" if rank else ""))
        found = Collector(event, LIMIT)
        try:
            try:
                self._subject.adapter.capture(reading, found)
            except ReplayError as error:
                found.notes.append(error.note)
            self._write(folder, event, found)
        except Exception as error:  # noqa: BLE001  the event is the news
            return BUNDLE_UNSAVED(error=reason(error))
        return f"saved in {folder}: anynan replay {folder}"

    def save(self, folder: str, limit: int) -> None:
        """Write the last failing call as a bundle; see ``Tracker.save``."""
        refuse_full(folder)
        if self._last is None:
            msg = "save(): nothing was bad yet, so there is nothing to save"
            raise ValueError(msg)
        reading, event = self._last
        found = Collector(event, limit)
        try:
            self._subject.adapter.capture(reading, found)
        except ReplayError as error:
            msg = (
                f"save(): {error}. Give track() save=folder, or call save() from an action, "
                "where the call is not over yet"
            )
            raise ValueError(msg) from None
        self._write(folder, event, found)

    def _write(self, folder: str, event: Event, found: Collector) -> None:
        from anynan._apps.bundle.bundle import save

        if event.operation is not None and found.call is None:
            found.notes.append(OPERATION_NOT_MET())
        save(folder, self._subject.signed(event), found, self._subject.adapter.dialect)
