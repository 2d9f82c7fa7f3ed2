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
    """Fail in another way at every number from 3 on: what tells the runs apart."""
    if n < 3:
        return x.sum()
    if n == 3:
        return torch.log(-x.abs() - n).sum()
    if n == 4:
        return torch.sqrt(-x.abs() - n).sum()
    return torch.asin(x.abs() + n).sum()


def named(step: Callable[..., object], times: int = 5, *args: object) -> list[tuple[str, str]]:
    """Run a step and list what was named, with the first bad index's evidence."""
    tracker = anynan.torch.track(step, action="record")
    for _ in range(times):
        tracker(*args)
    tracker.remove()
    found = []
    for event in tracker.events:
        assert event.operation is not None, event.notes
        found.append((event.operation.name, event.cause.evidence.partition(" at")[0]))
    return found


ALL = ["log", "sqrt", "asin"]


def operations(step: Callable[..., object], *args: object) -> list[str]:
    return [name for name, _ in named(step, 5, *args)]


# What it counts on.


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.n = 0
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
SEEN: list[Any] = []


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global count  # noqa: PLW0603
        count += 1
        self.tell("forward")
        return torch.sqrt(self.linear(x) * 0)

    def tell(self, what: str) -> None:
        SEEN.append(what)


def test_what_layers_and_hooks_on_them_write_outside_of_the_model_is_written_once() -> None:
    SEEN.clear()
    model, before = Telling(), count
    kept: dict[str, Any] = {}
    model.linear.register_forward_hook(lambda _, __, out: kept.update(out=out))
    model.linear.register_full_backward_hook(lambda *_: SEEN.append("hook"))
    model.linear.bias.register_hook(lambda _: SEEN.append("bias"))
    model.linear.weight.register_post_accumulate_grad_hook(lambda _: SEEN.append("weight"))
    with anynan.torch.track(model, action="record") as tracker:
        out = model(torch.ones(1, 2, requires_grad=True))
        mine = kept["out"]
        out.sum().backward()
    assert [event.phase for event in tracker.events] == ["backward"]
    assert count == before + 1
    assert sorted(SEEN) == ["bias", "forward", "hook", "weight"]
    assert kept["out"] is mine


# Whose dice.


# What it pulls.


def batches() -> list[torch.Tensor]:
    data = [torch.full((1, 2), float(i)) for i in range(8)]
    data[2] = -data[2]
    return data


def generator(data: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from data


def loader(data: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    return iter(DataLoader(torch.cat(data), batch_size=1))


WAYS = {"generator": generator, "map": lambda data: map(torch.clone, data), "loader": loader}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_fetches_its_batch(way: str) -> None:
    items = WAYS[way](batches())
    taken: list[float] = []

    def step() -> torch.Tensor:
        x = next(items)
        taken.append(float(x[0, 0]))
        return torch.log(x + 1).sum()

    kind = type(items)
    assert named(step, 4) == [("log", "log(-1.0)")]
    assert taken == [0.0, 1.0, -2.0, 3.0]
    assert type(items) is kind
    assert float(next(items)[0, 0]) == 4.0, "no batch was eaten"


# What other threads and processes hand over.


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

    assert [name for name, _ in named(step, 1)] == ["log"]
    assert results.qsize() == 1
    assert jobs.unfinished_tasks == 0


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
    assert threading.Condition.wait is wait
    assert signal.getsignal(signal.SIGALRM) is alarm
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    os.close(source)
    os.close(sink)
