"""Trainings over several ranks: replicated, sharded and split."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.torch_adapter.rank_parts import (
    BAD_STEP,
    SCENARIOS,
    Net,
    batch,
    ddp,
    fsdp,
    rank,
    scenario,
    train,
    untracked,
)
from tests.torch_adapter.training import Fault


@scenario
def bad_batch() -> dict[str, Any]:
    def data(step: int) -> torch.Tensor:
        x = batch(step)
        if step == BAD_STEP and rank() == 1:
            x[2, 0] = float("nan")
        return x

    return train(*ddp(), data=data)


def tensor_parallel() -> tuple[nn.Module, Fault]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    net = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
    return net, net.fault


def same(step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(step)
    return torch.randn(3, 4, generator=made)


def trained(
    make: Callable[[], tuple[nn.Module, Fault]],
    data: Callable[[int], torch.Tensor],
    *,
    beside: bool = False,
    **how: Any,
) -> dict[str, Any]:
    """Train what is made, and beside it the same without a tracker if that is asked for."""
    seen = train(*make(), data=data, **how)
    return seen | ({"untracked": untracked(make()[0], data)} if beside else {})


for _name, _make, _data in (
    ("", ddp, batch), ("fsdp_", fsdp, batch), ("tp_", tensor_parallel, same),
):  # fmt: skip
    _skip = {"action": "skip"} if _name else {}
    SCENARIOS |= {
        f"{_name}clean": partial(trained, _make, _data, beside=True),
        f"{_name}forward": partial(trained, _make, _data, armed="forward"),
        f"{_name}backward": partial(trained, _make, _data, armed="backward", **_skip),
        f"{_name}step": partial(trained, _make, _data, armed="forward", as_step=True, **_skip),
    }


@scenario
def weight_gradient() -> dict[str, Any]:
    """Spoil only the gradient of a weight: no layer's reading on rank 1 comes before its sum."""

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x * w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, grad.sum(0) / (0.0 if fault.armed else 1.0)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Spoil.apply(x, self.weight)

    fault = Fault()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4)))
    return train(model, fault, armed="x")


@scenario
def synchronised_norm() -> dict[str, Any]:
    """A layer that sums over the ranks in its forward pass takes the NaN to all of them."""
    torch.manual_seed(0)

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.distributed.nn.functional import all_reduce

            return x - all_reduce(x.mean(0)) / dist.get_world_size()

    fault = Fault()
    net = nn.Sequential(nn.Linear(4, 8), fault, Mean(), nn.Linear(8, 4))
    return train(DistributedDataParallel(net), fault, armed="forward")
