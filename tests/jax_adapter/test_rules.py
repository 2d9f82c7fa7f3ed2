"""Derivatives: those that the user wrote, those without their values, and traps."""

import functools

import jax
import jax.numpy as jnp
import pytest

import anynan
from anynan._reports.report import render
from tests.failing import failure


@jax.custom_vjp
def clip(x):
    return x


clip.defvjp(lambda x: (x, x), lambda _, g: (g / jnp.linalg.norm(g * 0),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, by):
    return jnp.tanh(x) * by


scaled.defvjp(lambda x, by: (scaled(x, by), x), lambda by, x, g: (jnp.log(x - 5) * g * by,))


def event_of(fn, *args):
    event = failure(anynan.jax.track(fn), *args)
    return event, render(event)


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
        (jnp.std, [1.0] * 3, "sqrt_gradient_at_zero"),
        (lambda p: jax.scipy.special.xlogy(p, p).sum(), [0.5, 0], "log_gradient_at_zero"),
    ],
)
def test_the_gradients_of_std_and_xlogy_have_a_cause(fn, x, tag):
    event, text = event_of(jax.grad(fn), jnp.array(x))
    assert (event.phase, event.cause.tag) == ("backward", tag)
    assert "saved[" not in text


def test_a_slope_in_forward_mode_is_its_functions():
    event, text = event_of(jax.jacfwd(jnp.arccos), jnp.float32(1.0))
    assert event.operation.name != "divide"
    assert event.operation.phase == "backward"
    assert event.cause.tag == "inverse_trig_gradient_at_one", text


ENDS = jnp.array([1.0, 0.0])
MINUS = jnp.array([1.0, -1.0])


UNUSED = {
    "log": (jax.grad(lambda x: jnp.log(x).sum()), (ENDS,), "log_of_zero"),
    "hessian": (jax.hessian(lambda x: (x**2.5).sum()), (MINUS,), "power_domain"),
    "underflow": (  # the Inf went under in arithmetic, and nothing masked it
        jax.grad(lambda x: (x / jnp.sqrt(jnp.mean(x**4))).sum()),
        (jnp.array([1e30, 1.0]),),
        "overflow_in_dtype",
    ),
    "updated": (  # the loss goes on behind it, and nobody takes that either
        lambda w, keep: (
            w - 0.1 * jax.grad(lambda w: (w * keep).sum() / keep.sum() + (w**2).sum())(w)
        ),
        (MINUS, jnp.zeros(2)),
        "divide_by_zero",
    ),
}


@pytest.mark.tier(2)
@pytest.mark.parametrize("name", UNUSED)
def test_a_value_that_nobody_took_has_its_forward_cause(name):
    fn, args, tag = UNUSED[name]
    cause = failure(anynan.jax.track(fn), *args).cause
    assert cause.tag == tag
    assert "hidden" not in cause.evidence


HIDDEN = {
    "where": lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum(),
    "maximum": lambda x: jnp.maximum(jnp.log(x), -10.0).sum(),
    "getitem": lambda x: jnp.tanh(jnp.log(x)[:1]).sum() * x[0],
}
STEPS = {"grad": jax.grad, "update": lambda fn: lambda w: w - 0.1 * jax.grad(fn)(w)}


@pytest.mark.tier(2)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_value_that_was_masked_is_a_trap(name, step):
    cause = failure(anynan.jax.track(STEPS[step](HIDDEN[name])), ENDS).cause
    assert cause.tag == "where_gradient_trap"
    assert f"hidden again by {name}" in cause.evidence or "is exactly 0" in cause.evidence


@pytest.mark.tier(2)
def test_what_a_step_returns_bad_was_not_hidden_in_it():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("d",))
    spec = jax.sharding.PartitionSpec

    def step(w, x):
        def loss(w):
            h = (x @ w) / jnp.where(jax.lax.axis_index("d") == 1, 0.0, 1.0)
            return (h**2).mean()

        value, slope = jax.value_and_grad(loss)(w)
        return w - jax.lax.pmean(slope, "d"), jax.lax.pmean(value, "d")

    whole = jax.shard_map(step, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=(spec(), spec()))
    event = failure(anynan.jax.track(whole), jnp.ones((4, 2)), jnp.ones((4, 4)))
    assert (event.operation.name, event.cause.tag) == ("divide", "divide_by_zero")
