"""One run of MLX, operation by operation, and the hunt that is built on it."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

import anynan
from anynan.mlx.observe import observe
from tests.mlx_adapter.test_contract import subject


def shown(target, *args):
    seen = []
    found = observe(target, args, {}, seen.append)
    return [(op.name, op.layer, op.phase, op.forward) for op in seen], found


def same(one, other):
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)


def test_a_step_is_shown_forward_backward_and_in_the_update():
    made = subject()
    made.step(made.good)
    before = made.state()
    seen, found = shown(made.step, made.good)
    assert found.error is None
    assert {phase for _, _, phase, _ in seen} == {"forward", "loss", "backward", "optimizer"}
    log = next(i for i, op in enumerate(seen) if op[:3] == ("log", "log", "forward"))
    assert ("log", "log", "backward", log) in seen
    same(before, made.state())


def test_what_is_compiled_is_shown_by_the_operations_of_its_code():
    step = mx.compile(lambda x: mx.exp(nn.relu(x)) * 2)
    seen, found = shown(step, mx.ones(2))
    assert [name for name, *_ in seen] == ["maximum", "exp", "multiply"]
    np.testing.assert_allclose(np.array(found.value), 2 * np.e, rtol=1e-6)
    assert step(mx.ones(2)).shape == (2,)


def test_a_write_into_an_array_is_shown_and_undone():
    x = mx.array([1.0, 2.0])

    def step(x):
        x[0] = mx.log(x[1])
        x += 1
        return x.sum()

    written = []
    found = observe(step, (x,), {}, lambda op: written.append(op.name) if op.written else None)
    assert written == ["setitem", "add"]
    assert x.tolist() == [1.0, 2.0]
    assert found.value.item() == pytest.approx(np.log(2) + 1 + 3)


def test_an_operation_runs_again_in_another_dtype_or_of_other_operands():
    made = []

    def look(op):
        if op.name == "multiply" and op.phase != "backward":
            made.append((op.rerun(dtype="float32")[0].item(), op.rerun({"self": mx.array(2.0)})))

    observe(lambda x: x * 60000, (mx.array(60000.0, mx.float16),), {}, look)
    assert made[0][0] == pytest.approx(3.6e9, rel=1e-3)
    assert made[0][1][0].item() == pytest.approx(120000)


def test_an_error_of_the_observers_is_its_own_and_the_programs_is_kept():
    def broken(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        observe(mx.compile(lambda x: mx.abs(x)), (mx.ones(1),), {}, broken)

    def raising(x):
        raise KeyError(str(x.shape))

    assert isinstance(shown(raising, mx.ones(1))[1].error, KeyError)


class Directions(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 3), nn.Dropout(0.1)

    def __call__(self, x):
        x = x / mx.linalg.norm(x, axis=1, keepdims=True)
        return self.inner(self.drop(x))


@pytest.mark.tier(2)
def test_a_model_is_moved_to_a_row_of_zeros():
    first = anynan.stress(Directions(), mx.random.normal((8, 4))).findings[0]
    assert (first.words, first.event.operation.name) == ("x: a row of zeros", "divide")
    assert first.event.tried is not None


@pytest.mark.tier(2)
def test_a_training_step_is_what_it_was_after_a_hunt():
    made, x = subject(), mx.random.normal((2, 2))
    before = made.state()
    assert anynan.stress(made.step, x).margins
    same(before, made.state())
