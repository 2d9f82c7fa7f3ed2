"""What a call began with, for a second run: models, optimizers, random states, and the rest."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import numpy as np

from anynan._arrays.containers import mapped
from anynan._base import context
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._reach.items import Exhausted
from anynan._reach.kept import Kept, Undo, container_state
from anynan._reach.reach import Reach


class Snapshot:
    """Hold objects, and Python's and NumPy's random states, as they are now; no value is copied.

    Args:
        held: Objects whose attributes and containers, at any depth, are to be as they are.
        more: What else puts something back.
    """

    def __init__(self, held: Sequence[Any], more: Sequence[Undo] = ()) -> None:
        self._undo: list[Undo] = list(more)
        self._seen: dict[int, Any] = {}
        for each in held:
            self._walk(each)
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002

    def _walk(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        own: dict[str, Any] = getattr(value, "__dict__", {})
        kept = (container_state(value), container_state(own))
        self._undo += [undo for undo in kept if undo is not None]
        inside = list(own.values())
        if isinstance(value, dict | list | tuple):
            inside += dict.values(value) if isinstance(value, dict) else value
        for item in inside:
            if isinstance(item, dict | list | set | tuple):
                self._walk(item)

    @property
    def drawn(self) -> tuple[Any, Any]:
        """Give the states of NumPy's and Python's global generators."""
        return self._numpy, self._python

    def put_back(self) -> None:
        """Make all of it what it was, in the objects that it was."""
        for undo in self._undo:
            undo()
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002


class Began:
    """Hold a call as it began.

    Args:
        fn: What was called.
        args: With what.
        kwargs: By name.
        held: The models and optimizers that it runs.
        reach: What else its code reaches; None where that is all.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        held: Sequence[Any], reach: Reach | None = None,
    ) -> None:  # fmt: skip
        self.fn, self._held, self._reach = fn, held, reach
        self.args, self.kwargs = copied(args), copied(kwargs)
        self.context = copy_context()
        self._given = [(f"args[{i}]", x) for i, x in enumerate(args)] + list(kwargs.items())
        self._kept = Kept() if reach is None else reach.now(self._given)
        self._state = Snapshot(held, self.random())
        self._written: dict[int, tuple[Any, Any]] = {}

    @property
    def drawn(self) -> tuple[Any, Any]:
        """Give the states that NumPy's and Python's global generators had."""
        return self._state.drawn

    # What a framework adds.

    def random(self) -> list[Undo]:
        """Give what puts the framework's own random states back to what they are now."""
        return []

    def content(self, x: Any) -> Any:
        """Give what an array holds now, for ``refill``."""
        raise NotImplementedError

    def refill(self, x: Any, content: Any) -> None:
        """Have an array hold what it held."""
        raise NotImplementedError

    # What runs it again.

    def keep(self, x: Any) -> None:
        """Keep what an array holds that is about to be written into in place."""
        if id(x) not in self._written:
            self._written[id(x)] = x, self.content(x)

    @contextmanager
    def again(self, say: Callable[[str], object]) -> Iterator[None]:
        """Let a second run find what the first found, and put all of it back after it.

        Args:
            say: Is told of what could not be put back.

        Raises:
            ReplayError: If it would take what cannot be given back.
        """
        reach = self._reach
        now = Snapshot(self._held, self.random())
        present = None if reach is None else reach.now(self._given)
        first, self._written = self._written, {}
        arrays = [(x, self.content(x)) for x, _ in first.values()]
        try:
            if reach is not None:
                reach.put_back(self._kept)
            self._state.put_back()
            for x, content in first.values():
                self.refill(x, content)
            with context.replay_context():
                if reach is None:
                    yield
                else:
                    with reach.again():
                        yield
        except Exhausted as error:
            raise ReplayError(str(error)) from error
        finally:
            for x, content in [*self._written.values(), *arrays]:
                self.refill(x, content)
            self._written = first
            now.put_back()
            for what in [] if reach is None or present is None else reach.put_back(present):
                say(NOT_PUT_BACK(who="a second run", what=what))


def copied(value: Any) -> Any:
    """Copy the containers of an argument, and no array.

    Example:
        >>> from anynan._reach.began import copied
        >>> given = {"x": [1.0]}
        >>> copied(given) == given, copied(given)["x"] is given["x"]
        (True, False)
    """
    return mapped(value, lambda x: x)
