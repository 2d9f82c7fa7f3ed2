"""Watch what comes out of a data loader: which batch, which field, which row."""

import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from anynan._arrays.access import (
    BLOCK,
    REFUSALS,
    detached,
    library_name,
    namespace,
    on_host,
    to_host,
    type_name,
)
from anynan._arrays.chunked import is_chunked
from anynan._arrays.containers import is_container, is_leaf
from anynan._arrays.messages import BATCH_UNREAD
from anynan._arrays.probe import probe
from anynan._arrays.values import plain
from anynan._base import context
from anynan._base.notices import warn
from anynan._checks import Finding, look_at_all
from anynan._diagnosis.causes import Situation, explain
from anynan._readings.policy import DEFAULT, Policy, reading_kind
from anynan._reports.logs import log
from anynan._reports.report import render
from anynan._steps.messages import ALLOW_IT
from anynan.errors import AnomalyError, NonFiniteError
from anynan.events import NON_FINITE, Event, Kind, Spread
from anynan.options import CHECKS, environment

T = TypeVar("T")
Action = Literal["raise", "warn", "record", "skip"] | Callable[[Event], object]

# What a function calls that makes another loader of one, for this process or for several.
_PREPARES, _SHARDS = "prepare_data_loader", "_requires_distributed_sampler"
_REMADE = (
    "a loader cannot be prepared or sharded once it is watched: do that first, and give "
    "anynan.watch() the loader that comes of it"
)
MAX_EVENTS = 10_000


