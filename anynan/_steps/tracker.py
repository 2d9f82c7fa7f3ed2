"""What ``track`` returns."""

import copy
import functools
import html
import inspect
import operator
import os
import sys
import threading
import types
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from anynan._bundle.collector import LIMIT
from anynan._diagnosis.rules.evidence import plural
from anynan._judging.judge import Judge
from anynan._notebooks.shell import shell
from anynan._readings.history import History
from anynan._readings.readings import Reading
from anynan._reports.escaping import name as printed
from anynan._runtime.about import ADAPTERS
from anynan._runtime.interrupts import whole
from anynan._runtime.tracebacks import shorten
from anynan.errors import AnomalyError
from anynan.events import PHASES, Event
from anynan.options import Options, environment

if TYPE_CHECKING:
    from anynan._steps.adapter import BaseAdapter


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
    if isinstance(target, Tracker):
        msg = f"this is a tracker already: {target!r}; track the {what} itself, its .fn"
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


def tracker_of(target: Any) -> "Tracker":
    """Give the tracker of what was tracked, or the tracker itself; for an adapter's ``untrack``.

    Args:
        target: What was given to ``track``, or what it returned. Of several trackers of the
            same thing the newest is meant.

    Raises:
        ValueError: If it is not tracked.
    """
    if isinstance(target, Tracker):
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


def _newest(target: Any) -> "Tracker | None":
    with _lock:
        known = [tracker for ref in _watching.values() if (tracker := ref()) is not None]
    for tracker in reversed(known):
        if tracker.judge.adapter is not None and tracker.fn is target:
            return tracker
    return None


def make_way(first: "Tracker", name: str, backend: str) -> None:
    """End the tracker of what is to be tracked again, if it was only found.

    Args:
        first: The tracker that watches it.
        name: Of the model.
        backend: Whose ``untrack`` ends it.

    Raises:
        ValueError: If somebody asked for it.
    """
    if first.judge.found or shell() is not None:  # the cell that tracks it was run again
        first.remove()
        return
    msg = (
        f"this {name} is tracked already, by {first!r}; call its remove(), or "
        f"anynan.{backend}.untrack(model), before tracking it again"
    )
    raise ValueError(msg)


_lock = threading.Lock()
_watching: "dict[int, weakref.ref[Tracker]]" = {}  # in the order of ``track``
started: Counter[str] = Counter()  # how many trackers were, in this process


def _is_cloudpickle(frame: types.FrameType) -> bool:
    return "cloudpickle" in str(frame.f_globals.get("__name__", ""))


