"""Models as other people write them: what their outputs, wrappers and checkpoints hold."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anynan
from tests.failing import failure
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import bad


def of(model: nn.Module, step: Any) -> anynan.Event:
    anynan.torch.track(model)
    return failure(step)


def test_a_layer_that_is_really_called_module() -> None:
    inner = nn.Sequential(OrderedDict(module=nn.Sequential(nn.Linear(4, 4))))
    inner.module[0].weight.data.fill_(torch.nan)
    event = failure(anynan.torch.track, nn.Sequential(nn.Linear(4, 4), inner))
    assert (event.layer, event.parameter) == ("1.module.0", "1.module.0.weight")


def norm() -> nn.Module:
    return Body(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_the_norm_that_overflowed_first_is_named_beside_the_one_that_did_harm() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)
            self.n1, self.n2 = norm(), norm()

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.n2(x + self.fc(self.n1(x.detach())))

    model = Net()
    model.embed.weight.data.fill_(6e37)
    event = of(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert (event.layer, event.operation.name) == ("n2", "pow")
    assert any("earlier in `n1`" in note and "fix both" in note for note in event.notes)


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


# Several outputs of one layer; not all need be what the loss is made of.
SPLITS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda h: h.chunk(2, -1),
    "unbind": lambda h: h.unbind(0),
    "loss and logits": lambda h: (h.square().mean(), h),
}


@pytest.mark.parametrize("tracked", ["model", "step"])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("split", list(SPLITS))
def test_a_clean_model_trains_on_one_of_its_outputs(split: str, used: int, tracked: str) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    model = nn.Sequential(layer, Body(SPLITS[split]))

    def step() -> None:
        model(x)[used].sum().backward()

    step()
    plain, layer.weight.grad = layer.weight.grad, None
    with anynan.torch.track(model if tracked == "model" else step) as tracker:
        step() if tracked == "model" else tracker()
    assert not tracker.events
    grad = layer.weight.grad
    assert grad is plain is None or torch.equal(grad, plain)


class Own(nn.Linear):
    """Compare values, as a metric does, and list the weights without any argument."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(3) == 1

    __hash__ = nn.Module.__hash__

    def parameters(self) -> Any:  # type: ignore[override]
        return [self.weight]


def test_modules_with_methods_of_their_own_are_told_apart() -> None:
    model = nn.Sequential(Own(4, 4), nn.Sequential(Own(4, 4)))
    model[1][0].bias.data.fill_(-99)
    with anynan.torch.track(model[0]):
        event = of(model[1], lambda: torch.log(model[1](torch.ones(2, 4))).sum().backward())
        assert event.operation.name == "log"
        model[0](torch.ones(2, 4)).sum().backward()


class Taken(nn.Linear):
    """A model that is handed a tree whose nodes know their parent."""

    def forward(self, x: Tensor, tree: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x).log()


def _ring() -> Any:
    parent: dict[str, Any] = {}
    parent["children"] = [{"parent": parent} for _ in range(3)]
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
