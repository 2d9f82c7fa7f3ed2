"""Weights that go bad: by an optimizer, by hand, or before anybody looked."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anynan
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter.training import Fault, bad, stepping


def test_a_weight_spoiled_by_hand_is_named_with_the_line_that_did_it() -> None:
    net = nn.Linear(2, 1)

    def step(x: Tensor, rate: float) -> None:
        net(x).square().mean().backward()
        for p in net.parameters():
            p.data -= rate * p.grad
            p.grad = None

    tracker = anynan.torch.track(step, level="operation")
    tracker(torch.ones(1, 2), 1e-3)
    event = failure(tracker, torch.full((1, 2), 1e3), 3e38)
    assert (event.step, event.parameter, event.operation.name) == (1, "weight", "multiply")
    assert event.operation.source.text == "p.data -= rate * p.grad"
    assert event.cause.tag == "overflow_in_dtype"
    report = anynan.reports.render(event)
    assert "written into a weight at step 1" in report and "optimizer at" not in report


@pytest.mark.parametrize("level", ["step", "layer"])
def test_a_nan_that_only_a_weights_gradient_holds_stops_the_update(level: Any) -> None:
    net = nn.Linear(2, 1)
    net.weight.register_hook(lambda grad: grad * math.nan)
    before = net.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with anynan.torch.track(net, level=level):
        event = failure(lambda: [net(torch.ones(1, 2)).sum().backward(), optimizer.step()])
    assert (event.phase, event.kind) == ("backward", "nan")
    assert torch.equal(net.weight, before)


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_a_gradient_that_was_read_too_late_is_blamed_for_the_weight() -> None:
    net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    tracker = anynan.torch.track(net, action="record", advanced=anynan.Advanced(read=4))
    for i in range(9):
        optimizer.zero_grad()
        out = net(torch.ones(1, 2))
        ((out * 0).sqrt() if i == 1 else out.square()).sum().backward()
        optimizer.step()
    tracker.remove()
    event = next(event for event in tracker.events if event.phase in ("optimizer", "parameter"))
    assert event.parameter == "weight"
    assert "step 1 were bad, which Advanced(read=4) saw only after" in event.cause.text
    assert "no gradient was bad" not in event.cause.text


@pytest.mark.parametrize("fault", ["input", "forward", "backward"])
@pytest.mark.parametrize(("tracked", "options"), [("model", {}), ("step", {"read": "end"})])
def test_what_follows_from_an_update_that_went_through(fault: str, tracked: str, options) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fault(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    target = model if tracked == "model" else stepping(model, optimizer)
    tracker = anynan.torch.track(target, action="record", **split(options))
    run = stepping(model, optimizer) if tracked == "model" else tracker
    for i in range(6):
        model[1].armed = fault if i == 3 else None
        x = torch.ones(2, 4)
        x[0, 0] = math.nan if i == 3 and fault == "input" else 1.0
        run(x)
    tracker.flush()
    (event,) = bad(tracker)
    assert (event.step, event.phase) == (3, fault) and event.spread.count > 1
    assert "since the update of step 3" in tracker.report()
    # A fault of its own is told as such once the weights are good again.
    model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    optimizer.state.clear()
    model[1].armed = "forward"
    run(torch.ones(2, 4))
    tracker.flush()
    found = [(event.step, event.times) for event in bad(tracker)]
    assert found == ([(3, 2)] if fault == "forward" else [(3, 1), (6, 1)])


def test_tensors_outside_of_modules_that_an_optimizer_holds() -> None:
    y = torch.tensor([4.0, 0.0], requires_grad=True)
    optimizer = torch.optim.SGD([y], 0.1)

    @anynan.torch.track
    def step() -> None:
        y.sqrt().sum().backward()
        optimizer.step()

    with pytest.warns(anynan.AnynanWarning, match="no module was found"):
        event = failure(step)
    assert (event.phase, event.operation.name) == ("backward", "sqrt")
    assert y.tolist() == [4.0, 0.0], "no update from a bad gradient"


def test_the_update_of_a_model_that_is_not_tracked_is_not_a_steps_own() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    mine, others = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))

    @anynan.torch.track(action="skip")
    def step(x: Tensor) -> None:
        model(x).sum().backward()
        mine.step()

    step(torch.ones(1, 2))
    model(torch.ones(1, 2))  # a call outside of the step
    (other(torch.ones(1, 2)) * math.nan).sum().backward()
    others.step()
    assert other.weight.isnan().all(), "nobody may drop this update"
    assert not step.events


def clipped(width: int, write: Any) -> anynan.Event:
    """Let the program write to gradients after the backward pass."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, width, bias=False), nn.Linear(width, width, bias=False)
    model = nn.Sequential(first, nn.ReLU(), last)
    optimizer = torch.optim.SGD(model.parameters())
    with anynan.torch.track(model, action="record") as tracker:
        (model(torch.randn(5, 4)).square().mean() * 1e25).backward()
        gradients = [p.grad for p in model.parameters()]
        norm = torch.sqrt(sum(grad.pow(2).sum() for grad in gradients))  # finite numbers, Inf
        write(model.parameters(), gradients, norm)
        optimizer.step()
    (event,) = tracker.events
    return event


CLIPPING: dict[str, Any] = {
    "in place": lambda _, grads, norm: [grad.mul_(norm / norm) for grad in grads],
    "all at once": lambda _, grads, norm: torch._foreach_mul_(grads, norm / norm),
    "replaced": lambda ps, _, norm: [setattr(p, "grad", p.grad / norm * norm) for p in ps],
}


@pytest.mark.parametrize("width", [8, 100])
@pytest.mark.parametrize("way", CLIPPING)
def test_what_clipping_made_of_finite_gradients_is_told(width: int, way: str) -> None:
    event = clipped(width, CLIPPING[way])
    assert event.operation.name == "pow"
    assert "grad.pow(2).sum()" in event.operation.source.text


def test_a_gradient_written_past_the_framework_is_said_to_be_unexplained() -> None:
    event = clipped(100, lambda _, gradients, __: gradients[0].numpy().fill(torch.nan))
    assert event.operation is None
    (note,) = (note for note in event.notes if "gradient-finite" in note)
    assert "it may have been written to after the backward pass" in note.lower()
    assert not any("replay-clean" in note for note in event.notes)
