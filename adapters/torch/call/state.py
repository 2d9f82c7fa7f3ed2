"""One thread's open step, and the signal that ends a replay."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan.torch.call.regions import Regions
from anynan.torch.call.rootcall import RootCall
from anynan.torch.read.slots import Slots


class StopReplay(BaseException):
    """Leave user code during a replay; a BaseException, so that it is not swallowed."""


class State:
    """Hold one thread's open step."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.deferred = slots.deferred
        self.thread = threading.current_thread()
        self.rows: Step | None = None
        self.idle = False
        self.used = False
        self.replaying = False
        self.base = -1
        self.in_optimizer = False
        # Whether the open step is one call of a function, which a replay runs as a whole.
        self.in_step = False
        self.depth = 0
        self.regions = Regions()
        self.operations: Any = None  # the watcher of every operation, where there is one
        self.ended: list[Step] = []
        self.step_roots: list[tuple[int, weakref.ref[RootCall]]] = []
        # The models' own calls inside a function's step: each with its model's path, the last one.
        self.inners: list[tuple[str, weakref.ref[RootCall]]] = []
        # What takes hooks off the leaves that layers returned: those do not go with the graph.
        self.leaves: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self.rows = None
        while self.leaves:
            self.leaves.pop().remove()
        self.calls: dict[str, int] = {}
        self.regions.clear()
        self.root: RootCall | None = None
        self.roots: dict[int, RootCall] = {}
        # A root call lives as long as its graph, and is emptied when the step ends.
        for _, ref in [*self.step_roots, *self.inners]:
            root = ref()
            if root is not None:
                root.release()
        self.step_roots.clear()
        self.inners.clear()
        self.inner: RootCall | None = None
        self.saw_backward = False
        self.broken = False
        self.trained = False
        self.updated = False
        self.scales: list[Any] = []
        self.uses: dict[int, int] = {}
        # One of the weights, by its module and name, and how often it had been written to as the
        # step began.
        self.weight: tuple[weakref.ref[Any], str, int] | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do work of our own, unseen by the hooks and by the operation watcher."""
        watcher = None if self.operations is None else self.operations.watcher
        was_idle = self.idle
        try:
            self.idle = True  # inside: an interrupt may come at any line
            if watcher is not None:
                watcher.busy = True
            yield
        except BaseException:
            self.broken = True
            raise
        finally:
            self.idle = was_idle
            if watcher is not None:
                watcher.busy = False

    def end_operations(self) -> None:
        """Stop the operation watcher, where there is one."""
        if self.operations is not None:
            self.operations.finish()
            self.operations = None

    def root_of(self, order: int) -> RootCall | None:
        """Give the root call that a reading of this step was made in."""
        before = [ref for start, ref in self.step_roots if start <= order]
        return before[-1]() if before else self.root

    def living_roots(self) -> list[RootCall]:
        """List the root calls of this step whose graphs are still there."""
        return [root for _, ref in self.step_roots if (root := ref()) is not None]

    def inner_roots(self, reading: Reading) -> list[RootCall]:
        """List the models' own calls inside a step that a reading may come from, the last first."""
        layer, found = reading.layer, []
        for path, ref in reversed(self.inners):
            root = ref()
            inside = layer is not None and (not path or f"{layer}.".startswith(f"{path}."))
            if root is None or not inside:
                continue
            if reading.site.parameter is None and root.calls.get(layer or "", 0) > reading.call:
                continue  # it began after that call of the layer
            found.append(root)
            if reading.site.parameter is None:
                break
        return found

    @property
    def spent(self) -> bool:
        """Tell whether its thread has ended and left nothing unread."""
        return self.rows is None and not self.ended and not self.thread.is_alive()
