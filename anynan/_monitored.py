"""What the callbacks of every training library share."""

from collections.abc import Callable, Mapping
from typing import Any

from anynan.events import Event
from anynan.options import ACTIONS
from anynan.tracker import Tracker


class Monitored:
    """Hold a Monitor's action, and its tracker once the training has begun.

    Args:
        action: ``"stop"`` or one of ``track``'s.
        options: For ``track``.

    Raises:
        ValueError: If the action is unknown.
    """

    def __init__(self, action: str, options: Mapping[str, Any]) -> None:
        known = ("stop", *ACTIONS)
        if action not in known:
            msg = f"action={action!r} is unknown; choose from {', '.join(known)}"
            raise ValueError(msg)
        self.action = action
        self.tracker: Tracker | None = None
        self._options = options

    @property
    def events(self) -> tuple[Event, ...]:
        """Return what was seen, oldest first."""
        return () if self.tracker is None else self.tracker.events

    def _begin(self, track: Callable[..., Tracker], target: Any) -> Tracker:
        """Track; to stop is to leave out the bad step's update first."""
        self._end()
        self.tracker = self._made(track, target, "skip" if self.action == "stop" else self.action)
        return self.tracker

    def _made(self, track: Callable[..., Tracker], target: Any, action: str) -> Tracker:
        return track(target, action=action, **self._options)

    def _end(self) -> None:
        """Watch no longer."""
        if self.tracker is not None:
            self.tracker.remove()

    def _stops(self) -> bool:
        """Tell whether the training is to end now."""
        tracker = self.tracker
        return self.action == "stop" and tracker is not None and tracker.count("bad") > 0
