"""What is watched: models, their layers, weights and buffers, and what a call of them takes."""

import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from anynan._arrays.arguments import bound
from anynan._base.identity import ByIdentity, SetByIdentity
from anynan._readings.patterns import choose
from anynan.options import Options
from anynan.torch.call.discovery import find_weights
from anynan.torch.private import BatchNorm, original
from anynan.torch.read.paths import clean_path, join
from anynan.torch.read.tensors import tensors


class Models:
    """Name the layers, weights and buffers of what is watched.

    Args:
        options: The tracker's.
        fn: The tracked function, None where a model is tracked.

    Attributes:
        refs: Each model, held weakly, behind the prefix of its paths.
        scripted: Those that take no hooks.
        hooked: The layers that are hooked, with their paths.
        parts: Whether a call of a part of a model counts as a call of the model.
        handed: Whether what comes in with a graph is another model's, and no batch.
        stepped: The optimizers that the tracked function stepped itself.
    """

    def __init__(self, options: Options, fn: Callable[..., Any] | None = None) -> None:
        self.options, self.fn = options, fn
        self.refs: list[tuple[str, weakref.ref[torch.nn.Module]]] = []
        self.scripted: SetByIdentity[torch.nn.Module] = SetByIdentity()
        self.hooked: ByIdentity[torch.nn.Module, str] = ByIdentity()
        self.parts = self.handed = False
        self.stepped: SetByIdentity[torch.optim.Optimizer] = SetByIdentity()

    def living(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Walk the models that are still there, with their prefixes."""
        for prefix, ref in self.refs:
            model = ref()
            if model is not None:
                yield prefix, model

    def renew(self) -> None:
        """Forget what was looked up, since the hooks are put on anew."""

    # Layers.

    def paths(self, prefix: str, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Give the watched layers of a model by path, patterns applied."""
        named = self.named(prefix, model)
        overrides = self.options.policy.overrides
        if self.options.layers is None and self.options.exclude is None and not overrides:
            return named
        # A pattern need not match in every model of a step.
        every = dict(named)
        for other, found in self.living():
            if found is not model:
                every.update(self.named(other, found))
        chosen = choose(
            every, self.options.layers, self.options.exclude, overrides, whole=self.whole(every)
        )
        return {path: module for path, module in named.items() if path in chosen}

    def whole(self, layers: dict[str, torch.nn.Module]) -> bool:
        """Tell whether these are all the layers there will be, so that a pattern must match one."""
        return True

    def named(self, prefix: str, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Map paths to modules; of a wrapper and what it wraps, which share one, the inner.

        Scripted and traced ones are left out: they take no hooks.
        """
        found: dict[str, torch.nn.Module] = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            path = join(prefix, clean_path(name, model))
            # A compiled module and what it was compiled from have one path: hooks on the first
            # run outside the graph.
            if not name.endswith("_orig_mod") or path not in found:
                found[path] = module
        return found

    def watched(self) -> list[str]:
        """List the layers that have a forward pass of their own."""
        return [
            path
            for prefix, model in self.living()
            for path, module in self.paths(prefix, model).items()
            if "forward" not in vars(module) and type(module).forward is not torch.nn.Module.forward
        ]

    def layers(self) -> dict[torch.nn.Module, str]:
        """Map the watched modules to their first path."""
        found: dict[torch.nn.Module, str] = {}
        for prefix, model in self.living():
            for path, module in self.paths(prefix, model).items():
                found.setdefault(module, path)
        return found

    def around(self, path: str) -> str | None:
        """Give the path of the model that a layer is inside of; None for a model itself.

        Where parts of a model are called by themselves nothing is known to be around them.
        """
        prefixes = [prefix for prefix, _ in self.living()]
        inside = [p for p in prefixes if p != path and (not p or path.startswith(f"{p}."))]
        return max(inside, key=len) if inside and not self.parts else None

    # Weights.

    def parameters(self) -> list[tuple[str, Any]]:
        """List the parameters by their full clean names.

        Of a tracked function those count, too, that its optimizers hold outside of modules.
        """
        found: dict[int, tuple[str, Any]] = {}
        for prefix, model in self.living():
            for name, p in model.named_parameters():
                found.setdefault(id(p), (join(prefix, clean_path(name, model)), p))
        names: dict[int, str] | None = None
        for optimizer in list(self.stepped) if self.fn is not None else ():
            for i, group in enumerate(optimizer.param_groups):
                for j, p in enumerate(group["params"]):
                    if id(p) not in found:
                        if names is None:
                            names = {id(x): name for name, x in find_weights(self.fn).items()}
                        found[id(p)] = names.get(id(p), f"param_groups[{i}][{j}]"), p
        return list(found.values())

    def with_gradient(self) -> list[tuple[str, Any]]:
        """List those that hold a gradient; PyTorch warns who asks one that was computed."""
        return [(name, p) for name, p in self.parameters() if p.is_leaf and p.grad is not None]

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """List the buffers by their full clean names."""
        return [
            (join(prefix, clean_path(name, model)), x)
            for prefix, model in self.living()
            for name, x in model.named_buffers()
        ]

    def statistics(self) -> dict[int, bool]:
        """Tell of running statistics, by id, whether calls only update them, as in training."""
        return {
            id(x): module.training
            for _, model in self.living()
            for module in model.modules()
            if isinstance(module, BatchNorm)
            for x in module.buffers(recurse=False)
        }

    # Calls.

    def inputs(
        self, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk the tensors that a model or a function is called with, by name."""
        for name, item in given(fn, args, kwargs):
            yield from tensors(item, name)


def given(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Name what a model or a function is called with."""
    fn = original(fn)  # a compiled module's own forward names nothing
    return bound(_argument_names(getattr(fn, "forward", fn)), args, kwargs)


def _argument_names(call: Callable[..., Any]) -> tuple[str, ...]:
    """Name a function's positional arguments, cheaply enough for every call."""
    code = getattr(call, "__code__", None)
    if code is None:
        return ()
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names[1:] if type(call) is MethodType else names
