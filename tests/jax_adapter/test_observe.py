"""A JAX program operation by operation, what breaks first in half precision, and a hunt."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import anynan
import anynan.jax.stress
from anynan._trace.op import RerunError
from anynan.jax.observe import observe
from tests.jax_adapter.models import made


def seen(fn, *args):
    ops = []

    def note(op):
        ops.append((op.number, op.name, op.layer, op.phase, op.forward, op.source))

    found = observe(fn, args, {}, note)
    assert found.error is None
    return found.value, ops


@pytest.mark.tier(2)  # each of its operations is compiled by itself
def test_a_training_step_gives_what_it_gives_and_shows_where_its_operations_are():
    step, *given = made()
    value, ops = seen(jax.jit(step), *given)
    right = step(*given)
    same = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), value, right)
    assert all(jax.tree.leaves(same))
    assert [number for number, *_ in ops] == list(range(len(ops)))
    assert {op[3] for op in ops} == {"forward", "loss", "backward", "optimizer"}
    tanh = next(op for op in ops if op[1] == "tanh" and op[3] == "forward")
    back = [op for op in ops if op[4] == tanh[0]]
    assert back
    assert {(op[2], op[3], op[5]) for op in back} == {("block_0", "backward", tanh[5])}
    assert tanh[5].text == 'return x + jnp.tanh(nn.Dense(4, name="up")(x))'


def test_loops_and_branches_run_as_they_come():
    def fn(x):
        x, ys = lax.scan(lambda c, y: (c * y, c + y), x, jnp.arange(1.0, 4.0), reverse=True)
        x = lax.while_loop(lambda c: c < 100, lambda c: c * 2, x)
        return lax.cond(x > 0, jnp.log, jnp.exp, x), ys, jax.checkpoint(jnp.sin)(x)

    value, ops = seen(fn, jnp.float32(2.0))
    for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(fn(jnp.float32(2.0))), strict=True):
        assert np.allclose(a, b)
    names = [op[1] for op in ops]
    assert names.count("multiply") == 3 + 4  # three rounds of the scan, four of the while loop
    assert "log" in names
    assert "exp" not in names


def test_an_operation_runs_once_more_with_other_operands_and_in_another_dtype():
    held = []

    def again(op):
        if op.kernel == "matmul":
            names = [name for name, _ in op.inputs]
            held.extend(op.rerun({names[0]: 2 * op.inputs[0][1]}))
            held.extend(op.rerun(dtype="bfloat16"))
            with pytest.raises(RerunError, match="dot_general cannot be run"):
                op.rerun({names[0]: jnp.ones((3, 5))})

    observe(jnp.matmul, (jnp.ones((2, 3)), jnp.ones((3, 2))), {}, again)
    assert np.allclose(held[0], 6)
    assert held[1].dtype == jnp.bfloat16


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        constant = nn.initializers.constant
        wide = {"kernel_init": constant(0.0), "bias_init": constant(400.0)}
        product = nn.Dense(4, name="gate", **wide)(x) * nn.Dense(4, name="up", **wide)(x)
        return nn.Dense(2, name="down", kernel_init=constant(1e-3))(product)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Gated(name="mlp")(x) / 10


def test_a_product_between_two_modules_breaks_and_the_plan_keeps_their_parent():
    net, x = Net(), jnp.ones((2, 4))
    params = net.init(jax.random.key(0), x)
    report = anynan.precision(net.apply, params, x)
    found = report.first()
    assert (found.name, found.layer, found.kind) == ("multiply", "mlp", "overflow")
    assert found.bits == pytest.approx(-1.29, abs=0.01)
    assert report.plan.finite
    assert list(report.plan.layers) == ["mlp"]
    halves = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
    assert not np.isfinite(net.apply(*halves)).any()
    names = {"jax": jax, "jnp": jnp}
    exec(report.code, names)
    with nn.intercept_methods(names["keep"]):
        assert np.isfinite(net.apply(*halves)).all()


X = jax.random.normal(jax.random.key(0), (6, 3))


def test_the_gradient_of_what_a_mask_hides_is_told_apart():
    def logs(x, many):
        return jnp.where(x > 0, jnp.log(x), 0.0).sum(), many + 1

    report = anynan.stress(logs, jnp.linspace(-1, 1, 8).reshape(4, 2), jnp.arange(3))
    (finding,) = report.findings
    assert (finding.group, finding.event.operation.name) == ("sloped", "log")
    assert finding.inputs.keys() == {"x", "many"}
    assert "0 times Inf is NaN" in finding.event.cause.text
    gradient = jax.grad(lambda x: logs(x, 0)[0])  # it takes the gradient itself
    assert anynan.stress(gradient, X).findings[0].group == "inside"


def test_the_slopes_of_all_edges_are_one_program(monkeypatch):
    made = []
    once = anynan.jax.stress.jit_once
    monkeypatch.setattr(anynan.jax.stress, "jit_once", lambda fn: made.append(fn) or once(fn))

    def loss(x):
        return (jnp.log(x + 3.5) / jnp.sqrt(x + 3.6) + jnp.exp(x)).sum()

    report = anynan.stress(loss, jnp.linspace(-3, 2, 6), domain=(-3, 2))
    assert {"log", "sqrt", "divide", "exp"} <= {x.site.operation for x in report.margins}
    assert report.runs > 20
    assert len(made) == 2  # and one with the gradient


def test_a_module_that_changes_in_each_call_is_run_as_a_copy():
    class Counting(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return jnp.log(abs(self.inner(x)))

    model = Counting()
    for target, given in ((model, ()), (lambda m, x: m(x), (model,))):
        report = anynan.stress(target, *given, X, budget=5)
        assert [m.site.operation for m in report.margins] == ["log"]
    assert model.calls[...] == 0


def test_a_function_that_takes_arrays_of_numpy_to_jax_is_jax_s():
    x = np.linspace(0.1, 1, 8, dtype="float32")
    report = anynan.stress(lambda x: jnp.log(x).sum(), x)
    assert report.findings[0].event.operation.name == "log"
