"""A second run among other code: threads, modes, the user's objects."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import anynan
from tests.threads import the_system_tells, waiting_for_a_pipe
from tests.torch_adapter.training import assert_same, hooks_on


class Bad(nn.Module):
    """Make a NaN, slowly enough for other threads to come by."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__()
        self.layer, self.delay = nn.Linear(2, 2), delay

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.delay)
        return self.layer(x).abs() * 0 / 0


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Repeat some work in another thread, which must raise nothing."""
    over, began = threading.Event(), threading.Event()

    def run() -> None:
        try:
            while not over.is_set():
                work()
                began.set()
        finally:
            began.set()

    with ThreadPoolExecutor() as pool:
        thread = pool.submit(run)
        began.wait()
        try:
            yield
        finally:
            over.set()
            thread.result()


def thrice(call: Callable[[Tensor], object]) -> None:
    for _ in range(3):
        call(torch.ones(1, 2))


def training() -> Callable[[], None]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    x = torch.ones(4, 3)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        assert model.weight.grad is not None
        time.sleep(0.0005)
        assert model.weight.grad is not None, "another thread took it away"
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize("tracked", ["model", "step"])
def test_another_thread_trains_its_own_model(tracked: str) -> None:
    model = Bad(0.02)
    target: Any = model if tracked == "model" else lambda x: model(x)
    tracker = anynan.torch.track(target, action="record")
    with beside(training()):
        thrice(model if tracked == "model" else tracker)
    assert tracker.events[0].operation is not None, "it was run again"


def test_threads_that_share_a_tracked_model() -> None:
    told: list[anynan.Event] = []  # each as it comes: the tracker counts them with the first
    model = Bad(0.01)
    tracker = anynan.torch.track(model, action=told.append)
    with beside(lambda: model(torch.ones(1, 2))):
        thrice(model)
    assert {(event.layer, event.kind) for event in told} == {("", "nan")}
    assert any("another thread" in note for event in told for note in event.notes)
    assert sum(event.times for event in tracker.events) == len(told)


def test_buffers_that_another_thread_updates_keep_its_updates() -> None:
    class Counter(Bad):
        def __init__(self) -> None:
            super().__init__(0.01)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            with lock:
                self.count += 1
                if not anynan.replaying():
                    calls.append(1)
            return super().forward(x)

    lock, calls = threading.Lock(), list[int]()
    model = Counter()
    anynan.torch.track(model, action="record")
    with beside(lambda: model(torch.ones(1, 2))):
        thrice(model)
    assert int(model.count) == len(calls)


@the_system_tells
def test_a_library_s_thread_that_waits_does_not_forbid_a_second_run() -> None:
    """As that of the compiler's workers does."""
    model = nn.Sequential(nn.Dropout(), Bad())
    tracker = anynan.torch.track(model, action="record")
    with waiting_for_a_pipe():
        model(torch.ones(3, 2))
    assert tracker.events[0].operation.name == "divide"


@pytest.mark.parametrize(
    "draw",
    [lambda: float(torch.rand((), dtype=torch.float64)), random.random, np.random.rand],
    ids=["torch", "python", "numpy"],
)
def test_random_numbers_of_another_thread_do_not_repeat(draw: Callable[[], float]) -> None:
    def step(x: Tensor) -> Tensor:
        draw()
        before, tries = len(drawn), 0
        while len(drawn) < before + 2 and tries < 1000:  # a busy machine may not run it for long
            tries += 1
            time.sleep(0.001)
        return model(x)

    model, drawn = Bad(), list[float]()

    def others() -> None:
        drawn.append(draw())
        for _ in range(1000):
            pass

    step = anynan.torch.track(step, action="record")
    with beside(others):
        thrice(step)
    assert len(set(drawn)) == len(drawn)
    assert any("random numbers" in note for event in step.events for note in event.notes)


def test_what_counts_operations_does_not_count_those_of_a_replay() -> None:
    plain, tracked = Bad(), Bad()
    tracker, counts = anynan.torch.track(tracked, action="record"), list[int]()
    for model in (plain, tracked):
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, 2))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
    assert tracker.events[0].operation is not None


def in_a_thread(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("end", ["validation", "remove", "raised", "thread"])
def test_operations_in_inference_mode(end: str) -> None:
    model = nn.Linear(2, 1)
    tracker = anynan.torch.track(model, level="operation")
    model(torch.ones(1, 2)).sum()
    if end == "raised":
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
    if end == "thread":
        in_a_thread(tracker.remove)
    with torch.inference_mode():
        if end == "remove":
            tracker.remove()
        model(torch.ones(1, 2))
    torch.ones(2).add(1)
    assert torch._C._len_torch_dispatch_stack() == 0
    model(torch.ones(1, 2)).sum().backward()
    assert not tracker.events


@pytest.mark.parametrize("end", ["remove", "pause", "thread"])
def test_what_watches_operations_goes_in_the_middle_of_a_step(end: str) -> None:
    def call() -> None:
        model(torch.ones(1, 2)).log().sum()

    def seams() -> Any:
        return vars(torch.amp.GradScaler)["step"], torch.autograd.backward, torch.autograd.grad

    before, model = seams(), nn.Linear(2, 1)
    tracker = anynan.torch.track(model, level="operation")
    in_a_thread(call) if end == "thread" else call()
    getattr(tracker, "pause" if end == "pause" else "remove")()
    assert seams() == before
    assert not hooks_on(model)


class Frozen(dict):  # type: ignore[type-arg]
    """Forbid what a dict can, as diffusers' configuration does."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        msg = "frozen"
        raise TypeError(msg)

    update = pop = setdefault = __delitem__ = clear = __setitem__ = _refuse  # type: ignore[assignment]


def test_objects_that_forbid_to_be_changed() -> None:
    net = Bad()
    net.config = Frozen(a=1, b=2)
    tracker = anynan.torch.track(net, action="record")
    net(torch.ones(1, 2)).sum().backward()
    assert dict(net.config) == {"a": 1, "b": 2}
    assert tracker.events[0].operation is not None


@pytest.mark.filterwarnings("ignore:anynan")
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_a_step_that_is_run_again_leaves_what_it_reaches() -> None:
    """Gradients of tensors in no module, those the step resets, and its schedule."""
    trackers: list[Any] = []

    def track(step: Any) -> Any:
        trackers.append(anynan.torch.track(step, action="record"))
        return trackers[0]

    def program(track: Any) -> list[Any]:
        torch.manual_seed(0)
        leaf, reset = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        @track
        def step(x: Tensor) -> Tensor:
            reset.grad = None
            scheduler.step()
            optimizer.param_groups[0]["momentum"] += 0.1
            bad = torch.log(net(x) * 0 - 1).sum()
            loss = bad + leaf.sqrt().sum() + (reset * x).sum()
            loss.backward()
            return loss

        for _ in range(2):
            step(torch.ones(1, 2))
        group = optimizer.param_groups[0]
        return [leaf.grad, reset.grad, group["lr"], group["momentum"], scheduler.last_epoch]

    assert_same(program(lambda step: step), program(track))
    assert trackers[0].events
