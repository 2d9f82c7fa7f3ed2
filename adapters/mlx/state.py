"""What a step began with, and how a second run finds it so and leaves no trace."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import mlx.core as mx
import numpy as np

from anynan._base import context
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._reach import Exhausted, Kept, Reach, container_state
from anynan.arrays.trackable import copied
from anynan.mlx.layers import Weight

Undo = Callable[[], object]


class Snapshot:
    """Hold models, optimizers and random states as they are now; no value is copied.

    Args:
        held: The models and optimizers.
    """

    def __init__(self, held: list[Any]) -> None:
        self._undo: list[Undo] = []
        self._seen: set[int] = set()
        for each in held:
            self._walk(each)
        # What MLX draws from; it is read where it is put back.
        self._key = mx.random.state[0]
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002

    def _walk(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        kept = container_state(value)
        own: dict[str, Any] = getattr(value, "__dict__", {})
        self._undo += [each for each in (kept, container_state(own)) if each is not None]
        inside = list(own.values())
        if isinstance(value, dict | list | tuple):
            inside += dict.values(value) if isinstance(value, dict) else value
        for item in inside:
            if isinstance(item, dict | list | set | tuple):
                self._walk(item)

    def put_back(self) -> None:
        """Make all of it what it was, in the objects that it was."""
        for undo in self._undo:
            undo()
        high, low = self._key.tolist()
        mx.random.seed(high << 32 | low)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002


class Root:
    """Hold a call as it began.

    Args:
        fn: What was called.
        args: With what.
        kwargs: By name.
        held: The models and optimizers that it runs.
        weights: Their weights.
        reach: What else its code reaches, None for a model's.

    Attributes:
        cotangents: The gradients that came into a model's outputs.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        held: list[Any], weights: list[Weight], reach: Reach | None = None,
    ) -> None:  # fmt: skip
        self.fn, self.held, self.weights = fn, held, weights
        self.args, self.kwargs = copied(args), copied(kwargs)
        self.context = copy_context()
        self._reach = reach
        self._given = [(f"args[{i}]", x) for i, x in enumerate(args)] + list(kwargs.items())
        self._kept = Kept() if reach is None else reach.now(self._given)
        self._state = Snapshot(held)
        self.cotangents: dict[str, Any] = {}
        self._written: dict[int, tuple[Any, Any]] = {}

    def keep(self, x: Any) -> None:
        """Keep what an array held, that is about to be written into."""
        if id(x) not in self._written:
            self._written[id(x)] = x, mx.stop_gradient(x)

    @contextmanager
    def again(self, say: Callable[[str], object]) -> Iterator[None]:
        """Let a second run find what the first found, and put all of it back after it.

        Raises:
            ReplayError: If it would take what cannot be given back.
        """
        reach = self._reach
        now, present = Snapshot(self.held), None if reach is None else reach.now(self._given)
        first, self._written = self._written, {}
        arrays = [(x, mx.stop_gradient(x)) for x, _ in first.values()]
        try:
            if reach is not None:
                reach.put_back(self._kept)
            self._state.put_back()
            for x, before in first.values():
                x[...] = before
            with context.replay_context():
                if reach is None:
                    yield
                else:
                    with reach.again():
                        yield
        except Exhausted as error:
            raise ReplayError(str(error)) from error
        finally:
            for x, before in [*self._written.values(), *arrays]:
                x[...] = before
            self._written = first
            now.put_back()
            for what in [] if reach is None or present is None else reach.put_back(present):
                say(NOT_PUT_BACK(who="a second run", what=what))
