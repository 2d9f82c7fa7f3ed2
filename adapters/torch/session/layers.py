"""The hooks on the layers of the watched models."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from anynan._base.interrupts import whole
from anynan.torch.call.growth import registered
from anynan.torch.call.models import Models
from anynan.torch.messages import COMPILED_LAYERS_ADDED, FUSED_PATH, LAYERS_CHANGED, SCRIPTED
from anynan.torch.read.paths import clean_path, inner, join
from anynan.torch.step.hooks import ForwardHook, RootHook
from anynan.torch.step.steps import Steps


class Layers:
    """Put hooks on layers, and take them off.

    Args:
        models: What is watched.
        steps: Where the hooks write to.
        enter: Called as a root call begins, with the module, its arguments and its path.
        leave: Called as it ends, with the module, its arguments and its output.

    Attributes:
        handles: What takes the hooks off.
        grown: How many modules had been put into tracked models when the hooks were put on.
    """

    def __init__(
        self, models: Models, steps: Steps, enter: Callable[..., None], leave: Callable[..., None]
    ) -> None:
        self._models, self._steps = models, steps
        self._enter, self._leave = enter, leave
        self._tracker, self._graphs = steps.tracker, steps.graphs
        self.handles: list[Any] = []
        self.grown = registered.count

    @whole
    def install(self) -> None:
        """Hook every model."""
        self._models.renew()
        for prefix, model in self._models.living():
            self.hook(prefix, model)

    @whole
    def remove(self) -> None:
        """Take every hook away."""
        self._models.hooked.clear()
        registered.followers.discard(self)
        while self.handles:
            self.handles.pop().remove()
        self._graphs.boards.clear()

    @whole
    def hook(self, prefix: str, model: torch.nn.Module) -> None:
        """Hook the layers of a model, and its own call."""
        models = self._models
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            self._tracker.judge.say(SCRIPTED())
        chosen = models.paths(prefix, model)
        ends = self._steps.options.level == "step"
        # Of a compiled module the outer one: its hooks run outside the graph.
        root = model if ends else inner(model)
        self._hook_entry(root, prefix)
        first: dict[torch.nn.Module, str] = {}
        for path, module in chosen.items():
            first.setdefault(module, path)
        for module, path in first.items():
            models.hooked.setdefault(module, path)
        registered.know(model)
        registered.followers.add(self)
        for outer in registered.outer(root):
            self.compiled(outer, root)
        self.grown = registered.count
        fixed = {} if ends else self._graphs.add(first, model)
        for module, path in ((root, prefix),) if ends else first.items():
            hook = ForwardHook(self._steps, path, fixed.get(path), self.called_past)
            self.handles.append(hook.on(module.register_forward_hook(hook)))
        self._hook_exit(root)
        # A trainer may call a method of the model instead of the model, as Lightning's does.
        own_loop = callable(getattr(root, "training_step", None))
        models.parts = models.parts or (models.fn is None and own_loop)
        if models.parts:
            self._hook_parts(prefix, root)
        if not ends:
            if any(isinstance(x, torch.nn.TransformerEncoderLayer) for x in model.modules()):
                self._tracker.judge.remark(FUSED_PATH())
            self._graphs.renew(model)

    @whole
    def compiled(self, outer: torch.nn.Module, model: torch.nn.Module) -> None:
        """See the calls of what was compiled from a model: the model's own hooks are in a graph."""
        for prefix, known in self._models.living():
            if model in (known, inner(known)):
                self._hook_entry(outer, prefix, first=False)
                self._hook_exit(outer)

    @whole
    def follow(self) -> bool:
        """Watch the layers that were put in, took another's place, or got another path.

        Returns:
            Whether others are watched now.
        """
        self.grown = registered.count
        try:
            now = self._models.layers()
        except ValueError as error:  # a pattern that matched before
            self._tracker.judge.say(LAYERS_CHANGED(error=str(error)))
            return False
        if now == dict(self._models.hooked):
            return False
        if self._graphs.ran():
            self._tracker.judge.say(COMPILED_LAYERS_ADDED())
            return False
        self.remove()
        self.install()
        return True

    def called_past(self) -> None:
        """Note that a layer was called without its model, and be ready the next time."""
        if self._models.parts or self._models.fn is not None:
            return
        self._models.parts = True
        for prefix, model in self._models.living():
            self._hook_parts(prefix, model)

    @whole
    def _hook_parts(self, prefix: str, model: torch.nn.Module) -> None:
        """Take a call of each part of a model for a call of the model: something to run again."""
        ends = self._steps.options.level == "step"
        for path, part in parts(prefix, model):
            self._hook_entry(part, path)
            if ends:
                hook = ForwardHook(self._steps, path, None, self.called_past)
                self.handles.append(hook.on(part.register_forward_hook(hook)))
            self._hook_exit(part)

    def _hook_entry(self, module: torch.nn.Module, path: str, *, first: bool = True) -> None:
        hook = RootHook(partial(self._enter, path=path))
        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
        self.handles.append(hook.on(handle))

    def _hook_exit(self, module: torch.nn.Module) -> None:
        hook = RootHook(self._leave)
        self.handles.append(hook.on(module.register_forward_hook(hook, always_call=True)))


def parts(prefix: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Walk the parts that a loop may call in the model's place, with their paths."""
    for name, child in model.named_children():
        path = join(prefix, clean_path(name, model))
        if type(child).forward is torch.nn.Module.forward:  # a list or a dict of modules
            yield from parts(path, child)
        else:
            yield path, child
