"""What a step reaches beside its model: a replay begins with it as the step did, and leaves it."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import anynan
from anynan._reach import patience

pytestmark = pytest.mark.filterwarnings("ignore:anynan. no module was found")


def fault(n: int, x: torch.Tensor) -> torch.Tensor:
    """Fail in another way at each number from 3 to 5: what tells the runs apart."""
    bad = {3: torch.log, 4: torch.sqrt, 5: torch.asin}.get(n, torch.neg)
    return bad(-x.abs() - n).sum()


def operations(step: Callable[..., object], *args: object, times: int = 5) -> list[str]:
    with anynan.torch.track(step, action="record") as tracker:
        for _ in range(times):
            tracker(*args)
    return [event.operation.name for event in tracker.events]


ALL = ["log", "sqrt", "asin"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.n = nn.Linear(2, 2), 0
        self.tensor = torch.zeros(())
        self.register_buffer("moving", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.tensor += 1
        self.moving += 1  # type: ignore[operator]
        assert self.n == self.tensor == self.moving
        return fault(self.n, self.linear(x))


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_layer_counts_in(whole: bool) -> None:
    model = Counting()
    target = (lambda x: model(x)) if whole else model
    assert operations(target, torch.ones(1, 2)) == ALL
    assert (model.n, float(model.tensor), float(model.moving)) == (5, 5.0, 5.0)


count = 0


def test_what_layers_and_hooks_on_them_write_outside_of_the_model_is_written_once() -> None:
    class Telling(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            global count  # noqa: PLW0603
            count += 1
            self.tell("forward")
            return torch.sqrt(super().forward(x) * 0)

        def tell(self, what: str) -> None:
            seen.append(what)

    def called(layer: nn.Module, _: Any, out: torch.Tensor) -> None:
        kept["out"] = out
        layer.weight.calls += 1

    layer, seen, kept, before = nn.Linear(2, 2), list[str](), {}, count
    layer.weight.calls = 0  # as what makes a gradient for each sample keeps with the weights
    layer.register_forward_hook(called)
    layer.register_full_backward_hook(lambda *_: seen.append("hook"))
    layer.bias.register_hook(lambda _: seen.append("bias"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append("weight"))
    with anynan.torch.track(model := Telling(layer), action="record") as tracker:
        out = model(torch.ones(1, 2, requires_grad=True))
        mine = kept["out"]
        out.sum().backward()
    assert [event.phase for event in tracker.events] == ["backward"]
    assert sorted(seen) == ["bias", "forward", "hook", "weight"]
    assert (count, layer.weight.calls, kept["out"] is mine) == (before + 1, 1, True)


WAYS: dict[str, Callable[[list[torch.Tensor]], Iterator[torch.Tensor]]] = {
    "generator": lambda data: (x for x in data),
    "map": lambda data: map(torch.clone, data),
    "loader": lambda data: iter(DataLoader(torch.cat(data), batch_size=1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_fetches_its_batch(way: str) -> None:
    items = WAYS[way]([torch.full((1, 2), -2.0 if i == 2 else i) for i in range(8)])
    taken: list[float] = []

    def step() -> torch.Tensor:
        x = next(items)
        taken.append(float(x[0, 0]))
        return torch.log(x + 1).sum()

    kind = type(items)
    assert operations(step, times=4) == ["log"]
    assert (taken, type(items)) == ([0.0, 1.0, -2.0, 3.0], kind)
    assert float(next(items)[0, 0]) == 4.0, "no batch was eaten"


@pytest.mark.parametrize("make", [queue.Queue, multiprocessing.Queue])
def test_a_step_that_takes_from_a_queue(make: Any) -> None:
    items = make()
    for n in range(1, 8):
        items.put(n)
    before = dict(vars(items))
    x = torch.ones(2, requires_grad=True)
    assert operations(lambda: fault(items.get(timeout=9), x)) == ALL
    assert items.get(timeout=9) == 6
    assert before.keys() == vars(items).keys()


def test_a_step_that_hands_over_does_so_once() -> None:
    results: queue.Queue[float] = queue.Queue(maxsize=1)
    jobs: queue.Queue[float] = queue.Queue()
    jobs.put(-1.0)

    def step() -> torch.Tensor:
        loss = torch.log(torch.tensor([jobs.get()])).sum()
        results.put(float(loss))
        jobs.task_done()
        return loss

    assert operations(step, times=1) == ["log"]
    assert (results.qsize(), jobs.unfinished_tasks) == (1, 0)


@pytest.mark.parametrize("way", ["event", "pipe"])
def test_a_second_run_does_not_wait_for_ever(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 0.01)
    monkeypatch.setattr(patience, "TIMES", 0)
    wait, alarm = threading.Condition.wait, signal.getsignal(signal.SIGALRM)
    ready = threading.Event()
    ready.set()
    source, sink = os.pipe()
    os.write(sink, b"1")

    def step() -> torch.Tensor:
        if way == "event":
            ready.wait()
            ready.clear()
        else:
            os.read(source, 1)
        return torch.log(-torch.ones(2)).sum()

    with anynan.torch.track(step, action="record") as tracker:
        tracker()
    (event,) = tracker.events
    assert event.operation is None
    assert any("it would have waited for more than 0 s" in note for note in event.notes)
    assert (threading.Condition.wait, signal.getsignal(signal.SIGALRM)) == (wait, alarm)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    os.close(source)
    os.close(sink)
