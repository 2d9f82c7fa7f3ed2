"""What PyTorch code computes and leaves behind, kept to be compared."""

import gc
import random
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch._dynamo  # what is seeded first imports it: once is enough for all cases
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

torch.set_num_threads(1)


def seed(number: int = 1) -> None:
    """Seed every generator of random numbers that a program may use."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def losses_of(outputs: Any) -> list[Tensor]:
    """Give the outputs that a backward pass can begin at."""
    return [
        tensor
        for tensor in tensors(outputs)
        if tensor.requires_grad
        and (tensor.is_floating_point() or tensor.is_complex())
        and tensor.layout == torch.strided
    ]


def backward(outputs: Any) -> None:
    parts = [
        (tensor.abs() if tensor.is_complex() else tensor).sum() for tensor in losses_of(outputs)
    ]
    if parts:
        sum(parts[1:], parts[0]).backward()


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def same(one: Tensor | None, two: Tensor | None) -> bool:
    """Tell whether two tensors hold the same values; NaN is the same as NaN."""
    if one is None or two is None:
        return one is two
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    one, two = _plain(one), _plain(two)
    equal = one == two
    if one.is_floating_point():
        equal |= (one != one) & (two != two)
    return bool(equal.all())


def finite(values: Iterable[Tensor | None]) -> bool:
    for value in values:
        if value is None or not (value.is_floating_point() or value.is_complex()):
            continue
        plain = _plain(value)
        if plain.is_meta or not plain.numel():
            continue
        if not bool(torch.isfinite(plain.float()).all()):
            return False
    return True


def differing(one: dict[str, list[Any]], two: dict[str, list[Any]]) -> list[str]:
    return [
        name
        for name in one
        if len(one[name]) != len(two[name])
        or not all(same(x, y) for x, y in zip(one[name], two[name], strict=True))
    ]


# What is patched while something is tracked would be found here.
_PLACES: tuple[Any, ...] = (
    nn.Module,
    torch.Tensor,
    torch._C.TensorBase,
    torch.autograd.Function,
    torch.autograd.graph.Node,
    torch.optim.Optimizer,
    torch.amp.GradScaler,
    torch,
    torch.autograd,
    torch.nn.functional,
    torch.utils.checkpoint,
    torch.nn.modules.module,
    optimizers,
)


class Footprint:
    """Hooks, patches and attributes there were before something was tracked."""

    def __init__(self, *targets: Any) -> None:
        gc.collect()
        self._targets = targets
        self._places = [*_PLACES, *{type(target) for target in targets}]
        self._before = dict(self._look())

    def _look(self) -> Iterator[tuple[str, Any]]:
        for place in self._places:
            for name, value in list(vars(place).items()):
                if callable(value):
                    yield f"{place.__name__}.{name}", id(value)
                elif isinstance(value, dict) and "hook" in name:
                    yield f"{place.__name__}.{name}", len(value)
        for target in self._targets:
            parts = target.named_modules() if isinstance(target, nn.Module) else [("", target)]
            for path, part in parts:
                kind = f"{path}:{type(part).__name__}"
                for name, value in list(vars(part).items()):
                    size = len(value) if isinstance(value, dict) and "hook" in name else ""
                    yield f"{kind}.{name}", size
            if isinstance(target, nn.Module):
                for path, weight in target.named_parameters():
                    yield f"{path} hooks", len(weight._backward_hooks or ())
                    yield f"{path} later hooks", len(weight._post_accumulate_grad_hooks or ())
                    yield f"{path} attributes", sorted(vars(weight))
        yield "modes", len(_get_current_dispatch_mode_stack())
        yield "function modes", torch._C._len_torch_function_stack()

    def left(self, tracker: "weakref.ref[Any] | None" = None) -> str:
        """Say what was left after ``remove()``; ``yes`` for nothing."""
        now = dict(self._look())
        changed = [name for name, value in self._before.items() if now.get(name, value) != value]
        # A program may keep something of its own on its modules; ours would say so.
        changed += [name for name in now.keys() - self._before.keys() if "anynan" in name]
        if tracker is not None:
            gc.collect()
            if tracker() is not None:
                changed.append("the tracker itself")
        return f"left: {', '.join(sorted(changed)[:5])}" if changed else "yes"
