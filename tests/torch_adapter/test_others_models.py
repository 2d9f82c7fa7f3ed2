"""Models as other people write them: what their outputs, wrappers and checkpoints hold."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import anynan
from tests.failing import failure
from tests.torch_adapter.training import bad


def of(model: nn.Module, step: Any) -> anynan.Event:
    anynan.torch.track(model)
    return failure(step)


def named(event: anynan.Event) -> tuple[Any, ...]:
    assert event.operation is not None, event.notes
    return event.layer, event.phase, event.operation.name


def test_a_layer_that_is_really_called_module() -> None:
    inner = nn.Sequential(OrderedDict(module=nn.Sequential(nn.Linear(4, 4))))
    inner.module[0].weight.data.fill_(torch.nan)
    event = failure(anynan.torch.track, nn.Sequential(nn.Linear(4, 4), inner))
    assert (event.layer, event.parameter) == ("1.module.0", "1.module.0.weight")


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
    model.embed.weight.data.fill_(6e37)
    event = of(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert named(event)[::2] == ("n2", "pow")
    assert any("earlier in `n1`" in note and "fix both" in note for note in event.notes)


class Policy(nn.Linear):
    """Return a distribution, as reinforcement learning does."""

    def forward(self, x: Tensor) -> Normal:
        return Normal(super().forward(x) * 1e38, torch.ones(2), validate_args=False)


def test_a_bad_value_in_a_distribution() -> None:
    model = Policy(4, 2)
    model.weight.data.fill_(10.0)
    event = of(model, lambda: model(torch.ones(2, 4)))
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


class Spoils(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * 0 - 1).log()


@pytest.mark.parametrize("way", ["same", "view", "derived"])
def test_what_another_watched_model_gave_is_no_bad_batch(way: str) -> None:
    one, two = Spoils(2, 2), nn.Linear(2, 2)
    first, second = (anynan.torch.track(each, action="record") for each in (one, two))
    made = one(torch.ones(3, 2)).detach()
    given = {"same": made, "view": made.view(3, 2)[:2], "derived": made * 2}[way]
    two(given).sum().backward()
    second.flush()
    (event,) = bad(second)
    assert (event.layer, event.phase, event.cause.tag) == (None, "loss", "made_by_another")
    assert "Spoils gave in its step 0" in event.cause.text
    assert "input" not in {event.phase for event in second.events}
    assert [event.operation.name for event in first.events] == ["log"]


def test_a_batch_that_was_bad_before_another_model_saw_it_is_the_batch() -> None:
    models, x = (nn.Identity(), nn.Linear(2, 2)), torch.full((3, 2), torch.nan)
    _, second = (anynan.torch.track(each, action="record") for each in models)
    for each in models:
        each(x)
    second.flush()
    assert bad(second)[0].phase == "input"


class Parts(nn.Linear):
    """Return several outputs of one layer; not all need be what the loss is made of."""

    def forward(self, x: Tensor) -> Any:
        return SPLITS[self.split](super().forward(x))


SPLITS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda h: h.chunk(2, -1),
    "unbind": lambda h: h.unbind(0),
    "loss and logits": lambda h: (h.square().mean(), h),
}


@pytest.mark.parametrize("tracked", ["model", "step"])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("split", list(SPLITS))
def test_a_clean_model_trains_on_one_of_its_outputs(split: str, used: int, tracked: str) -> None:
    model, x = Parts(4, 4), torch.randn(2, 4)
    model.split = split

    def step() -> None:
        model(x)[used].sum().backward()

    step()
    plain, model.weight.grad = model.weight.grad, None
    with anynan.torch.track(model if tracked == "model" else step) as tracker:
        step() if tracked == "model" else tracker()
    assert not tracker.events
    grad = model.weight.grad
    assert grad is plain is None or torch.equal(grad, plain)


class Learner(nn.Sequential):
    """A module whose own list is of the weights that it trains, and takes no arguments."""

    def parameters(self) -> Any:  # type: ignore[override]
        return [*self[0].parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self[0](x) - 99)


def test_a_module_whose_parameters_are_listed_by_a_method_of_its_own() -> None:
    model = nn.Sequential(Learner(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    event = of(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert named(event) == ("0", "forward", "log")


class Counted(nn.Linear):
    """A module that compares its values, as a metric does."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(3) == 1

    __hash__ = nn.Module.__hash__


def test_modules_that_compare_by_value_are_told_apart() -> None:
    model = nn.Sequential(Counted(4, 4), Counted(4, 4))
    model[1].bias.data.fill_(-99)
    with anynan.torch.track(model[0]):
        event = of(model[1], lambda: torch.log(model[1](torch.ones(2, 4))).sum().backward())
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
def test_an_argument_may_hold_itself_or_be_deeper_than_the_stack(make, name: str | None) -> None:
    model = Taken(4, 1)
    model.weight.data.fill_(1.0)
    model.bias.data.zero_()
    with anynan.torch.track(model):
        model(torch.ones(2, 4), make()).sum().backward()
        operation = failure(model, -torch.ones(2, 4), make()).operation
    assert (operation and operation.name) == name
