"""A second run that sees other values proves nothing: the first run's facts are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import anynan
from tests.failing import failure


def one_of(values, layer):
    """Make a function that takes its data from a callback, in a layer or outside of all."""
    left = list(values)

    def host():
        return np.float32(left.pop(0) if len(left) > 1 else left[0])

    def fn(x):
        y = io_callback(host, jax.ShapeDtypeStruct((), jnp.float32)) + 0 * x
        if not layer:
            return jnp.log(y)
        with jax.named_scope("layer"):
            return jnp.log(y)

    return fn


@pytest.mark.parametrize("layer", [False, True])
def test_a_callback_that_feeds_data(layer):
    tracked = anynan.jax.track(one_of([-1.0, 1.0], layer), action="record")
    assert np.isnan(tracked(jnp.float32(1)))
    (event,) = tracked.events
    assert (event.kind, event.operation) == ("nan", None)
    assert any("the second run saw other values than the first" in note for note in event.notes)
    assert event.cause.tag == "unknown"
    assert event.layer == ("layer" if layer else None)


def test_a_pure_callback_that_is_called_again_is_said():
    def fn(x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jnp.log(jax.pure_callback(lambda x: np.float32(-x), shape, x))

    event = failure(anynan.jax.track(fn), jnp.float32(1))
    assert event.operation.name == "log"
    assert any("pure_callback" in note and "the second run called" in note for note in event.notes)


def test_infs_of_both_signs_agree_with_themselves():
    def fn(x):
        with jax.named_scope("layer"):
            return jnp.exp(x) * jnp.array([1.0, -1.0])

    event = failure(anynan.jax.track(fn), jnp.full(2, 100.0))
    assert (event.kind, event.operation.name, event.notes) == ("posinf", "exp", ())
