"""``track``: its forms, its options, and every shape of model it meets."""

import contextlib
import functools
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan import AnynanWarning, NonFiniteError, Policy
from anynan.torch.update import updates


class Fault(nn.Module):
    """Pass values through, or make a NaN of them when armed."""

    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        self.where = where
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.armed:
            return x
        if self.where == "forward":
            return torch.log(-1 - x.abs())
        # Finite values, and the gradient of a root at zero.
        return x + torch.sqrt(0 * x)


class Net(nn.Module):
    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.fault = Fault(where)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fault(self.first(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


class Deep(nn.Module):
    """Two blocks, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Block()
        self.right = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def batch(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> Any:
    loss = model(batch() if x is None else x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def hooks_on(model: nn.Module) -> int:
    return sum(
        len(held)
        for module in model.modules()
        for name, held in vars(module).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and isinstance(held, dict)
    )


def bad(tracker: anynan.Tracker) -> list[anynan.Event]:
    return [event for event in tracker.events if event.severity == "bad"]


# The forms of track.


def test_with_block_watches_and_then_removes() -> None:
    model = Net()
    with anynan.torch.track(model) as tracker, torch.no_grad():
        model(batch())
        model.fault.armed = True
        with pytest.raises(NonFiniteError) as caught:
            model(batch())
    event = caught.value.event
    assert (event.layer, event.phase, event.kind, event.step) == ("fault", "forward", "nan", 1)
    assert caught.value.tracker is tracker
    assert bad(tracker) == [event]
    assert hooks_on(model) == 0
    model(batch())  # nobody watches any more


def test_with_block_raises_what_was_unread_at_its_end() -> None:
    model = Net()
    model.fault.armed = True
    with (
        pytest.raises(NonFiniteError, match="fault"),
        anynan.torch.track(model, read="step", backward=False),
    ):
        out = model(batch().requires_grad_())
        assert out.isnan().any()
    assert hooks_on(model) == 0


def test_with_block_keeps_the_users_own_exception() -> None:
    model = Net()
    model.fault.armed = True
    with (
        pytest.raises(KeyError, match="mine") as caught,
        anynan.torch.track(model, read="step"),
    ):
        model(batch().requires_grad_())
        raise KeyError("mine")
    (note,) = caught.value.__notes__  # of what was still to be read
    assert "NaN first appeared" in note and "fault" in note
    assert hooks_on(model) == 0


def test_hooks_live_on_when_the_tracker_is_not_kept() -> None:
    model = Net()
    anynan.torch.track(model)
    model.fault.armed = True
    with pytest.raises(NonFiniteError):
        model(batch())


def test_decorator_without_options() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @anynan.torch.track
    def step(x: torch.Tensor) -> torch.Tensor:
        """Train once."""
        return train(model, optimizer, x)

    assert isinstance(step, anynan.Tracker)
    assert (step.__name__, step.__doc__) == ("step", "Train once.")
    assert torch.is_tensor(step(batch()))
    assert step.history.steps() == [0]
    model.fault.armed = True
    with pytest.raises(NonFiniteError) as caught:
        step(batch())
    assert (caught.value.event.layer, caught.value.event.step) == ("fault", 1)


def test_decorator_with_options() -> None:
    model = Net()

    @anynan.torch.track(action="record", history=2)
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for _ in range(3):
        step(batch())
    assert step.history.steps() == [1, 2]
    model.fault.armed = True
    assert step(batch()).isnan().all()
    assert [event.layer for event in bad(step)] == ["fault"]


def test_tracked_function_gives_back_the_original() -> None:
    def step(x: int) -> int:
        return x + 1

    tracker = anynan.torch.track(step, action="record")
    with pytest.warns(AnynanWarning, match="no module was found"):
        assert tracker(2) == 3
    assert tracker.fn is step
    tracker.remove()
    assert tracker(3) == 4  # removed, it still stands in for the function


def test_remove_is_safe_twice_and_untrack_is_the_same() -> None:
    model = Net()
    tracker = anynan.torch.track(model)
    tracker.remove()
    tracker.remove()
    assert hooks_on(model) == 0
    again = anynan.torch.track(model)
    anynan.torch.untrack(model)
    assert hooks_on(model) == 0
    assert "removed" in repr(again)
    with pytest.raises(ValueError, match="not tracked"):
        anynan.torch.untrack(model)


def test_pause_leaves_no_hook_and_resume_watches_again() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, action="record")
    train(model, optimizer)
    tracker.pause()
    assert hooks_on(model) == 0
    assert not updates._handles
    model.fault.armed = True
    model(batch())
    assert not tracker.events
    model.fault.armed = False
    tracker.resume()
    train(model, optimizer)
    assert tracker.history.steps() == [0, 1]
    model.fault.armed = True
    model(batch())
    assert [event.layer for event in bad(tracker)] == ["fault"]


def test_pause_and_resume_a_step() -> None:
    model = Net()

    @anynan.torch.track(action="record")
    def step() -> None:
        model(batch())

    step()
    step.pause()
    assert hooks_on(model) == 0
    model.fault.armed = True
    step()
    assert not step.events
    step.resume()
    step()
    assert [event.layer for event in bad(step)] == ["fault"]


def test_check_reads_what_is_still_on_the_device() -> None:
    model = Net()
    tracker = anynan.torch.track(model, read="step")
    model(batch())
    tracker.check()
    model.fault.armed = True
    model(batch())
    with pytest.raises(NonFiniteError, match="fault"):
        tracker.check()


# Options.


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, {"", "left", "left.inner", "left.inner.first", "right.inner.last"}),
        ({"layers": "left"}, {"left"}),
        ({"layers": "left*"}, {"left", "left.inner", "left.inner.first", "left.inner.last"}),
        (
            {"layers": ["*first", "*last"], "exclude": "left"},
            {"right.inner.first", "right.inner.last"},
        ),
        ({"layers": lambda path, layer: isinstance(layer, Fault)}, {"left.inner.fault"}),
        ({"exclude": lambda path, layer: isinstance(layer, Block)}, {""}),
    ],
)
def test_layers_and_exclude_choose_what_is_read(options: Any, seen: set[str]) -> None:
    model = Deep()
    with anynan.torch.track(model, **options) as tracker:
        model(batch())
    read = {reading.layer for reading in tracker.history if reading.phase == "forward"}
    assert seen <= read
    if "layers" in options and callable(options["layers"]):
        assert read == {"left.inner.fault", "right.inner.fault"}
    if options.get("exclude") == "left":
        assert read == seen
    if options.get("layers") == "left":
        assert read == {"left"}
    if options.get("layers") == "left*":
        assert not any(path.startswith("right") for path in read)
    if callable(options.get("exclude")):
        assert read == {""}


def test_a_fault_inside_a_skipped_layer_is_seen_where_it_leaves() -> None:
    model = Deep()
    model.left.inner.fault.armed = True
    tracker = anynan.torch.track(model, exclude="left", action="record")
    model(batch())
    (event,) = bad(tracker)
    assert event.operation is not None
    assert event.operation.name == "log"
    assert event.spread.surfaced == "forward (the model itself)"


def test_backward_false_reads_no_gradient() -> None:
    model = Net("backward")
    model.fault.armed = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with anynan.torch.track(model, backward=False) as tracker:
        train(model, optimizer)
    assert {reading.phase for reading in tracker.history} == {"input", "forward"}


def test_replay_false_stays_at_the_layer() -> None:
    model = Net()
    model.fault.armed = True
    tracker = anynan.torch.track(model, replay=False, action="record")
    model(batch())
    (event,) = bad(tracker)
    assert event.layer == "fault"
    assert event.operation is None


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_action_raise(read: Any) -> None:
    model = Net()
    model.fault.armed = True
    anynan.torch.track(model, action="raise", read=read)
    with pytest.raises(NonFiniteError, match="NaN first appeared in the forward pass of step 0"):
        model(batch())  # without gradients one call is one step
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_raised_inside_the_failing_layer() -> None:
    model = Net()
    model.fault.armed = True
    ran: list[bool] = []
    model.last.register_forward_pre_hook(lambda *_: ran.append(anynan.replaying()))
    anynan.torch.track(model)
    with pytest.raises(NonFiniteError):
        model(batch())
    assert False not in ran


def test_action_warn_says_it_once_a_step_and_goes_on() -> None:
    model = Net()
    model.fault.armed = True
    tracker = anynan.torch.track(model, action="warn")
    for _ in range(2):
        with pytest.warns(AnynanWarning) as said, torch.no_grad():
            assert model(batch()).isnan().all()
        assert len(said) == 1
        assert "log" in str(said[0].message)
    assert [(event.step, event.times) for event in bad(tracker)] == [(0, 2)]


def test_action_record_says_nothing() -> None:
    model = Net()
    model.fault.armed = True
    tracker = anynan.torch.track(model, action="record")
    model(batch())  # a warning would be an error here
    assert len(bad(tracker)) == 1


def test_action_callable_gets_the_event() -> None:
    model = Net()
    model.fault.armed = True
    got: list[anynan.Event] = []
    tracker = anynan.torch.track(model, action=got.append)
    model(batch())
    assert got == bad(tracker)
    assert got[0].layer == "fault"


def test_action_callable_may_raise_what_it_likes() -> None:
    model = Net()
    model.fault.armed = True

    def stop(event: anynan.Event) -> None:
        raise StopIteration(event.layer)

    anynan.torch.track(model, action=stop)
    with pytest.raises(StopIteration, match="fault"):
        model(batch())


def test_patience_skips_the_first_bad_steps_in_a_row() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, patience=2)
    train(model, optimizer)
    before = model.first.weight.detach().clone()
    model.fault.armed = True
    for i in (1, 2):
        with pytest.warns(AnynanWarning, match=f"skipped {i} of 2 bad steps in a row"):
            train(model, optimizer)
    assert torch.equal(before, model.first.weight)
    model.fault.armed = False
    train(model, optimizer)  # a good step: the count starts again
    assert not torch.equal(before, model.first.weight)
    model.fault.armed = True
    for _ in range(2):
        with pytest.warns(AnynanWarning):
            train(model, optimizer)
    with pytest.raises(NonFiniteError):
        train(model, optimizer)
    assert [(event.step, event.times) for event in bad(tracker)] == [(1, 5)]


def test_history_is_bounded_and_zero_keeps_nothing() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with anynan.torch.track(model, history=3) as tracker:
        for _ in range(5):
            train(model, optimizer)
        assert tracker.history.steps() == [2, 3, 4]
        assert len(tracker.history) == 3
    with anynan.torch.track(model, history=0) as tracker:
        train(model, optimizer)
        assert list(tracker.history) == []


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_readings_and_stats_hold_the_true_values(read: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = batch(64)
    with anynan.torch.track(model, stats=("mean", "rms", "norm", "absmax"), read=read) as tracker:
        out = model(x)
        out.square().sum().backward()
        tracker.check()
    (reading,) = tracker.dump("1", "forward")
    assert reading.lo == out.min().item()
    assert reading.hi == out.max().item()
    out = out.detach()
    expected = (out.mean(), out.square().mean().sqrt(), out.norm())
    assert reading.stats == pytest.approx([float(x) for x in expected], rel=1e-5)
    assert reading.absmax == out.abs().max().item()
    (grad,) = tracker.dump("1", "backward")
    assert grad.hi == (2 * out).max().item()
    numbers = tracker.metrics(layers=True)
    assert numbers["anynan/absmax/forward/1"] == reading.absmax
    assert numbers["anynan/rms/forward/1"] == pytest.approx(float(expected[1]), rel=1e-5)
    assert all(type(value) is float for value in numbers.values())


def test_policy_large_is_suspect_and_made_bad_it_acts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    x = torch.full((2, 4), 1e5)
    tracker = anynan.torch.track(model, policy=Policy(large=1e3))
    with pytest.warns(AnynanWarning, match="beyond the limit"), torch.no_grad():
        model(x)
    assert {event.severity for event in tracker.events} == {"suspect"}
    tracker.remove()
    anynan.torch.track(model, policy=Policy(large=1e3, bad=("large",)))
    with pytest.raises(anynan.AnomalyError) as caught:
        model(x)
    assert caught.value.event.kind == "large"
    assert not isinstance(caught.value, NonFiniteError)


def test_policy_allow_and_expect_are_counted_never_hidden() -> None:
    model = Net()
    model.fault.armed = True
    allowed = Policy(allow=(anynan.Allow("*", "nan", "a test of sensors"),))
    with anynan.torch.track(model, policy=allowed) as tracker:
        model(batch())
    assert tracker.count("expected")
    assert {event.expected for event in tracker.events} == {"a test of sensors"}
    assert "a test of sensors" in tracker.report()
    with anynan.torch.track(model) as tracker, anynan.expect(nan=True, reason="calibration"):
        model(batch())
    assert {event.expected for event in tracker.events} == {"calibration"}


def test_expect_covers_the_gradients_made_inside() -> None:
    model = Net("backward")
    model.fault.armed = True
    with anynan.torch.track(model) as tracker:
        with anynan.expect(nan=True, posinf=True, neginf=True, reason="a known trap"):
            loss = model(batch()).sum()
        loss.backward()
    assert not bad(tracker)
    assert {event.phase for event in tracker.events} == {"backward"}


def test_spike_in_the_gradient_norm() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tracker = anynan.torch.track(model, policy=Policy(spike=20.0))
    x = batch()
    for _ in range(8):
        train(model, optimizer, x)
    with pytest.warns(AnynanWarning, match="gradient"):
        train(model, optimizer, x * 100)
    (event,) = tracker.events
    assert (event.kind, event.severity, event.step) == ("spike", "suspect", 8)


class Sometimes(nn.Linear):
    """A layer whose weight only matters when it runs."""

    runs = False

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.runs else x


@pytest.mark.parametrize(("exact", "since"), [(True, (2, 3)), (False, (0, 6))])
def test_parameters_true_says_exactly_since_when(exact: bool, since: tuple[int, int]) -> None:
    model = nn.Sequential(OrderedDict(body=Net(), rarely=Sometimes()))
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, parameters=exact, action="record")
    for i in range(7):
        if i == 3:
            with torch.no_grad():
                model.rarely.weight[1, 0] = torch.nan
        model.rarely.runs = i == 6
        train(model, optimizer)
        if bad(tracker):
            break
    (event,) = bad(tracker)
    assert event.parameter == "rarely.weight"
    assert event.layer == "rarely"
    assert event.phase == "parameter" or not exact  # an update lies in between
    assert event.step == since[1]
    assert event.since == since
    assert "step" in str(tracker.report())


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_parameters_true_takes_a_buffer_of_minus_inf_for_a_mask(read: Any) -> None:
    model = Net()
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    with anynan.torch.track(model, parameters=True, read=read) as tracker:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not tracker.events


def test_a_parameter_that_is_bad_at_attach() -> None:
    model = Net()
    with torch.no_grad():
        model.last.weight[1, 3] = torch.inf
    with pytest.raises(NonFiniteError) as caught:
        anynan.torch.track(model)
    event = caught.value.event
    assert (event.phase, event.parameter, event.kind) == ("parameter", "last.weight", "posinf")
    assert hooks_on(model) == 0
    assert event.summary is not None
    assert event.summary.first_bad == (1, 3)


@pytest.mark.parametrize("read", [2, 3])
def test_read_every_n_steps(read: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, read=read)
    model.fault.armed = True
    with pytest.raises(NonFiniteError) as caught:
        for _ in range(5):
            train(model, optimizer)
    assert (caught.value.event.step, caught.value.event.layer) == (0, "fault")
    assert "step 0 was over when it was read" in str(caught.value)
    assert tracker.step == read - 1


def test_level_operation_shows_contained_origins_and_changes_nothing() -> None:
    class Guarded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, torch.log(x), x)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), Guarded(), nn.Dropout(0.5))
    x = batch(8)
    torch.manual_seed(2)
    plain = model(x)
    with anynan.torch.track(model, level="operation") as tracker, torch.no_grad():
        torch.manual_seed(2)
        watched = model(x)
    assert torch.equal(plain, watched)
    assert tracker.events
    assert {event.severity for event in tracker.events} == {"suspect"}
    event = tracker.events[0]
    assert event.layer == "1"
    assert event.operation is not None
    assert event.operation.name == "log"
    assert event.operation.source is not None
    assert event.operation.source.text == "return torch.where(x > 0, torch.log(x), x)"
    assert "contained" in " ".join(event.notes)


def test_level_operation_still_finds_what_is_bad() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = anynan.torch.track(model, level="operation", action="record")
    train(model, optimizer)
    model.fault.armed = True
    train(model, optimizer)
    event = bad(tracker)[0]
    assert event.operation is not None
    assert (event.layer, event.operation.name) == ("fault", "log")


@pytest.mark.parametrize("word", ["off", "record", "warn", "raise"])
def test_the_environment_overrides_action(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", word)
    model = Net()
    model.fault.armed = True
    tracker = anynan.torch.track(model, action="record" if word == "raise" else "raise")
    expected: Any = {
        "raise": pytest.raises(NonFiniteError),
        "warn": pytest.warns(AnynanWarning),
    }.get(word, contextlib.nullcontext())
    with expected:
        model(batch())
    assert len(tracker.events) == (0 if word == "off" else 1)
    assert bool(hooks_on(model)) == (word != "off")


def test_the_environment_turns_a_tracked_step_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYNAN", "off")
    model = Net()
    model.fault.armed = True
    step = anynan.torch.track(lambda x: model(x))
    assert step(batch()).isnan().all()
    assert hooks_on(model) == 0


# Shapes of inputs and outputs.


@dataclass
class Answer:
    logits: torch.Tensor
    note: str = ""
    hidden: Any = None


class Returns(nn.Module):
    """Return a bad tensor inside some container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        good, wrong = x * self.scale, torch.log(-1 - (x * self.scale).abs())
        if self.kind == "tensor":
            return wrong
        if self.kind == "tuple":
            return good, (None, wrong)
        if self.kind == "dict":
            return {"count": torch.tensor(3), "logits": wrong}
        if self.kind == "dataclass":
            return Answer(good, "text", [good, wrong])
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=good, hidden_states=(good, wrong))


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("tensor", "output"),
        ("tuple", "output[1][1]"),
        ("dict", "output['logits']"),
        ("dataclass", "output.hidden[1]"),
        ("modeloutput", "output['hidden_states'][1]"),
    ],
)
def test_outputs_of_every_shape(kind: str, tensor: str) -> None:
    if kind == "modeloutput":
        pytest.importorskip("transformers")
    model = nn.ModuleDict({"inside": Returns(kind)})
    outer = Wrap(model["inside"])
    anynan.torch.track(outer)
    with pytest.raises(NonFiniteError) as caught:
        outer(batch())
    event = caught.value.event
    assert event.layer == "inside"
    assert event.tensor.replace('"', "'") in (
        tensor,
        tensor.replace("['hidden_states']", ".hidden_states"),
    )
    assert event.operation is not None
    assert event.operation.name == "log"