class Watched(Generic[T]):
    """Yield the batches of an iterable, each one looked at; made by ``anynan.watch``.

    Whatever else the iterable can do (``len``, ``dataset``, ``set_epoch``) it can still do.

    Attributes:
        name: What a batch is called in reports.
        events: What was found, oldest first.
    """

    def __init__(self, iterable: Iterable[T], name: str, policy: Policy, action: Action) -> None:
        self._iterable, self._policy, self._action = iterable, policy, action
        self.name = name
        self._told = False
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def __iter__(self) -> Iterator[T]:
        for number, batch in enumerate(self._iterable):
            if self._passes(number, batch):
                yield batch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Libraries look for loaders to prepare by their class, and pass others by in silence.
        asked = set(sys._getframe(1).f_code.co_names)
        if _PREPARES in asked or (_SHARDS in asked and os.environ.get("WORLD_SIZE", "1") != "1"):
            raise TypeError(_REMADE)
        return Watched

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_iterable":
            raise AttributeError(name)
        return getattr(self._iterable, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # What loads it may not have anynan: the first of a tuple is the loader itself.
        return operator.getitem, ((self._iterable,), 0)

    def __repr__(self) -> str:
        return f"<anynan.watch {self.name}: {self._iterable!r}>"

    def _passes(self, number: int, batch: Any) -> bool:
        """Look at one batch, act, and tell whether it is to be handed on."""
        action: Any = environment() or self._action
        if action == "off" or not (is_leaf(batch) or is_container(batch)):
            return True
        found, unread = look_at_all(batch, self.name, self._policy, None, "input")
        if unread is not None and not self._told:
            self._told = True
            warn(f"anynan: {BATCH_UNREAD(error=unread)}")
        bad = [finding for finding in found if finding.severity == "bad"]
        for finding in found:
            if finding.severity == "suspect":
                self.events.append(_event(finding, [], number))
                log(self.events[-1])
        if not bad:
            return True
        event = _event(bad[0], bad[1:], number)
        self.events.append(event)
        log(event)
        running = context.running.get()
        if running is not None and running.take(event, bad[0].array, len(bad) - 1):
            return bool(action != "skip")  # made in this call, and no fault of the data
        if action == "raise":
            error = NonFiniteError if event.kind in NON_FINITE else AnomalyError
            raise error(render(event), event)
        if action in ("warn", "skip"):
            text = render(event) + ("\n\n  this batch is left out" if action == "skip" else "")
            warn(text)
        elif callable(action):
            action(event)
        return bool(action != "skip")


def watch(
    iterable: Iterable[T], name: str = "batch", *, policy: Policy | None = None,
    action: Action = "raise",
) -> Watched[T]:  # fmt: skip
    """Wrap a data loader, and check every batch before it is used.

    Args:
        iterable: What yields the batches: arrays, or containers of them.
        name: What a batch is called in reports, such as ``train``.
        policy: What counts as bad; ``Policy()`` by default. As for a model's inputs, -Inf alone
            is only suspect.
        action: ``"raise"``, ``"warn"``, ``"record"``, ``"skip"`` (the batch is left out) or a
            function of the Event. ``ANYNAN`` in the environment overrides it.

    Returns:
        An iterable of the same batches, the same objects; its length and attributes are those of
        the one that was given, ``.events`` holds what was found.

    Raises:
        TypeError: If ``iterable`` yields no batches, or an option is of the wrong type.
        ValueError: If the action is unknown.
        NonFiniteError: While it is iterated, if a batch is bad.

    Example:
        >>> import anynan, numpy
        >>> data = [{"x": numpy.ones((2, 3))}, {"x": numpy.full((2, 3), numpy.nan)}]
        >>> batches = anynan.watch(data, "train", action="record")
        >>> len(list(batches)), batches.events[0].step, batches.events[0].tensor
        (2, 1, "train['x']")
    """
    if not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
        msg = f"watch() takes something that yields batches, not {type_name(iterable)}"
        raise TypeError(msg)
    if not isinstance(name, str):
        msg = f"watch(name=...) takes a string, not {type_name(name)}"
        raise TypeError(msg)
    if policy is not None and not isinstance(policy, Policy):
        msg = f"watch(policy=...) takes an anynan.Policy, not {type_name(policy)}"
        raise TypeError(msg)
    CHECKS["action"]("action", action)
    return Watched(iterable, name, DEFAULT if policy is None else policy, action)


def bad_rows(value: Any) -> tuple[int, ...]:
    """List the rows of an array of any library that hold a NaN or an Inf."""
    try:
        shape = getattr(value, "shape", ())
        if not shape or is_chunked(value):
            return ()
        held = plain(value)
        if tuple(held.shape) != tuple(shape):  # the stored elements of a sparse array
            return ()
        view = on_host(held)
        if view is not None:
            return tuple(_rows(view))
        xp = namespace(value)
        flags = ~xp.isfinite(detached(value))
        flags = xp.any(xp.reshape(flags, (shape[0], -1)), axis=1)
        if hasattr(xp, "argwhere"):  # the numbers of the bad rows cross, not a flag for each
            return tuple(to_host(xp.argwhere(flags)).ravel().tolist())
        return tuple(np.flatnonzero(to_host(flags)).tolist())
    except REFUSALS:
        return ()


def _rows(view: np.ndarray[Any, Any]) -> Iterator[int]:
    many = max(1, BLOCK // max(1, view[:1].size))
    for start in range(0, len(view), many):
        block = view[start : start + many]
        if block.dtype.kind == "V" and block.dtype.names is None:  # a float that NumPy has not
            block = block.astype(np.float32)
        if block.dtype.char in "efdgFDG":
            bad = ~np.isfinite(np.ma.getdata(block)) & ~np.ma.getmaskarray(block)
            yield from (start + np.flatnonzero(bad.reshape(len(block), -1).any(axis=1))).tolist()
            continue
        for i in range(len(block)):
            span = probe(block[i : i + 1])
            if span is not None and reading_kind(*span) is not None:
                yield start + i


def _event(finding: Finding, others: list[Finding], number: int) -> Event:
    return Event(
        backend=library_name(finding.array),
        layer=None,
        phase="input",
        kind=finding.kind,
        severity=finding.severity,
        step=number,
        tensor=finding.path,
        summary=finding.summary,
        cause=explain(
            Situation(
                phase="input",
                kind=finding.kind,
                tensor=finding.path,
                summary=finding.summary,
                rows=bad_rows(finding.array) if finding.kind in NON_FINITE else (),
            )
        ),
        spread=Spread(len(others)),
        notes=(ALLOW_IT(policy=_allowing(finding.kind)),),
    )


def _allowing(kind: Kind) -> str:
    """Write the option that would let such data pass."""
    return f'policy=anynan.Policy(allow=anynan.Allow("*", "{kind}", "why", "input"))'
