"""Find the first batch that a training step goes bad on, and leave no trace of the search."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Unpack

import torch

from anynan._arrays.containers import leaves
from anynan._base.context import replay_context
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._readings.policy import reading_kind
from anynan._reports.report import render
from anynan._steps.tracked import Handle, inside, untracked
from anynan.errors import AnomalyError, AnynanWarning
from anynan.events import Event
from anynan.options import ADVANCED, EVERYDAY, Options, TrackOptions, environment, flat
from anynan.torch.call.discovery import find_iterators
from anynan.torch.call.randomstate import RandomState
from anynan.torch.messages import BATCH_WRITTEN, SEARCH_BEHIND, SEARCH_GUESS, STATE_BAD
from anynan.torch.private import version
from anynan.torch.read.probes import all_ends, measure, plain
from anynan.torch.session.function import FunctionSession
from anynan.torch.tracking import KNOWN, start
from anynan.torch.update.snapshot import Snapshot, pause_trackers, stateful_objects


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
    ``every=n`` the steps run unwatched. After n of them anynan reads the weights, gradients,
    buffers, optimizer states and returned losses. If something is bad, it puts back the state of n
    batches ago and runs those batches once more, watched, and reads after each. Use it for steps
    that watching slows down, or that it cannot see into. Let the step return its loss: a fault that
    leaves no trace in the state or the loss goes unseen.

    Afterwards models (weights, gradients, buffers, attributes, training flags), optimizers,
    schedulers, loss scalers and random states are as they were found, in the same objects. They
    are searched for in the function's closure, globals, defaults and bound object, and among the
    living optimizers and schedulers of those models. That takes the memory of one copy of all
    this, of two copies and n batches with ``every=n``. Iterators, files, counters and lists of
    the program's own are not put back; ``anynan.replaying()`` is True meanwhile, so that code can
    hold back.

    Args:
        step: A function of one batch that trains on it, or a tracker of one.
        batches: Any iterable; it is walked once, and no further than to the bad batch.
        every: How many steps to run between two readings.
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
        fn = untracked(step)
        given = None if state is None else list(state)
        objects = stateful_objects(fn, batches, given)
        search = _Search(fn, chosen, objects, given or [])
        found = Snapshot(objects)
        stack.enter_context(replay_context())
        try:
            if every == 1:
                return search.watched(enumerate(batches), unread=("optimizer",))
            return search.by_windows(batches, every)
        finally:
            found.restore()
            lost = list(dict.fromkeys(found.lost))
            lost += [f"the iterator {name}" for name in find_iterators(fn)]
            if lost:
                text = NOT_PUT_BACK(who="first_bad_batch", what=", ".join(lost))
                warnings.warn(f"anynan: {text}", AnynanWarning, stacklevel=2)


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


# The search.


# A batch with its index, and the random states and its own versions before it ran.
_Ran = tuple[int, Any, RandomState, list[int]]


@dataclass
class _Search:
    """Run a step over batches, watched or not."""

    fn: Callable[[Any], Any]
    options: Options
    objects: list[Any]
    given: list[Any]

    def __post_init__(self) -> None:
        self.scaled = any(
            isinstance(item, torch.amp.GradScaler) and item.is_enabled() for item in self.objects
        )
        # State that is bad before anything ran may be so by design.
        self.meant = {
            part[:3]: reading_kind(low, high) for part, _, low, high in _read(_parts(self.objects))
        }

    def watched(
        self, batches: Iterable[tuple[int, Any]], unread: tuple[str, ...]
    ) -> BadBatch | None:
        """Run steps under a tracker, and look after each at the phases that it may not read."""
        tracker = start(self.fn, self.options)
        inner = inside(tracker).judge
        models = [item for item in self.given if isinstance(item, torch.nn.Module)]
        try:
            if models and isinstance(inner.adapter, FunctionSession):
                # What was given as state may be out of the function's sight.
                inner.adapter.give(models)
            for index, batch in batches:
                known, error, loss = len(tracker.events), None, None
                try:
                    loss = tracker(batch)
                except Exception as stop:  # noqa: BLE001  the user's own check, perhaps
                    error = stop
                new = [event for event in tracker.events[known:] if event.severity == "bad"]
                if not new and isinstance(error, AnomalyError):
                    new = [error.event]
                if error is not None and not new:
                    error.add_note(f"in batch {index} of first_bad_batch")
                    raise error
                event = _at(new[0], index) if new else self.look([loss], index, unread)
                if event is not None:
                    notes = event.notes if new else (*event.notes, SEARCH_BEHIND())
                    return BadBatch(index, replace(event, notes=notes), batch)
            return None
        finally:
            with inner.softly():
                tracker.remove()

    def by_windows(self, batches: Iterable[Any], every: int) -> BadBatch | None:
        """Run unwatched and look after every few steps; run those again that end badly."""
        self.watched((), ())  # weights that are bad already stop the search here
        numbered = iter(enumerate(batches))
        while True:
            good, failed = Snapshot(self.objects), None
            ran: list[_Ran] = []
            losses: list[Any] = []
            for index, batch in islice(numbered, every):
                ran.append((index, batch, RandomState.now(), _versions(batch)))
                try:
                    losses.append(self.fn(batch))
                except Exception as error:  # noqa: BLE001  the user's own check, perhaps
                    failed = error
                    break
            if not ran:
                return None
            seen = self.look(losses, ran[-1][0], _PHASES)
            if seen is not None or failed is not None:
                good.restore()
                return self.again(ran, seen, failed)
            del good  # before the next copy is made

    def again(self, ran: list[_Ran], seen: Event | None, failed: Exception | None) -> BadBatch:
        """Run batches again, watched, from the state that they began with."""
        changed = ", ".join(str(i) for i, batch, _, before in ran if _versions(batch) != before)

        def batches() -> Iterator[tuple[int, Any]]:
            for index, batch, random, _ in ran:
                random.restore()
                yield index, batch

        found = self.watched(batches(), _PHASES)
        if found is None:
            index, batch = ran[-1][:2]
            if failed is not None:
                failed.add_note(f"in batch {index} of first_bad_batch")
                raise failed
            assert seen is not None  # or there was nothing to look for
            found = BadBatch(index, replace(seen, notes=(*seen.notes, SEARCH_GUESS())), batch)
        if changed:
            note = BATCH_WRITTEN(batch=changed)
            event = replace(found.event, notes=(*found.event.notes, note))
            found = replace(found, event=event)
        return found

    def look(self, losses: list[Any], index: int, phases: tuple[str, ...]) -> Event | None:
        """Look at the state and the losses; describe the first that is bad."""
        asked = (pair for pair in _parts(self.objects, losses) if pair[0][0] in phases)
        for part, x, low, high in _read(asked):
            phase, tensor, weight, buffer = part
            kind, state = reading_kind(low, high), phase == "optimizer"
            if kind is None or (self.scaled and phase == "backward"):
                continue  # a loss scaler makes infinite gradients on purpose
            if (buffer or state) and self.meant.get(part[:3]) == kind:
                continue
            layer = None if weight is None else weight.rpartition(".")[0]
            # A buffer of -Inf is a mask.
            judged = self.options.policy.weigh(kind, "forward" if buffer else phase, layer)
            if judged is not None and judged[1] == "bad":
                return Event(
                    backend="torch", layer=layer, phase=phase, kind=kind, severity="bad",
                    step=index, tensor=tensor, parameter=weight, summary=measure(x),
                    notes=(STATE_BAD(part=tensor),) * state,
                )  # fmt: skip
        return None


def _at(event: Event, index: int) -> Event:
    """Count an event's steps as batches."""
    shift = index - event.step
    since = None if event.since is None else (event.since[0] + shift, event.since[1] + shift)
    return replace(event, step=index, since=since)


