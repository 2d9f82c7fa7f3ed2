"""What is tracked, with which options, and what watches it: what every part of a judge asks."""

import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from anynan._base.context import but
from anynan._base.messages import left, slug_of
from anynan._diagnosis.evidence import Evidence
from anynan._steps.framework import Framework
from anynan.events import Event
from anynan.options import Options, environment

lock = threading.Lock()
watching: "dict[int, weakref.ref[Subject]]" = {}  # in the order of ``track``


class Subject:
    """Hold what is tracked, and the adapter that watches it; ``Tracked`` is one.

    Attributes:
        options: What the user asked for.
        name: What is tracked is called so.
        where: Where in the user's training it is, as text or what gives it; noted in each event.
        handle: The user's ``Tracker``.
        watched_by: The adapter; None before tracking begins and after it ends.
        found: Whether nobody asked for it by name: it gives way to a tracker of the user's own.
        anywhere: Whether what it trains is no part of a model, and may be used by any.
    """

    anywhere = False

    def __init__(self, target: Any, options: Options, name: str) -> None:
        self._target, self.options, self.name = target, options, name
        self.where: object = ""
        self.handle: Any = None
        self.watched_by: Framework | None = None
        self.found = False
        self._local = threading.local()

    # Names.

    @property
    def of_model(self) -> bool:
        """Tell whether a model is tracked, and not a function."""
        return isinstance(self._target, weakref.ref)

    @property
    def fn(self) -> Any:
        """Give back what was tracked, unchanged; None for a model that is gone."""
        # A model is held weakly: it owns the hooks, the hooks own the tracker.
        return self._target() if isinstance(self._target, weakref.ref) else self._target

    def let_go(self) -> None:
        """Hold a function no longer: what the program itself does not hold is gone, with us too."""
        self._target = self.handle = None

    def renew(self, fn: Any) -> None:
        """Go on with a function that the program made anew in the place of this one."""
        self._target = fn

    @property
    def target(self) -> str:
        """Say what is tracked, as ``model Generator`` or ``function preprocess``."""
        if not self.of_model:
            return f"function {self.name}"
        named = [tracker for tracker in self._beside() if tracker.name == self.name]
        number = f" {named.index(self) + 1}" if len(named) > 1 and self in named else ""
        return f"model {self.name}{number}"

    @property
    def among_others(self) -> bool:
        """Tell whether reports must say which of several tracked models they are about."""
        return self.of_model and len(self._beside()) > 1

    def _beside(self) -> "list[Subject]":
        """List the models that this backend watches, in the order they were tracked."""
        adapter = self.watched_by
        if adapter is None:
            return []
        beside = []
        with lock:
            for key, ref in list(watching.items()):
                tracker = ref()
                other = None if tracker is None else tracker.watched_by
                if tracker is None or other is None:
                    del watching[key]
                elif other.backend == adapter.backend and tracker.of_model:
                    beside.append(tracker)
        return [tracker for tracker in beside if tracker.fn is not None]

    # Who watches it, and what for.

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
    def soft(self) -> bool:
        """Tell whether nothing is raised in this thread now."""
        return bool(getattr(self._local, "soft", False))

    def softly(self, *, on: bool = True) -> AbstractContextManager[None]:
        """Warn instead of raising inside, for steps that are read when nobody can catch."""
        return but(self._local, soft=self.soft or on)

    @property
    def evidence(self) -> Evidence:
        """Say where an event is seen that concerns no single reading."""
        return Evidence(self.adapter.backend, self.adapter.rank())

    def signed(self, event: Event) -> Event:
        """Name in an event what is tracked, and leave out the notes that are to be ignored."""
        if self.options.ignore:
            event = replace(event, notes=left(event.notes, self.options.ignore))
        return event if event.target else replace(event, target=self.target)

    def ignores(self, text: str) -> bool:
        """Tell whether the user does not want to read a note."""
        return slug_of(text) in self.options.ignore
