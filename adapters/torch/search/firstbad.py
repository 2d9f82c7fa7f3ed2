"""Find the first batch that a training step goes bad on, and leave no trace of the search."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch

from anynan._arrays.containers import leaves
from anynan._base.context import replay_context
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._reports.report import render
from anynan._steps.tracked import Handle, inside
from anynan.errors import AnomalyError, AnynanWarning
from anynan.events import Event
from anynan.options import ADVANCED, EVERYDAY, Options, TrackOptions, environment, flat
from anynan.torch.call.discovery import find_iterators
from anynan.torch.call.randomstate import RandomState
from anynan.torch.call.snapshot import Snapshot
from anynan.torch.private import version
from anynan.torch.search.objects import objects_of, pause_trackers
from anynan.torch.search.parts import first_bad, meant, moments, parts
from anynan.torch.session.function import FunctionSession
from anynan.torch.tracking import KNOWN, start
from anynan.tracker import Tracker

BEHIND = (
    "found by looking at the state after the step: the tracker saw nothing bad, so it was made "
    "where it does not watch"
)


@dataclass(frozen=True, eq=False)
class BadBatch:
    """Hold what ``first_bad_batch`` found; its text is the report.

    Attributes:
        index: Position of the batch in ``batches``, from 0.
        event: What went bad; phase ``input`` where the batch itself holds bad values.
        batch: The batch, as ``batches`` gave it.
    """

    index: int
    event: Event
    batch: Any = field(repr=False)

    def __str__(self) -> str:
        return f"batch {self.index} is the first bad one\n\n{render(self.event)}"


def first_bad_batch(
    step: Callable[[Any], Any],
    batches: Iterable[Any],
    *,
    every: int = 1,
    state: Iterable[Any] | None = None,
    **options: Unpack[TrackOptions],
) -> BadBatch | None:
    """Train on batches until one makes something bad, then put everything back.

    Each batch is one call of ``step``, watched as by ``track`` with ``parameters=True``. With
    ``every=n`` the steps run unwatched, and only after n of them the weights, gradients, buffers,
    optimizer states and returned losses are looked at. When something is bad there, the state of n
    batches ago is put back, bisection finds the batch, and the batch is run once more under the
    tracker. This is for steps that watching slows down, or that it cannot see into. Let the step
    return its loss: what leaves no trace in the state or the loss goes unseen between two looks.

    Afterwards models (weights, gradients, buffers, attributes, training flags), optimizers,
    schedulers, loss scalers and random states are as they were found, in the same objects. They
    are searched for in the function's closure, globals, defaults and bound object, and among the
    living optimizers and schedulers of those models. That takes the memory of one copy of all
    this, of three copies and n batches with ``every=n``. Iterators, files, counters and lists of
    the program's own are not put back; ``anynan.replaying()`` is True meanwhile, so that code can
    stand back.

    Args:
        step: A function of one batch that trains on it, or a tracker of one.
        batches: Any iterable; it is walked once, and no further than to the bad batch.
        every: How many steps to run between two looks.
        state: More objects to put back, with ``state_dict`` and ``load_state_dict``.
        **options: Options of ``track``, such as ``policy``, ``layers`` and ``exclude``.

    Returns:
        The first bad batch with its index and event, None if no batch is bad.

    Raises:
        TypeError: If step or batches cannot be used, or an option is unknown.
        ValueError: If no state can be found, or every is no positive number.
        NonFiniteError: If a weight is bad before the first batch.

    Example:
        >>> import torch, anynan
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(batch):
        ...     optimizer.zero_grad()
        ...     loss = model(batch).log().sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> _ = torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> bad = anynan.torch.first_bad_batch(step, [torch.ones(3, 2), -torch.ones(3, 2)])
        >>> bad.index, bad.event.operation.name
        (1, 'log')
    """
    chosen = _check(step, batches, every, options)
    with ExitStack() as stack:
        pause_trackers(step, stack)
        fn = inside(step).fn if isinstance(step, Handle) else step
        given = None if state is None else list(state)
        objects = objects_of(fn, batches, given)
        search = _Search(fn, chosen, objects, given or [])
        start = Snapshot(objects)
        stack.enter_context(replay_context())
        try:
            return search.one_by_one(batches) if every == 1 else search.by_windows(batches, every)
        finally:
            start.restore()
            _say_lost(fn, start)


def _check(step: Any, batches: Any, every: Any, options: Mapping[str, Any]) -> Options:
    if isinstance(step, torch.nn.Module | type) or not callable(step):
        seen = step.__name__ if isinstance(step, type) else type(step).__name__
        msg = (
            f"first_bad_batch() takes a function that trains on one batch, not {seen}: "
            "write for example lambda batch: model(batch).sum().backward()"
        )
        raise TypeError(msg)
    if isinstance(step, Handle) and isinstance(inside(step).fn, torch.nn.Module | None):
        msg = "this tracker watches a model: give the function that trains on one batch"
        raise TypeError(msg)
    walkable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, Mapping | str | bytes) or not walkable:
        msg = f"batches is an iterable of batches, not {type(batches).__name__}"
        raise TypeError(msg)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        msg = f"every={every!r}: give how many steps to run between two looks, 1 or more"
        raise ValueError(msg)
    given = flat(options)
    for name in ("action", "patience", "read", "parameters"):
        if name in given:
            msg = f"first_bad_batch() sets {name}= by itself"
            raise TypeError(msg)
    if environment() == "off":
        msg = "ANYNAN=off turns watching off: unset it to look for the first bad batch"
        raise ValueError(msg)
    for name in given.keys() - {*EVERYDAY, *ADVANCED}:
        known = ", ".join(("every", "state", *EVERYDAY))
        msg = f"first_bad_batch() has no option {name!r}; the options are {known}"
        raise TypeError(msg)
    chosen = Options.checked(options, KNOWN, "PyTorch")
    if isinstance(step, Handle) and not options:
        chosen = inside(step).judge.options
    return replace(chosen, action="raise", patience=0, parameters=True, read="auto")


def _say_lost(fn: Any, start: Snapshot) -> None:
    lost = list(dict.fromkeys(start.lost))
    lost += [f"the iterator {name}" for name in find_iterators(fn)]
    if lost:
        text = NOT_PUT_BACK(who="first_bad_batch", what=", ".join(lost))
        warnings.warn(f"anynan: {text}", AnynanWarning, stacklevel=3)


# The search.


class _Search:
    """Run a step over batches, watched or not."""

    def __init__(
        self, fn: Callable[[Any], Any], options: Options, objects: list[Any], given: list[Any]
    ) -> None:
        self.fn, self.options, self.objects = fn, options, objects
        self.scaled = any(
            isinstance(item, torch.amp.GradScaler) and item.is_enabled() for item in objects
        )
        self.meant = meant(parts(objects))
        self.given = [item for item in given if isinstance(item, torch.nn.Module)]

    def one_by_one(self, batches: Iterable[Any]) -> BadBatch | None:
        """Watch every step."""
        with self._tracker() as tracker:
            for index, batch in enumerate(batches):
                event = _run(tracker, batch, index) or self.look_behind(index)
                if event is not None:
                    return BadBatch(index, event, batch)
        return None

    def by_windows(self, batches: Iterable[Any], every: int) -> BadBatch | None:
        """Run unwatched, and look after every few steps."""
        self._tracker_of_now().remove()  # weights that are bad already stop the search here
        first = 0
        window = _Window(self, first)
        for batch in batches:
            failed = window.run(batch)
            if failed is None and len(window.batches) < every:
                continue
            if failed is not None or window.bad():
                return window.locate(failed)
            first += len(window.batches)
            window = _Window(self, first)
        return window.locate(None) if window.batches and window.bad() else None

    def _tracker_of_now(self) -> Tracker:
        tracker = start(self.fn, self.options)
        session = inside(tracker).judge.adapter
        if self.given and isinstance(session, FunctionSession):
            # What was given as state may be out of the function's sight.
            session.give(self.given)
        return tracker

    @contextmanager
    def _tracker(self) -> Iterator[Tracker]:
        tracker = self._tracker_of_now()
        try:
            yield tracker
        finally:
            with inside(tracker).judge.softly():
                tracker.remove()

    def look(self, losses: list[Any], index: int) -> Event | None:
        """Look at the state and the losses; describe the first that is bad."""
        found = parts(self.objects, losses)
        return first_bad(found, self.options.policy, index, self.meant, scaled=self.scaled)

    def look_behind(self, index: int) -> Event | None:
        """Look at what the tracker does not read: the optimizers' own states."""
        names = {
            id(p): name
            for model in self.objects
            if isinstance(model, torch.nn.Module)
            for name, p in model.named_parameters()
        }
        found = moments(self.objects, names)
        event = first_bad(found, self.options.policy, index, self.meant, scaled=self.scaled)
        return None if event is None else replace(event, notes=(*event.notes, BEHIND))

    def watched(self, batch: Any, index: int) -> Event | None:
        """Run one step under a tracker of its own."""
        with self._tracker() as tracker:
            return _run(tracker, batch, index)


