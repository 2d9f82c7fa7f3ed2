"""Act on an event: raise, warn, skip the update, call back."""

import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from anynan.adapter import Adapter
from anynan.errors import AnomalyError, AnynanWarning, NonFiniteError
from anynan.events import NON_FINITE, Event
from anynan.monitor import Rows
from anynan.options import Options, environment
from anynan.reporting import render
from anynan.sources import user_level

MAX_EVENTS = 10_000


class Actor:
    """Record a tracker's events, and do what its options say about them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.adapter: Adapter | None = None
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streak = 0
        self.where = ""  # where in the user's training it is, noted in each event

    def accept(self, rows: Rows, event: Event) -> None:
        """Act on the event that a step failed by, be it this rank's or another's.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        rows.failed, rows.held = event, None
        if event.rank != self._adapter.rank():
            rows.spread = 0  # the other rank has counted its own
        self._act(event, rows)

    @property
    def _adapter(self) -> Adapter:
        if self.adapter is None:
            msg = "this tracker was removed: track the model again to watch it"
            raise RuntimeError(msg)
        return self.adapter

    def _record(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            self._counts["expected" if event.expected else event.severity] += 1

    def _act(self, event: Event, rows: Rows) -> None:
        self._record(event)
        self._streak += 1
        softly = getattr(self._local, "softly", None)
        action: Any = softly or environment() or self.options.action
        patient = softly is None and self._streak <= self.options.patience
        if action == "off" or (action == "record" and not patient):
            return
        text = render(event, here=self._adapter.rank())
        if patient:
            rows.skip = True
            warnings.warn(
                f"{text}\n\n  skipped {self._streak} of {self.options.patience} bad "
                "steps in a row that patience= allows",
                AnynanWarning,
                stacklevel=user_level(),
            )
        elif action == "raise":
            kind = NonFiniteError if event.kind in NON_FINITE else AnomalyError
            raise kind(text, event, self)
        elif action == "warn":
            warnings.warn(text, AnynanWarning, stacklevel=user_level())
        elif action == "skip":
            rows.skip = True
            if self._streak == 1:
                text = f"{text}\n\n  the update of this step is dropped"
                warnings.warn(text, AnynanWarning, stacklevel=user_level())
        elif isinstance(action, Callable):  # type: ignore[arg-type]
            action(event)

    def softly(self, *, on: bool = True) -> "_Softly":
        """Warn instead of raising inside, for rows that are read when nobody can catch."""
        return _Softly(self._local, on)


class _Softly:
    """Warn instead of raising, for rows that are read when nobody can catch."""

    def __init__(self, local: threading.local, on: bool) -> None:
        self._local, self._on = local, on

    def __enter__(self) -> None:
        if self._on:
            self._local.softly = "warn"

    def __exit__(self, *details: object) -> None:
        self._local.softly = None
