"""What the code of a call reaches: kept as the call begins, and found so by a second run."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from anynan._base import context
from anynan._base.threads import busy_threads
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._reach import Exhausted, Kinds, Reach, container_state, refill
from anynan._reach.messages import ANOTHER_THREAD, STATE_MISSED
from anynan.arrays.records import is_finite
from anynan.arrays.tracked import is_tracked

KINDS = Kinds(arrays=(np.ndarray,))
# Bytes of an array that is copied when a call begins, and how many of them are looked at.
SMALL = 2**16
MANY = 100
_SAMPLE = 64  # elements by which a larger one is known again


def _itself(x: Any) -> Any:
    return x


class ReachableState:
    """Keep what calls of one function can reach.

    Args:
        fn: The function.

    Attributes:
        is_due: Counts a call; tells whether it is time to look again.
        is_empty: Whether there was nothing at the last search that a run could change.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._reach = Reach(fn, KINDS)
        self.is_due = self._reach.is_due
        self.is_empty = False

    def look(self) -> Self:
        """Search for what a call can reach."""
        self._reach.search([])
        self.is_empty = self._reach.is_empty
        return self

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "StateSnapshot":
        """Take what a call begins with."""
        given = [(f"args[{i}]", x) for i, x in enumerate(args)]
        given = [(name, x) for name, x in (*given, *kwargs.items()) if type(x) is not np.ndarray]
        return StateSnapshot(self._reach, given)

    def lending(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have iterators keep what the call takes from them."""
        return self._reach.lending(args, kwargs)


class StateSnapshot:
    """Hold what a call began with, beside its arguments.

    Args:
        reach: What its code reaches: plain state, containers and generators are kept.
        given: Its arguments by name, those that are no arrays.

    Attributes:
        held: Containers among the arguments that were kept elsewhere, with keys and items.
        missed: What the last second run did not find as the first had.
    """

    def __init__(self, reach: Reach, given: list[tuple[str, Any]]) -> None:
        self._reach, self._given, self._kept = reach, given, reach.now(given)
        self._random = random.getstate()
        self.missed: list[str] = []
        self.held: Sequence[tuple[Any, tuple[Any, ...] | None, tuple[Any, ...]]] = ()
        self._known: dict[int, tuple[Any, Any]] = {}
        for holder in self._kept.arrays[:MANY]:
            x = holder.get()
            if isinstance(x, np.ndarray) and x.dtype != object:
                self._known[id(x)] = x, x.copy() if x.nbytes <= SMALL else mark(x)

    @contextmanager
    def again(
        self, say: Callable[[str], object], lend: Callable[[Any], Any] = _itself,
        give: Callable[[Any, str], Any] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Let a second run find what the first found, and put all of it back after it.

        Args:
            say: Is told of what could not be put back.
            lend: Puts an array that the code reaches under watch, if one does.
            give: Does so with the arrays of an iterator's item.

        Raises:
            ReplayError: If it would move what cannot be put back.
        """
        reach, self.missed = self._reach, []
        present, drawn = reach.now(self._given), np.random.get_state()  # noqa: NPY002
        python = random.getstate()
        held = [container_state(value) for value, _, _ in self.held]
        arrays = [(holder, holder.get()) for holder in self._kept.arrays]
        busy = busy_threads()
        try:
            if busy:
                self.missed = [ANOTHER_THREAD(name=next(iter(busy.values())))]
            else:
                self.missed = [STATE_MISSED(what=what) for what in reach.put_back(self._kept)]
                random.setstate(self._random)
            for value, keys, then in self.held:
                refill(value, then if keys is None else tuple(zip(keys, then, strict=True)))
            for holder in self._kept.arrays:
                x = holder.get()
                if isinstance(x, np.ndarray):
                    copy = self._as_it_was(holder.name, x)
                    holder.set(lend(copy))
            with context.replay_context(), reach.again(give):
                yield
        except Exhausted as error:
            raise ReplayError(str(error)) from error
        finally:
            np.random.set_state(drawn)  # noqa: NPY002
            random.setstate(python)
            for holder, x in arrays:
                holder.set(x)
            for undo in held:
                if undo is not None:
                    undo()
            for what in present.put_back():
                say(NOT_PUT_BACK(who="a second run", what=what))

    def corrupted(self) -> Iterator[tuple[str, Any]]:
        """Yield what the code reaches past its arguments and that this call made bad.

        Under the recorder that is what its operations wrote.
        """
        done: set[int] = set()
        for holder in self._kept.arrays[:MANY]:
            x = holder.get()
            plain = x._raw if is_tracked(x) else x
            if id(x) in done or not isinstance(plain, np.ndarray) or is_finite(plain):
                continue
            done.add(id(x))
            known = self._at_first(x)
            if is_tracked(x):
                made = bool(x._tape.parents(x))
            elif known is None:
                made = True
            else:  # of a large one only some elements are known
                before = np.frombuffer(known, x.dtype) if isinstance(known, bytes) else known
                made = not _is_same(x, known) and is_finite(before)
            if made:
                yield holder.name, x

    def had(self, x: Any) -> bool:
        """Tell whether an array was there, and held what it holds now."""
        known = self._at_first(x)
        return known is not None and _is_same(x, known)

    def _as_it_was(self, name: str, x: Any) -> Any:
        known = self._at_first(x)
        if isinstance(known, np.ndarray):
            return known.copy()
        if known is not None and not _is_same(x, known):
            self.missed.append(STATE_MISSED(what=f"{name} (written in place, too large to keep)"))
        return x.copy()

    def _at_first(self, x: Any) -> Any:
        """Give the copy or the mark of an array that was there, or None."""
        _, known = self._known.get(id(x), (None, None))
        return known


@contextmanager
def untouched(fn: Callable[..., Any], say: Callable[[str], object]) -> Iterator[None]:
    """Have all that a function's code reaches afterwards as it was before.

    Args:
        fn: The function.
        say: Is told of what could not be put back.

    Raises:
        ReplayError: If the code takes from an iterator or a queue: there is nothing to give it.
    """
    reached = ReachableState(fn).look()
    with reached.lending((), {}), reached.begin((), {}).again(say):
        yield


def mark(x: Any) -> bytes:
    """Give some elements, by which an array is known again."""
    flat = x.reshape(-1) if x.flags.c_contiguous else x.flat
    held: bytes = np.asarray(flat[:: max(x.size // _SAMPLE, 1)]).tobytes()
    return held


def _is_same(x: Any, known: Any) -> bool:
    """Tell whether an array holds what its copy or its mark says."""
    if isinstance(known, np.ndarray):
        return bool(known.tobytes() == x.tobytes())
    return bool(mark(x) == known)
