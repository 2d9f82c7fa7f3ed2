"""Derivatives that the user wrote, or that no operation of the forward pass shows."""

import functools

import jax
import jax.numpy as jnp
import pytest

import anynan


@jax.custom_vjp
def clip(x):
    return x


clip.defvjp(lambda x: (x, x), lambda _, g: (g / jnp.linalg.norm(g * 0),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, by):
    return jnp.tanh(x) * by


scaled.defvjp(lambda x, by: (scaled(x, by), x), lambda by, x, g: (jnp.log(x - 5) * g * by,))


def event_of(fn, *args):
    with pytest.raises(anynan.NonFiniteError) as caught:
        anynan.jax.track(fn)(*args)
    return caught.value.event, str(caught.value)


@pytest.mark.parametrize(
    ("fn", "operation"),
    [
        (lambda x: (clip(x) ** 2).sum(), "divide"),
        (lambda x: scaled(x, 2.0).sum(), "log"),
        (lambda x: jax.vmap(lambda v: scaled(v, 2.0))(x).sum(), "log"),
    ],
)
def test_a_custom_backward_rule_is_no_forward_operation(fn, operation):
    event, text = event_of(jax.value_and_grad(fn), jnp.array([1.0, 2.0]))
    assert (event.phase, event.operation.name) == ("backward", operation)
    assert event.operation.direct
    assert "(forward)" not in text
    assert "via the backward rule of the custom_vjp called here" in text
    assert anynan.Event.from_json(event.to_json()) == event


@pytest.mark.parametrize(
    ("fn", "x", "tag"),
    [
        (jnp.std, jnp.ones(3), "sqrt_gradient_at_zero"),
        (
            lambda p: jax.scipy.special.xlogy(p, p).sum(),
            jnp.array([0.5, 0.0]),
            "log_gradient_at_zero",
        ),
    ],
)
def test_the_gradients_of_std_and_xlogy_have_a_cause(fn, x, tag):
    event, text = event_of(jax.grad(fn), x)
    assert (event.phase, event.cause.tag) == ("backward", tag)
    assert "saved[" not in text


def test_a_slope_in_forward_mode_is_its_functions():
    event, text = event_of(jax.jacfwd(jnp.arccos), jnp.float32(1.0))
    assert event.operation.name != "divide"
    assert event.operation.phase == "backward"
    assert event.cause.tag == "inverse_trig_gradient_at_one", text
