"""What ``track`` returns: the user's hands on what is tracked."""

import copy
import functools
import html
import operator
import os
import sys
import types
from typing import TYPE_CHECKING, Any, Self

from anynan._base import products
from anynan._base.notices import warn
from anynan._base.tracebacks import shorten
from anynan._calls.collector import LIMIT
from anynan._readings.history import History
from anynan._reports.messages import RENAMED
from anynan._steps.tracked import Handle, Tracked, inside, tracker_of
from anynan.errors import AnomalyError
from anynan.events import Event
from anynan.options import DEPRECATED

if TYPE_CHECKING:
    from anynan._steps.adapter import BaseAdapter


def begin(tracked: Tracked, adapter: "BaseAdapter") -> "Tracker":
    """Start to watch; adapters call this at the end of ``track``."""
    tracker = Tracker(tracked)
    tracked.start(adapter)
    return tracker


def untrack(target: Any) -> Any:
    """Stop watching, and give back what was tracked.

    Args:
        target: What was given to ``track``, or what it returned, of any framework.

    Returns:
        The model or the function, unchanged; None for a model that is gone.

    Raises:
        ValueError: If it is not tracked.

    Example:
        >>> import anynan, numpy
        >>> log = anynan.track(numpy.log)
        >>> anynan.untrack(log) is numpy.log
        True
    """
    tracked = tracker_of(target)
    tracked.remove()
    return tracked.fn


def old_untrack(target: Any) -> Any:
    """Stop watching: what each framework's own ``untrack`` was until 0.1."""
    warn(RENAMED(old="untrack", new="anynan.untrack for every framework"), DEPRECATED)
    return untrack(target)


