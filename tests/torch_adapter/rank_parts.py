"""What the programs of several ranks are made of, and what a rank tells of one."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anynan
from tests.flat import split
from tests.torch_adapter.training import Fault

STEPS = 4
BAD_STEP = 2
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}


def scenario(run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    SCENARIOS[run.__name__] = run
    return run


_ears = threading.local()


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what anynan warns of on this rank."""
    _ears.said = []
    yield _ears.said


@contextmanager
def hearing() -> Iterator[None]:
    """Hand each of anynan's warnings to the thread that caused it."""

    def hear(message: Any, category: type[Warning], *_: object) -> None:
        if category is anynan.AnynanWarning and hasattr(_ears, "said"):
            _ears.said.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        yield


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.fault, self.last = nn.Linear(4, width), Fault(), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fault(self.first(x)).tanh())


def rank() -> int:
    return dist.get_rank()


def batch(step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + rank())
    return torch.randn(3, 4, generator=made)


def train(
    model: nn.Module,
    fault: Fault,
    *,
    armed: str = "",
    where: tuple[int, ...] = (1,),
    data: Callable[[int], torch.Tensor] = batch,
    tracked: nn.Module | None = None,
    as_step: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train for some steps with a fault on some ranks; say where and how that ended."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    target: Any = step if as_step else tracked or model
    seen: dict[str, Any] = {"error": None, "warnings": []}
    with heard() as said:
        tracker = anynan.torch.track(target, **split(options))
        run = tracker if as_step else step
        at = 0
        try:
            for at in range(STEPS):
                fault.armed = armed if at == BAD_STEP and rank() in where else ""
                run(data(at))
        except anynan.AnomalyError as error:
            seen.update(error=type(error).__name__, message=str(error), event=told(error.event))
        except (RuntimeError, OSError) as error:
            seen.update(error=type(error).__name__, message=str(error)[:300])
        tracker.remove()
    return seen | {
        "stopped": at,
        "events": [told(event) for event in tracker.events if event.severity == "bad"],
        "warnings": said,
        "notes": list(tracker.notes),
        "finite": all(bool(torch.isfinite(whole(p)).all()) for p in model.parameters()),
        "weights": sum(float(whole(p).detach().double().sum()) for p in model.parameters()),
        "layers": sorted({r.layer for r in tracker.history if r.layer is not None}),
    }


def stepping(
    model: nn.Module, data: Callable[[int], torch.Tensor] = batch
) -> Callable[[int], None]:
    """Give a step of a training by its number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(at: int) -> None:
        x = data(at)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def until_bad(step: Callable[[int], object], steps: int = STEPS) -> dict[str, Any]:
    """Run a step by its number until anynan raises; say at which one, and of what."""
    seen: dict[str, Any] = {"event": None}
    at = 0
    try:
        for at in range(steps):
            step(at)
    except anynan.AnomalyError as error:
        seen.update(event=told(error.event), message=str(error))
    return seen | {"stopped": at}


def whole(p: Any) -> torch.Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


def told(event: anynan.Event) -> dict[str, Any]:
    names = ("rank", "layer", "phase", "kind", "step", "parameter")
    operation = event.operation
    return {name: getattr(event, name) for name in names} | {
        "op": None if operation is None else operation.name,
        "line": None if operation is None or operation.source is None else operation.source.text,
        "cause": None if event.cause is None else event.cause.tag,
        "notes": list(event.notes),
    }


def ddp(**kwargs: Any) -> tuple[nn.Module, Fault]:
    torch.manual_seed(0)
    net = Net()
    return DistributedDataParallel(net, **kwargs), net.fault


def untracked(model: nn.Module, data: Callable[[int], torch.Tensor] = batch) -> float:
    """Train as ``train`` does, without a tracker: what the weights come to."""
    step = stepping(model, data)
    for at in range(STEPS):
        step(at)
    return sum(float(whole(p).detach().double().sum()) for p in model.parameters())


def fsdp() -> tuple[nn.Module, Fault]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = Net()
    for module in (net.first, net.last, net):
        fully_shard(module)
    return net, net.fault
