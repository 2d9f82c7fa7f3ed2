"""The replay of a large step: layers first, then the operations of those that went bad."""

import jax
import jax.numpy as jnp
import pytest

import anynan
from anynan.jax.replay import replay
from tests.failing import failure
from tests.jax_adapter.models import made


@pytest.mark.parametrize(
    ("bad", "zero", "found"),
    [("log", False, ("head", "forward", "log")), ("root", True, ("head", "backward", "sqrt"))],
)
def test_a_large_step_is_narrowed_to_the_layers_that_went_bad(bad, zero, found, monkeypatch):
    monkeypatch.setattr(replay, "MOST", 5)
    asked = []
    flags = replay.flags

    def counting(program, arrays, wanted):
        asked.append(len(wanted))
        return flags(program, arrays, wanted)

    monkeypatch.setattr(replay, "flags", counting)
    step, params, state, x = made(bad)
    event = failure(anynan.jax.track(step), params, state, x * (0 if zero else 1))
    assert (event.layer, event.phase, event.operation.name) == found
    program_size = 80
    assert max(asked) < program_size


def test_a_replay_can_be_left_out():
    tracked = anynan.jax.track(lambda x: jnp.log(x).sum(), advanced=anynan.Advanced(replay=False))
    event = failure(tracked, -jnp.ones(2))
    assert (event.phase, event.operation) == ("loss", None)


def test_what_a_loop_inside_a_loop_left_is_followed_into_it():
    def solve(y, rounds):
        def step(state):
            def stage(inner):
                k, slopes = inner
                return k + 1, slopes.at[k].set(-y / (y - y))

            i, y = state
            start = 0, jnp.zeros((2, 3))
            _, slopes = jax.lax.while_loop(lambda inner: inner[0] < rounds, stage, start)
            return i + 1, y + jnp.array([0.5, 0.5]) @ slopes

        return jax.lax.while_loop(lambda state: state[0] < rounds, step, (0, y))[1]

    event = failure(anynan.jax.track(solve), jnp.ones(3), 2)
    assert event.operation.name == "divide"
    assert "-y / (y - y)" in event.operation.source.text


@pytest.mark.parametrize("stats", [(), ("norm",)])
def test_a_nan_is_seen_before_max_and_min_which_lose_it_in_a_sum_on_a_cpu(stats):
    def step(w, x):
        with jax.named_scope("squash"):
            y = 2 * jnp.minimum(jnp.sqrt(x), 0.1) + 1
        return w - jnp.clip(x + y, 0, 1).sum()

    given = {"advanced": anynan.Advanced(stats=stats)} if stats else {}
    tracked = anynan.jax.track(jax.jit(step), action="record", **given)
    tracked(jnp.ones(3), jnp.linspace(-1, 1, 12544).reshape(16, 28, 28, 1))
    assert tracked.events[0].operation.name == "sqrt"
    assert tracked.events[0].layer == "squash"
