"""What is tracked, with which options, and what watches it: what every part of a judge asks."""

import weakref
from dataclasses import replace
from typing import Any, Protocol

from anynan._base.messages import left, slug_of
from anynan._diagnosis.evidence import Evidence
from anynan._steps.framework import Framework
from anynan.events import Event
from anynan.options import Options, environment


class Target(Protocol):
    """What is tracked; ``Tracked`` is one."""

    name: str
    where: object
    handle: Any

    @property
    def of_model(self) -> bool:
        """Tell whether a model is tracked, and not a function."""

    @property
    def target(self) -> str:
        """Say what is tracked."""

    @property
    def among_others(self) -> bool:
        """Tell whether reports must say which of several tracked models they are about."""

    @property
    def fn(self) -> Any:
        """Give what was tracked, None for a model that is gone."""


class Subject:
    """Hold what is tracked, weakly, and the adapter that watches it.

    Attributes:
        options: What the user asked for.
        watched_by: The adapter; None before tracking begins and after it ends.
        found: Whether nobody asked for it by name: it gives way to a tracker of the user's own.
    """

    def __init__(self, options: Options, target: Target) -> None:
        self.options = options
        self._target = weakref.ref(target)  # it holds its judge
        self.watched_by: Framework | None = None
        self.found = False

    @property
    def target(self) -> Target | None:
        """Give what is tracked, None once it is gone."""
        return self._target()

    @property
    def name(self) -> str:
        """Give the name of what is tracked, as a sentence takes it."""
        target = self.target
        return "it" if target is None else target.name

    @property
    def adapter(self) -> Framework:
        """Give the adapter.

        Raises:
            RuntimeError: If the tracker was removed.
        """
        if self.watched_by is None:
            msg = "this tracker was removed: track the model again to watch it"
            raise RuntimeError(msg)
        return self.watched_by

    @property
    def action(self) -> Any:
        """Give what is done about an event, unless the environment says otherwise."""
        return environment() or self.options.action

    @property
    def evidence(self) -> Evidence:
        """Say where an event is seen that concerns no single reading."""
        return Evidence(self.adapter.backend, self.adapter.rank())

    def signed(self, event: Event) -> Event:
        """Name in an event what is tracked, and leave out the notes that are to be ignored."""
        if self.options.ignore:
            event = replace(event, notes=left(event.notes, self.options.ignore))
        target = self.target
        return event if event.target or target is None else replace(event, target=target.target)

    def ignores(self, text: str) -> bool:
        """Tell whether the user does not want to read a note."""
        return slug_of(text) in self.options.ignore
