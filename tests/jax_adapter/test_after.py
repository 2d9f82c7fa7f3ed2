"""The steps after a fault: judged by what is known, without another look."""

import jax
import jax.numpy as jnp
import optax
import pytest

import anynan
from anynan.jax.program.evaluator import jit_once
from anynan.jax.read import probes
from anynan.jax.session import settlement

TX = optax.adam(1e-3)


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@jax.jit
def step(params, state, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def start():
    params = [0.1 * jnp.eye(3)] * 3
    return params, TX.init(params)


X = jnp.ones((2, 3))
BAD = X.at[0, 0].set(jnp.nan)


@pytest.fixture
def looks(monkeypatch):
    """Count what a step costs beside its own run: second runs, and arrays looked at."""
    seen = []

    def count(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: seen.append(name) or real(*a, **k))

    for name in ("flags", "replay", "attempt"):
        count(settlement, name)
    count(probes, "worst")
    count(probes, "measure")
    return seen


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
@pytest.mark.parametrize("level", ["step", "layer"])
def test_later_steps_are_judged_by_what_is_known(level, looks):
    tracked = anynan.jax.track(step, action="warn", level=level)
    params, state = start()
    for x in (X, BAD, X):
        params, state, _ = tracked(params, state, x)
    assert looks
    looks.clear()
    for x in (X, X, BAD):
        params, state, _ = tracked(params, state, x)
    assert looks.count("flags") == looks.count("replay") == looks.count("worst") == 0
    assert len(tracked.events) == 1
    said = [note for note in tracked.notes if "counts as its consequence" in note]
    assert len(said) == 1
    assert tracked.events[0].spread.count > 3


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_a_fault_compiles_its_second_run_and_nothing_over_all_weights_beside_it(monkeypatch):
    tracked = anynan.jax.track(step, action="record")
    params, state = start()
    params, state, _ = tracked(params, state, X)
    jit_once(probes.code)  # asks once what the compiler can do
    compiled, real = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda fn, **given: compiled.append(fn) or real(fn, **given))
    tracked(params, state, BAD)
    assert len(compiled) == 1  # the second run, which brings out what is told of
    assert len(tracked.events) == 1


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_a_fault_after_the_weights_were_put_back_is_a_fault_of_its_own():
    tracked = anynan.jax.track(step, action="record")
    params, state = start()
    for x in (X, BAD, X, X):
        params, state, _ = tracked(params, state, x)
    params, state = start()
    for x in (X, X, X.at[0, 0].set(jnp.inf)):
        params, state, _ = tracked(params, state, x)
    assert [event.step for event in tracked.events] == [1, 6]
