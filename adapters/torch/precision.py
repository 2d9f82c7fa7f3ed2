"""Run a target in a narrow dtype: weights and inputs cast, some modules kept in float32."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray

from anynan._base.patches import Patches
from anynan._trace.op import Observed, Observer
from anynan.torch.call.discovery import find_state, find_weights, named_models
from anynan.torch.observe import Sight, observe, takes
from anynan.torch.private import tree_leaves, tree_map
from anynan.torch.read.paths import clean_path, join
from anynan.torch.read.probes import on_host
from anynan.torch.weights.optimizers import find_optimizers

_CODE = """\
kept = {kept}  # whether the result is cast back

def cast(x, dtype):
    if isinstance(x, (tuple, list)):
        return type(x)(cast(each, dtype) for each in x)
    if isinstance(x, dict):
        return type(x)(**{{name: cast(each, dtype) for name, each in x.items()}})
    return x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x

for name, back in kept.items():
    module = model.get_submodule(name){how}
    module.register_forward_pre_hook(
        lambda _, args, kwargs: cast((args, kwargs), torch.float32), with_kwargs=True)
"""
_BACK = """\
    if back:
        module.register_forward_hook(lambda _, args, out: cast(out, torch.{dtype}))
"""
_AUTOCAST = '''
    module.forward = torch.autocast("cuda", enabled=False)(module.forward)  # or "cpu"'''


def narrowed_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Narrowed | None":
    """Give what runs a target of this framework in narrow dtypes; None for all else."""
    return Narrowed(target, args, kwargs) if takes(target, args, kwargs) else None


class Narrowed:
    """Run one target in narrow dtypes.

    Args:
        target: A model, a training step, or any function.
        args: What it is called with.
        kwargs: By name.
    """

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._call = target, args, dict(kwargs)
        self._sight = Sight(target)
        found = named_models(target, args, kwargs)
        self._models = list(found.values())
        self._modules = [
            (join(name, clean_path(path, model)), module)
            for name, model in found.items()
            for path, module in model.named_modules()
        ]

    @cached_property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        weights = {id(p) for model in self._models for p in model.parameters()}
        named = [x for x in find_state(self._call[0]).values() if hasattr(x, "param_groups")]
        return [*named, *(x for x in find_optimizers(weights) if not any(x is o for o in named))]

    def observe(self, observer: Observer) -> Observed:
        """Run as it is, and show each operation."""
        return observe(*self._call, observer)

    def host(self, x: Any) -> NDArray[Any] | None:
        """Give a tensor's numbers to NumPy; None if it has none with a fraction."""
        if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
            return None
        if x.layout is not torch.strided or x.is_meta:
            return None
        return on_host(x)

    def rounded(self, x: Any, dtype: str) -> Any:
        """Round a tensor to a dtype, and give it in its own again."""
        return x if x.is_complex() else x.detach().to(getattr(torch, dtype)).to(x.dtype)

    def bounded(self, x: Any) -> Any:
        """Put the largest number in the place of Inf, and 0 in that of NaN."""
        return torch.nan_to_num(x.detach())

    def given(self) -> list[tuple[str, str | None, Any]]:
        """List weights, buffers and arguments."""
        found: list[tuple[str, str | None, Any]] = []
        for path, module in self._modules:
            for held in (module._parameters, module._buffers):
                found += [(join(path, name), path, x) for name, x in held.items() if _narrows(x)]
        arrays = [x for x in tree_leaves(self._call[1:]) if _narrows(x)]
        return found + [(f"input {i}", None, x) for i, x in enumerate(arrays)]

    def sizes(self) -> dict[str, int]:
        """Give the modules that are called, with the elements of all weights in them."""
        lists = torch.nn.ModuleList | torch.nn.ModuleDict
        return {
            path: sum(p.numel() for p in module.parameters())
            for path, module in self._modules
            if not isinstance(module, lists)
        }

    def tied(self, layer: str) -> list[str]:
        """List the modules that hold a weight of another module's, or of one in it."""
        mine = {id(p) for path, m in self._modules if path == layer for p in m.parameters()}
        within = layer + "." if layer else ""
        return [
            path
            for path, module in self._modules
            if path != layer
            and not path.startswith(within)
            and any(id(p) in mine for p in module._parameters.values())
        ]

    def run(self, observer: Observer, dtype: str, how: str, keep: Mapping[str, bool]) -> Observed:
        """Run in a dtype, with some modules kept in float32, and leave no trace."""
        narrow: torch.dtype = getattr(torch, dtype)
        _, args, kwargs = self._call
        kept = [module for path, module in self._modules if path in keep]
        weights = (p.device.type for model in self._models for p in model.parameters())
        device = next(weights, "cpu") if how == "autocast" else None
        with ExitStack() as stack:
            if device is None:
                cast = _rounding(narrow) if how == "round" else lambda x: x.to(narrow)
                stack.enter_context(self._cast(kept, cast))
                args, kwargs = tree_map(
                    lambda x: _like(x, cast) if _narrows(x) else x, (args, kwargs)
                )
            else:
                stack.enter_context(_autocast(device, narrow))
            for path, module in self._modules if how != "round" else ():
                if path in keep:  # what the model itself returns stays as it is
                    back = keep[path] and device is None and module not in self._models
                    _keep(stack, module, narrow, device, back=back)
            sight = stack.enter_context(self._sight)
            return sight.run(args, kwargs, observer)

    def code(self, dtype: str, how: str, keep: Mapping[str, bool], scale: float) -> str:
        """Write the code that keeps modules in float32, and scales the loss."""
        text = ""
        if keep and how == "autocast":
            text = _CODE.format(kept=dict.fromkeys(keep, False), how=_AUTOCAST)
        elif keep:
            kept = {k: back and bool(k) for k, back in keep.items()}
            text = _CODE.format(kept=kept, how=".float()") + _BACK.format(dtype=dtype)
        return text + (f"scaler = torch.amp.GradScaler(init_scale={scale:g})" * (scale != 1))

    @contextmanager
    def _cast(
        self, kept: Sequence[torch.nn.Module], cast: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[None]:
        """Have weights, buffers, gradients and optimizer state in another dtype meanwhile."""
        wide = {id(x) for module in kept for x in _held(module.modules())}
        tensors = {id(x): x for x in _held(module for _, module in self._modules)}
        tensors.update((id(x), x) for x in find_weights(self._call[0]).values() if _narrows(x))
        tensors = {number: x for number, x in tensors.items() if number not in wide}
        held = [(x, x.data, x.grad) for x in tensors.values()]
        states = [
            (state, name, x)
            for optimizer in self._optimizers
            for weight, state in optimizer.state.items()
            if id(weight) in tensors and isinstance(state, dict)
            for name, x in state.items()
            if _narrows(x) and x.shape == weight.shape
        ]
        try:
            with torch.no_grad():
                for x, data, grad in held:
                    x.grad = None
                    x.data = cast(data)
                    x.grad = None if grad is None else cast(grad)
                for state, name, value in states:
                    state[name] = cast(value)
            yield
        finally:
            for x, data, grad in held:
                x.grad = None
                x.data = data
                x.grad = grad
            for state, name, value in states:
                state[name] = value


def _held(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Walk the weights and buffers that modules hold themselves, of those that can be cast."""
    for module in modules:
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None and _narrows(x):
                yield x


@contextmanager
def _autocast(device: str, narrow: torch.dtype) -> Iterator[None]:
    """Have the forward pass under autocast; the backward pass follows it, and is under none."""

    def outside(real: Callable[..., Any]) -> Callable[..., Any]:
        def differentiate(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, enabled=False):
                return real(*args, **kwargs)

        return differentiate

    with Patches() as patches, torch.autocast(device, narrow):
        for name in ("backward", "grad"):
            patches.change(torch.autograd, name, outside)
        yield


def _keep(
    stack: ExitStack, module: torch.nn.Module, narrow: torch.dtype, device: str | None,
    *, back: bool,
) -> None:  # fmt: skip
    """Have a module compute in float32: what it is given is cast, and what it gives cast back."""
    inner = ExitStack()
    stack.enter_context(inner)

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        if device is not None:
            inner.enter_context(torch.autocast(device, enabled=False))
        return tree_map(lambda x: x.float() if _is(x, narrow) else x, (args, kwargs))

    def after(_: Any, args: Any, out: Any) -> Any:
        inner.close()
        if not back:
            return out
        return tree_map(lambda x: x.to(narrow) if _is(x, torch.float32) else x, out)

    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _narrows(x: Any) -> bool:
    wide = (torch.float32, torch.float64)
    return isinstance(x, torch.Tensor) and x.dtype in wide and x.layout is torch.strided


def _rounding(narrow: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(narrow).to(x.dtype)


def _like(x: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Cast an argument; a leaf that takes a gradient is one again."""
    return cast(x.detach()).requires_grad_(x.requires_grad)


def _is(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is dtype
