"""Faults for PyTorch models, each put at a place that is known afterwards."""

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.wild.torch_state import tensors

NAN_WEIGHT, DIVIDE, ROOT, SCALE = "nan weight", "divide", "root", "scale"
KINDS = (NAN_WEIGHT, DIVIDE, ROOT, SCALE)
# What the causes of these are called; of a layer that is scaled it depends on what overflows.
CAUSES = {
    NAN_WEIGHT: {"bad_parameter", "weight_written"},
    DIVIDE: {"divide_by_zero"},
    ROOT: {"norm_gradient_at_zero", "sqrt_gradient_at_zero"},
}
OPERATIONS = {DIVIDE: "divide", ROOT: "sqrt"}
FACTOR = 1e30


def divided(output: Tensor) -> Tensor:
    return output / (output.detach() * 0)


def rooted(output: Tensor) -> Tensor:
    """Add a 0 whose slope is infinite."""
    return output + (output * 0).square().sum().sqrt()


def called_leaves(model: nn.Module, step: Callable[[], Any]) -> list[str]:
    """Name the innermost layers whose output is one float tensor that learns, in call order."""
    seen: dict[str, None] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.numel() and output.requires_grad:
                seen[name] = None

        return see

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and not any(True for _ in module.children()):
                stack.enter_context(module.register_forward_hook(hook(name)))
        step()
    return list(seen)


def has_weight(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.is_floating_point() and weight.requires_grad


def places(case: str, kind: str, model: nn.Module, leaves: list[str]) -> list[str]:
    """Order the layers a fault may be put into: always the same for one program and kind."""
    modules = dict(model.named_modules())
    able = [name for name in leaves if kind in OPERATIONS or has_weight(modules[name])]
    random.Random(zlib.crc32(f"{case} {kind}".encode())).shuffle(able)
    return able


def put(kind: str, module: nn.Module) -> None:
    if kind in OPERATIONS:
        change = divided if kind == DIVIDE else rooted
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return change(inner(*args, **kwargs))

        module.forward = forward
        return
    weight: Any = module.weight
    with torch.no_grad():
        if kind == SCALE:
            weight.mul_(FACTOR)
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            weight.view(-1)[weight.numel() // 2] = torch.nan
        else:
            weight.fill_(torch.nan)  # of an embedding, a step may read any row or none


def _bad(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.numel():
        return False
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        return False
    tensor = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    return not tensor.amax() < torch.inf  # which a NaN is not either


PLACING = (
    "where", "masked_fill", "full", "fill_", "zeros", "ones", "empty", "scalar_tensor", "clone",
    "copy_", "constant_pad", "lift_fresh", "_to_copy", "detach", "alias", "new_", "view",
)  # fmt: skip


@dataclass
class Truth:
    """What really happens in a faulty program, seen without `anynan`.

    Attributes:
        origins: The operations that made a NaN or +Inf of finite operands, each with the layer
            it ran in, None outside the model.
        backward: Those of the backward pass.
        harm: A bad value left a layer, or is in the loss or a gradient.
        shown: It is in the loss, a gradient or what the model returns.
    """

    origins: list[tuple[str, str | None]] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    harm: bool = False
    shown: bool = False

    @property
    def outside(self) -> bool:
        """Tell whether only the code that makes the loss of the model's outputs does it."""
        return {layer for _, layer in self.origins} == {None}


class Oracle(TorchDispatchMode):
    """Look at what leaves each layer, and, where that is asked for, at every operation."""

    def __init__(self, model: nn.Module, *, operations: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.truth, self.operations = model, Truth(), operations
        self._inside: list[str] = []
        self._returning = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tensors((args, kwargs))
        bad_before = any(map(_bad, operands))
        output = func(*args, **(kwargs or {}))
        placed = any(word in str(func) for word in PLACING)
        # What an operation writes in place is its result too: running statistics.
        if not bad_before and not placed and any(map(_bad, tensors(output) + operands)):
            if self._returning:
                self.truth.backward.append(str(func))
            else:
                layer = self._inside[-1] if self._inside else None
                self.truth.origins.append((str(func), layer))
        return output

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._inside and self._inside[-1] == name:
                self._inside.pop()
            if any(map(_bad, tensors(output))):
                self.truth.harm = True
                self.truth.shown = self.truth.shown or not name

        return leave

    def look(self, step: Callable[[], Tensor]) -> Truth:
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                stack.enter_context(module.register_forward_pre_hook(self._enter(name)))
                stack.enter_context(module.register_forward_hook(self._leave(name)))
            with self if self.operations else nullcontext():
                loss = step()
                self._returning = True
                loss.backward()
        grads = [weight.grad for weight in self.model.parameters()]
        self.truth.shown = self.truth.shown or any(map(_bad, [loss, *grads]))
        self.truth.harm = self.truth.harm or self.truth.shown
        return self.truth


def alike(model: nn.Module, one: str | None, two: str | None) -> bool:
    if one == two:
        return True
    modules = dict(model.named_modules(remove_duplicate=False))
    return one is not None and two is not None and modules.get(one) is modules.get(two, model)


def owners(model: nn.Module, weight: Any) -> Iterator[str]:
    """Name every path a weight is known by: tied weights have several."""
    for name, other in model.named_parameters(remove_duplicate=False):
        if other is weight:
            yield name
