"""Models that nobody named are found by their first call, and watched as if they had been."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import anynan
from anynan._everywhere import Found, watch_everything
from anynan.options import Options
from anynan.torch.session.session import session_of
from tests.failing import failure
from tests.processes import python
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import net


def log() -> nn.Module:
    return Body(lambda x: torch.log(-1 - x * x))


def watched(**options: Any) -> Iterator[Found]:
    real = nn.Module.__call__, torch.compile
    found = Found()
    end = watch_everything(Options(**options), found)
    yield found
    end()
    assert (nn.Module.__call__, torch.compile) == real


@pytest.fixture
def found() -> Iterator[Found]:
    yield from watched(action="record")


@pytest.fixture
def raising() -> Iterator[Found]:
    yield from watched(action="raise")


COMPILED: dict[str, Any] = {
    "model": lambda module, **how: torch.compile(module, **how),
    "method": lambda module, **how: module.compile(**how) or module,
    "function": lambda module, **how: torch.compile(lambda x: module(x), **how),
}


def models(found: Found) -> list[nn.Module]:
    """List what is watched, but for the program as TensorFlow sees it, if a test imported that."""
    watched = [tracker.fn for tracker in found.living()]
    return [model for model in watched if isinstance(model, nn.Module)]


def train(model: Any, criterion: Any = None, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        out = model(torch.ones(3, 4))
        (criterion or nn.functional.mse_loss)(out, torch.zeros_like(out)).backward()
        optimizer.step()
        optimizer.zero_grad()


def facts(event: anynan.Event) -> Any:
    return event.layer, event.phase, event.kind, event.step, event.operation, event.cause


def test_the_event_is_that_of_track(raising: Found) -> None:
    event, model = failure(train, net(log())), net(log())
    with anynan.torch.track(model):
        assert facts(event) == facts(failure(train, model))
    assert [facts(event) for event in raising.bad()] == [facts(event)]


def test_a_loss_belongs_to_the_model_it_is_given(raising: Found) -> None:
    class LogLoss(nn.Module):
        def forward(self, x, y):
            return (-1 - x.square().sum()).log() + y.sum()

    event = failure(train, net(), LogLoss())
    assert (event.layer, event.operation.name) == ("LogLoss", "log")
    (line,) = raising.lines()
    assert line.startswith("anynan: Sequential: 1 bad in 1 step: 5 layers")


def test_the_programs_own_passes_are_read_where_something_was_tracked_before() -> None:
    model = net()
    with anynan.torch.track(model):
        train(model)
    for found in watched(action="record"):
        weight = torch.zeros(3, requires_grad=True)
        weight.log().sum().backward()
        assert [event.operation.name for event in found.events] == ["log"]


def test_a_bad_label_is_named(raising: Found) -> None:
    label = torch.from_numpy(np.full((3, 4), np.nan, "f"))
    event = failure(lambda: nn.MSELoss()(net()(torch.ones(3, 4)), label).backward())
    assert (event.phase, event.layer, event.tensor) == ("input", "MSELoss", "target")


def test_the_outer_model_takes_over(found: Found) -> None:
    encoder = net()
    encoder(torch.ones(3, 4))
    model = nn.Sequential(encoder, nn.Linear(4, 1))
    train(model)
    encoder(torch.ones(3, 4)).sum().backward()
    assert (session_of(encoder), session_of(model) is None) == (None, False)
    found.close()
    assert [line.split(":")[1] for line in found.lines()] == [" Sequential", " Sequential"]
    assert "4 layers" in found.lines()[0]


def test_the_users_own_tracker_takes_over(found: Found) -> None:
    model = net(log())
    train(model)
    mine = anynan.torch.track(model, action="record")
    for p in model.parameters():
        p.data.fill_(-1.0)
    model(torch.ones(3, 4))
    assert ([event.layer for event in mine.events][-1], len(found.events)) == ("3", 1)
    anynan.untrack(model)
    model(torch.ones(3, 4))  # it was ended on purpose
    assert session_of(model) is None


@pytest.mark.parametrize("level", ["step", "layer"])
def test_the_models_of_the_users_own_step_are_left_to_it(level: Any, found: Found) -> None:
    model = nn.Sequential(net(), log())

    @anynan.torch.track(action="record", level=level)
    def step(x):
        return model[1](model[0](x)).sum()

    step(torch.ones(3, 4))
    assert (len(step.events), found.events, found.lines()) == (1, [], [])


def test_what_cannot_be_watched_is_a_line_and_no_exception(found: Found) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    for _ in range(2):
        model(torch.ones(3, 4, device="meta"))
    (line,) = found.lines()
    assert "a Linear is not watched: ValueError: weight is on the meta device" in line


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # an error hides what went wrong
@pytest.mark.usefixtures("found")
def test_a_model_that_is_first_called_as_it_is_traced_is_traced() -> None:
    traced = torch.jit.trace(net(), (torch.ones(3, 4),))
    assert traced(torch.ones(3, 4)).isfinite().all()


@pytest.mark.usefixtures("found")
def test_large_models_that_the_program_drops_free_their_memory_at_once() -> None:
    model = nn.Linear(4096, 4097)
    model(torch.ones(1, 4096))
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_models_that_are_gone_are_not_kept(found: Found) -> None:
    for _ in range(40):
        train(last := net(), steps=1)
    gc.collect()
    assert len(models(found)) <= 16
    found.close()
    assert len(found.lines()) == 40
    assert session_of(last) is None and not any(each._forward_hooks for each in last.modules())


@pytest.mark.tier(2)
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize(
    ("options", "layers"), [({"action": "record"}, "5 layers"), ({"level": "step"}, "")]
)
def test_what_is_compiled_is_watched_without_a_graph_break(how: str, options, layers: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    for found in watched(**options):
        module = net(nn.Tanh())
        model = COMPILED[how](module, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        found.close()
        line, *notes = found.lines()
        assert f": nothing went bad in 2 steps: {layers}" in line
        assert not any("anynan did not see the model's own call" in note for note in notes)
        assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})


class Wrapper(nn.Module):
    def __init__(self, base: nn.Module, shift: float) -> None:
        super().__init__()
        self.base, self.shift = base, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.base(x).abs() + self.shift)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_wrapper_that_is_made_anew_at_each_step_is_one_model(found: Found, calls: int) -> None:
    func = net()
    optimizer = torch.optim.SGD(func.parameters(), lr=1e-3)
    hooks = []
    for i in range(30):
        x = torch.ones(2, 4)
        for _ in range(calls):
            x = Wrapper(func, -1e3 if i == 25 and calls == 1 else 2.0)(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        hooks.append(len(func._forward_hooks) + len(func[0]._forward_hooks))
    assert len(models(found)) <= calls and max(hooks) <= 4 * calls
    assert (len(found.lines()) - len(found.events)) <= calls + 1
    assert [event.operation.name for event in found.bad()] == ["log"] * (calls == 1)


def test_a_gradient_that_stands_for_many_is_left_alone(found):
    model, x = net(), torch.ones(4)
    jacobian = torch.autograd.functional.jacobian
    both = [jacobian(model, x, vectorize=vectorize) for vectorize in (True, False)]
    torch.testing.assert_close(*both)
    model(torch.ones(2, 4)).sum().backward()
    assert not found.events and not found.notes


@pytest.mark.parametrize("tracked", [False, True])
def test_weights_that_were_noted_can_change_places(found, tracked):
    torch.compile(torch.neg, backend="eager")(torch.ones(1))  # the compiler is there from here on
    model = net()
    if tracked:
        anynan.torch.track(model)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model(torch.ones(1, 4).double()).dtype is torch.float64


def test_a_view_that_a_write_has_spoiled_stops_no_call():
    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

    base, model = torch.ones(2, requires_grad=True) * 2, net()
    spoiled = View.apply(base)
    with torch.no_grad():
        base.add_(1)
    step = anynan.torch.track(lambda x: model(x) if x.sum() else x + spoiled)
    assert step(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.tier(2)
def test_the_profiler_of_pytorch_sees_modules_behind_what_watches_them(tmp_path):
    (tmp_path / "p.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 1))\n"
        "for attempt in range(3):\n"
        "    try:\n"
        "        with torch.profiler.profile(with_stack=True) as profile:\n"
        "            model(torch.ones(1, 4)).sum().backward()\n"
        "        keys = [e.key for e in profile.key_averages() if 'nn.Module' in e.key]\n"
        "        break\n"
        "    except (RuntimeError, UnicodeDecodeError) as error:  # of its own\n"
        "        print(error)\n"
        "print(*sorted(keys))\n"
    )
    done = python("-m", "anynan", "run", "p.py", cwd=tmp_path)
    # It reads a local of the call by its name, and dies where there is none.
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("nn.Module: Linear_0 nn.Module: Sequential_0\n")
