"""The second run: of a large step, of one that sees other values, and of a bundle."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import anynan
from anynan._calls.calls import BundleError
from anynan.jax.bundle import DIALECT
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
    assert max(asked) < 80  # the size of the program


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

    advanced = anynan.Advanced(stats=stats)
    tracked = anynan.jax.track(jax.jit(step), action="record", advanced=advanced)
    tracked(jnp.ones(3), jnp.linspace(-1, 1, 12544).reshape(16, 28, 28, 1))
    assert (tracked.events[0].layer, tracked.events[0].operation.name) == ("squash", "sqrt")


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.mark.parametrize("layer", [None, "layer"])
def test_a_callback_that_feeds_data(layer):
    left = [1.0, -1.0]

    def fn(x):
        y = io_callback(lambda: np.float32(left.pop()), NUMBER) + 0 * x
        with jax.named_scope(layer) if layer else nullcontext():
            return jnp.log(y)

    tracked = anynan.jax.track(fn, action="record")
    assert np.isnan(tracked(jnp.float32(1)))
    (event,) = tracked.events
    assert (event.kind, event.operation) == ("nan", None)
    assert any("the second run saw other values than the first" in note for note in event.notes)
    assert (event.cause.tag, event.layer) == ("unknown", layer)


def test_a_pure_callback_that_is_called_again_is_said():
    def fn(x):
        return jnp.log(jax.pure_callback(lambda x: np.float32(-x), NUMBER, x))

    event = failure(anynan.jax.track(fn), jnp.float32(1))
    assert event.operation.name == "log"
    assert any("pure_callback" in note and "the second run called" in note for note in event.notes)


@pytest.mark.parametrize(
    "name", ["primitives.pure_callback_p", "lax.infeed_p", "lax.log", "os.system", "x.log_p"]
)
def test_a_bundle_runs_no_callback_and_nothing_else_than_primitives(name):
    with pytest.raises(BundleError, match="is not run"):
        DIALECT.function(name)
