"""Inside the program: calls, loops, branches, custom rules, and what cannot be opened."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import anynan
from tests.failing import failure
from tests.jax_adapter.models import same


@dataclass(frozen=True)
class Case:
    """Say what a program does, and what must be reported when it is given bad numbers."""

    fn: Callable[..., Any]
    operation: str
    phase: str = "loss"
    iteration: int | None = None
    good: Any = (0.5, 1.0, 2.0, 3.0)
    bad: Any = (0.5, 1.0, 2.0, -1.0)


inner = jax.jit(lambda x: jnp.log(x) * 2)


def branches(x):
    return lax.cond(x.sum() > 0, lambda x: jnp.log(x), lambda x: x, x).sum()


def scan(x):
    def step(carry, item):
        root = jnp.sqrt(item)
        return carry + root, root

    return lax.scan(step, 0.0, x)[0]


def carried(x):
    def step(carry, _):
        return jnp.log(carry), None

    return lax.scan(step, x, length=3)[0].sum()


def nested(x):
    def row(carry, item):
        def cell(inner, value):
            return inner + jnp.sqrt(value), None

        return lax.scan(cell, carry, item)[0], None

    return lax.scan(row, 0.0, x.reshape(2, 2))[0]


def counted(x):
    return lax.fori_loop(0, 4, lambda i, total: total + jnp.log(x[i]), 0.0)


def until(x):
    def body(state):
        i, total = state
        return i + 1, total + jnp.log(x[i])

    return lax.while_loop(lambda state: state[0] < 4, body, (0, 0.0))[1]


@jax.custom_vjp
def bad_backward(x):
    return x * 2


bad_backward.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.log(x) * g,))


CASES = {
    "jit_in_jit": Case(jax.jit(lambda x: inner(x).sum()), "log"),
    "cond": Case(branches, "log", bad=(5.0, -1.0, 1.0, 1.0)),
    "scan": Case(scan, "sqrt", iteration=3),
    "scan_carry": Case(carried, "log", iteration=0, good=(2e6,) * 4),
    "scan_in_scan": Case(nested, "sqrt", iteration=1),
    "fori_loop": Case(counted, "log", iteration=3),
    "while": Case(until, "log", iteration=3),
    "grad_of_scan": Case(jax.grad(scan), "sqrt", "backward", 2, bad=(1.0, 1.0, 0.0, 1.0)),
    "grad_of_checkpoint": Case(
        jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sqrt(x).sum())(x)),
        "sqrt",
        "backward",
        bad=(0.0,) * 4,
    ),
    "grad_of_custom_vjp": Case(jax.grad(lambda x: bad_backward(x).sum()), "log", "backward"),
    "cholesky": Case(
        lambda x: jnp.linalg.cholesky(jnp.diag(x)).sum(), "cholesky", bad=(1.0, 1.0, 1.0, -1.0)
    ),
    "pure_callback": Case(
        lambda x: jax.pure_callback(host_log, jax.ShapeDtypeStruct((4,), jnp.float32), x).sum(),
        "pure_callback",
    ),
}


def host_log(x):
    with np.errstate(all="ignore"):
        return np.log(np.asarray(x, np.float32))


@pytest.mark.parametrize("name", CASES)
def test_the_operation_is_found(name):
    case = CASES[name]
    event = failure(anynan.jax.track(case.fn), jnp.array(case.bad))
    found = event.operation.name, event.phase, event.iteration
    assert found == (case.operation, case.phase, case.iteration)
    assert event.operation.source.file == __file__
    assert not event.notes or "pure_callback" in name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.tier(2)
def test_results_are_those_of_jit_and_nothing_is_said(name):
    case = CASES[name]
    tracked = anynan.jax.track(case.fn)
    assert same(tracked(jnp.array(case.good)), jax.jit(case.fn)(jnp.array(case.good)))
    assert tracked.events == tracked.notes == ()
