"""The ways people train: a fault is named exactly, a clean run is as if nobody watched."""

import itertools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_module_registration_hooks

import anynan
from anynan import NonFiniteError
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter import training
from tests.torch_adapter.programs import PROGRAMS, Gan, Lbfgs, Program
from tests.torch_adapter.training import LINES, WORDS, Count, Fault, assert_same

# PyTorch's own, from the inner one of two nested reentrant regions.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

every_track = pytest.mark.parametrize("track", ["model", "step"])
every_read = pytest.mark.parametrize("read", ["immediate", "end"])
READS: list[dict[str, Any]] = [{"read": "immediate"}, {"read": "end"}, {"level": "step"}]
WAYS = list(itertools.product(("model", "step"), READS, ("forward", "backward")))
CLEAN: list[tuple[str, Any]] = [
    ("model", {"read": "end"}), ("step", {}), ("step", {"level": "operation"}),
]  # fmt: skip


def turned(ways: Sequence[Any], count: int = 1) -> Any:
    """Combine each program with so many of the ways, in turn; all but the first are variants."""
    return [
        pytest.param(name, *way, marks=[pytest.mark.tier(2)] if nth else [])
        for at, name in enumerate(PROGRAMS)
        for nth in range(count)
        for way in [ways[(5 * at + 7 * nth) % len(ways)]]
    ]


class Run:
    """A program that is tracked as a model, as a step, or not."""

    def __init__(self, name: str, track: str | None, **options: Any) -> None:
        training.seed()
        self.it: Program = PROGRAMS[name]()
        self.step: Any = self.it.step
        self.tracker: Any = None
        if track == "model":
            self.tracker = anynan.torch.track(self.it.model, **split(options))
        elif track == "step":
            self.step = self.tracker = anynan.torch.track(self.it.step, **split(options))
        several = track == "step" and len(self.it.models()) > 1
        self.layer = f"model.{self.it.layer}" if several else self.it.layer
        # The critic's own step begins with the generator's turn of the step before.
        self.call = 2 if track == "model" and isinstance(self.it, Gan) else self.it.call

    def state(self) -> dict[str, Any]:
        return training.everything(self.it.models(), self.it.optimizers())


@pytest.mark.parametrize(("name", "track", "options", "armed"), turned(WAYS, 3))
def test_the_fault_is_named(name: str, track: str, options: Any, armed: str) -> None:
    run = Run(name, track, **options)
    run.step()
    run.it.arm(armed)
    before = [p.detach().clone() for p in run.it.model.parameters()]
    if name == "ClipStrict" and options.get("read") == "end":  # PyTorch's own error is first
        kind = NonFiniteError if track == "step" else RuntimeError  # raised from that
        with warnings.catch_warnings(action="ignore"), pytest.raises(kind) as caught:
            run.step()
        assert "non-finite" in str(caught.value.__cause__ or caught.value)
        (event,) = run.tracker.events
    else:
        event = failure(run.step)
    found = event.operation
    assert (event.layer, event.phase, event.step) == (run.layer, armed, 1)
    if "level" not in options:  # else a call of the model is run again alone, and counts its own
        assert event.call == run.call
    assert (found.name, found.source.text) == (WORDS[armed], LINES[armed])
    assert not any("not reproduce" in note for note in event.notes)
    assert_same(before, [p.detach() for p in run.it.model.parameters()])


@pytest.mark.parametrize(("name", "track", "options"), turned(CLEAN, 2))
def test_a_clean_run_is_as_if_nobody_watched(name: str, track: str, options: Any) -> None:
    states = []
    for tracked in (False, True):
        run = Run(name, track if tracked else None, **options)
        losses = [run.step().detach() for _ in range(3)]
        states.append({"losses": losses, **run.state()})
    assert_same(*states)
    assert run.tracker.events == run.tracker.notes == ()
    seen = {(r.layer, r.phase, r.call) for r in run.tracker.history if r.step == 1}
    assert {(run.layer, phase, run.call) for phase in ("forward", "backward")} <= seen


@pytest.mark.parametrize(("name", "track"), turned([("model",), ("step",)]))
def test_one_read_before_each_update(name: str, track: str) -> None:
    counts = []
    for tracked in (False, True):
        run = Run(name, track if tracked else None, read="end")
        run.step()
        with Count() as count:
            for _ in range(3):
                run.step()
        counts.append(count.reads)
    updates = 3 if isinstance(run.it, Lbfgs) else 1
    # A tracked step is read for both optimizers, and for what it returns.
    expected = updates if track == "model" else updates + len(run.it.optimizers())
    assert counts[1] - counts[0] == 3 * expected