def _run(tracker: Tracker, batch: Any, index: int) -> Event | None:
    """Run one watched step; give its event if it is bad."""
    known = tracker.events
    error: BaseException | None = None
    try:
        tracker(batch)
    except AnomalyError as stop:
        error = stop
    except Exception as stop:
        stop.add_note(f"in batch {index} of first_bad_batch")
        error = stop
        if not _new(tracker, known):
            raise
    found = _new(tracker, known)
    if found:
        return _at(found[0], index)
    return _at(error.event, index) if isinstance(error, AnomalyError) else None


def _new(tracker: Tracker, known: tuple[Event, ...]) -> list[Event]:
    return [e for e in tracker.events[len(known) :] if e.severity == "bad"]


def _at(event: Event, index: int) -> Event:
    """Count an event's steps as batches."""
    shift = index - event.step
    since = None if event.since is None else (event.since[0] + shift, event.since[1] + shift)
    return replace(event, step=index, since=since)


class _Window:
    """Hold the batches since the last good state, and that state."""

    def __init__(self, search: _Search, first: int) -> None:
        self.search, self.first = search, first
        self.batches: list[Any] = []
        self.randoms: list[RandomState] = []
        self.versions: list[list[int]] = []
        self.losses: list[Any] = []
        self.seen: Event | None = None
        self.good = Snapshot(search.objects)

    def run(self, batch: Any) -> Exception | None:
        """Run one more step; give the error that it raised."""
        self.batches.append(batch)
        self.randoms.append(RandomState.now())
        self.versions.append(_versions(batch))
        try:
            self.losses.append(self.search.fn(batch))
        except Exception as error:  # noqa: BLE001  the user's own check, perhaps
            return error
        return None

    def bad(self) -> bool:
        """Tell whether the state or a loss is bad now, and remember which."""
        last = self.first + len(self.batches) - 1
        found = self.search.look(self.losses, last)
        self.seen = self.seen or found
        return found is not None

    def locate(self, failed: Exception | None) -> BadBatch:
        """Bisect, and run the batch that is found under the tracker."""
        changed = [
            str(self.first + i)
            for i, (batch, before) in enumerate(zip(self.batches, self.versions, strict=True))
            if _versions(batch) != before
        ]
        low, high = 0, len(self.batches)
        while high - low > 1:
            middle = (low + high) // 2
            self.good.restore()
            self.losses.clear()
            for i in range(low, middle):
                self.randoms[i].restore()
                self.losses.append(self.search.fn(self.batches[i]))
            if self.bad():
                high = middle
            else:
                low = middle
                self.good = Snapshot(self.search.objects)
        self.good.restore()
        self.randoms[low].restore()
        index, batch = self.first + low, self.batches[low]
        event = self.search.watched(batch, index) or self._unwatched(index, failed)
        if changed:
            note = (
                f"the step writes into its batch (batch {', '.join(changed)}), so what was run "
                "again started from other values"
            )
            event = replace(event, notes=(*event.notes, note))
        return BadBatch(index, event, batch)

    def _unwatched(self, index: int, failed: Exception | None) -> Event:
        """Describe what the tracker did not see: what is bad now, or was at the end."""
        event = self.search.look([], index)
        if event is not None:
            note = BEHIND
        elif failed is not None:
            failed.add_note(f"in batch {index} of first_bad_batch")
            raise failed
        else:
            assert self.seen is not None  # or there was nothing to look for
            event = self.seen
            note = (
                "it did not happen again when the batches ran a second time from the last good "
                "state: the batch is a guess"
            )
        return replace(event, step=index, notes=(*event.notes, note))


def _versions(batch: Any) -> list[int]:
    """Count the writes to the tensors of a batch."""
    return [
        version(x)
        for _, x in leaves(batch, "batch")
        if isinstance(x, torch.Tensor) and not x.is_inference()
    ]
