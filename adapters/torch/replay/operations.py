"""``level="operation"``: the replay's watcher, on every step."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from anynan._base.context import but
from anynan._base.interrupts import whole
from anynan._diagnosis.lineage import Replay
from anynan._readings.readings import Reading
from anynan.torch.call.rootcall import RootCall
from anynan.torch.private import StorageWeakRef, current_mode
from anynan.torch.replay.scene import Scene
from anynan.torch.replay.seams import Seam
from anynan.torch.replay.watcher import Watcher


class Operations:
    """Watch one step's operations: those of its root calls and of its backward passes.

    The watcher is a dispatch mode, and is entered and left inside one call each time: a context
    that begins in between, as ``inference_mode`` does, puts back the modes it found.
    """

    @whole
    def __init__(
        self, scene: Scene, root: RootCall, entered: str | None, compiled: Callable[[], bool]
    ) -> None:
        self._compiled = compiled
        self._storages: list[StorageWeakRef] = []
        self._scene, self._of_model = scene, isinstance(root.fn, torch.nn.Module)
        self.watcher = Watcher({})
        self.enter(root)
        self._thread = threading.get_ident()
        self._depth = 0
        self._stack = ExitStack()
        self._stack.enter_context(scene.layers(self.watcher, root.calls))
        if entered is not None:  # the root layer's own call began before its hooks were there
            self.watcher.layers.append((entered, 0))
        self._stack.enter_context(Seam(self.watcher, replaying=False, around=self.watching))

    def enter(self, root: RootCall) -> None:
        """Note what a root call is given: another call of the same step may have made it."""
        for key, known in self._scene.outside(root).items():
            self.watcher.recorder.outside.setdefault(key, known)
        # What these weak references know gives its number to no other storage.
        self._storages += self._scene.storages(root)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside."""
        try:
            self.begin()
            yield
        finally:
            self.end()

    @whole
    def begin(self) -> None:
        """Enter the watcher; where it is entered, go on."""
        if self._depth == 0:
            self._inference = torch.is_inference_mode_enabled()
            self.watcher.__enter__()
        self._depth += 1

    @whole
    def end(self) -> None:
        """Leave the watcher, at the outermost call."""
        if self._depth == 1:
            self._leave()
        self._depth = max(self._depth - 1, 0)

    def look_at_gradients(self) -> None:
        """Note the bad gradients that landed on weights and that no optimizer takes."""
        self._scene.gradients(self.watcher)

    def seen(self, reading: Reading, value: Any) -> Replay | None:
        """Tell what was seen so far; None where compiled code ran, which shows nothing.

        Args:
            reading: What is bad; it is read before the watcher's own hooks look there.
            value: The tensor, None if it is gone.
        """
        if self._compiled():
            return None
        if isinstance(value, torch.Tensor):
            site = reading.site
            with but(self.watcher, busy=False):
                label = site.parameter or site.tensor
                self.watcher.check_sink(site.phase, site.layer, label, value)
        seen = self._seen()
        made = any(sink.phase == "loss" and sink.parents for sink in seen.sinks)
        if self._of_model and reading.phase == "loss" and not made:
            seen.incoming = True
            return seen
        if self._of_model and reading.phase == "backward" and seen.records:
            # What made the loss was not watched.
            first = seen.records[0]
            seen.incoming = first.layer is None and any(
                item.source == "unknown" for item in first.operands
            )
        return seen

    def ended(self, error: BaseException) -> Replay:
        """Tell what was seen up to an exception."""
        seen = self._seen()
        seen.raised = error
        if self.watcher.recorder.taken is not None:
            seen.sinks.append(self.watcher.recorder.taken)
        return seen

    def finish(self) -> Replay:
        """Stop watching and hand over what was seen; safe to do again."""
        self._stop()
        return self._seen()

    @whole
    def _stop(self) -> None:
        self._stack.close()
        if self._depth:
            self._depth = 0
            self._leave()
        self.watcher.forget()

    def _seen(self) -> Replay:
        seen = self.watcher.recorder
        return Replay(list(seen.records), list(seen.sinks), list(seen.notes))

    def _leave(self) -> None:
        """Leave the watcher where it was entered; elsewhere it stays, and looks no more."""
        here = threading.get_ident() == self._thread
        same = here and torch.is_inference_mode_enabled() == self._inference
        if same and current_mode() is self.watcher:
            self.watcher.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        else:
            self.watcher.busy = True
