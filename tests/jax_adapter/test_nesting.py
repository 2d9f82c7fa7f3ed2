"""Loops, branches and calls inside each other, with a fault before, inside and after them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import anynan
from tests.failing import failure

pytestmark = pytest.mark.tier(2)


def both(f):
    def fn(x):
        c, ys = lax.scan(lambda c, v: (f(c + v),) * 2, x, jnp.stack([x, x]))
        return c + ys.sum(0)

    return fn


WRAPS = {
    "carry": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=3)[0],
    "stacked": lambda f: (
        lambda x: lax.scan(lambda c, v: (c, f(v)), 0.0, jnp.stack([x, x + 1]))[1].sum(0)
    ),
    "both": both,
    "cond": lambda f: lambda x: lax.cond(x.sum() > -1e9, f, lambda v: v, x),
    "remat": jax.checkpoint,
}


def log(x):
    return jnp.log(x - 5)  # bad


def root(x):
    return jnp.sqrt(x - lax.stop_gradient(x))  # bad


CASES = [(name, "after", log) for name in (*WRAPS, "carry stacked", "remat carry")]
CASES += [(name, "before", root) for name in ("carry", "cond", "stacked carry", "carry remat")]
CASES += [(name, "inside", root) for name in ("carry", "stacked", "remat carry", "both cond")]


@pytest.mark.parametrize(("wraps", "where", "fault"), CASES)
def test_a_fault_before_inside_or_after_nested_parts_of_a_training_step(wraps, where, fault):
    def loss(params, x):
        def body(x):
            x = jnp.tanh(x * params["w"])
            return fault(x) if where == "inside" else x

        for name in wraps.split():  # the inner one first
            body = WRAPS[name](body)
        x = x * params["w"]
        x = body(fault(x) if where == "before" else x)
        return (fault(x) if where == "after" else x).sum()

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, params, grads), value

    event = failure(anynan.jax.track(step), {"w": jnp.ones(2)}, jnp.array([0.5, 0.25]))
    found = ("loss", "log_of_negative") if fault is log else ("backward", "sqrt_gradient_at_zero")
    assert (event.phase, event.cause.tag, event.notes) == (*found, ())
    assert "# bad" in event.operation.source.text


def placed_by_round(x):
    def rounds(_, c):
        def step(c, y):
            return c + jnp.where((y > 4.5) & (c > 13), jnp.log(-y), y), None

        return lax.scan(step, c, x)[0]

    return lax.fori_loop(0, 2, rounds, 0.0)


def hidden_in_while(x):
    def body(state):
        i, y = state
        return i + 1, jnp.where(i < 3, y, jnp.log(-y))

    return lax.while_loop(lambda state: state[0] < 5, body, (0, x))[1].sum()


def overwritten(x):
    return lax.scan(lambda _, y: (jnp.log(y - 1.5), None), 0.0, x)[0]


SIX = jnp.arange(6.0)


@pytest.mark.parametrize(
    ("fn", "x", "iteration", "evidence"),
    [
        (placed_by_round, SIX, 5, "log(-5.0)"),
        (hidden_in_while, SIX[1:2], 3, "log(-1.0)"),
        (overwritten, SIX[::-1], 5, "log(-1.5)"),
    ],
)
def test_the_round_that_did_harm_is_named(fn, x, iteration, evidence):
    event = failure(anynan.jax.track(fn), x)
    assert (event.operation.name, event.iteration, event.notes) == ("log", iteration, ())
    assert event.cause.evidence.startswith(evidence)


def deep(depth):
    """Make scans in scans that count down, and take a logarithm innermost."""

    def body(c, _):
        c = c - 1
        return c, jnp.log(c)

    for _ in range(depth - 1):
        inner = body

        def body(c, _, inner=inner):
            c, ys = lax.scan(inner, c, None, length=2)
            return c, ys.sum(0)

    return lambda c: lax.scan(body, c, None, length=2)[1].sum()


@pytest.mark.parametrize("depth", [2, 4])
def test_what_is_compiled_for_a_report_is_the_same_for_any_depth_of_loops(depth, monkeypatch):
    from anynan.jax.replay import flags, records, zoom

    compiled = []
    for module in (flags, records, zoom):
        real = module.jit_once
        monkeypatch.setattr(
            module, "jit_once", lambda fn, real=real: compiled.append(fn) or real(fn)
        )
    event = failure(anynan.jax.track(deep(depth)), jnp.float32(2**depth - 0.5))
    assert (event.operation.name, event.iteration, event.cause.evidence) == ("log", 1, "log(-0.5)")
    # The bad rounds, what is read in them, the values of the record; and the fix.
    assert len(compiled) == 4


def filled(depth):
    """Make loops that fill what begins as +Inf, as a solver does with what it saves."""

    class Filled(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            def row(i, ys):
                if depth == 1:
                    return ys.at[i].set(self.w * x[i])
                return lax.fori_loop(0, 3, lambda j, ys: ys.at[i, j].set(self.w * x[i, j]), ys)

            # Of such a loop the length is not known.
            least = x.shape[0] + jnp.int32(x[0, 0] < 0)
            return lax.fori_loop(0, least, row, jnp.full_like(x, jnp.inf))

    return Filled(jnp.float32(2))


@pytest.mark.parametrize("depth", [1, 2])
def test_an_inf_that_loops_write_over_is_no_fault_and_hides_none(depth):
    tracked = anynan.jax.track(jax.jit(lambda model, x: model(x)), action="record")
    x = jnp.ones((4, 3), jnp.float32)
    tracked(filled(depth), x)
    assert {event.severity for event in tracked.events} <= {"suspect"}
    tracked(filled(depth), x.at[2, 1].set(3e38))
    (event,) = (event for event in tracked.events if event.severity != "suspect")
    assert (event.operation.name, event.iteration) == ("multiply", 2 if depth == 1 else 1)
    assert event.cause.tag == "overflow_in_dtype"
