"""What a program differentiates and compiles is watched as if it were tracked."""

import sys

import mlx.core as mx
import pytest
from mlx import nn, optimizers

from anynan._everywhere import Found, watch_everything
from anynan.mlx.seams import SEAMS
from anynan.options import Options
from tests.processes import ran

X, Y = mx.full((4, 3), 0.5), mx.zeros((4, 1))


@pytest.fixture
def found():
    real = mx.compile, mx.grad, mx.vmap, nn.value_and_grad
    for session in list(SEAMS.sessions):  # another test's
        session.tracker.remove()
    found = Found()
    end = watch_everything(Options(action="record", level="step"), found)
    yield found
    end()
    assert (mx.compile, mx.grad, mx.vmap, nn.value_and_grad) == real


def made():
    mx.random.seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), optimizers.Adam(0.1)


def loss(model, x, y):
    return mx.log((model(x) - y).square().mean() - y.sum())


def update(model, optimizer):
    def step(x, y):
        value, gradients = nn.value_and_grad(model, loss)(model, x, y)
        optimizer.update(model, gradients)
        return value

    return step


def compiled(model, optimizer):
    state = [model.state, optimizer.state]
    return mx.compile(update(model, optimizer), inputs=state, outputs=state)


def mine(found):
    """List MLX's trackers: other frameworks are there, too, where another test imported them."""
    return [tracker for tracker in found.living() if tracker.backend_name == "mlx"]


def told(found):
    return [(e.step, e.phase, e.kind, e.operation and e.operation.name) for e in found.bad()]


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("how", ["anew", "compiled"])
def test_a_training_is_told_its_operation_once(how, first, found):
    model, optimizer = made()
    step = (update if how == "anew" else compiled)(model, optimizer)
    for number in range(5):
        mx.eval(step(X, Y + (number == first)), model.parameters())
    assert told(found) == [(first, "loss", "nan", "log")]
    (tracker,) = mine(found)
    assert len(tracker.history) == 5
    (line, *_) = found.lines()
    assert ": 1 bad in 5 steps" in line


class Divides(nn.Module):
    def __call__(self, x):
        return x / (x.sum() * 0)


def test_what_the_update_of_a_compiled_step_spoilt_is_its_consequence(found):
    model, optimizer = made()
    model.layers.insert(1, Divides())
    step = compiled(model, optimizer)
    for _ in range(4):
        mx.eval(step(X, Y), model.state)
    assert told(found) == [(0, "forward", "posinf", "divide")]


def test_a_clean_training_is_as_without_and_says_what_ran(found):
    def train(watched):
        model, optimizer = made()
        make = nn.value_and_grad if watched else nn.utils.value_and_grad
        slope = make(model, lambda x, y: (model(x) - y).square().mean())
        losses = []
        for _ in range(3):
            value, gradients = slope(X, Y)
            optimizer.update(model, gradients)
            losses.append(value.item())
        return losses

    assert train(True) == pytest.approx(train(False), rel=1e-6)
    assert not found.events
    assert "nothing went bad in 3 steps" in found.lines()[0]


def test_functions_of_functions_are_one_step(found):
    third = mx.grad(mx.grad(mx.grad(lambda x: x**4)))
    assert third(mx.array(2.0)).item() == 48
    assert mx.vmap(mx.grad(mx.sqrt))(mx.array([1.0, 4.0])).tolist() == [0.5, 0.25]
    (tracker,) = mine(found)
    assert len(tracker.history) == 1


def test_what_a_library_compiles_for_its_layers_is_no_step(found):
    room = {"mx": mx, "__name__": "m"}
    text, file = "made = mx.compile(lambda x: x * 2)", f"{sys.prefix}/lib/site-packages/m.py"
    exec(compile(text, file, "exec"), room)
    assert room["made"](X).sum().item() == 12
    assert not mine(found)


def test_a_weight_written_between_compiled_steps_is_not_put_to_the_optimizer(found):
    model, optimizer = made()
    step = compiled(model, optimizer)
    for number in range(4):
        mx.eval(step(X, Y), model.state)
        if number == 1:
            model.layers[2].bias = model.layers[2].bias / 0
            mine(found)[0].judge.adapter.finish()  # no step is open, so that ends none
    (event,) = found.bad()
    assert (event.phase, event.parameter, event.step) == ("parameter", "layers.2.bias", 2)
    assert event.cause and event.cause.tag == "bad_parameter"


@pytest.mark.parametrize(
    ("line", "harm"),
    [
        ("y = mx.log(x)", "y holds NaN as the program ends"),
        ("print(mx.log(x))", "a number was NaN as it was read, at p.py:3"),
        ("[mx.log(x).item()]", "a number was NaN as it was read, at p.py:3"),
    ],
)
def test_eager_code_is_named_and_what_it_lost_counts(line, harm, tmp_path):
    program = f"import mlx.core as mx\nx = mx.array([-1.0])\n{line}\n"
    ended = ran(tmp_path, program, options=("--fail",))
    assert f"anynan: {harm}" in ended.stderr
    assert "[eager-mlx]" in ended.stderr
    assert "[nothing-ran]" not in ended.stderr
    assert ended.returncode == 1
