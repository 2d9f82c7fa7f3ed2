"""Find the models of a program by themselves: each is watched from its first call on."""

import functools
import importlib
import itertools
import re
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from anynan._base.identity import SetByIdentity
from anynan._base.imports import when_imported
from anynan._base.patches import Patches
from anynan._base.tracebacks import variables
from anynan._everywhere import Found
from anynan._steps.tracked import inside
from anynan.errors import AnomalyError
from anynan.options import Options
from anynan.torch.call import noted, seams
from anynan.torch.call.discovery import find_iterators, find_modules, in_arguments
from anynan.torch.call.note import leaves
from anynan.torch.call.reached import Reached
from anynan.torch.graphs.compiler import between_graphs
from anynan.torch.private import TRANSFORMS, call_code, is_tracing
from anynan.torch.session.model import ModelSession
from anynan.torch.session.program import Watch
from anynan.torch.session.session import session_of
from anynan.torch.tracking import start
from anynan.torch.update.updates import Updates, leave, listen, watching

# Trainers that own the step: module, the method that trains, and the door to them.
TRAINERS = (
    *(
        ("lightning.pytorch.trainer.trainer", method, "lightning")
        for method in ("fit", "validate", "test", "predict")
    ),
    ("transformers.trainer", "train", "transformers"),
)
# A model that its function drops before the backward pass is still there for a replay.
HELD, HELD_BYTES = 16, 2**26
_LAYERS = "torch.nn.modules."
# The files between the line that calls a module and the look at it.
_BETWEEN = {__file__, call_code.co_filename}

_is_compiling = torch.compiler.is_compiling
_is_dynamo = torch.compiler.is_dynamo_compiling


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch every model that is called, from its first call on.

    The call of all modules is replaced, and no global hook registered: those cost more, and the
    compiler warns of them.

    Args:
        options: As for ``track``.
        found: Is given the trackers.

    Returns:
        What undoes it; the trackers stay.
    """
    finder, patches = Finder(options, found), Patches()
    patches.change(torch.nn.Module, "__call__", finder.calling)
    patches.change(torch, "compile", finder.compiling)
    for holder, names in TRANSFORMS:  # the call of what one gives is one operation
        for name in names:
            patches.change(holder, name, seams.transforming)
    patches.change(torch, "from_numpy", seams.taking)
    patches.change(torch.utils, "swap_tensors", seams.swapping)
    new = vars(torch.nn.Parameter)["__new__"]
    patches.put(torch.nn.Parameter, "__new__", staticmethod(seams.making(new)))
    apply = vars(torch.autograd.Function)["apply"]  # of one kind up to PyTorch 2.13, then another
    patches.put(torch.autograd.Function, "apply", classmethod(seams.applying(apply)))

    def own(name: str, method: str, door: str) -> None:
        patches.change(sys.modules[name].Trainer, method, partial(finder.training, door))

    patches.change(warnings, "showwarning", seams.placing)
    warnings.filterwarnings("always", module=re.escape(noted.__name__))
    rule = warnings.filters[0]
    watch = Watch(options, found)
    noted.everywhere = noted.Everywhere(watch.around, watch.loss, watch.before)
    noted.unread = _unread
    noted.begin().put()

    @between_graphs
    def after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        watch.updated(optimizer)

    listen()
    handles = [register_optimizer_step_post_hook(after_update)]
    waiting = [when_imported(where[0], partial(own, *where)) for where in TRAINERS]

    def undo() -> None:
        while waiting:
            waiting.pop()()
        while handles:
            handles.pop().remove()
        noted.away()
        with suppress(Exception):
            watch.finish()
        noted.everywhere, noted.unread = None, nullcontext
        noted.end()
        leave()
        patches.undo()
        if rule in warnings.filters:
            warnings.filters.remove(rule)  # type: ignore[attr-defined]

    return undo


class _Inside(threading.local):
    """Tell whether this thread is in a module's call."""

    call = False


@contextmanager
def _unread() -> Iterator[None]:
    """Have every watched model read nothing."""
    with ExitStack() as stack:
        for each in watching():
            stack.enter_context(each.steps.threads.state().aside())
        yield


