"""What is tracked, and who judges it: the inside of a tracker."""

import functools
import inspect
import weakref
from collections import Counter
from typing import Any, overload

from anynan._base import products
from anynan._base.about import ADAPTERS
from anynan._base.escaping import name as printed
from anynan._base.interrupts import whole
from anynan._base.shell import shell
from anynan._diagnosis.rules.evidence import plural
from anynan._readings.history import History
from anynan._steps.framework import Framework
from anynan._steps.judge import Judge
from anynan._steps.subject import Subject, lock, watching
from anynan.events import Event
from anynan.options import Options, environment


def refuse_target(target: Any, what: str, backend: str = "") -> None:
    """Refuse what would be watched in vain; adapters ask at ``track``.

    That is nothing at all, a tracker, a class in its object's place, another framework's model,
    and a function that returns before its body runs.

    Args:
        target: What was given to ``track``.
        what: What it takes.
        backend: Name of the adapter, where it watches functions alone.

    Raises:
        TypeError: If it is one of these.
    """
    if target is None:
        msg = f"track() was given None: is a return statement missing where the {what} was made?"
        raise TypeError(msg)
    if isinstance(target, Handle):
        msg = f"this is a tracker already: {target!r}; track the {what} itself"
        raise TypeError(msg)
    if isinstance(target, type):
        msg = f"track() takes a {what}, not the class {target.__name__}: create an object first"
        raise TypeError(msg)
    name = getattr(target, "__name__", type(target).__name__)
    packages = {kind.__module__.partition(".")[0] for kind in type(target).__mro__}
    other = next((each for each in ADAPTERS if each in packages and each != backend), None)
    if backend and other is not None:
        msg = f"track() takes a {what}, and {name} is {other}'s: use anynan.{other}.track()"
        raise TypeError(msg)
    late = _returns_early(target)
    if late:
        msg = (
            f"track() cannot watch {name}: the body of {late} runs after the call; track the "
            "function that it calls for each step or item"
        )
        raise TypeError(msg)


def _returns_early(target: Any) -> str:
    """Say what a function is that returns before its body runs, empty if it is none of these."""
    while isinstance(target, functools.partial):
        target = target.func
    try:
        target = inspect.unwrap(target)
    except Exception:  # noqa: BLE001  an object that answers to every attribute
        return ""
    for fn in (target, *(vars(kind).get("__call__") for kind in type(target).__mro__)):
        if inspect.iscoroutinefunction(fn):
            return "an async function"
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            return "a generator function"
    return ""


def tracker_of(target: Any) -> "Tracked":
    """Give the tracker of what was tracked, or the tracker itself; for an adapter's ``untrack``.

    Args:
        target: What was given to ``track``, or what it returned. Of several trackers of the
            same thing the newest is meant.

    Raises:
        ValueError: If it is not tracked.
    """
    target = inside(target)
    if isinstance(target, Tracked):
        return target
    tracker = _newest(target)
    if tracker is not None:
        return tracker
    name = getattr(target, "__name__", f"this {type(target).__name__}")
    msg = f"{name} is not tracked: give untrack() what was given to track(), or what it returned"
    raise ValueError(msg)


def is_tracked(target: Any) -> bool:
    """Tell whether something is watched as it is, by whatever backend."""
    return _newest(target) is not None


def _newest(target: Any) -> "Tracked | None":
    with lock:
        known = [tracker for ref in watching.values() if isinstance(tracker := ref(), Tracked)]
    for tracker in reversed(known):
        names = (tracker.fn, *(ref() for ref in tracker.aliases))
        if tracker.judge.adapter is not None and any(each is target for each in names):
            return tracker
    return None


def make_way(first: "Tracked", name: str) -> None:
    """End the tracker of what is to be tracked again, if it was only found.

    Args:
        first: The tracker that watches it.
        name: Of the model.

    Raises:
        ValueError: If somebody asked for it.
    """
    if first.found or shell() is not None:  # the cell that tracks it was run again
        first.remove()
        return
    msg = (
        f"this {name} is tracked already, by {first!r}; call its remove(), or "
        "anynan.untrack(model), before tracking it again"
    )
    raise ValueError(msg)


started: Counter[str] = Counter()  # how many trackers were, in this process


class Handle:
    """Stand for what is tracked in the user's hands; ``anynan.Tracker`` is one."""

    def __init__(self, tracked: "Tracked") -> None:
        self._tracked = tracked
        tracked.handle = self


