"""Watch a framework whose values are computed later, or on a device: one read for a whole step.

What a framework with lazy arrays has in common with every other such is here: a tracked function's
step, what waits to be computed, and what the core asks when something is bad. An adapter derives
from ``LazyAdapter``, tells it of layers, gradients and updates with ``write``, and gives what is
marked so below.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from anynan._arrays.containers import leaves
from anynan._base.context import expectations
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps.adapter import BaseAdapter
from anynan.errors import AnomalyError
from anynan.events import Phase


class Waiting(NamedTuple):
    """Hold a reading that is not computed yet.

    Attributes:
        rows: The step it belongs to.
        order: Its place there.
        ends: Smallest and largest value, and the sum of squares of a weight's gradient.
    """

    rows: Step
    order: int
    ends: tuple[Any, ...]


class Local(threading.local):
    """Hold what is under way in one thread.

    Attributes:
        open: Whether a tracked function runs.
        root: What the open step began with; None while there is none.
        second: The second run under way.
        waiting: Readings that are not computed yet.
    """

    def __init__(self) -> None:
        self.open = False
        self.root: Any = None
        self.second: Any = None
        self.waiting: list[Waiting] = []
        self.begin()

    def begin(self) -> None:
        """Begin a step; a derived one keeps more."""


class LazyAdapter(BaseAdapter):
    """Read a step's values in one go, when the program needs them or the step ends.

    Attributes:
        paused: Whether nothing is watched now.
        traced: Whether something ran that had no values while it was traced.
    """

    in_order = True
    local: Any

    paused = False
    traced = False

    # What an adapter gives.

    def is_float(self, x: Any) -> bool:
        """Tell whether a value is an array that could hold NaN or Inf."""
        raise NotImplementedError

    def dtype(self, x: Any) -> tuple[str, float | None]:
        """Give the short name of an array's dtype, and its largest finite value."""
        raise NotImplementedError

    def lazy_ends(self, x: Any, *, norm: bool) -> tuple[Any, ...]:
        """Give the smallest and the largest value, and with ``norm`` the sum of squares, lazily.

        A NaN among the values makes NaN of the first two. No array of the size of ``x`` is made.
        """
        raise NotImplementedError

    def compute(self, lazy: Sequence[Any]) -> None:
        """Compute what waits, all at once.

        Raises:
            RuntimeError: If some of it can never be computed: it was traced.
        """
        raise NotImplementedError

    def number(self, lazy: Any) -> float:
        """Bring one number that was computed to the host."""
        raise NotImplementedError

    def say_traced(self) -> None:
        """Say that something was traced, and not read."""

    def began(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Keep what a step begins with, for a second run."""
        raise NotImplementedError

    def write_result(self, result: Any) -> None:
        """Write what a tracked function returned."""
        raise NotImplementedError

    def run_again(self, root: Any, reading: Reading | None, repairs: Sequence[Repair]) -> Any:
        """Run a step again, and leave no trace; ``replay`` and ``attempt`` of it say what was seen.

        Raises:
            ReplayError: If it cannot be.
        """
        raise NotImplementedError

    # A step.

    def step_of(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, given: dict[str, Any]
    ) -> Any:  # fmt: skip
        """Run one step of a tracked function.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Those by name.
            given: All of them by name.
        """
        local, judge = self.local, self.tracker.judge
        local.open = True
        try:
            local.root = self.began(fn, args, kwargs)
            self.write_inputs(given.items())
            try:
                result = fn(*args, **kwargs)
            except AnomalyError:
                raise
            except BaseException as error:
                with judge.carried_by(error, judge.rows()):
                    self.end()
                raise
            self.write_result(result)
            return result
        finally:
            local.open = False
            self.end()

    def end(self) -> None:
        """Close the open step, and have it judged."""
        local, judge = self.local, self.tracker.judge
        if local.root is None:
            return
        try:
            self.fetch()
            self._watch_operations()
            rows = judge.close_step()
            if rows is not None:
                judge.settle(rows)
        finally:
            local.root, local.waiting = None, []
            local.begin()

    def _watch_operations(self) -> None:
        """Run the step a second time where every operation is to be seen."""
        judge = self.tracker.judge
        rows = judge.rows()
        if judge.level != "operation" or rows.failed is not None:
            return
        judge.review(rows)
        judge.operations(rows, lambda: self._again(None).replay())

    # Readings.

    def write_inputs(self, given: Iterable[tuple[str, Any]]) -> None:
        """Write what came in, by name."""
        for name, value in given:
            for label, x in leaves(value, name, self.tracker.judge.say):
                self.write("input", None, label, x)

    def write(
        self, phase: Phase, layer: str | None, tensor: str, x: Any, call: int = 0, *,
        parameter: str | None = None, norm: bool = False,
    ) -> None:  # fmt: skip
        """Write a reading of an array, which is computed later; anything else is passed over."""
        if not self.is_float(x) or 0 in x.shape:
            return
        judge = self.tracker.judge
        rows = judge.rows()
        site = judge.monitor.site(layer, phase, tensor, *self.dtype(x), parameter=parameter)
        order = rows.reserve(site, call)
        rows.keep(order, weakref.ref(x))
        expected = expectations()
        if expected is not None:
            rows.expect([order], expected)
        self.local.waiting.append(Waiting(rows, order, self.lazy_ends(x, norm=norm)))

    def unread(self) -> list[Any]:
        """Give what waits, so that the program's own evaluation computes it, too."""
        return [x for item in self.local.waiting for x in item.ends]

    def fetch(self) -> None:
        """Compute all that waits, and bring it to the host."""
        waiting, self.local.waiting = self.local.waiting, []
        if not waiting:
            return
        try:
            self.compute([x for item in waiting for x in item.ends])
        except RuntimeError:
            self.traced = True
            self.say_traced()
        for item in waiting:
            low, high = self._fetched(item)
            item.rows.fill((low,), (high,))

    def _fetched(self, item: Waiting) -> tuple[float, float]:
        if self.traced:
            try:
                self.compute(item.ends)
            except RuntimeError:
                return math.inf, -math.inf  # nothing is known of it
        low, high, *squares = map(self.number, item.ends)
        if squares:
            item.rows.add_norm(item.order, math.sqrt(max(squares[0], 0.0)))
        return (math.nan, math.nan) if low != low or high != high else (low, high)

    # What the core asks for.

    def set_paused(self, paused: bool) -> None:
        """Stop or go on."""
        if paused:
            self.finish()
        self.paused = paused

    def read(self) -> None:
        """Compute what waits, and have it judged."""
        self.fetch()
        if self.local.root is not None:
            self.tracker.judge.review(self.tracker.judge.rows())

    def finish(self) -> None:
        """End the open step."""
        if not self.local.open:
            self.end()

    def replay(self, reading: Reading) -> Replay:
        """Run the step again, operation by operation.

        Raises:
            ReplayError: If its call is not known.
        """
        seen: Replay = self._again(reading).replay()
        return seen

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the step again to its end, with operations repaired."""
        found: Attempt | None = None
        with suppress(Exception):  # then nothing is told of it
            found = self._again(reading, repairs).attempt()
        return found

    def _again(self, reading: Reading | None, repairs: Sequence[Repair] = ()) -> Any:
        if self.local.root is None:
            msg = "the step was over when it was read, so it cannot be run again"
            raise ReplayError(msg)
        return self.run_again(self.local.root, reading, repairs)
