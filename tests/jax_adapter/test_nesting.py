"""Loops, branches and calls inside each other, with a fault before, inside and after them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import anynan
from tests.failing import failure

pytestmark = pytest.mark.tier(2)


def carry(f):
    return lambda x: lax.scan(lambda c, _: (f(c), None), x, length=3)[0]


def stacked(f):
    return lambda x: lax.scan(lambda c, v: (c, f(v)), 0.0, jnp.stack([x, x + 1]))[1].sum(0)


def both(f):
    def fn(x):
        c, ys = lax.scan(lambda c, v: (f(c + v),) * 2, x, jnp.stack([x, x]))
        return c + ys.sum(0)

    return fn


def reverse(f):
    rounds = {"reverse": True, "unroll": 2}
    return lambda x: lax.scan(lambda c, v: (c + f(v), None), x * 0, jnp.stack([x] * 3), **rounds)[0]


def fori(f):
    return lambda x: lax.fori_loop(0, 2, lambda _, c: f(c), x)


def branch(f):
    return lambda x: lax.cond(x.sum() > -1e9, f, lambda v: v, x)


def vmap(f):
    return lambda x: jax.vmap(f)(jnp.stack([x, x + 1])).sum(0)


def while_loop(f):
    return lambda x: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))[1]


WRAPS = {
    "carry": carry, "stacked": stacked, "both": both, "reverse": reverse, "fori": fori,
    "cond": branch, "remat": jax.checkpoint, "vmap": vmap, "jit": jax.jit, "while": while_loop,
}  # fmt: skip
DIFFERENTIABLE = [name for name in WRAPS if name != "while"]
PAIRS = (
    "carry stacked", "stacked carry", "remat carry", "carry remat", "cond both", "both cond",
    "vmap carry", "reverse vmap", "carry fori", "jit both",
)  # fmt: skip


def log(x):
    return jnp.log(x - 5)  # bad


def root(x):
    return jnp.sqrt(x - lax.stop_gradient(x))  # bad


FAULTS = {"log": (log, "log_of_negative"), "root": (root, "sqrt_gradient_at_zero")}


def made(wraps, where, fault):
    """Give a training step with the fault before, inside or after the wraps, inner one first."""
    fault = FAULTS[fault][0]

    def loss(params, x):
        def body(x):
            x = jnp.tanh(x * params["w"])
            return fault(x) if where == "inside" else x

        for name in wraps.split():
            body = WRAPS[name](body)
        x = x * params["w"]
        if where == "before":
            x = fault(x)
        x = body(x)
        return (fault(x) if where == "after" else x).sum()

    return loss


def training(loss):
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, params, grads), value

    return step


def reported(fn):
    event = failure(anynan.jax.track(fn), {"w": jnp.ones(2)}, jnp.array([0.5, 0.25]))
    assert event.notes == ()
    assert "# bad" in event.operation.source.text
    return event.phase, event.cause.tag


CASES = [(name, "after", "log") for name in (*DIFFERENTIABLE, *PAIRS[:4])]
CASES += [pytest.param(name, "after", "log", marks=pytest.mark.long) for name in PAIRS[4:]]
CASES += [(name, "after", "root") for name in ("carry", "both", "stacked", "carry fori")]
CASES += [(name, "before", "root") for name in ("carry", "reverse", "cond", *PAIRS[:4])]
CASES += [(name, "inside", "root") for name in ("carry", "stacked", "remat carry", "both cond")]


@pytest.mark.parametrize(("wraps", "where", "fault"), CASES)
def test_a_fault_of_a_training_step_is_named(wraps, where, fault):
    phase = "loss" if fault == "log" else "backward"
    found = reported(training(made(wraps, where, fault)))
    assert found == (phase, FAULTS[fault][1])


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("wraps", ["while", "carry while", "while vmap"])
def test_a_fault_of_a_forward_pass_is_named(wraps, where):
    assert reported(made(wraps, where, "log")) == ("loss", "log_of_negative")


def placed_by_round(x):
    def rounds(_, c):
        def step(c, y):
            return c + jnp.where((y > 4.5) & (c > 13), jnp.log(-y), y), None

        return lax.scan(step, c, x)[0]

    return lax.fori_loop(0, 2, rounds, 0.0)


def hidden_first(x):
    def step(c, y):
        return c + jnp.where(y < 2.5, 0.0, jnp.log(y - 4)), None

    return lax.scan(step, 0.0, x)[0]


def hidden_in_while(x):
    def body(state):
        i, y = state
        return i + 1, jnp.where(i < 3, y, jnp.log(-y))

    return lax.while_loop(lambda state: state[0] < 5, body, (0, x))[1].sum()


def overwritten(x):
    return lax.scan(lambda _, y: (jnp.log(y - 1.5), None), 0.0, x)[0]


def gone_twice(x):
    return lax.scan(lambda h, _: (1 / (h - h), None), x, length=4)[0].sum()


def backwards(x):
    return lax.scan(lambda c, y: (c + jnp.sqrt(y - 2), None), 0.0, x, reverse=True)[0]


def past_the_kept(x):
    def body(i, c):
        return jnp.where(i < 300, c, jnp.log(c - 99))

    return lax.while_loop(lambda s: s[0] < 302, lambda s: (s[0] + 1, body(*s)), (0, x))[1].sum()


SIX = jnp.arange(6.0)


@pytest.mark.parametrize(
    ("fn", "x", "operation", "iteration", "evidence"),
    [
        (placed_by_round, SIX, "log", 5, "log(-5.0)"),
        (hidden_first, SIX, "log", 3, "log(-1.0)"),
        (hidden_in_while, SIX[1:2], "log", 3, "log(-1.0)"),
        (overwritten, SIX[::-1], "log", 5, "log(-1.5)"),
        (gone_twice, SIX, "divide", 0, "1.0 / 0.0"),
        (backwards, SIX, "sqrt", 1, "sqrt(-1.0)"),
    ],
)
def test_the_round_that_did_harm_is_named(fn, x, operation, iteration, evidence):
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.jax.track(fn)(x)
    event = caught.value.event
    assert (event.operation.name, event.iteration) == (operation, iteration)
    assert f"iteration {iteration})" in str(caught.value)
    assert event.cause.evidence.startswith(evidence)
    assert event.notes == ()


def test_a_fault_after_many_rounds_accuses_no_input():
    event = failure(anynan.jax.track(past_the_kept), SIX)
    assert (event.phase, event.operation.name) == ("loss", "log")


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


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_what_is_compiled_for_a_report_is_the_same_for_any_depth_of_loops(depth, monkeypatch):
    from anynan.jax.replay import flags, records, zoom

    compiled = []
    for module in (flags, records, zoom):
        real = module.jit_once
        monkeypatch.setattr(
            module, "jit_once", lambda fn, real=real: compiled.append(fn) or real(fn)
        )
    event = failure(anynan.jax.track(deep(depth)), jnp.float32(2**depth - 0.5))
    assert (event.operation.name, event.iteration) == ("log", 1)
    assert event.cause.evidence == "log(-0.5)"
    # The bad rounds, what is read in them, the values of the record; and the fix.
    assert len(compiled) == 4


def test_a_fix_that_is_not_enough_takes_no_second_look_into_loops_in_loops(monkeypatch):
    from anynan.jax.replay import flags, zoom

    compiled = []
    for module in (flags, zoom):
        real = module.jit_once
        monkeypatch.setattr(
            module, "jit_once", lambda fn, real=real: compiled.append(fn) or real(fn)
        )

    def fn(x):
        def inner(c, _):
            return (x - 1) / (c - c), None

        return lax.scan(lambda c, _: (lax.scan(inner, c, None, length=2)[0], None), x, length=2)[0]

    event = failure(anynan.jax.track(lambda x: jnp.log(fn(x) - 1e30).sum()), jnp.ones(2))
    assert event.operation.name == "divide"
    assert event.tried is None
    assert len(compiled) == 4


def test_a_loop_in_a_branch_of_a_loop_runs_as_it_is():
    def fn(x):
        def inner(c, t):
            return c - t, jnp.log(c - 1.5)

        def branch(c):
            return lax.scan(inner, c, jnp.arange(3.0))[1].sum()

        def outer(c, t):
            return c, lax.cond(t > 0, branch, lambda c: c, c)

        return lax.scan(outer, x, jnp.arange(3.0))[1].sum()

    event = failure(anynan.jax.track(fn), jnp.float32(2.0))
    assert event.operation.source.function == "branch"


def test_the_first_bad_round_of_every_loop_is_looked_at():
    def fn(x):
        def inner(c, t):
            return c, jnp.log(c - t)

        def outer(c, t):
            c, ys = lax.scan(inner, c, jnp.arange(4.0) + t, reverse=True)
            return c, ys.sum()

        return lax.scan(outer, x, jnp.arange(3.0))[1].sum()

    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.jax.track(fn)(jnp.float32(4.5))  # 4.5 - (3 + 2): the last item, which runs first
    event = caught.value.event
    assert event.iteration == 3
    assert event.cause.evidence == "log(-0.5)"


def test_what_a_round_leaves_to_the_next_is_followed_from_what_the_next_gave():
    def fn(x):
        def turn(c, _):
            y = lax.scan(lambda a, b: (a + b, None), c, jnp.ones((2, 2)))[0]
            return c - jnp.sqrt(c - 5), y.sum()  # the first round gives a sum that is fine

        return lax.scan(turn, x, None, length=3)[1]

    event = failure(anynan.jax.track(fn), jnp.ones(2))
    assert (event.operation.name, event.iteration) == ("sqrt", 0)