class Wrap(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_gradients_of_outputs_of_every_shape(kind: str) -> None:
    class Make(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {
                "tuple": (x, x * 2),
                "dict": {"a": x, "b": x * 2},
                "dataclass": Answer(x, hidden=x * 2),
            }[kind]

    class Use(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.make = nn.Linear(4, 4), Make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.make(self.first(x))
            second = {
                "tuple": lambda: out[1],
                "dict": lambda: out["b"],
                "dataclass": lambda: out.hidden,
            }[kind]()
            return torch.sqrt(0 * second).sum()

    model = Use()
    anynan.torch.track(model)
    with pytest.raises(NonFiniteError) as caught:
        model(batch()).backward()
    event = caught.value.event
    assert event.phase == "backward"
    assert event.operation is not None
    assert event.operation.name == "sqrt"


def test_keyword_inputs_are_named() -> None:
    model = Wrap(Net())
    anynan.torch.track(model)
    x = batch()
    x[1, 2] = torch.nan
    with pytest.raises(NonFiniteError) as caught:
        model(x=x)
    event = caught.value.event
    assert (event.phase, event.tensor, event.kind) == ("input", "x", "nan")
    assert event.cause is not None
    assert event.cause.tag == "bad_input"
    assert "row" in str(caught.value)


def test_positional_inputs_are_named_after_the_argument() -> None:
    class Two(nn.Module):
        def forward(self, image: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
            return image + extra["mask"]

    model = Two()
    anynan.torch.track(model)
    with pytest.raises(NonFiniteError) as caught:
        model(batch(), {"mask": torch.full((4,), torch.nan)})
    assert caught.value.event.tensor == "extra['mask']"


# Shapes of models.


def test_shared_module_counts_its_calls() -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = Log()
            self.alias = self.shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.alias(self.shared(1 + x.abs()) - 100)

    model = Twice()
    tracker = anynan.torch.track(model, action="record")
    with torch.no_grad():
        model(batch())
    (event,) = bad(tracker)
    assert event.layer in ("shared", "alias")
    assert event.call == 1
    assert [r.call for r in tracker.history if r.layer == event.layer] == [0, 1]


def test_reentrant_module() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            if not depth:
                return torch.log(-1 - self.leaf(x).abs())
            return self(x, depth - 1) + 1

    model = Tree()
    tracker = anynan.torch.track(model, action="record")
    with torch.no_grad():
        model(batch())
    (event,) = bad(tracker)
    assert event.layer == ""
    assert event.operation is not None
    assert event.operation.name == "log"
    assert tracker.history.steps() == [0]
    assert len([r for r in tracker.history if r.phase == "input"]) == 1


def test_frozen_parameters() -> None:
    model = Net("backward")
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with anynan.torch.track(model) as tracker:
        for _ in range(3):
            train(model, optimizer)
    assert tracker.history.steps() == [0, 1, 2]
    parameters = {r.site.parameter for r in tracker.history} - {None}
    assert parameters == {"last.weight", "last.bias"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", ["immediate", "step"])
def test_without_gradients(mode: Any, read: Any) -> None:
    model = Net().eval()
    tracker = anynan.torch.track(model, read=read)
    with mode():
        model(batch())
        model(batch())
    assert tracker.history.steps() == [0, 1]
    model.fault.armed = True
    with mode(), pytest.raises(NonFiniteError) as caught:
        model(batch())
    event = caught.value.event
    assert event.operation is not None
    assert (event.layer, event.step, event.operation.name) == ("fault", 2, "log")
    # And outside inference mode again, with the same slots.
    model.fault.armed = False
    model(batch()).sum().backward()


def test_several_models_in_one_process() -> None:
    one, two = Net(), Net()
    first = anynan.torch.track(one, action="record")
    second = anynan.torch.track(two, action="record")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    for model, optimizer in zip((one, two), optimizers, strict=True):
        train(model, optimizer)
    train(two, optimizers[1])
    assert (first.history.steps(), second.history.steps()) == ([0], [0, 1])
    two.fault.armed = True
    train(one, optimizers[0])
    train(two, optimizers[1])
    assert not first.events
    assert [event.step for event in bad(second)] == [2]
    first.remove()
    two.fault.armed = False
    train(two, optimizers[1])  # the other one's optimizer hooks are still there
    assert second.history.steps()[-1] == 3


def test_a_tracked_step_with_a_tracked_model_reports_once() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = anynan.torch.track(model, action="record")

    @anynan.torch.track(action="record")
    def step() -> None:
        train(model, optimizer)

    step()
    model.fault.armed = True
    step()
    assert len(bad(step)) + len(bad(inner)) == 1
    assert bad(step)[0].layer == "fault"
    model(batch())  # outside the step the inner tracker watches again
    assert len(bad(inner)) == 1


def test_with_blocks_over_different_targets_nest() -> None:
    one, two = Net(), Net()
    with anynan.torch.track(one) as first, anynan.torch.track(two) as second:
        two(one.first(batch()))
        one(batch())
    assert len(second.history) == 1
    assert not (bad(first) or bad(second))
    assert hooks_on(one) == hooks_on(two) == 0


def make_gan() -> Any:
    """Make a class whose training step, a method, has two models and two optimizers."""

    class Gan:
        def __init__(self) -> None:
            self.generator = Net()
            self.critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
            self.optimizers = [
                torch.optim.Adam(self.generator.parameters(), lr=1e-3),
                torch.optim.Adam(self.critic.parameters(), lr=1e-3),
            ]

        @anynan.torch.track(action="record")
        def step(self, real: torch.Tensor) -> torch.Tensor:
            fake = self.generator(batch())
            self.optimizers[1].zero_grad()
            (self.critic(fake.detach()).mean() - self.critic(real).mean()).backward()
            self.optimizers[1].step()
            self.optimizers[0].zero_grad()
            loss = -self.critic(fake).mean()
            loss.backward()
            self.optimizers[0].step()
            return loss

    return Gan()


def test_a_step_with_two_models_is_a_method() -> None:
    gan = make_gan()
    tracker = type(gan).step
    gan.step(torch.randn(3, 2))
    layers = {r.layer for r in tracker.history}
    assert {"generator", "generator.first", "critic.2"} <= layers
    assert tracker.history.steps() == [0]
    weights = {r.site.parameter for r in tracker.history if r.phase == "backward"}
    assert {"generator.first.weight", "critic.0.bias"} <= weights
    gan.generator.fault.armed = True
    gan.step(torch.randn(3, 2))
    (event,) = bad(tracker)
    assert (event.layer, event.step) == ("generator.fault", 1)
    tracker.remove()
    assert hooks_on(gan.generator) == hooks_on(gan.critic) == 0


def test_patterns_need_not_match_in_every_model_of_a_step() -> None:
    one, two = Net(), Net()

    @anynan.torch.track(layers="one.f*")
    def step() -> None:
        two(batch())
        one(batch())

    step()
    assert {r.layer for r in step.history if r.phase == "forward"} == {"one.first", "one.fault"}


def test_a_step_meets_a_new_model_later() -> None:
    @anynan.torch.track(action="record")
    def step(model: nn.Module, x: torch.Tensor) -> None:
        model(x)

    for armed in (False, False, True):
        model = Net()
        model.fault.armed = armed
        step(model, batch())
    (event,) = bad(step)
    assert event.layer is not None
    assert event.layer.endswith("fault")
    assert event.step == 2


def test_models_are_found_in_arguments_and_partials() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return train(net, optimizer, x)

    given = anynan.torch.track(step, action="record")
    given(model, batch())
    model.fault.armed = True
    given(model, batch())
    assert [event.layer for event in bad(given)] == ["fault"]
    given.remove()
    model.fault.armed = False
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    bound = anynan.torch.track(functools.partial(step, model), action="record")
    model.fault.armed = True
    bound(batch())
    assert [event.layer for event in bad(bound)] == ["fault"]


# Threads.


def run_threads(*targets: Any) -> None:
    errors: list[BaseException] = []

    def guarded(target: Any) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_that_train_different_models() -> None:
    models = [Net() for _ in range(3)]
    trackers = [anynan.torch.track(model, action="record") for model in models]

    def work(i: int) -> None:
        optimizer = torch.optim.SGD(models[i].parameters(), lr=0.01)
        for at in range(10):
            models[i].fault.armed = i == 1 and at == 7
            train(models[i], optimizer)
            if models[i].fault.armed:
                break

    run_threads(*[lambda i=i: work(i) for i in range(3)])
    assert [len(bad(t)) for t in trackers] == [0, 1, 0]
    assert bad(trackers[1])[0].step == 7
    assert [len(t.history) for t in trackers] == [10, 8, 10]


def test_threads_that_share_one_tracker_have_their_own_steps() -> None:
    model = Net().eval()
    tracker = anynan.torch.track(model, action="record")
    barrier = threading.Barrier(2)

    def work() -> None:
        with torch.no_grad():
            for _ in range(20):
                barrier.wait()
                model(batch())

    run_threads(work, work)
    assert not tracker.events
    steps = tracker.history.steps()
    assert sorted(steps) == sorted([*range(20), *range(20)])
    sizes: dict[int, list[str | None]] = {}
    entries = list(tracker.history)
    assert len(entries) == 40 * 5
    assert not sizes


def test_a_thread_raises_its_own_error_only() -> None:
    model = Net().eval()
    anynan.torch.track(model)
    outcome: dict[str, Any] = {}
    go = threading.Barrier(2)

    def good() -> None:
        go.wait()
        with torch.no_grad():
            outcome["good"] = model(torch.ones(2, 4))

    def wrong() -> None:
        go.wait()
        try:
            with torch.no_grad():
                model(torch.full((2, 4), torch.nan))
        except NonFiniteError as error:
            outcome["wrong"] = error.event.phase

    run_threads(good, wrong)
    assert outcome["wrong"] == "input"
    assert outcome["good"].isfinite().all()


# What is in reach of a logger.


def test_report_names_steps_headroom_and_events() -> None:
    model = Net()
    tracker = anynan.torch.track(model, action="record")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.fault.armed = True
    with torch.no_grad():
        model(batch())
    text = tracker.report()
    assert "steps     0 to 1" in text
    assert "headroom" in text
    assert "1 bad" in text
    tracker.clear()
    assert not tracker.events
    assert not list(tracker.history)


def test_wrappers_do_not_show_in_paths() -> None:
    model = nn.DataParallel(Net())
    model.module.fault.armed = True
    tracker = anynan.torch.track(model, action="record")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch())
    assert bad(tracker)[0].layer == "fault"


def test_a_replay_leaves_the_gradients_of_other_models_alone() -> None:
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    seen = []

    class Log(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(other.weight.grad)
            return torch.log(x)

    model = torch.nn.Sequential(Log())
    tracker = anynan.torch.track(model, action="record")
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model(torch.tensor([-1.0]))
    assert len(bad(tracker)) == 1
    assert len(seen) == 3  # the step, its replay, and one with the fix
    assert all(gradient is other.weight.grad for gradient in seen)