@pytest.mark.tier(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_kept_alive(name: str) -> None:
    run = Run(name, "step", read="end")
    counts = []
    for _ in range(2):
        for _ in range(3):
            run.step()
        counts.append(training.live_tensors())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["Plain", "CellsInRegionReentrant", "WholeModelReentrant"])
@every_read
def test_a_backward_pass_in_another_thread(name: str, read: Any) -> None:
    """An engine runs a device's backward passes in a thread of its own, as here."""
    run = Run(name, "model", read=read, action="record")
    real = torch.Tensor.backward

    def backward(self: torch.Tensor) -> None:
        thread = threading.Thread(target=real, args=(self,))
        thread.start()
        thread.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", backward)
        for _ in range(2):
            run.step()
        seen = {(r.layer, r.phase, r.call) for r in run.tracker.history if r.step == 1}
        assert (run.layer, "backward", run.call) in seen
        assert not run.tracker.notes
        run.it.arm("backward")
        run.step()
    (event,) = run.tracker.events
    assert (event.layer, event.phase, event.call) == (run.layer, "backward", run.call)
    assert (event.step, event.operation.name) == (2, "sqrt")


@every_track
@every_read
def test_layers_put_in_after_tracking_are_watched(track: str, read: Any) -> None:
    """As low-rank adapters are, around layers that are watched already."""
    run = Run("Plain", track, read=read)
    run.step()
    model, fault = run.it.model, Fault()
    model.first = nn.Sequential(model.first, nn.Linear(4, 4), fault)
    run.it.optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        run.step()
    seen = {(r.layer, r.phase, r.call) for r in run.tracker.history if r.step == 1}
    layers = ("", "first", "first.0", "first.1", "first.2", "last", "fault")
    assert sorted(x for x in seen if x[1] == "forward") == sorted((x, "forward", 0) for x in layers)
    assert "first.1.weight" in {r.site.parameter for r in run.tracker.history if r.step == 1}
    assert not run.tracker.notes
    fault.armed = "backward"
    event = failure(run.step)
    assert (event.layer, event.phase, event.operation.name) == ("first.2", "backward", "sqrt")
    run.tracker.remove()
    assert not any(module._forward_hooks for module in model.modules())
    assert not _global_module_registration_hooks


def test_a_bad_weight_that_is_put_in_is_seen() -> None:
    run = Run("Plain", "model")
    run.step()
    run.it.model.first = nn.Linear(4, 4)
    run.it.model.first.bias.data[1] = torch.inf
    event = failure(run.step)
    assert (event.phase, event.parameter) == ("parameter", "first.bias")


class Poisoned(torch.autograd.Function):
    """A linear layer whose gradient of the weight, and of nothing else, is bad."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, torch.log(-(x.T @ grads[0]).abs())


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor, _: Any) -> torch.Tensor:
        return Poisoned.apply(x, self.weight)


@pytest.mark.parametrize("name", ["Plain", "ClipNorm"])
@every_track
@every_read
def test_a_gradient_that_only_a_weight_gets(name: str, track: str, read: Any) -> None:
    """Clipping spreads it to every weight; the layer that made it is named all the same."""
    run = Run(name, track, read=read)
    run.step()
    model = run.it.model
    # In the middle, so that neither end of the weights is right by chance.
    model.fault = Odd(4, 4, bias=False)
    run.it.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    event = failure(run.step)
    assert (event.layer, event.phase, event.operation.name) == ("fault", "backward", "log")
    assert event.operation.source is not None


@every_read
def test_two_tracked_models_of_one_program(read: Any) -> None:
    """A generator and a critic, each with its own tracker and its own steps."""
    run = Run("Gan", "model", read=read)
    generator, fault = run.it.models()[1], Fault()
    generator.append(fault)
    second = anynan.torch.track(generator, advanced=anynan.Advanced(read=read))
    for _ in range(3):
        run.step()
    assert run.tracker.events == second.events == ()
    assert second.history.steps() == [0, 1, 2]
    fault.armed = "backward"
    event = failure(run.step)
    assert second.events == (event,)
    assert (event.layer, event.phase, event.operation.name) == ("3", "backward", "sqrt")
    assert not run.tracker.events
