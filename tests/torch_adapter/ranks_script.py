"""Programs of several ranks, and what each rank saw of them: see test_distributed."""

import importlib
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anynan
from tests.torch_adapter import rank_parts as parts
from tests.torch_adapter.rank_parts import BAD_STEP, SCENARIOS, STEPS, batch, rank, scenario, train
from tests.torch_adapter.training import Fault


@scenario
def bad_batch() -> dict[str, Any]:
    def data(step: int) -> torch.Tensor:
        x = batch(step)
        if step == BAD_STEP and rank() == 1:
            x[2, 0] = float("nan")
        return x

    return train(*parts.ddp(), data=data)


def tensor_parallel(mesh: Any = None) -> tuple[Any, Fault]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    net = parts.net()
    plan = {"first": parallel.ColwiseParallel(), "last": parallel.RowwiseParallel()}
    over = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    parallel.parallelize_module(net, over, plan)
    return net, net.fault


def trained(make: Any, data: Callable[[int], torch.Tensor], **how: Any) -> dict[str, Any]:
    return train(*make(), data=data, **how)


def clean(make: Any, data: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """Train what is made, and beside it the same without a tracker."""
    return trained(make, data) | {"untracked": parts.untracked(make()[0], data)}


for _name, _make, _data in (
    ("", parts.ddp, batch), ("fsdp_", parts.fsdp, batch), ("tp_", tensor_parallel, parts.drawn),
):  # fmt: skip
    _skip = {"action": "skip"} if _name else {}
    SCENARIOS |= {
        f"{_name}clean": partial(clean, _make, _data),
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


@scenario
def evaluation() -> dict[str, Any]:
    """Evaluate on one rank only, and find something there: no other rank is waited for."""
    model, fault = parts.ddp()
    seen: dict[str, Any] = {"error": None}
    with anynan.torch.track(model):
        step = parts.stepping(model)
        for at in range(3):
            step(at)
            if rank() == 0 and at == 1:
                fault.armed = "forward"
                with torch.no_grad():
                    seen = parts.until_bad(lambda at: model.module(batch(at)), 1)
                fault.armed = ""
    return seen | {"stopped": at}


@scenario
def fsdp_evaluation() -> dict[str, Any]:
    """Without gradients each rank acts alone, and a replay of sharded weights would wait."""
    model, fault = parts.fsdp()
    fault.armed = "forward"
    with anynan.torch.track(model), torch.no_grad():
        return parts.until_bad(lambda at: model(batch(at)), 1)


class Zeros(nn.Module):
    """Make NaN of a batch of zeros, also when it is run again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * torch.log(x.abs().sum())


def zeros() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(Zeros(), nn.Linear(4, 4)))


def zeroed(at: int, when: int) -> torch.Tensor:
    """Give a batch, of zeros on the second rank in one step."""
    return batch(at) * (0.0 if at == when and rank() == 1 else 1.0)


@scenario
def accumulation() -> dict[str, Any]:
    """The bad call is the first of two, under no_sync."""
    model = zeros()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(at: int) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(zeroed(at, 1)).square().mean().backward()
        model(batch(at)).square().mean().backward()
        optimizer.step()

    with anynan.torch.track(model):
        return parts.until_bad(step, 3)


@scenario
def result_only() -> dict[str, Any]:
    """What a step returns is read after its update: all ranks hear of it at the next one."""
    model, _ = parts.ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(at: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(at)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach() * (float("nan") if at == 1 and rank() == 1 else 1.0)

    with anynan.torch.track(step) as tracker:
        return parts.until_bad(tracker)


@scenario
def counted() -> dict[str, Any]:
    """Count the all-reduces of one step, with tracking and without."""
    from torch.profiler import profile

    model, _ = parts.ddp()
    step = parts.stepping(model)

    def count() -> int:
        for _ in range(3):
            step(0)
        with profile() as seen:
            for _ in range(3):
                step(0)
        return sum(e.count for e in seen.key_averages() if e.key.startswith("gloo:"))

    plain = count()
    with anynan.torch.track(model):
        tracked = count()
    with anynan.torch.track(model, advanced=anynan.Advanced(across_ranks=False)):
        off = count()
    return {"plain": plain, "tracked": tracked, "off": off}


@scenario
def settings() -> dict[str, Any]:
    """The same fault under other settings: buffers that are sent around, other reads."""
    seen = {}
    for name, wrapped, options in [
        ("buffers", {}, {}),
        ("static", {"static_graph": True}, {}),
        ("step", {}, {"read": "end"}),
        ("every", {}, {"read": 2}),
        ("operation", {}, {"level": "operation"}),
        ("no replay", {}, {"replay": False}),
    ]:
        torch.manual_seed(0)
        fault = Fault()
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), fault, nn.Linear(8, 4))
        model = DistributedDataParallel(net, **wrapped)
        seen[name] = train(model, fault, armed="forward", action="skip", **options)
    return {"seen": seen}


@scenario
def mesh() -> dict[str, Any]:
    """Tensor parallelism inside sharded data parallelism, over four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net, fault = tensor_parallel(both["tp"])
    for module in (net.first, net.last, net):
        fully_shard(module, mesh=both["dp"])

    def data(step: int) -> torch.Tensor:
        return parts.drawn(100 * step + rank() // 2)

    return train(net, fault, armed="forward", where=3, data=data)


@scenario
def bad_shard() -> dict[str, Any]:
    """A weight is bad in the shard of one rank before the step."""
    model, fault = parts.fsdp()

    def data(step: int) -> torch.Tensor:
        if step == BAD_STEP and rank() == 1:
            model.first.weight.data.to_local()[0, 0] = float("inf")
        return batch(step)

    return train(model, fault, data=data)


def received(source: int) -> torch.Tensor:
    x = torch.empty(3, 4)
    dist.recv(x, source)
    return x


def pipeline(armed: str, where: int) -> dict[str, Any]:
    """Two stages by hand: the first one's layers on rank 0, the second one's on rank 1."""
    torch.manual_seed(0)
    fault = Fault()
    stage = nn.Sequential(nn.Linear(4, 4), fault, nn.Tanh())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def step(at: int) -> None:
        fault.armed = armed if at == BAD_STEP and rank() == where else ""
        optimizer.zero_grad()
        if rank() == 0:
            out = stage(batch(at))
            dist.send(out.detach(), 1)
            out.backward(received(1))
        else:
            x = received(0).requires_grad_()
            stage(x).square().mean().backward()
            dist.send(x.grad, 0)
        optimizer.step()

    with anynan.torch.track(stage):
        return parts.until_bad(step)


SCENARIOS |= {
    "pipeline_forward": partial(pipeline, "forward", 0),
    "pipeline_backward": partial(pipeline, "backward", 1),
}


@scenario
def apart() -> dict[str, Any]:
    """Without the knob a rank raises at once, in the layer, and tells nobody."""
    net = parts.net()
    return train(net, net.fault, armed="forward", across_ranks=False)


@scenario
def scaler() -> dict[str, Any]:
    """A scaler skips the update, so that no optimizer's step is there to agree at."""
    model = zeros()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(at: int) -> None:
        optimizer.zero_grad()
        scale.scale(model(zeroed(at, 1)).square().mean()).backward()
        scale.step(optimizer)
        scale.update()

    with anynan.torch.track(model):
        return parts.until_bad(step)


@scenario
def refused() -> dict[str, Any]:
    """The program itself raises on the bad value, before any update."""

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.isfinite(x).all():
                return x
            raise ValueError("no NaN here")

    torch.manual_seed(0)
    fault = Fault()
    net = nn.Sequential(nn.Linear(4, 4), fault, Picky())
    step = parts.stepping(net)
    with parts.heard() as said:
        tracker = anynan.torch.track(net)
        with suppress(ValueError):
            for at in range(STEPS):
                fault.armed = "forward" if at == BAD_STEP else ""
                step(at)
        tracker.remove()
    return {"stopped": at, "warnings": said, "events": [parts.told(e) for e in tracker.events]}


def killed(victim: int) -> dict[str, Any]:
    """One rank dies before it comes to agree; if it is not the first, rank 1 has a report."""
    from anynan.torch.distributed import links

    links.ROLL_CALL = timedelta(seconds=1)
    net = parts.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    anynan.torch.track(net)

    def step(at: int) -> None:
        net.fault.armed = "forward" if at == BAD_STEP and rank() == 1 and victim else ""
        optimizer.zero_grad()
        net(batch(at)).square().mean().backward()
        if at == BAD_STEP and rank() == victim:
            os._exit(7)
        optimizer.step()

    return parts.until_bad(step)


SCENARIOS |= {f"killed_{victim}": partial(killed, victim) for victim in (0, 2)}


def lonely(tracks: bool, leaves: int) -> dict[str, Any]:
    model, _ = parts.ddp()
    step = parts.stepping(model)
    with parts.heard() as said:
        tracker = anynan.torch.track(model) if tracks else None
        for at in range(STEPS):
            if at == leaves and tracker is not None:
                tracker.remove()
                tracker = None
            step(at)
        if tracker is not None:
            tracker.remove()
    return {"stopped": at, "warnings": said}


@scenario
def one_tracks() -> dict[str, Any]:
    """The first scenario of its run: what tracked before would count."""
    with patch("anynan.torch.distributed.links.GRACE", timedelta(seconds=1)):
        return lonely(rank() == 0, STEPS)


@scenario
def one_leaves() -> dict[str, Any]:
    return lonely(True, 2 if rank() == 1 else STEPS)


@scenario
def one_does_not_come() -> dict[str, Any]:
    """Rank 1 skips an update that the others make: they wait for a bounded time."""
    second = timedelta(seconds=1)
    net = parts.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shorter = patch.multiple("anynan.torch.distributed.links", PATIENCE=second, ROLL_CALL=second)
    with shorter, parts.heard() as said, anynan.torch.track(net):
        for at in range(STEPS):
            optimizer.zero_grad()
            net(batch(at)).square().mean().backward()
            if rank() == 0 or at == 0:
                optimizer.step()
        dist.barrier()
    return {"stopped": at, "warnings": said}


def run(number: int, ranks: int, names: str, folder: Path) -> None:
    """Be one of the ranks."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name in names.split():
        with parts.hearing():
            result = {"rank": rank(), "scenario": name, **SCENARIOS[name]()}
        (folder / f"{name}.{rank()}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


def main(folder: str, *launches: str) -> None:
    """Run every rank in a process of its own, which need not import everything again."""
    importlib.import_module("torch._dynamo")  # which the first optimizer's step asks for
    for at, launch in enumerate(launches):
        ranks, _, names = launch.partition(":")
        place = Path(folder, str(at))
        place.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        started = []
        for number in range(int(ranks)):
            child = os.fork()
            if not child:
                run(number, int(ranks), names, place)
                return
            started.append(child)
        for child in started:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
