"""What is noted behind models: a loss that no step owns is told with operation, line and fix."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

import anynan
from anynan._everywhere import Found, watch_everything
from anynan.options import Options
from anynan.torch.call import noted
from anynan.torch.private import function_modes
from tests.failing import failure
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import Count, net, same, sgd, snapshot


@pytest.fixture
def found() -> Iterator[Found]:
    everything = Found()
    end = watch_everything(Options(action="record", level="step"), everything)
    yield everything
    end()


def train(loss_of: Callable[[Tensor], Tensor], steps: int = 2) -> nn.Module:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model(torch.ones(3, 4))).backward()
        optimizer.step()
    return model


def story(event: anynan.Event) -> tuple[Any, ...]:
    assert event.operation is not None, (event.cause, event.notes)
    return event.phase, event.operation.name, event.operation.source.function, event.cause.tag


def distance(y: Tensor) -> Tensor:
    return y.square().mean() + (y - y.detach()).pow(2).sum().sqrt()


def entropy(y: Tensor) -> Tensor:
    p = (y * 1e4).softmax(-1)
    return -(p * p.log()).sum()


def in_place(y: Tensor) -> Tensor:
    loss = y.square().mean() - 1e3
    loss += 1
    loss.mul_(2)
    return loss.sqrt()


LOSSES = [
    (distance, ("backward", "sqrt", "distance", "norm_gradient_at_zero")),
    (entropy, ("loss", "log", "entropy", "log_of_zero")),
    (in_place, ("loss", "sqrt", "in_place", "sqrt_of_negative")),
]


@pytest.mark.parametrize(("loss", "wanted"), LOSSES)
def test_a_loop_that_owns_no_step_is_told_operation_and_line(found, loss, wanted) -> None:
    train(loss)
    (event, *_) = found.bad()
    assert (story(event), event.layer) == (wanted, None)
    assert event.tried is not None


def test_statistics_that_code_beside_the_model_keeps_are_not_written_again() -> None:
    model = net()
    norms = nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)
    with anynan.torch.track(model, action="record") as tracker:
        y = norms[0](model(torch.ones(3, 4) * torch.arange(3.0).reshape(3, 1)))
        y = norms[1](y.T[None])
        kept = [x.clone() for norm in norms for x in norm.buffers()]
        ((y - y.detach()).pow(2).sum().sqrt() + y.sum()).backward()
    assert tracker.events[0].operation.name == "sqrt" and not function_modes.count()
    assert all(map(torch.equal, kept, (x for norm in norms for x in norm.buffers())))


def test_a_gradient_of_a_gradient_is_told_where_it_was_made(found: Found) -> None:
    critic = net()
    nn.init.zeros_(critic[2].weight)
    optimizer = torch.optim.Adam(critic.parameters())

    def penalty(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return ((g.pow(2).sum(1).sqrt() - 1) ** 2).mean()

    (critic(torch.rand(3, 4)).mean() + penalty(torch.rand(3, 4))).backward()
    optimizer.step()
    assert story(found.bad()[0])[:3] == ("backward", "sqrt", "penalty")


def hidden(y: Tensor) -> Tensor:
    """Make bad values that come to no harm."""
    with torch.no_grad():
        ratio = (y / 0).nan_to_num(0.0, 0.0, 0.0)
        torch.where(y > 9, y.sqrt(), y).mean().item()
    mask = torch.zeros(3, 4).masked_fill(torch.eye(4)[:3] > 0, -torch.inf)
    weights = (y + mask).softmax(-1)
    tricky = torch.logsumexp(torch.cat([y, torch.full((3, 1), -torch.inf)], 1), 1)
    return (weights * y).sum() + tricky.mean() + ratio.sum()


def test_bad_values_that_come_to_no_harm_are_no_event_and_change_nothing(found: Found) -> None:
    seen = train(hidden, 4).state_dict()
    assert found.bad() == []
    noted.of().end()  # type: ignore[union-attr]
    plain = train(hidden, 4).state_dict()
    assert all(torch.equal(x, plain[name]) for name, x in seen.items())


def test_a_mode_of_the_program_leaves_in_its_own_order(found: Found) -> None:
    class Counts(BaseTorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return super().__torch_function__(func, types, args, kwargs)

    before = function_modes.count()
    with Counts() as mode, torch.device("cpu"):
        train(entropy, 1)
        with Counts():
            train(distance, 1)
    assert mode.count and function_modes.count() == before
    assert len(found.bad()) == 2


def test_nothing_is_kept_alive_behind_the_next_pass(found: Found) -> None:
    class Mark:
        pass

    model, refs = net(), []

    def loss_of(y: Tensor) -> Tensor:
        refs.append(weakref.ref(z := y * 2))
        return z.square().mean()

    for _ in range(4):
        loss_of(model(torch.ones(3, 4))).backward()
    unused = model(torch.ones(3, 4)).sum() * 2  # its graph goes with it
    unused.grad_fn.metadata["mark"] = mark = Mark()
    refs.append(weakref.ref(mark))
    del unused, mark
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_each_thread_has_its_own(found: Found) -> None:
    thread = threading.Thread(target=train, args=(entropy, 1))
    thread.start()
    train(distance, 1)
    thread.join()
    assert {story(event)[2] for event in found.bad()} == {"entropy", "distance"}


@pytest.mark.parametrize(("size", "copies"), [(2000, noted.WRITTEN), (4, noted.WRITTEN + 3)])
def test_a_tensor_that_lives_long_is_copied_without_end_only_if_it_is_small(found, size, copies):
    net()(torch.ones(1, 4)).sum().backward()
    average = torch.ones(size)
    with Count() as count:
        for _ in range(noted.WRITTEN + 3):
            average.mul_(0.9)
    assert count.seen["clone"] == copies


# A model that is tracked alone: the loss is what its backward pass begins with.


def log_of_negative(out: torch.Tensor) -> torch.Tensor:
    """Make a NaN that sends back a finite gradient."""
    return (-1 - out.square().mean()).log()


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
@pytest.mark.parametrize("read", ["auto", "end"])
def test_a_bad_loss_with_a_finite_gradient_is_seen_before_the_update(read: Any, level: Any) -> None:
    model = net()
    optimizer, before = sgd(model), snapshot(model)
    with anynan.torch.track(model, advanced=anynan.Advanced(read=read), level=level):
        event = failure(
            lambda: (log_of_negative(model(torch.ones(3, 4))).backward(), optimizer.step())
        )
    assert (event.layer, event.phase, event.tensor, event.kind) == (None, "loss", "loss", "nan")
    assert (event.operation.name, event.cause.tag) == ("log", "log_of_negative")
    assert event.operation.source.text == "return (-1 - out.square().mean()).log()"
    assert event.notes == ()
    if level != "operation":
        assert (event.tried.outcome, event.tried.extent) == ("finite", "loss")
    assert same(before, model)


def losses(tracker: anynan.Tracker) -> list[Any]:
    return [(r.step, r.call, r.layer) for r in tracker.history if r.phase == "loss"]


def test_every_pass_of_a_step_has_its_own_and_what_a_layer_gave_is_not_read_twice() -> None:
    model = net()
    optimizer = sgd(model)
    with anynan.torch.track(model) as tracker:
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
    assert losses(tracker) == [(0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None)]

    model = net(Body(lambda x: x.mean()))
    with anynan.torch.track(model) as tracker:
        model(torch.ones(3, 4)).backward()
    assert losses(tracker) == []


def test_of_two_models_one_tells_it() -> None:
    one, two = net(), net()
    with (
        anynan.torch.track(one, action="record") as first,
        anynan.torch.track(two, action="record") as second,
    ):
        log_of_negative(two(one(torch.ones(3, 4)))).backward()
    assert len(first.events) + len(second.events) == 1


def test_a_mask_that_the_model_gave_is_no_fault_of_its_own() -> None:
    model = net(Body(lambda x: torch.full_like(x, -torch.inf) + x))
    with anynan.torch.track(model):
        event = failure(lambda: model(torch.ones(3, 4)).softmax(-1).mean().backward())
    assert (event.phase, event.operation.name) == ("loss", "softmax")
    assert event.cause.tag == "softmax_fully_masked"


@pytest.mark.filterwarnings("ignore:Suspect")  # the -Inf that the model gives is told, too
@pytest.mark.parametrize("level", ["step", "layer", "operation"])
def test_a_log_of_zero_that_the_model_gave_is_named(level: Any) -> None:
    model = net(Body(lambda x: (x * 1e4).softmax(-1).log()))
    with anynan.torch.track(model, level=level):
        event = failure(lambda: model(torch.ones(3, 4)).mean().backward())
    assert (event.phase, event.operation.name, event.notes) == ("forward", "log", ())
    assert event.spread.surfaced == "the loss"
