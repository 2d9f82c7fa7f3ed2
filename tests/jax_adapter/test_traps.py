"""A gradient without its value: a trap is said only where something hid the bad value."""

import jax
import jax.numpy as jnp
import pytest

import anynan
from tests.failing import failure

pytestmark = pytest.mark.tier(2)

X = jnp.array([1.0, 0.0])
MINUS = jnp.array([1.0, -1.0])


def event_of(fn, *args):
    return failure(anynan.jax.track(fn), *args)


UNUSED = {
    "log": (jax.grad(lambda x: jnp.log(x).sum()), (X,), "log_of_zero"),
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


@pytest.mark.parametrize("name", UNUSED)
def test_a_value_that_nobody_took_has_its_forward_cause(name):
    fn, args, tag = UNUSED[name]
    event = event_of(fn, *args)
    assert event.cause.tag == tag
    assert "hidden" not in event.cause.evidence


HIDDEN = {
    "where": (lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum(), X),
    "maximum": (lambda x: jnp.maximum(jnp.log(x), -10.0).sum(), X),
    "getitem": (lambda x: jnp.tanh(jnp.log(x)[:1]).sum() * x[0], X),
}


STEPS = {
    "grad": jax.grad,
    "update": lambda fn: lambda w: w - 0.1 * jax.grad(fn)(w),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_value_that_was_masked_is_a_trap(name, step):
    fn, x = HIDDEN[name]
    event = event_of(STEPS[step](fn), x)
    assert event.cause.tag == "where_gradient_trap"
    assert f"hidden again by {name}" in event.cause.evidence or "is exactly 0" in (
        event.cause.evidence
    )


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
    assert event.operation.name == "divide"
    assert event.cause.tag == "divide_by_zero"
