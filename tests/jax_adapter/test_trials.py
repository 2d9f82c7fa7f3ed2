"""A fix is tried before it is told: what the report claims of it is what really comes of it."""

import math
import random
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import softmax

import anynan
from anynan.jax.program.program import Program
from tests.failing import failure
from tests.flat import split

pytestmark = pytest.mark.tier(2)

W = jnp.arange(3.0)


def step_of(loss):
    def step(w, *args):
        value, gradient = jax.value_and_grad(loss)(w, *args)
        return w - 0.1 * gradient, value

    return step


def failing(step, *args, **options):
    """Run a tracked step once; return what stopped it."""
    event = failure(anynan.jax.track(step, **split(options)), *args)
    assert anynan.Event.from_json(event.to_json()) == event
    return event


def logs(w):
    return jnp.log(w).sum()


def scanned(w):
    return jax.lax.scan(lambda carry, x: (carry + jnp.log(x), None), 0.0, w)[0]


def branched(w):
    return jax.lax.cond(w[1] > 0, lambda w: jnp.log(w).sum(), lambda w: w.sum(), w)


def compiled(w):
    return jax.jit(lambda w: jnp.log(w))(w).sum()


@pytest.mark.parametrize("loss", [logs, scanned, branched, compiled])
def test_what_the_report_says_of_the_fix_is_what_comes_of_it(loss):
    trial = failing(jax.jit(step_of(loss), donate_argnums=0), W + 0).tried
    assert (trial.repair, trial.outcome, trial.extent) == ("log(x + 1e-8)", "finite", "step")
    assert trial.loss == pytest.approx(float(jnp.log(W + 1e-8).sum()), rel=1e-4)
    if loss in (logs, compiled):
        assert trial.gradient_norm == pytest.approx(1e8, rel=1e-4)
    else:  # it is in a branch or a loop
        assert trial.gradient_norm is None


def test_faults_that_do_not_depend_on_each_other_come_in_one_report():
    event = failing(step_of(lambda w: (jnp.log(w) + jnp.sqrt(w)).sum()), W)
    assert event.tried.outcome == "another"
    (other,) = event.others
    assert (other.operation.name, other.phase) == ("sqrt", "backward")
    assert other.tried.outcome == "finite"


def of_softmax(w):
    scores = jnp.where(w < 9, -jnp.inf, w)
    return (softmax(scores) * w).sum()


def of_mapped(w):
    return jax.vmap(lambda w: softmax(jnp.where(w < 9, -jnp.inf, w)))(w[None]).sum()


@pytest.mark.parametrize("loss", [of_softmax, of_mapped])
@pytest.mark.parametrize("ruled", [False, True])
def test_a_function_of_several_operations_is_repaired_as_one(loss, ruled):
    with jax.softmax_custom_jvp(ruled) if hasattr(jax, "softmax_custom_jvp") else nullcontext():
        event = failing(step_of(loss), W)
    assert event.operation.name == "softmax"
    assert (event.tried.repair[:10], event.tried.outcome) == ("where(seen", "finite")
    assert event.tried.loss == 0
    assert jnp.isnan(softmax(jnp.full(2, -jnp.inf))).all()  # it is itself again


def test_no_function_of_the_programs_keeps_a_repair():
    shared = jax.jit(lambda w: jnp.log(w))
    event = failing(step_of(lambda w: shared(w).sum()), W)
    assert event.tried.outcome == "finite"
    assert float(shared(W)[0]) == -math.inf
    assert float(jnp.log(W)[0]) == -math.inf
    assert "bind" not in vars(jax.extend.core.primitives.log_p)
    assert math.isnan(float(jax.grad(lambda w: (shared(w) * 0).sum())(W)[0]))


def test_a_fix_costs_one_more_trace_and_none_without_a_replay(monkeypatch):
    traced = []
    real = Program.__init__
    monkeypatch.setattr(Program, "__init__", lambda *args: (traced.append(1), real(*args))[1])
    failing(step_of(logs), W)
    assert len(traced) == 2
    traced.clear()
    assert failing(step_of(logs), W, replay=False).tried is None
    assert len(traced) == 1


def test_what_a_trace_for_a_trial_took_and_wrote_is_as_the_first_trace_left_it():
    taken, counts, buffer = [], {"traces": 0}, np.zeros(3)
    items, numbers, drawn = iter([1.0, 2.0, 3.0]), (float(i) for i in range(1, 4)), []
    dice, python = np.random.default_rng(0), random.Random(0)

    def loss(w):
        counts["traces"] += 1
        buffer[0] += 1
        taken.append((next(items), next(numbers)))
        drawn.append((dice.random(), python.random()))
        return jnp.log(w).sum()

    event = failing(step_of(loss), W)
    assert event.operation
    assert (taken, counts, buffer.tolist()) == ([(1.0, 1.0)], {"traces": 1}, [1, 0, 0])
    assert (next(items), next(numbers)) == (2.0, 2.0)
    again = np.random.default_rng(0), random.Random(0)
    assert drawn == [(again[0].random(), again[1].random())]
    assert (dice.random(), python.random()) == (again[0].random(), again[1].random())
