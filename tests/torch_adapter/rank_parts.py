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
from tests.torch_adapter.training import Fault, Net

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


def rank() -> int:
    return dist.get_rank()


def drawn(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def batch(step: int) -> torch.Tensor:
    return drawn(100 * step + rank())


def stepping(model: nn.Module, data: Any = batch) -> Callable[[int], torch.Tensor]:
    """Give a step of a training by its number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(at: int) -> torch.Tensor:
        x = data(at)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def until_bad(step: Callable[[int], object], steps: int = STEPS) -> dict[str, Any]:
    """Run a step by its number until something is raised; say at which one, and of what."""
    seen: dict[str, Any] = {"error": None, "event": None}
    at = 0
    try:
        for at in range(steps):
            step(at)
    except (anynan.AnomalyError, RuntimeError, OSError) as error:
        seen |= {"error": type(error).__name__, "message": str(error)}
        if isinstance(error, anynan.AnomalyError):
            seen["event"] = told(error.event)
    return seen | {"stopped": at}


def train(
    model: nn.Module, fault: Fault, *, armed="", where=1, data=batch, as_step=False, **options: Any
) -> dict[str, Any]:
    """Train for some steps with a fault on one rank; say where and how that ended."""
    step: Any = stepping(model, data)
    target = step if as_step else model
    with heard() as said, anynan.torch.track(target, **split(options)) as tracker:

        def one(at: int) -> None:
            fault.armed = armed if at == BAD_STEP and rank() == where else ""
            (tracker if as_step else step)(at)

        seen = until_bad(one)
    return seen | {
        "events": [told(event) for event in tracker.events if event.severity == "bad"],
        "warnings": said,
        "finite": all(bool(torch.isfinite(whole(p)).all()) for p in model.parameters()),
        "weights": total(model),
        "layers": sorted({r.layer for r in tracker.history if r.layer is not None}),
    }


def untracked(model: nn.Module, data: Callable[[int], torch.Tensor] = batch) -> float:
    """Train as ``train`` does, without a tracker: what the weights come to."""
    until_bad(stepping(model, data))
    return total(model)


def total(model: nn.Module) -> float:
    return sum(float(whole(p).detach().double().sum()) for p in model.parameters())


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


def net() -> Net:
    """Make the same network on every rank."""
    torch.manual_seed(0)
    return Net(width=8, out=4)


def ddp() -> tuple[nn.Module, Fault]:
    made = net()
    return DistributedDataParallel(made), made.fault


def fsdp() -> tuple[nn.Module, Fault]:
    from torch.distributed.fsdp import fully_shard

    made = net()
    for module in (made.first, made.last, made):
        fully_shard(module)
    return made, made.fault
