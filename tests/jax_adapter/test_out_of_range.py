"""Reads beyond the end of an array: JAX fills them with NaN, and blames nobody."""

import jax
import jax.numpy as jnp
import pytest

import anynan
from tests.failing import failure

pytestmark = pytest.mark.tier(2)

TABLE = {"table": jnp.arange(20.0).reshape(5, 4)}


def take(params, tokens):
    return jnp.tanh(jnp.take(params["table"], tokens, axis=0)).sum()  # bad


def filled(params, tokens):
    return params["table"].at[tokens].get(mode="fill").sum()  # bad


def looped(params, tokens):
    def step(total, token):
        return total + jnp.take(params["table"], token, axis=0), None  # bad

    return jax.lax.scan(step, jnp.zeros(4), tokens)[0].sum()


CASES = [
    (take, [7, 1], "index 7 is out of range for 5 entries"),
    (take, [1, -8], "index -8 is out of range for 5 entries"),
    (filled, [1, 5], "index 5 is out of range for 5 entries"),
    (take, [[7, 9]], "index 7 is out of range for 5 entries, 2 such indices in all"),
    (looped, [0, 6], "index 6 is out of range for 5 entries"),
]


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "grad"])
@pytest.mark.parametrize(("fn", "tokens", "evidence"), CASES)
def test_the_read_its_index_and_the_size_are_named(fn, tokens, evidence, grad):
    step = fn
    if grad:
        step = jax.value_and_grad(lambda params, tokens: fn(params, tokens).sum())
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.jax.track(step)(TABLE, jnp.array(tokens))
    event = caught.value.event
    assert event.cause.tag == "index_out_of_range", str(caught.value)
    assert (event.operation.name, event.cause.evidence) == ("take", evidence)
    assert event.operation.phase in ("forward", "loss")
    assert "# bad" in event.operation.source.text
    assert not any(summary.bad for summary in event.operation.inputs)
    assert event.notes == ()


def test_a_read_in_range_of_what_is_bad_is_not_the_origin():
    def fn(x, tokens):
        return jnp.take(jnp.log(x), tokens).sum()

    event = failure(anynan.jax.track(fn), jnp.array([-1.0, 1.0]), jnp.array([0, 1]))
    assert event.operation.name == "log"


def test_a_filled_read_that_is_masked_is_no_failure():
    def fn(x, tokens):
        return jnp.where(tokens < 2, jnp.take(x, tokens), 0.0).sum()

    assert anynan.jax.track(fn)(jnp.ones(2), jnp.array([0, 5])) == 1
