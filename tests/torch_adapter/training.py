"""What the tests of this folder share: faults, ways to train, and comparisons."""

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import anynan

# How a root's slope at zero and a logarithm below zero are named in an event.
WORDS = {"forward": "log", "backward": "sqrt"}
LINES = {"forward": "return torch.log(-1 - x.abs())", "backward": "return x + torch.sqrt(0 * x)"}


class Fault(nn.Module):
    """Pass values through, or make a bad value of them when armed, on one turn or on all."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: str | None = None
        self.at: int | None = None

    def forward(self, x: torch.Tensor, turn: int | None = None) -> torch.Tensor:
        if self.at is not None and turn != self.at:
            return x
        if self.armed == "forward":
            return torch.log(-1 - x.abs())
        if self.armed == "backward":
            # The slope of a root at zero.
            return x + torch.sqrt(0 * x)
        return x


def seed(number: int = 3) -> None:
    """Put every generator at one place."""
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002
    random.seed(number)


def bad(tracker: anynan.Tracker) -> list[anynan.Event]:
    return [event for event in tracker.events if event.severity == "bad"]


def assert_same(one: Any, two: Any, where: str = "") -> None:
    """Compare two nested states bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.nan_to_num(7.0, 8.0, 9.0), two.nan_to_num(7.0, 8.0, 9.0)), where
        assert torch.equal(one.isnan(), two.isnan()), where
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, two), where
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_same(one[key], two[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert one == two, where


def everything(models: Iterable[nn.Module], keepers: Iterable[Any] = ()) -> dict[str, Any]:
    """Copy all that a step may have touched: weights, gradients, states, random states."""
    models = list(models)
    return {
        "weights": [{k: v.clone() for k, v in model.state_dict().items()} for model in models],
        "gradients": [
            None if p.grad is None else p.grad.clone() for m in models for p in m.parameters()
        ],
        "training": [module.training for m in models for module in m.modules()],
        "states": [copy.deepcopy(keeper.state_dict()) for keeper in keepers],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),  # type: ignore[index]  # noqa: NPY002
        "python": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
    }


def live_tensors() -> int:
    gc.collect()
    # type() and not isinstance(): that asks lazy objects for their class, and wakes them.
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


class Count(TorchDispatchMode):
    # What brings a value to the host.
    READS = ("_to_copy", "_local_scalar_dense", "item", "copy")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return sum(self.seen[name] for name in self.READS)


# A small training, and what compares two.


class Net(nn.Module):
    """Two layers around a fault."""

    def __init__(self, fault: Fault | None = None, *, width: int = 4, out: int = 2) -> None:
        super().__init__()
        self.fault = fault or Fault()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, out)

    def forward(self, x: torch.Tensor, turn: int | None = None) -> torch.Tensor:
        return self.last(self.fault(self.first(x), turn).tanh())


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Fault(), nn.Linear(8, 2))


def net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), *layers)


def batch(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(batch()).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    loss: torch.Tensor = model(batch() if x is None else x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def stepping(model: Any, optimizer: Any = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Give a training step of a model, to be tracked."""
    optimizer = optimizer or sgd(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        return train(model, optimizer, x)

    return step


def snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(before: list[torch.Tensor], model: nn.Module) -> bool:
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def hooks_on(model: nn.Module) -> int:
    return sum(
        len(held)
        for module in model.modules()
        for name, held in vars(module).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and isinstance(held, dict)
    )