class Tracker(Handle):
    """Watch a model or a function, and act when something is bad.

    ``track`` makes one. As a context manager it ends at exit. The tracker of a function is called
    in the function's place.

    Example:
        >>> import anynan, numpy
        >>> with anynan.track(numpy.log, action="record") as log:
        ...     with numpy.errstate(all="ignore"):
        ...         _ = log(numpy.array([1.0, -1.0]))
        >>> [event.kind for event in log.events]
        ['nan']
    """

    def __init__(self, tracked: Tracked) -> None:
        super().__init__(tracked)
        target = self._fn = None if tracked.of_model else tracked.fn
        if hasattr(target, "__name__"):
            functools.update_wrapper(self, target, updated=())  # type: ignore[arg-type]

    # Called in the function's place.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the tracked function (one step) or module.

        Raises:
            RuntimeError: If it was a model that is gone: a tracker keeps none alive.
        """
        tracked = self._tracked
        adapter = tracked.watched_by  # no call of ours: each step pays for it
        fn: Any = tracked.fn if self._fn is None else self._fn
        if fn is None:
            msg = f"the {tracked.name} that this tracker watched is gone: keep a reference to it"
            raise RuntimeError(msg)
        if adapter is None or tracked.paused:
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
        fn = self._tracked.fn
        return (operator.getitem, ((fn,), 0)) if name is None or by_value else name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._tracked.fn, memo)

    def _global_name(self) -> str | None:
        """Give the name by which a decorated function's module knows this tracker."""
        fn = self._tracked.fn
        name = getattr(fn, "__qualname__", None)
        found: Any = sys.modules.get(getattr(fn, "__module__", None) or "")
        for part in name.split(".") if isinstance(name, str) else ():
            found = getattr(found, part, None)
        return name if found is self else None

    # Life.

    def __enter__(self) -> Self:
        self._tracked.refuse_removed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self.remove(raising=True)
            return
        with self._tracked.judge.carried_by(error, None, raising=False):  # it stays the program's
            self.remove()

    def remove(self, *, raising: bool = False) -> None:
        """Stop watching. Unjudged readings are judged first, with a warning if one is bad.

        Args:
            raising: Apply the tracker's own action to it, as at the end of a ``with`` block.
        """
        self._tracked.remove(raising=raising)

    def pause(self) -> None:
        """Stop watching until ``resume``, at no cost meanwhile."""
        self._tracked.pause()

    def resume(self) -> None:
        """Watch again after ``pause``.

        Raises:
            RuntimeError: If the tracker was removed.
        """
        self._tracked.resume()

    def flush(self) -> None:
        """Judge now what was not judged yet, whatever ``read`` says.

        Raises:
            AnomalyError: As the tracker's action says.
            RuntimeError: If the tracker was removed.
        """
        self._tracked.flush()

    # What was seen.

    @property
    def name(self) -> str:
        """Name what is tracked, by a model's class or a function's name."""
        return self._tracked.name

    @property
    def step(self) -> int:
        """Return this thread's step, from 0."""
        return self._tracked.step

    @property
    def where(self) -> str:
        """Name the place in the training, as ``"epoch 3"``: set it, and each event shows it."""
        return str(self._tracked.where)

    @where.setter
    def where(self, where: str) -> None:
        self._tracked.where = where

    @property
    def events(self) -> tuple[Event, ...]:
        """Return the recorded events, oldest first."""
        return self._tracked.events

    @property
    def history(self) -> History:
        """Return the readings of the last steps."""
        return self._tracked.history

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what is not watched, and what watching changes, each once."""
        return (*self._tracked.notes, *self._tracked.judge.notes.remarks)

    def count(self, word: str) -> int:
        """Count events by severity (``"bad"``, ``"suspect"``), or those ``"expected"``."""
        return self._tracked.count(word)

    def clear(self) -> None:
        """Forget events, readings and gradient norms; watching continues."""
        self._tracked.judge.clear()

    def metrics(self, *, layers: bool = False) -> dict[str, float]:
        """Return the last step's numbers as a flat dict, for any logger.

        Args:
            layers: Add the numbers of each layer.
        """
        from anynan._runs.overview import metrics

        return metrics(self._tracked, layers=layers)

    def report(self) -> str:
        """Return the state as text: steps, tightest headroom, events, what was allowed."""
        from anynan._runs.overview import overview
        from anynan._runs.run import of

        return overview(of(self._tracked))

    def to_jsonl(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        """Write history and events to a file, and each further step until ``remove``.

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
        products.part("runfile", "writing").Writer(path, every).follow(self._tracked)

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
        from anynan._runs.run import of

        of(self._tracked).to_html(path)

    def save(self, folder: str | os.PathLike[str], *, limit: int = LIMIT) -> None:
        """Write the last failing call as a bundle, to be attached or kept.

        Its operation with whole operands, the layer's inputs and weights and the call's inputs
        (safetensors), the event and versions (JSON), and ``reproduce.py``, which shows the same
        operation fail. The call is run again for it, so it must not be over: call this from an
        action, or in the ``except`` that catches the error; or track with ``save=folder``.

        Args:
            folder: The folder to make; one that exists must be empty.
            limit: The most bytes of tensors to keep, 256 MiB by default.

        Raises:
            FileExistsError: If something is in the folder.
            ValueError: If nothing was bad yet, or the call is over.
            OSError: If it cannot be written.

        Example:
            >>> tracker.save("bundle")  # doctest: +SKIP
        """
        products.part("bundle", "saver")  # or there is nobody to ask
        self._tracked.saver.save(os.fspath(folder), limit)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{html.escape(self.report())}</pre>'

    def __repr__(self) -> str:
        return repr(self._tracked)

    # What is not found on the class ends here: the function's own, and names of 0.1.

    if not TYPE_CHECKING:  # else no name would be unknown to a type checker

        def __getattr__(self, name: str) -> Any:
            if name in _OLD and "_tracked" in vars(self):
                new, give = _OLD[name]
                warn(RENAMED(old=f"Tracker.{name}", new=new), DEPRECATED)
                return give(self)
            fn = vars(self).get("_fn")
            if fn is not None and hasattr(fn, name) and not name.startswith("__"):
                return getattr(fn, name)  # as lower() of a jitted one: what that runs is unwatched
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)


_OLD: dict[str, tuple[str, Any]] = {
    "check": ("flush()", lambda tracker: tracker.flush),
    "dump": ("history.select(...)", lambda tracker: tracker.history.select),
    "fn": ("what anynan.untrack(tracker) returns", lambda tracker: inside(tracker).fn),
    "paused": ("shown by repr(tracker)", lambda tracker: inside(tracker).paused),
    "remarks": ("part of notes", lambda tracker: inside(tracker).judge.notes.remarks),
    "target": ("name", lambda tracker: inside(tracker).target),
}


def _is_cloudpickle(frame: types.FrameType) -> bool:
    return "cloudpickle" in str(frame.f_globals.get("__name__", ""))
