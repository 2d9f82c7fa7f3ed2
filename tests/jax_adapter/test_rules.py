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
        (lambda x: jax.lax.scan(lambda c, v: (c + clip(v) ** 2, None), 0.0, x)[0], "divide"),
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
        (lambda x: x.std(axis=0).sum(), jnp.ones((3, 2)), "sqrt_gradient_at_zero"),
        (
            lambda p: jax.scipy.special.xlogy(p, p).sum(),
            jnp.array([0.5, 0.0]),
            "log_gradient_at_zero",
        ),
    ],
)
@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
def test_the_gradients_of_std_and_xlogy_have_a_cause(fn, x, tag, transform):
    event, text = event_of(transform(fn), x)
    assert (event.phase, event.cause.tag) == ("backward", tag)
    assert "saved[" not in text


@pytest.mark.parametrize(
    ("fn", "x", "tag"),
    [
        (jnp.sqrt, 0.0, "sqrt_gradient_at_zero"),
        (jnp.arccos, 1.0, "inverse_trig_gradient_at_one"),
    ],
)
def test_a_slope_in_forward_mode_is_its_functions(fn, x, tag):
    def pushed(x):
        return jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]

    for derivative in (pushed, jax.jacfwd(fn)):
        event, text = event_of(derivative, jnp.float32(x))
        assert event.operation.name != "divide"
        assert event.operation.phase == "backward"
        assert event.cause.tag == tag, text


def test_evidence_names_no_number_and_nobody_self():
    event, _ = event_of(jax.grad(lambda x: jnp.cbrt(x).sum()), jnp.zeros(2))
    assert event.cause.tag == "unknown"
    assert "saved[" not in event.cause.evidence
    assert "self" not in event.cause.evidence


def test_a_function_that_a_rule_called_first_has_its_own_line_elsewhere():
    """JAX keeps what it traced of ``norm``: from 0.12 on with the stack of the call of the rule."""
    ruled = jax.value_and_grad(lambda x: (clip(x) ** 2).sum())
    event_of(ruled, jnp.ones(2))
    event_of(ruled, jnp.ones(3))

    def loss(w, x):
        return jnp.linalg.norm(w * x)

    event, text = event_of(jax.value_and_grad(loss), jnp.ones(()), jnp.zeros(3))
    assert event.operation.name == "vector_norm", text
    assert event.operation.source.text == "return jnp.linalg.norm(w * x)"