class Finder:
    """Track a module that is called and not yet watched: nothing called it, so it is a model."""

    def __init__(self, options: Options, found: Found) -> None:
        self._options, self._found = options, found
        self._known: SetByIdentity[torch.nn.Module] = SetByIdentity()
        self._past: SetByIdentity[torch.nn.Module] = SetByIdentity()
        self._stateless: SetByIdentity[torch.nn.Module] = SetByIdentity()
        self._held: deque[torch.nn.Module] = deque(maxlen=HELD)
        self._last = weakref.ref[torch.nn.Module](torch.nn.Module())  # the model that ran last

    def calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Look at a module before its call begins, unless another's runs."""
        inside, look, stateless = _Inside(), self.look, self._stateless

        # PyTorch's profiler reads the local of this name, and does not ask whether it is there.
        def called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _is_dynamo() or inside.call or _is_compiling() or is_tracing():
                return call(self, *args, **kwargs)
            inside.call = True
            notes = noted.away()
            try:
                look(self, computes=_has_graph((args, kwargs)))
                if notes is not None and (self in stateless or _is_free_keras(self)):
                    notes.put()  # as a loss: it is code like any
                out = call(self, *args, **kwargs)
                if notes is not None:
                    # A model's session sees to outputs with a gradient.
                    mine = session_of(self) is not None
                    for x in (*args, *leaves(out)):
                        given = any(x is item for item in args)
                        if type(x) is torch.Tensor and (given or not (mine and x.requires_grad)):
                            notes.hold(x)
                return out
            finally:
                inside.call = False
                if notes is not None:
                    notes.put()

        return called

    def compiling(self, compile_: Callable[..., Any]) -> Callable[..., Any]:
        """Look at the models of a function before it is compiled: its graphs get no hooks later.

        What a module is compiled to is called like any other.
        """

        def compiled(model: Any = None, **options: Any) -> Any:
            made = compile_(model, **options)
            if model is None or isinstance(model, torch.nn.Module | type):
                return made
            mine: list[Any] = []  # the models that its code names
            reached = Reached(model)
            again: list[Any] = [None]  # what an investigation calls, if it can

            @functools.wraps(made)
            def run(*args: Any, **kwargs: Any) -> Any:
                if _is_compiling():
                    return made(*args, **kwargs)
                if not mine:
                    mine.extend(map(weakref.ref, find_modules(model).values()))
                    if isinstance(model, FunctionType | MethodType) and not find_iterators(model):
                        again[:] = [model]
                call, models = made, [ref() for ref in mine]
                models += in_arguments(args, kwargs)
                for module in filter(None, models):
                    self.look(module)
                    session = session_of(module)
                    if again[0] and isinstance(session, ModelSession):
                        call = partial(session.through, model, call, reached)
                if call is made:
                    return noted.called(made, again[0], args, kwargs, sys._getframe(1))
                with noted.apart():
                    return call(*args, **kwargs)

            return run

        return compiled

    def training(self, door: str, train: Callable[..., Any]) -> Callable[..., Any]:
        """Watch what a Trainer trains by its own door: with the loss and the update."""

        def trained(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                try:
                    module = importlib.import_module(f"anynan.torch.{door}")
                    stack.enter_context(module.watched(trainer, self._options, self._found))
                    self._found.trainers.append(trainer)
                    stack.callback(self._found.trainers.remove, trainer)
                except Exception as error:  # noqa: BLE001  its model is found all the same
                    self._found.fail(f"a {type(trainer).__name__}", error)
                return train(trainer, *args, **kwargs)

        return trained

    def look(self, module: torch.nn.Module, *, computes: bool = False) -> None:
        """Track a module, if nobody does; the parts that were found before give way.

        Args:
            module: The module.
            computes: It goes on with what has a graph: without weights it is a loss then.
        """
        if self._found.trainers:
            return
        try:
            if module in self._known or self._is_others(module):
                if module is not self._last() and module not in self._past:
                    self._again(module)
                return
            heir = self._heir(module)
            if heir is not None:
                heir.take_over(module)
                self._known.add(module)
                self._hold(module)
                self._last = weakref.ref(module)
                return
            last = self._last()
            session = None if last is None else session_of(last)
            bare = _is_bare(module)
            if bare and (computes or isinstance(session, ModelSession)):  # a loss: no model
                self._stateless.add(module)
                self._known.add(*module.modules())
                if isinstance(session, ModelSession):
                    session.join(module)
                return
            owner = None if bare else _owner(module)
            module = owner or module
            for part in module.modules():
                session = session_of(part)
                if session is not None and self._found.has(session.tracker):
                    session.tracker.remove()
            self._known.add(*module.modules())
            self._hold(module)
            tracker = start(module, self._options)
            self._found.add(tracker, minor=bare)
            adapter: Any = inside(tracker).judge.adapter
            if adapter is not None:
                adapter.models.handed = True
                if owner is not None:
                    adapter.layers.called_past()
            if not bare:  # a transform of data has no losses
                self._last = weakref.ref(module)
        except AnomalyError as error:  # a weight is bad already
            if error.tracker is not None:
                self._found.add(error.tracker)
            raise
        except Exception as error:  # noqa: BLE001  it is not watched then, and that is said
            self._found.fail(f"a {type(module).__name__}", error)

    def _hold(self, module: torch.nn.Module) -> None:
        """Hold a model for a while, in the memory that there is for all of them."""
        self._held.append(module)
        while sum(w.nbytes for each in self._held for w in each.parameters()) > HELD_BYTES:
            self._held.popleft()

    def _again(self, module: torch.nn.Module) -> None:
        """Note which model runs; a part of one is called past it, as by a method that samples."""
        mine = session_of(module) is not None
        if not mine:
            self._past.add(module)
        if _is_bare(module):
            return
        if mine:
            self._last = weakref.ref(module)
            return
        for each in _watchers(module):
            each.called_past()

    def _heir(self, module: torch.nn.Module) -> ModelSession | None:
        """Give the session of a wrapper that is gone, if this is the same one made anew.

        A library may wrap what it is given at every call, in a module without state of its own.
        """
        if module._parameters or module._buffers or not module._modules:
            return None
        parts = [*module.modules()][1:]
        alike = [
            other
            for other in self._held
            if type(other) is type(module) and [*other.modules()][1:] == parts
        ]
        kept = [weakref.ref(other) for other in alike]
        while alike:  # nobody else may hold it any more
            self._held.remove(alike.pop())
        self._held.extend(filter(None, (ref() for ref in kept)))
        adapters = (tracker.judge.adapter for tracker in self._found.living())
        heirs = (x for x in adapters if isinstance(x, ModelSession) and x.follows(module))
        return next(heirs, None)

    @staticmethod
    def _is_others(module: torch.nn.Module) -> bool:
        """Tell whether it is watched already, or is somebody else's affair."""
        if isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
            return True
        # What measures a range as a model is quantized is none of the program's.
        measures = type(module).__module__.startswith("torch.ao.quantization.")
        return measures or _is_keras(module) or bool(_watchers(module))


def _is_keras(module: torch.nn.Module) -> bool:
    keras: Any = sys.modules.get("keras")
    return keras is not None and isinstance(module, getattr(keras, "Layer", ()))


def _watchers(module: torch.nn.Module) -> list[Updates]:
    """List what watches a module, by itself or within a model."""
    return [
        each
        for each in watching()
        if any(part is module for _, model in each.models.living() for part in model.modules())
    ]


def _is_free_keras(module: torch.nn.Module) -> bool:
    """Tell whether it is a layer of Keras's that nobody trains or tracks through Keras."""
    return _is_keras(module) and not _watchers(module)


def _owner(layer: torch.nn.Module) -> torch.nn.Module | None:
    """Give the model whose method calls a layer of PyTorch's that it holds, as its ``forward``."""
    if next(layer.children(), None) is not None or not type(layer).__module__.startswith(_LAYERS):
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    names = () if frame is None else frame.f_code.co_varnames[:1]
    found = variables(frame).get(names[0]) if frame is not None and names else None
    if not isinstance(found, torch.nn.Module) or found is layer:
        return None
    return found if any(part is layer for part in found.modules()) else None


def _has_graph(x: Any, depth: int = 2) -> bool:
    """Tell whether there is a tensor with a graph among what a module is called with."""
    if isinstance(x, torch.Tensor):
        return bool(x.requires_grad)
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, list | tuple):
        return False
    return depth > 0 and any(_has_graph(item, depth - 1) for item in x)


def _is_bare(module: torch.nn.Module) -> bool:
    """Tell whether it has nothing that a model has: no weights, no statistics of what it saw.

    Quantized weights are no parameters. An unbuilt layer of Keras's, when asked for its
    parameters, keeps an empty list of them.
    """
    if _is_keras(module):
        return not module.weights
    if next(itertools.chain(module.parameters(), module.buffers()), None) is not None:
        return False
    return not any(type(x).__module__.startswith("torch.ao.nn.") for x in module.modules())
