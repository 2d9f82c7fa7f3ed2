"""Bad input: one clear error that says what was seen and what to do."""

import math
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from tests.failing import failure
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import stepping


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = net()
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device.*materialise"):
        anynan.torch.track(model)


def test_patterns_on_a_step_whose_model_comes_with_the_first_call() -> None:
    @anynan.torch.track(layers="nowhere")
    def step(model: nn.Module) -> None:
        model(torch.ones(1, 2))

    with pytest.raises(ValueError, match="layers='nowhere' matches no layer"):
        step(net())


def test_the_traceback_of_a_step_ends_in_the_line_of_the_layer() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = Body(torch.log)

        def forward(self, x):
            return self.log(x)  # here

    model = Net()

    def step(x):
        return model(x).sum()

    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.torch.track(step)(-torch.ones(2))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].line == "return self.log(x)  # here"
    assert not any("anynan/_" in frame.filename for frame in frames)


def test_what_would_watch_nothing_is_refused_in_one_line() -> None:
    async def later(x: torch.Tensor) -> torch.Tensor:
        return x

    def items() -> Iterator[int]:
        yield 1

    large, spike = anynan.Policy(large=1), anynan.Policy(bad="spike")
    lost = anynan.Policy(overrides={"nowhere": large})
    uses: dict[str, tuple[Any, dict[str, Any]]] = {
        "None: is a return statement missing": (None, {}),
        "the body of an async function runs after": (later, {}),
        "the body of a generator function runs after": (items, {}),
        "layers= takes globs or predicates, not the class Linear": (net(), {"layers": nn.Linear}),
        "'nowhere' matches no layer": (net(), {"policy": lost}),
        r"bad='spike'\) does nothing without spike=": (net(), {"policy": spike}),
        "save=.* cannot be written": (net(), {"save": f"{__file__}/bundle"}),
    }
    for words, (target, options) in uses.items():
        with pytest.raises((TypeError, ValueError, OSError), match=words):
            anynan.torch.track(target, **options)
    policy = anynan.Policy(overrides={"model": large}, bad="large")
    anynan.torch.track(net(), policy=policy).remove()


def test_an_adapter_of_functions_names_the_one_that_a_module_belongs_to() -> None:
    pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"Sequential is torch's: use anynan\.torch\.track\(\)"):
        anynan.jax.track(net())


def test_what_is_allowed_and_was_not_needed_is_listed_as_such() -> None:
    allow = anynan.Allow("*", "neginf", "a mask")
    with anynan.torch.track(net(), policy=anynan.Policy(allow=allow)) as tracker:
        assert "a mask (not needed so far)" in tracker.report()


def test_recording_warns_of_no_value_and_logs_each_suspect(caplog, recwarn) -> None:
    model = net()
    step: Any = anynan.torch.track(
        stepping(model, torch.optim.SGD(model.parameters(), lr=1e-6)),
        action="record",
        policy=anynan.Policy(large=1e-6, headroom=1, spike=1.0001),
        advanced=anynan.Advanced(patience=2),
    )
    for i in range(24):
        step(torch.full((2, 2), 1.0 + 1e4 * (i == 22)))
    step(torch.full((2, 2), math.inf))
    step.remove()
    assert {event.kind for event in step.events} >= {"large", "spike"}
    assert {record.levelname for record in caplog.records} == {"WARNING", "ERROR"}
    assert len(caplog.records) == len(step.events)
    assert not [warning for warning in recwarn if warning.category is anynan.AnynanWarning]


def test_metrics_never_look_healthier_once_all_weights_are_nan() -> None:
    model = net()
    advanced = anynan.Advanced(replay=False)
    step: Any = anynan.torch.track(stepping(model), action="record", advanced=advanced)
    step(torch.ones(2, 2))
    before = step.metrics()
    for p in model.parameters():
        p.data.fill_(torch.nan)
    step(torch.ones(2, 2))
    after = step.metrics()
    assert before.keys() <= after.keys()
    assert math.isfinite(before["anynan/gradient_norm"])
    assert not math.isfinite(after["anynan/gradient_norm"])
    assert math.isnan(after["anynan/headroom"])
    text = step.report()
    assert "not finite in 2 of 2 layers" in text
    assert "tightest headroom" not in text


def test_a_number_that_came_in_bad_is_no_sample_of_the_data() -> None:
    model = net()

    @anynan.torch.track(action="record")
    def step(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return (model(x) * rate).sum()

    step(torch.ones(2, 2), torch.tensor(torch.nan))
    (event,) = (event for event in step.events if event.severity == "bad")
    assert "sample" not in event.cause.fix.replace("no sample", "")


def test_a_tracker_whose_model_nobody_holds_says_so() -> None:
    tracker = anynan.torch.track(net())
    with pytest.raises(RuntimeError, match="the Sequential .* is gone: keep a reference"):
        tracker(torch.ones(2, 2))


# What a report of a PyTorch program says, where the words depend on what is tracked and how.


def test_the_trail_of_a_backward_fault_comes_from_the_loss_and_ends_in_the_layer():
    def slope(x):
        return x + (x * 0).square().sum(-1, keepdim=True).sqrt()

    model = nn.Sequential(nn.Linear(3, 4), Body(slope), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    anynan.torch.track(model)
    event = failure(lambda: model(torch.randn(2, 3)).sum().backward())
    assert (event.layer, event.phase) == ("1", "backward")
    names = [name for name, _ in event.trail]
    assert names[-2:] == ["2", "1"]
    assert "0" not in names
    assert event.trail[-1][1] is None
    assert all(size is not None for _, size in event.trail[:-1])


class Generator(nn.Sequential):
    pass


def failing(model):
    """Spoil what a tracked model is given, and return what is said."""
    with pytest.raises(anynan.NonFiniteError) as caught:
        model(torch.full((2, 3), -1.0))
    return caught.value


def test_with_two_tracked_models_a_report_says_which_it_is_about():
    generator = Generator(Body(torch.log), nn.Linear(3, 1))
    anynan.torch.track(generator)
    assert "Generator" not in str(failing(generator))
    judge = nn.Sequential(Body(torch.log), nn.Linear(3, 1))
    with anynan.torch.track(judge):
        error = failing(generator)
        assert str(error).split("\n")[2:4] == ["  model   Generator", "  layer   0"]
        assert error.event.target == "model Generator"
        assert "  model   Sequential\n" in str(failing(judge))
        twin = nn.Sequential(Body(torch.log))
        with anynan.torch.track(twin):
            assert failing(judge).event.target == "model Sequential 1"
            assert "  model   Sequential 2\n" in str(failing(twin))
    assert "Generator" not in str(failing(generator))


def test_weights_that_change_while_no_layer_runs_are_still_told():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracker = anynan.torch.track(lambda x: model(x).sum())
    model.weight.grad = torch.ones(1, 3)
    with pytest.warns(anynan.AnynanWarning, match="no watched layer was seen running"):
        optimizer.step()
    tracker.remove()


def test_the_operands_of_linear_have_their_names_in_the_order_in_which_it_is_written():
    layer = nn.Linear(3, 2)
    anynan.torch.track(layer)
    event = failure(layer, torch.full((4, 3), torch.nan))
    operation = event.operation
    assert operation.operands == ("x", "weight", "bias")
    assert [x.shape for x in operation.inputs] == [(4, 3), (3, 2), (2,)]
    rows = [x.split()[1] for x in str(event).splitlines() if x.startswith("  input ")]
    assert rows == ["x:", "weight:", "bias:"]
    assert anynan.Event.from_json(event.to_json()).operation == operation
