"""What happens to a bad step: its state, what was donated, and the next step."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import anynan
from tests.failing import failure
from tests.jax_adapter.models import same

OPTIMIZER = optax.adam(1e-2)
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
    allow = [
        anynan.Allow("*", "nan", "a test"),
        anynan.Allow("model", "nan", "a test"),
    ]
    tracked = anynan.jax.track(train_step, action="skip", policy=anynan.Policy(allow=allow))
    *after, _ = tracked(*start(), BAD)
    assert not same(tuple(after), start())


def test_skip_needs_a_state_to_go_back_to():
    tracked = anynan.jax.track(lambda x: jnp.log(x), action="skip")
    with pytest.raises(ValueError, match="returns no argument's new value"):
        tracked(GOOD)


def test_an_action_that_does_not_stop_leaves_the_results_as_they_are():
    tracked = anynan.jax.track(train_step, action="warn")
    with pytest.warns(anynan.AnynanWarning, match="NaN first appeared in `"):
        out = tracked(*start(), BAD)
    assert same(out, jax.jit(train_step)(*start(), BAD))
    assert len(tracked.events) == 1


def test_what_a_donation_hides_is_said_with_the_way_out():
    donating = jax.jit(train_step, donate_argnums=(0, 1))
    tracked = anynan.jax.track(donating, action="record")
    tracked(*start(), BAD)
    (event,) = tracked.events
    assert event.operation is None
    assert (
        "track(..., advanced=anynan.Advanced(keep_inputs=True)) keeps what is donated"
        in event.notes[0]
    )
    tracked = anynan.jax.track(
        donating, action="record", advanced=anynan.Advanced(keep_inputs=True)
    )
    state = start()
    tracked(*state, BAD)
    assert tracked.events[0].operation.name == "log"
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def half_step(params, opt_state, x):
    def loss_fn(params):
        return (x * params["w"]).sum()

    grads = jax.grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


def test_an_update_from_finite_gradients_is_put_to_the_optimizer():
    params = {"w": jnp.ones(2, jnp.float16)}
    x = jnp.full(2, 1e-4, jnp.float16)
    event = failure(anynan.jax.track(half_step), params, OPTIMIZER.init(params), x)
    assert (event.phase, event.parameter) == ("optimizer", "w")
    assert event.cause.tag == "optimizer_epsilon_underflow"
    assert "0 in float16" in event.cause.evidence


def test_a_bad_weight_is_named_with_the_steps_it_went_bad_in():
    tracked = anynan.jax.track(train_step)
    params, state = start()
    params, state, _ = tracked(params, state, GOOD)
    params = {"layer": {"w": params["layer"]["w"].at[1].set(jnp.nan)}}
    event = failure(tracked, params, state, GOOD)
    assert (event.phase, event.parameter, event.layer) == ("parameter", "layer.w", "layer")
    assert event.since == (1, 1)


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
