"""What one step's code can reach: searched seldom, kept at every step."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from anynan._base.interrupts import Interrupts
from anynan._diagnosis.evidence import ReplayError
from anynan._reach.items import Items, is_plain
from anynan._reach.kept import Kept
from anynan._reach.messages import ITERATOR_UNHELD
from anynan._reach.patience import patience
from anynan._reach.queues import Taken, is_queue
from anynan._reach.search import Found, Holder, Kinds, Search, fixed, is_iterator

_NOTHING = Found()
_NOTHING_KEPT = Kept()


class Reach:
    """Keep what the code of a step can reach, so that a second run finds what the first found.

    Objects are searched for at the first step, and again at the second, fourth, eighth and so
    on (``is_due``): what a program makes later is met then.

    Args:
        fn: The step's function.
        kinds: What the framework's own objects are.

    Attributes:
        is_empty: Whether the last search found nothing that a run could change.
    """

    def __init__(self, fn: Any, kinds: Kinds) -> None:
        self._fn, self._kinds = fn, kinds
        self._found = Found()
        self.is_empty = False
        self._calls = 0
        self._lent: dict[int, Items] = {}
        self._guards: dict[int, Items] = {}
        self._queues: list[Taken] = []
        self._runs_again = False
        self._began = time.monotonic()

    def is_due(self) -> bool:
        """Count a step; tell whether it is time to search again."""
        self._calls += 1
        return self._calls & (self._calls - 1) == 0

    def search(self, more: Iterable[Holder]) -> None:
        """Look for everything again.

        Args:
            more: Where further objects are that its code runs.
        """
        self._found = Search(self._fn, more, self._kinds).found
        self.is_empty = self._found == _NOTHING

    def now(self, given: Iterable[tuple[str, Any]] = ()) -> Kept:
        """Take the present state.

        Args:
            given: Arguments of the step by name, which are looked through at every step.
        """
        holders = [fixed(name, value) for name, value in given]
        if not holders:
            return _NOTHING_KEPT if self.is_empty else Kept(self._found)
        return Kept(self._found, Search(None, holders, self._kinds).found)

    @property
    def arrays(self) -> list[Holder]:
        """Where arrays are held that the step may write to in place."""
        return self._found.arrays

    def put_back(self, kept: Kept) -> list[str]:
        """Make everything what it was then, with what stands for iterators in their place.

        In a second run those begin again, too.

        Returns:
            What could not be put back, with the error.
        """
        if self._runs_again:
            for items in self._lent.values():
                items.rewind()
            for taken in self._queues:
                taken.record.rewind()
        return kept.put_back({**self._lent, **self._guards})

    @contextmanager
    def lending(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Have iterators keep what the step takes; afterwards all is held as it was.

        Args:
            args: The step's arguments.
            kwargs: Those by name.

        Yields:
            The arguments to call it with.
        """
        self._began = time.monotonic()
        if not self._lends_any(args, kwargs):
            yield args, kwargs
            return
        swapped: list[tuple[Holder, Items]] = []
        lent: dict[int, Items] = {}

        def lend(name: str, value: Any) -> Any:
            if not self._may_lend(value):
                return value
            if id(value) not in lent:
                lent[id(value)] = Items(value, name)
            return lent[id(value)]

        try:
            with Interrupts():
                for holder in self._found.iterators:
                    value = holder.get()
                    if self._may_lend(value) and holder.set(lend(holder.name, value)):
                        swapped.append((holder, lent[id(value)]))
                args = tuple(lend(f"args[{i}]", value) for i, value in enumerate(args))
                kwargs = {name: lend(name, value) for name, value in kwargs.items()}
                self._lent = lent
                named = {f"args[{i}]": value for i, value in enumerate(args)} | kwargs
                named |= {holder.name: holder.get() for holder in self._found.queues}
                queues = {id(x): (x, name) for name, x in named.items() if is_queue(x)}
                self._queues = [Taken(x, name) for x, name in queues.values()]
            yield args, kwargs
        finally:
            with Interrupts():
                for taken in self._queues:
                    taken.end()
                self._lent, self._queues = {}, []
                for holder, items in swapped:
                    if holder.get() is items:  # else the step put another there
                        holder.set(items.iterator)

    @contextmanager
    def again(self, change: Callable[[Any, str], Any] | None = None) -> Iterator[None]:
        """Give out the items of the first run once more; nothing is taken from what is not lent.

        Args:
            change: Gives, for an item and its iterator's name, what is given out.

        Raises:
            ReplayError: If that cannot be seen to.
        """
        lent = list(self._lent.values())
        for taken in self._queues:
            taken.record.rewind(change)
        guards: list[tuple[Holder, Items]] = []
        for items in lent:
            items.rewind(change)
        self._runs_again = True
        try:
            for holder in self._found.iterators:
                value = holder.get()
                if not is_iterator(type(value)) or type(value) is Items:
                    continue
                guard = Items(value, holder.name)
                guard.rewind()
                if not holder.set(guard):
                    raise ReplayError(ITERATOR_UNHELD(name=holder.name))
                guards.append((holder, guard))
                self._guards[id(value)] = guard
            with patience(time.monotonic() - self._began):
                yield
        finally:
            self._runs_again, self._guards = False, {}
            for holder, guard in guards:
                if holder.get() is guard:
                    holder.set(guard.iterator)
            for items in lent:
                items.go_on()

    def _lends_any(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether there is anything that a step may take from."""
        if self._found.iterators or self._found.queues:
            return True
        return any(self._may_lend(x) or is_queue(x) for x in (*args, *kwargs.values()))

    def _may_lend(self, value: Any) -> bool:
        kind = type(value)
        return is_iterator(kind) and (is_plain(value) or issubclass(kind, self._kinds.iterators))