class Tracker:
    """Watch a model or a function, and act when a reading breaks the policy.

    Made by an adapter's ``track``. A context manager that removes the hooks at exit; for a
    tracked function it is also callable in the function's place.

    Attributes:
        name: What is tracked is called so.
        paused: Whether it stands still, between ``pause`` and ``resume``.
        where: Where in the user's training it is; noted in each event.
        judge: What adapters write readings into, and what acts on them.
    """

    def __init__(self, target: Any, options: Options, name: str) -> None:
        self._target = target
        self.name = name
        self.paused = False
        self.where = ""
        self._backend: str | None = None
        self._removed = False
        self.judge: Judge = Judge(options, self)

    # Names.

    @property
    def _of_model(self) -> bool:
        """Tell whether a model is tracked, and not a function."""
        return isinstance(self._target, weakref.ref)

    @property
    def target(self) -> str:
        """Say what is tracked, as ``model Generator`` or ``function preprocess``."""
        if not self._of_model:
            return f"function {self.name}"
        named = [tracker for tracker in self._beside() if tracker.name == self.name]
        number = f" {named.index(self) + 1}" if len(named) > 1 and self in named else ""
        return f"model {self.name}{number}"

    @property
    def _among_others(self) -> bool:
        """Tell whether reports must say which of several tracked models they are about."""
        return self._of_model and len(self._beside()) > 1

    def _beside(self) -> "list[Tracker]":
        """List the models that this backend watches, in the order they were tracked."""
        adapter = self.judge.adapter
        if adapter is None:
            return []
        beside = []
        with _lock:
            for key, ref in list(_watching.items()):
                tracker = ref()
                other = None if tracker is None else tracker.judge.adapter
                if tracker is None or other is None:
                    del _watching[key]
                elif other.backend == adapter.backend and tracker._of_model:  # noqa: SLF001
                    beside.append(tracker)
        return [tracker for tracker in beside if tracker.fn is not None]

    @property
    def step(self) -> int:
        """Give this thread's step, from 0."""
        return self.judge.step

    # Called in the function's place.

    @property
    def fn(self) -> Any:
        """Give back what was tracked, unchanged; None for a model that is gone."""
        # A model is held weakly: it owns the hooks, the hooks own the tracker.
        return self._target() if isinstance(self._target, weakref.ref) else self._target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the tracked function (one step) or module."""
        target, adapter = self._target, self.judge.adapter
        fn: Any = target() if isinstance(target, weakref.ref) else target
        if adapter is None or self.paused:
            return fn(*args, **kwargs)
        try:
            return adapter.call(fn, args, kwargs)
        except AnomalyError as error:
            shorten(error)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind like a function, so that methods can be tracked."""
        return self if instance is None else types.MethodType(self, instance)

    # To another process, or a copy, goes what is tracked: hooks, locks and threads stay here.

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = self._global_name()
        # Where a worker has no __main__ of ours, what it is sent is the function by value.
        by_value = self.__module__ == "__main__" and _is_cloudpickle(sys._getframe(1))
        # What loads it may not have anynan: the first of a tuple is the function itself.
        return (operator.getitem, ((self.fn,), 0)) if name is None or by_value else name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.fn, memo)

    def _global_name(self) -> str | None:
        """Give the name by which a decorated function's module knows this tracker."""
        name = getattr(self._target, "__qualname__", None)
        found: Any = sys.modules.get(getattr(self._target, "__module__", None) or "")
        for part in name.split(".") if isinstance(name, str) else ():
            found = getattr(found, part, None)
        return name if found is self else None

    # Life.

    def start(self, adapter: "BaseAdapter") -> Self:
        """Install an adapter's hooks; adapters call this at the end of ``track``."""
        if hasattr(self._target, "__name__"):
            functools.update_wrapper(self, self._target, updated=())
            for name, value in getattr(self._target, "__dict__", {}).items():
                if not hasattr(self, name):  # the tracker's own names stay its own
                    setattr(self, name, value)
        if environment() == "off":
            return self
        self.judge.adapter = adapter
        self._backend = adapter.backend
        with _lock:
            _watching[id(self)] = weakref.ref(self)
            started["trackers"] += 1
        try:
            adapter.attach()
        except BaseException:
            adapter.detach()
            self.judge.adapter = None
            raise
        return self

    def __enter__(self) -> Self:
        self._refuse_removed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self.remove(raising=True)
            return
        with self.judge.carried_by(error, None, raising=False):  # it stays the program's own
            self.remove()

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
    def _detach(self, adapter: "BaseAdapter") -> None:
        for follower in self.judge.followers:
            follower.end(self)
        self.judge.followers.clear()
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
        self._refuse_removed()
        if self.judge.adapter is not None and self.paused:
            self.judge.adapter.set_paused(False)
        self.paused = False

    def check(self) -> None:
        """Read and judge now what has not been read yet, whatever the read point.

        Raises:
            AnomalyError: As the tracker's action says.
            RuntimeError: If the tracker was removed.
        """
        self._refuse_removed()
        if self.judge.adapter is not None:
            self.judge.adapter.read()

    def _refuse_removed(self) -> None:
        if self._removed:
            msg = f"this tracker was removed and watches nothing: track {self.name} again"
            raise RuntimeError(msg)

    # What was seen.

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the recorded events, oldest first."""
        return self.judge.events

    @property
    def history(self) -> History:
        """Return the ring of past readings."""
        return self.judge.monitor.history

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what could not be watched, each said once."""
        return self.judge.notes

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what watching changes, such as a fused path that it turns off."""
        return self.judge.remarks

    def dump(self, path_contains: str = "", phase: str | None = None) -> list[Reading]:
        """Return past readings whose layer path contains a string, in one phase or all.

        Raises:
            ValueError: If there is no such phase.
        """
        if phase is not None and phase not in PHASES:
            msg = f"phase={phase!r} is unknown; choose from {', '.join(PHASES)}"
            raise ValueError(msg)
        return [
            reading
            for reading in self.history
            if path_contains in (reading.layer or "") and phase in (None, reading.phase)
        ]

    def clear(self) -> None:
        """Forget events, readings and gradient norms; the hooks stay."""
        self.judge.clear()

    def metrics(self, *, layers: bool = False) -> dict[str, float]:
        """Return the last step's numbers as a flat dict, for any logger.

        Args:
            layers: Give those of each layer, too, and not only the handful over all of them.
        """
        from anynan._reports.overview import metrics

        return metrics(self, layers=layers)

    def report(self) -> str:
        """Return the state as text: steps, tightest headroom, events, what was allowed."""
        from anynan._reports.overview import overview
        from anynan._reports.run import of

        return overview(of(self))

    def to_jsonl(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        """Write history and events to a file, and go on with every step until ``remove``.

        A line is written as soon as it is known, so that a run that is killed leaves a file
        that can be read: by ``anynan report FILE``, or ``anynan.load``. From rank 1 on, the
        rank is put into the file's name.

        Args:
            path: The file; one that is there is replaced.
            every: Write one step in so many, and those with an event.

        Raises:
            ValueError: If ``every`` is no positive whole number.
            OSError: If the file cannot be opened.

        Example:
            >>> tracker.to_jsonl("run.jsonl")  # doctest: +SKIP
        """
        from anynan._jsonl.writing import Writer

        Writer(path, every).follow(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write what was seen as one page of HTML: report, layers by steps, curves, numbers.

        The page stands alone, and can be read without scripts.

        Args:
            path: The file; one that is there is replaced.

        Raises:
            OSError: If it cannot be written.

        Example:
            >>> tracker.to_html("report.html")  # doctest: +SKIP
        """
        from anynan._reports.run import of

        of(self).to_html(path)

    def save(self, folder: str | os.PathLike[str], *, limit: int = LIMIT) -> None:
        """Write the last failing call as a bundle, to be attached or kept.

        Its operation with whole operands, the layer's inputs and weights and the call's inputs
        (safetensors), the event and versions (JSON), and ``reproduce.py``, which shows the same
        operation fail. The call is run again for it, so it must not be over: call this from an
        action, or in the ``except`` that catches the error; or track with ``save=folder``.

        Args:
            folder: Where to; it is made, and nothing in it is overwritten.
            limit: So many bytes of tensors are kept at most, 256 MiB by default.

        Raises:
            FileExistsError: If something is in the folder.
            ValueError: If nothing was bad yet, or the call is over.
            OSError: If it cannot be written.

        Example:
            >>> tracker.save("bundle")  # doctest: +SKIP
        """
        self.judge.save(os.fspath(folder), limit)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{html.escape(self.report())}</pre>'

    def count(self, word: str) -> int:
        """Count events by severity (``bad``, ``suspect``) or ``expected``."""
        return self.judge.count(word)

    def __repr__(self) -> str:
        state = "removed" if self.judge.adapter is None else "paused" if self.paused else "watching"
        return f"<anynan.Tracker {state} {printed(self.name)}: {plural(len(self.events), 'event')}>"
