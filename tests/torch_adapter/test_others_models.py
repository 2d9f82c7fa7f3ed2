"""Models as other people write them: what their outputs, wrappers and checkpoints hold."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import anynan
from anynan import NonFiniteError
from tests.flat import split


def failure(model: nn.Module, step: Any, **options: Any) -> anynan.Event:
    tracker = anynan.torch.track(model, **split(options))
    with pytest.raises(NonFiniteError) as caught:
        step()
        tracker.flush()
    return caught.value.event


def named(event: anynan.Event) -> tuple[Any, ...]:
    assert event.operation is not None, event.notes
    return event.layer, event.phase, event.operation.name


class Residual(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(x)


def test_a_layer_that_is_really_called_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual(nn.Sequential(nn.Linear(4, 4))))
    with torch.no_grad():
        model[1].module[0].weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError) as caught:
        anynan.torch.track(model)
    event = caught.value.event
    assert (event.layer, event.parameter) == ("1.module.0", "1.module.0.weight")
    assert event.parameter in dict(model.named_parameters())


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_the_norm_that_overflowed_first_is_named_beside_the_one_that_did_harm() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.n1, self.n2 = nn.Linear(4, 4), Norm(), Norm()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.n2(x + self.fc(self.n1(x.detach())))

    model = Net()
    with torch.no_grad():
        model.embed.weight.fill_(6e37)
    event = failure(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert named(event)[::2] == ("n2", "pow")
    assert any("earlier in `n1`" in note and "fix both" in note for note in event.notes)


class Policy(nn.Module):
    """Return a distribution, as reinforcement learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.mean(x) * 1e38, torch.ones(2), validate_args=False)


def test_a_bad_value_in_a_distribution() -> None:
    model = Policy()
    with torch.no_grad():
        model.mean.weight.fill_(10.0)
    event = failure(model, lambda: model(torch.ones(2, 4)))
    assert named(event) == ("", "forward", "multiply")
    assert "loc" in event.tensor or event.tensor == "output"


def test_a_copy_in_the_middle_of_an_operation_level_step_has_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with anynan.torch.track(model, level="operation"):
        model(torch.ones(1, 2))
        copied, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, thawed):
        assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in copied.modules())


class Spoils(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * 0 - 1).log()


@pytest.mark.parametrize("way", ["same", "view", "derived"])
def test_what_another_watched_model_gave_is_no_bad_batch(way: str) -> None:
    one, two = Spoils(), nn.Linear(2, 2)
    first = anynan.torch.track(one, action="record")
    second = anynan.torch.track(two, action="record")
    made = one(torch.ones(3, 2)).detach()
    given = {"same": made, "view": made.view(3, 2)[:2], "derived": made * 2}[way]
    two(given).sum().backward()
    second.flush()
    event = next(event for event in second.events if event.severity == "bad")
    assert (event.layer, event.phase, event.cause.tag) == (None, "loss", "made_by_another")
    assert "Spoils gave in its step 0" in event.cause.text
    assert "input" not in {event.phase for event in second.events}
    assert [event.operation.name for event in first.events] == ["log"]


def test_a_batch_that_was_bad_before_another_model_saw_it_is_the_batch() -> None:
    one, two = nn.Identity(), nn.Linear(2, 2)
    x = torch.full((3, 2), torch.nan)
    with anynan.torch.track(one, action="record"):
        second = anynan.torch.track(two, action="record")
        one(x)
        two(x)
        second.flush()
    event = next(event for event in second.events if event.severity == "bad")
    assert event.phase == "input"


# Outputs without a gradient: what a model returns beside what the loss is made of.


class Parts(nn.Module):
    """Return several outputs of one layer."""

    def __init__(self, split: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.split = nn.Linear(4, 4), split

    def forward(self, x: Tensor) -> Any:
        return self.split(self.layer(x))


SPLITS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda h: h.chunk(2, -1),
    "unbind": lambda h: h.unbind(0),
    "loss and logits": lambda h: (h.square().mean(), h),
}


@pytest.mark.parametrize("tracked", ["model", "step"])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("split", list(SPLITS))
def test_a_clean_model_trains_on_one_of_its_outputs(split: str, used: int, tracked: str) -> None:
    torch.manual_seed(0)
    model = Parts(SPLITS[split])
    x = torch.randn(2, 4)

    def step() -> None:
        model(x)[used].sum().backward()

    step()
    plain = model.layer.weight.grad
    model.zero_grad()
    if tracked == "model":
        tracker = anynan.torch.track(model)
        step()
    else:
        tracker = anynan.torch.track(step)
        tracker()
    tracker.flush()
    assert not tracker.events
    grad = model.layer.weight.grad
    assert grad is plain is None or torch.equal(grad, plain)


class Learner(nn.Module):
    """A module whose own lists are of the weights that it trains, and take no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.fast = nn.Linear(4, 4), nn.Linear(4, 4)

    def parameters(self) -> Any:  # type: ignore[override]
        return [*self.net.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.net(x) - 99)


def test_a_module_whose_parameters_are_listed_by_a_method_of_its_own() -> None:
    model = nn.Sequential(Learner(), nn.Linear(4, 4))
    event = failure(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert named(event) == ("0", "forward", "log")


class Counted(nn.Linear):
    """A module that compares its values, as a metric does."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(3) == 1

    __hash__ = nn.Module.__hash__


def test_modules_that_compare_by_value_are_told_apart() -> None:
    model = nn.Sequential(Counted(4, 4), Counted(4, 4))
    with torch.no_grad():
        model[1].bias.fill_(-99)
    with anynan.torch.track(model[0]):
        event = failure(model[1], lambda: torch.log(model[1](torch.ones(2, 4))).sum().backward())
        assert event.operation is not None and event.operation.name == "log"
        model[0](torch.ones(2, 4)).sum().backward()


class Taken(nn.Linear):
    """A model that is handed a tree whose nodes know their parent."""

    def forward(self, x: Tensor, tree: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x).log()


def _ring() -> Any:
    parent: dict[str, Any] = {"children": []}
    parent["children"] += [{"parent": parent} for _ in range(3)]
    return parent


def _deep() -> Any:
    found: list[Any] = []
    for _ in range(3000):
        found = [found]
    return found


@pytest.mark.parametrize(("make", "name"), [(_ring, "log"), (_deep, None)])
def test_an_argument_may_hold_itself_or_be_deeper_than_the_stack(
    make: Any, name: str | None
) -> None:
    model = Taken(4, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    with anynan.torch.track(model):
        model(torch.ones(2, 4), make()).sum().backward()
        with pytest.raises(anynan.NonFiniteError) as caught:
            model(-torch.ones(2, 4), make()).sum().backward()
    operation = caught.value.event.operation
    assert (operation and operation.name) == name