@overload
def inside(target: Handle) -> "Tracked": ...
@overload
def inside(target: object) -> Any: ...
def inside(target: Any) -> Any:
    """Give what a tracker holds; anything else is given back as it is."""
    return target._tracked if isinstance(target, Handle) else target  # noqa: SLF001  its own


def untracked(target: Any) -> Any:
    """Give what a tracker watches; anything else is given back as it is."""
    return inside(target).fn if isinstance(target, Handle) else target


class Tracked(Subject):
    """Hold what is tracked, its adapter and its judge: the inside of an ``anynan.Tracker``.

    Adapters make one in ``track``, and hold it; the user holds the ``Tracker`` alone.

    Attributes:
        paused: Whether it stands still, between ``pause`` and ``resume``.
        judge: What adapters write readings into, and what acts on them.
        saver: What keeps the last failing call, for a bundle; None where there is no such product.
        aliases: What else stands for it, as the model that a compiled one was made of.
    """

    def __init__(self, target: Any, options: Options, name: str) -> None:
        super().__init__(target, options, name)
        self.paused = False
        self.aliases: list[weakref.ref[Any]] = []
        self.backend_name: str | None = None
        self._removed = False
        self.judge = Judge(self)
        bundle = products.find("bundle", "saver")
        self.saver: Any = None if bundle is None else bundle.Saver(self)
        if self.saver is not None:
            self.judge.investigator.found.append(self.saver)

    @property
    def step(self) -> int:
        """Give this thread's step, from 0."""
        return self.judge.step

    # Life.

    def start(self, adapter: Framework) -> None:
        """Install an adapter's hooks; ``anynan.tracker.begin`` calls this."""
        if environment() == "off":
            return
        self.judge.adapter = adapter
        self.backend_name = adapter.backend
        with lock:
            watching[id(self)] = weakref.ref(self)
            started["trackers"] += 1
        try:
            adapter.attach()
        except BaseException:
            adapter.detach()
            self.judge.adapter = None
            raise

    def remove(self, *, raising: bool = False) -> None:
        """Take every hook away; unread rows are read first, and warned about if bad.

        Args:
            raising: Apply the tracker's own action to what is found unread, as at the end
                of a ``with`` block, instead of only warning.
        """
        adapter = self.judge.adapter
        if adapter is None:
            return
        try:
            with self.judge.softly(on=not raising):
                adapter.finish()
        finally:
            self._detach(adapter)

    @whole
    def _detach(self, adapter: Framework) -> None:
        for follower in self.judge.record.listeners:
            follower.end(self)
        self.judge.record.listeners.clear()
        self.judge.adapter = None
        self._removed = True
        adapter.detach()
        while self.judge.ends:
            self.judge.ends.pop()()

    def pause(self) -> None:
        """Stop watching until ``resume``, at no cost meanwhile."""
        if self.judge.adapter is not None and not self.paused:
            self.judge.adapter.set_paused(True)
        self.paused = True

    def resume(self) -> None:
        """Watch again after ``pause``.

        Raises:
            RuntimeError: If the tracker was removed.
        """
        self.refuse_removed()
        if self.judge.adapter is not None and self.paused:
            self.judge.adapter.set_paused(False)
        self.paused = False

    def flush(self) -> None:
        """Read and judge now what has not been read yet, whatever the read point.

        Raises:
            AnomalyError: As the tracker's action says.
            RuntimeError: If the tracker was removed.
        """
        self.refuse_removed()
        if self.judge.adapter is not None:
            self.judge.adapter.read()

    def refuse_removed(self) -> None:
        """Refuse to go on with what watches nothing any more.

        Raises:
            RuntimeError: If the tracker was removed.
        """
        if self._removed:
            msg = f"this tracker was removed and watches nothing: track {self.name} again"
            raise RuntimeError(msg)

    # What was seen.

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the recorded events, oldest first."""
        return self.judge.record.events

    @property
    def history(self) -> History:
        """Return the ring of past readings."""
        return self.judge.monitor.history

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what could not be watched, each said once."""
        return self.judge.notes.warnings

    def count(self, word: str) -> int:
        """Count events by severity (``bad``, ``suspect``) or ``expected``."""
        return self.judge.record.counts[word]

    def __repr__(self) -> str:
        state = "removed" if self.judge.adapter is None else "paused" if self.paused else "watching"
        return f"<anynan.Tracker {state} {printed(self.name)}: {plural(len(self.events), 'event')}>"
