"""What watched models gave that was bad: the next one that is given it has no bad batch."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from anynan._steps.subject import Subject

# Tells whether another array lies in the same memory.
Memory = Callable[[Any], bool]

# As many are remembered: those of the steps that are open, and of the last ones.
MANY = 64


@dataclass(frozen=True, slots=True)
class Producer:
    """Say what of a watched model may be what another was given.

    Attributes:
        name: The model's.
        step: In which of its steps it was bad.
        certain: True if it is the same memory; else the model gave something bad just before, and
            if that is the model itself, something of the same shape in its last step.
        itself: Whether it is the model that was given it.
    """

    name: str
    step: int
    certain: bool
    itself: bool = False


@dataclass(frozen=True, slots=True)
class _Made:
    subject: weakref.ref[Subject]
    name: str
    step: int
    memory: Memory | None
    own: bool
    thread: int
    number: int
    shape: Any


_made: deque[_Made] = deque(maxlen=MANY)


# The number of what is remembered next, by which a step tells what came after it; what it was as
# the program that is watched as a whole began.
upcoming, began = [0], [0]


def note(
    subject: Subject, step: int, memory: Memory | None, *, own: bool, value: Any = None
) -> None:
    """Remember something bad that left a watched layer or function.

    Args:
        subject: What is tracked.
        step: In which it was read.
        memory: Where it lies, None where that is not known.
        own: False if bad data had come in, which may be what it is.
        value: The array, None where its shape does not tell.
    """
    thread, shape = threading.get_ident(), _shape(value)
    _made.append(
        _Made(weakref.ref(subject), subject.name, step, memory, own, thread, turn(), shape)
    )


def turn() -> int:
    """Number what happened to be bad, among all that is watched."""
    upcoming[0] += 1
    return upcoming[0] - 1


def producer(subject: Subject, value: Any, since: float, last: int = -1) -> Producer | None:
    """Give what is known of the origin of something bad that a model was given.

    Args:
        subject: That model.
        value: What it was given, None if it is gone.
        since: What was remembered when its last step ended.
        last: The number of that, where what it gave may have been made into this.
    """
    near, shape = None, _shape(value)
    for made in reversed(tuple(_made)):
        other = made.subject()
        if value is not None and made.memory is not None and made.memory(value):
            return Producer(made.name, made.step, certain=True, itself=other is subject)
        if other is None or other.watched_by is None:
            continue  # it is tracked no more: only what it gave is known
        here = made.own and made.thread == threading.get_ident() and near is None
        if here and other is not subject and made.number >= since:
            near = Producer(made.name, made.step, certain=False)
        elif here and other is subject and made.step == last and shape and made.shape == shape:
            near = Producer(made.name, made.step, certain=False, itself=True)
    return near


def among(values: Iterable[Any]) -> Memory:
    """Give what knows these by identity, and keeps none of them alive."""
    refs = [x if isinstance(x, weakref.ref) else weakref.ref(x) for x in values]
    return lambda x: any(ref() is x for ref in refs)


def hand_on(values: list[Any], made_of_them: Iterable[Any]) -> bool:
    """Remember what the program made of something bad that was told; tell whether it was."""
    for made in reversed(tuple(_made)):
        if made.memory is not None and any(map(made.memory, values)):
            _made.append(replace(made, memory=among(made_of_them), number=turn()))
            return True
    return False


def _shape(value: Any) -> Any:
    """Give an array's shape, None where it has none that it can tell, as if it is ragged."""
    try:
        return getattr(value, "shape", None)
    except RuntimeError:
        return None
