"""Stand before the ways into a backward pass and an update, in one thread and no other."""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from anynan._base.patches import Patches
from anynan._base.walks import walk
from anynan.torch.call.state import StopReplay
from anynan.torch.private import node_number, nodes_before, task
from anynan.torch.read.probes import local
from anynan.torch.replay.names import node_name
from anynan.torch.replay.watcher import Watcher

_lock = threading.Lock()
# The functions are the whole process's: each calls the seam of its own thread, if that has one.
_open: dict[int, list["Seam"]] = {}
_patches = Patches()


class Seam:
    """Show a watcher each backward pass: the loss, the graph, the gradients into nodes.

    Args:
        watcher: What to tell.
        replaying: Whether this is a second run, which a loss scaler's step ends.
        around: Gives a context for each backward pass.
        leaf: Called with each leaf that a backward pass can reach.
        before: Called with the roots of each backward pass before it begins.
    """

    def __init__(
        self, watcher: Watcher, *, replaying: bool = True,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        leaf: Callable[[torch.Tensor], None] | None = None,
        before: Callable[[Any], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self.watcher, self.replaying, self.around, self.leaf = watcher, replaying, around, leaf
        self.before = before
        self._handles: list[Any] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        """Stand there for this thread."""
        with _lock:
            if not _open:
                _install()
            _open.setdefault(self._thread, []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Step aside; safe to call twice, and from another thread."""
        with _lock:
            mine = _open.get(self._thread, [])
            if self in mine:
                mine.remove(self)
            if not mine:
                _open.pop(self._thread, None)
            if not _open:
                _patches.undo()
        while self._handles:
            self._handles.pop().remove()

    def run(self, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one backward pass in the watcher's sight."""
        roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        self.before(roots)
        self._look(roots)
        with self.around():
            return real(*args, **kwargs)

    def _look(self, given: Any) -> None:
        watcher = self.watcher
        items = [given] if isinstance(given, torch.Tensor) else list(given)
        items = [getattr(item, "node", item) for item in items]
        for x in items:
            if isinstance(x, torch.Tensor) and not watcher.layers and x.numel() == 1:
                watcher.check_sink("loss", None, "loss", x)
        roots = [x.grad_fn if isinstance(x, torch.Tensor) else x for x in items]
        for node in walk(filter(None, roots), nodes_before):
            leaf = getattr(node, "variable", None)
            if leaf is not None and self.leaf is not None:
                self.leaf(leaf)
            self._handles.append(node.register_prehook(functools.partial(_incoming, watcher)))
            if watcher.runner is not None:
                behind = watcher.runner.stand_behind(node, watcher)
                self._handles += [] if behind is None else [behind]
            for following in nodes_before(node):
                names = watcher.consumers.setdefault(node_number(following), [])
                names.append(node_name(node.name()))


def _incoming(watcher: Watcher, gradients: Any) -> None:
    watcher.tasks.add(task())
    watcher.incoming = tuple(local(x) if isinstance(x, torch.Tensor) else x for x in gradients)


def _seam() -> Seam | None:
    mine = _open.get(threading.get_ident())
    return mine[-1] if mine else None


def _install() -> None:
    _patches.change(torch.autograd, "backward", _through)
    _patches.change(torch.autograd, "grad", _through)
    _patches.change(torch.amp.GradScaler, "step", _ended)


def _through(real: Callable[..., Any]) -> Callable[..., Any]:
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        seam = _seam()
        if seam is None:
            return real(*args, **kwargs)
        return seam.run(real, args, kwargs)

    return differentiate


def _ended(real: Callable[..., Any]) -> Callable[..., Any]:
    def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        seam = _seam()
        if seam is not None and seam.replaying:
            raise StopReplay
        return real(scaler, *args, **kwargs)

    return step