def _versions(batch: Any) -> list[int]:
    """Count the writes to the tensors of a batch."""
    return [
        version(x)
        for _, x in leaves(batch, "batch")
        if isinstance(x, torch.Tensor) and not x.is_inference()
    ]


# What a step may make bad.

_PHASES = ("loss", "parameter", "backward", "optimizer")
# Phase, words, the weight that it belongs to, and whether it is a buffer.
_Part = tuple[Any, str, str | None, bool]


def _parts(
    objects: Iterable[Any], losses: Iterable[Any] = ()
) -> Iterator[tuple[_Part, torch.Tensor]]:
    """Walk losses, weights, gradients, buffers and optimizer states."""
    for loss in losses:
        for name, x in leaves(loss, "loss"):
            if isinstance(x, float):
                x = torch.tensor(x, dtype=torch.float64, device="cpu")  # noqa: PLW2901
            if isinstance(x, torch.Tensor) and x.numel() == 1:
                yield ("loss", name, None, False), x
    names: dict[int, str] = {}
    for model in objects:
        if isinstance(model, torch.nn.Module):
            for name, p in model.named_parameters():
                names.setdefault(id(p), name)
                word = name.rpartition(".")[2]
                yield ("parameter", word, name, False), p
                if p.grad is not None:
                    yield ("backward", f"grad of {word}", name, False), p.grad
            for name, buffer in model.named_buffers():
                yield ("parameter", name.rpartition(".")[2], name, True), buffer
    for optimizer in objects:
        if isinstance(optimizer, torch.optim.Optimizer):
            for weight, held in optimizer.state.items():
                for name, x in leaves(held, "state"):
                    if isinstance(x, torch.Tensor):
                        yield ("optimizer", name, names.get(id(weight)), False), x


def _read(
    found: Iterable[tuple[_Part, torch.Tensor]],
) -> list[tuple[_Part, torch.Tensor, float, float]]:
    """Give both ends of every tensor that can hold something bad; one read for each device."""
    kept = [(part, x, values) for part, x in found if (values := plain(x)) is not None]
    read = all_ends([values for _, _, values in kept])
    return [(part, x, *both) for (part, x, _), both in zip(kept, read, strict=True)]
