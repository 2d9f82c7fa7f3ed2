"""What happens to a bad step: its state, what was donated, and the steps after it."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import anynan
from anynan.jax.program.evaluator import jit_once
from anynan.jax.read import probes
from anynan.jax.session import settlement
from tests.failing import failure
from tests.jax_adapter.models import OPTIMIZER, adam, made, same

GOOD, BAD = jnp.array([1.0, 2.0]), jnp.array([1.0, -2.0])


def train_step(params, opt_state, x):
    def loss_fn(params):
        return jnp.log(x * params["layer"]["w"]).sum()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def start():
    params = {"layer": {"w": jnp.ones(2)}}
    return params, OPTIMIZER.init(params)


def test_skip_drops_the_bad_update_and_training_goes_on():
    tracked = anynan.jax.track(train_step, action="skip")
    state = start()
    *state, _ = tracked(*state, GOOD)
    with pytest.warns(anynan.AnynanWarning, match="the update of this step is dropped"):
        *after, loss = tracked(*state, BAD)
    assert jnp.isnan(loss)
    assert same(after, state)
    *after, _ = tracked(*after, GOOD)
    assert not same(after, state)
    with pytest.warns(anynan.AnynanWarning, match="log"):
        tracked(*after, BAD)
    (event,) = tracked.events
    assert (event.step, event.times, event.operation.name) == (1, 2, "log")


def test_skip_keeps_an_update_of_which_all_that_is_bad_is_allowed():
    allow = [anynan.Allow(place, "nan", "a test") for place in ("*", "model")]
    tracked = anynan.jax.track(train_step, action="skip", policy=anynan.Policy(allow=allow))
    *after, _ = tracked(*start(), BAD)
    assert not same(tuple(after), start())


def test_skip_needs_a_state_to_go_back_to():
    tracked = anynan.jax.track(lambda x: jnp.log(x), action="skip")
    with pytest.raises(ValueError, match="returns no argument's new value"):
        tracked(GOOD)


def test_what_a_donation_hides_is_said_with_the_way_out():
    donating = jax.jit(train_step, donate_argnums=(0, 1))
    tracked = anynan.jax.track(donating, action="record")
    tracked(*start(), BAD)
    (event,) = tracked.events
    assert event.operation is None
    assert "anynan.Advanced(keep_inputs=True)) keeps what is donated" in event.notes[0]
    advanced = anynan.Advanced(keep_inputs=True)
    tracked = anynan.jax.track(donating, action="record", advanced=advanced)
    state = start()
    tracked(*state, BAD)
    assert tracked.events[0].operation.name == "log"
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_an_update_from_finite_gradients_is_put_to_the_optimizer():
    step, *_ = adam()
    params, x = {"w": jnp.ones(2, jnp.float16)}, jnp.full(2, 1e-4, jnp.float16)
    event = failure(anynan.jax.track(step), params, OPTIMIZER.init(params), x)
    assert (event.phase, event.parameter) == ("optimizer", "w")
    assert event.cause.tag == "optimizer_epsilon_underflow"
    assert "0 in float16" in event.cause.evidence


def test_expected_values_are_listed_and_not_raised():
    def step(x):
        with anynan.expect(neginf=True, nan=True, reason="empty rows"):
            return jnp.log(x)

    tracked = anynan.jax.track(step)
    tracked(BAD)
    assert [event.expected for event in tracked.events] == ["empty rows"]


def test_the_memory_that_is_kept_does_not_grow():
    tracked = anynan.jax.track(functools.partial(train_step), action="record")
    state = start()
    counts = []
    for _ in range(4):
        *state, _ = tracked(*state, GOOD)
        counts.append(len(jax.live_arrays()))
    assert counts[1] == counts[2] == counts[3]


COSTS = ("flags", settlement), ("replay", settlement), ("attempt", settlement), ("worst", probes)


@pytest.fixture
def looks(monkeypatch):
    """Count what a step costs beside its own run: second runs, and arrays looked at."""
    seen = []
    for name, owner in COSTS:
        real = getattr(owner, name)
        spy = lambda *a, name=name, real=real, **k: seen.append(name) or real(*a, **k)  # noqa: E731
        monkeypatch.setattr(owner, name, spy)
    return seen


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
@pytest.mark.parametrize("level", ["step", "layer"])
def test_later_steps_are_judged_by_what_is_known(level, looks):
    step, params, state, fine = made()
    tracked = anynan.jax.track(jax.jit(step), action="warn", level=level)
    spoilt = fine.at[0, 0].set(jnp.nan)
    for x in (fine, spoilt, fine):
        params, state, _ = tracked(params, state, x)
    assert looks
    looks.clear()
    for x in (fine, fine, spoilt):
        params, state, _ = tracked(params, state, x)
    assert looks.count("flags") == looks.count("replay") == looks.count("worst") == 0
    assert len(tracked.events) == 1
    said = [note for note in tracked.notes if "counts as its consequence" in note]
    assert len(said) == 1
    assert tracked.events[0].spread.count > 3


def test_a_fault_compiles_its_second_run_and_nothing_over_all_weights_beside_it(monkeypatch):
    step, *state = adam()
    tracked = anynan.jax.track(jax.jit(step), action="record")
    state = tracked(*state, GOOD)
    jit_once(probes.code)  # asks once what the compiler can do
    compiled, real = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda fn, **given: compiled.append(fn) or real(fn, **given))
    tracked(*state, GOOD.at[0].set(jnp.nan))
    assert len(compiled) == 1  # the second run, which brings out what is told of
    assert len(tracked.events) == 1
