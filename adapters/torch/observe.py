"""Run a model, a step or a function once, show each operation, and leave no trace."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from anynan._arrays.containers import leaves
from anynan._base.context import replay_context
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._steps.tracked import untracked
from anynan._trace.op import Observed, Observer, Op
from anynan._trace.target import Target
from anynan.options import Options
from anynan.torch.call.discovery import find_iterators, find_modules, named_models
from anynan.torch.call.models import Models
from anynan.torch.call.reached import Reached
from anynan.torch.call.rootcall import RootCall, cut
from anynan.torch.call.state import StopReplay
from anynan.torch.graphs.compiler import eager
from anynan.torch.private import give_saved_tensors_hooks, take_saved_tensors_hooks, tree_leaves
from anynan.torch.read.probes import on_host
from anynan.torch.replay.replay import disabled_modes
from anynan.torch.replay.scene import Scene
from anynan.torch.replay.seams import Seam
from anynan.torch.replay.watcher import Watcher
from anynan.torch.update.snapshot import Snapshot, pause_trackers, stateful_objects


def takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a target is PyTorch's: a model, or what uses one or is called with tensors."""
    fn = untracked(target)
    if isinstance(fn, torch.nn.Module):
        return True
    given = leaves((args, dict(kwargs)), "", objects=True)
    tensors = any(isinstance(x, torch.Tensor) for _, x in given)
    return callable(fn) and bool(tensors or find_modules(fn, args, dict(kwargs)))


class Sight:
    """See the operations of one target, in as many runs as are asked for.

    Its trackers are paused meanwhile. Each run begins from the state that the first one found.

    Args:
        target: A model, a training step, or any function.

    Attributes:
        objects: What a run may change, once there was one: models, optimizers, scalers.
    """

    def __init__(self, target: Any) -> None:
        self.fn: Any = untracked(target)
        self._target, self._stack = target, ExitStack()
        self.models = Models(Options(), None if isinstance(self.fn, torch.nn.Module) else self.fn)
        self._reached = Reached(self.models.fn)
        self.objects: list[Any] = []

    def __enter__(self) -> Self:
        """Pause who watches."""
        pause_trackers(self._target, self._stack)
        self._stack.enter_context(replay_context())
        return self

    def __exit__(self, *_: object) -> None:
        """Let them watch again."""
        self._stack.close()

    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer | None,
        before: Callable[[Any], object] = lambda _: None,
        kernels: AbstractContextManager[Any] | None = None,
    ) -> Observed:  # fmt: skip
        """Run it once.

        Args:
            args: What it is called with. Leaves of the graph stay the very tensors.
            kwargs: By name.
            observer: Sees each operation; None for nobody.
            before: Called with the roots of each backward pass before it begins.
            kernels: A mode that computes each operation in PyTorch's place.
        """
        found, kwargs = Observed(), dict(kwargs)
        with self.kept(args, kwargs, found.notes), ExitStack() as stack:
            # What observes works under its own settings.
            stack.callback(give_saved_tensors_hooks, take_saved_tensors_hooks())
            stack.enter_context(disabled_modes())
            if kernels is not None:  # it is asked after the watcher
                stack.enter_context(kernels)
            self._watched(stack, args, kwargs, observer, before, found)
        return found

    @contextmanager
    def kept(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], notes: list[str]
    ) -> Iterator[None]:
        """Put back what runs inside change.

        Args:
            args: What it is called with.
            kwargs: By name.
            notes: Where to say what could not be put back.
        """
        found = named_models(self.fn, args, kwargs)
        self.models.refs = [(name, weakref.ref(model)) for name, model in found.items()]
        given = [(f"args[{i}]", x) for i, x in enumerate(args)] + list(kwargs.items())
        self._reached.begin(self.models, given)
        if not self.objects:  # the search looks at the whole heap
            self.objects = stateful_objects(self.fn, (), [])
        kept = Snapshot([*self.objects, *tree_leaves((args, dict(kwargs)))])
        put_back = self._reached.hold()
        lost = [f"the iterator {name}" for name in find_iterators(self.fn)]
        try:
            yield
        finally:
            try:
                put_back()
            except Exception as error:  # noqa: BLE001  the rest is put back all the same
                lost.append(str(error))
            kept.restore()
            notes += [
                NOT_PUT_BACK(who="the run", what=what)
                for what in dict.fromkeys([*kept.lost, *lost])
            ]

    def _watched(
        self, stack: ExitStack, args: tuple[Any, ...], kwargs: dict[str, Any],
        observer: Observer | None, before: Callable[[Any], object], found: Observed,
    ) -> None:  # fmt: skip
        args, kwargs = cut((args, kwargs), leaves=False)
        root = RootCall.now(self.fn, args, kwargs, (), {})
        scene = Scene(self.models)
        watcher, failed = Watcher(scene.outside(root)), list[BaseException]()

        def show(op: Op) -> Sequence[Any] | None:
            try:
                return None if observer is None else observer(op)
            except BaseException as error:
                failed.append(error)
                raise StopReplay from error  # past what the program catches

        watcher.observer = show
        watcher.within, watcher.called = Sight._watched.__code__, root.source()
        stack.enter_context(eager())
        stack.enter_context(scene.layers(watcher, {}))
        stack.enter_context(Seam(watcher, replaying=False, before=before))
        stack.enter_context(_updates(watcher))
        try:
            if observer is None:
                found.value = self.fn(*root.args, **root.kwargs)
                return
            with watcher:
                found.value = self.fn(*root.args, **root.kwargs)
        except Exception as error:  # noqa: BLE001  the program's own: it is told, not raised
            found.error = error
        except StopReplay:
            raise failed[0] from None
        finally:
            watcher.forget()
            watcher.observer = None


def observe(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer
) -> Observed:
    """Run a target once, show each operation, and leave no trace."""
    with Sight(target) as sight:
        return sight.run(args, kwargs, observer)


class TorchTarget(Target):
    """Reach the numbers of dense tensors."""

    takes, shows = staticmethod(takes), staticmethod(observe)

    def is_array(self, x: Any) -> bool:
        """Tell whether something is a dense tensor with numbers in it."""
        dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
        return dense and not (x.is_meta or x.is_nested)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """Bring a tensor to the host; what NumPy has no dtype for in float32."""
        return on_host(x)

    def like(self, numbers: np.ndarray[Any, Any], x: Any) -> Any:
        """Make a tensor of the same dtype and device, and a leaf where that is one."""
        # A kernel may round otherwise where numbers lie elsewhere: they lie as a tensor's own do.
        made = torch.from_numpy(np.array(numbers)).to(device=x.device, dtype=x.dtype, copy=True)
        return made.requires_grad_(x.requires_grad)


@contextmanager
def _updates(watcher: Watcher) -> Iterator[None]:
    """Tell the watcher while an optimizer steps."""

    def tell(updating: bool, *_: object) -> None:
        watcher.updating = updating

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(partial(tell, True)).remove)
        stack.callback(register_optimizer_step_post_hook(partial(tell, False)).remove)
        yield
