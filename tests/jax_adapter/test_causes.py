"""Causes that JAX produces beyond those of tests/conformance/recipes_causes.py.

The rows that JAX cannot produce stand in ``NOT_IN_JAX``, each with its reason.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import anynan
from anynan._diagnosis.causes import RULES
from tests.conformance.recipes_causes import produced
from tests.failing import failure
from tests.flat import split
from tests.jax_adapter.models import adam

NOT_IN_JAX = {
    "product_gradient_at_zero": "the gradient of a product multiplies the other factors",
    "lgamma_gradient_at_pole": "the forward result is +Inf already, which is lgamma_pole",
    "logit_gradient_at_bound": "the forward result is Inf already, which is logit_of_zero_or_one",
    "optimizer_setting_bad": "a setting is a number of the code: its operation is named",
    "ctc_target_too_long": "a loss is made of primitives, and those in use stay finite",
    "optimizer_step_too_large": "an update is named at its operation, such as overflow_in_dtype",
    "weight_written": "a weight comes in as an argument: bad_parameter",
    "overwritten_input": "arrays of JAX cannot be written to",
    "uninitialised_memory": "every array of JAX is filled",
    "running_statistics_bad": "batch statistics are arrays like the weights: bad_parameter",
    "loss_scale_floor": "JAX has no loss scaler",
    "loss_scale_too_high": "JAX has no loss scaler",
    "target_class_masked": "a loss is made of primitives: the gather or the sum is named",
    "binary_cross_entropy_saturated": "a loss is made of primitives: its logarithm is named",
    "kl_div_domain": "a loss is made of primitives: its logarithm is named",
    "cdist_gradient_at_zero": "a distance is a square root of a sum: norm_gradient_at_zero",
}


def test_a_norm_is_one_operation():
    step = jax.value_and_grad(lambda params, x: jnp.linalg.norm(x * params["w"]))  # bad
    event = failure(anynan.jax.track(step), {"w": jnp.ones(())}, jnp.zeros(2))
    found = (event.cause.tag, event.operation.name, event.phase, event.kind)
    assert found == ("norm_gradient_at_zero", "vector_norm", "backward", "nan")
    assert event.operation.source.text.endswith("# bad")


ELSEWHERE = {  # produced by the tests of this folder's other files
    "bad_input", "bad_parameter", "index_out_of_range", "optimizer_epsilon_underflow",
    "optimizer_state_overflow",
}  # fmt: skip


def caught(fn, *args, steps=1, **options):
    tracked = anynan.jax.track(fn, **split(options))
    with pytest.raises(anynan.AnomalyError) as error:
        for _ in range(steps):
            args = (*tracked(*args), *args[2:])
    return error.value.event.cause.tag


def test_a_bad_label():
    def loss(params, x, y):
        return ((x * params["w"] - y) ** 2).mean()

    event = failure(anynan.jax.track(loss), {"w": jnp.ones(2)}, jnp.ones(2), jnp.array([1, np.nan]))
    assert event.cause.tag == "bad_label"


def update(rate):
    optimizer = optax.sgd(rate)

    def step(params, opt_state, x):
        grads = jax.grad(lambda params: ((x * params["w"]) ** 2).sum())(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones(2)}
    return step, params, optimizer.init(params), jnp.ones(2)


def test_an_optimizer_state_that_came_in_bad():
    step, params, state = adam()
    state = (state[0]._replace(mu={"w": jnp.full(2, jnp.nan)}), *state[1:])
    assert caught(step, params, state, jnp.ones(2)) == "optimizer_state_bad"


def test_a_gradient_that_vanishes_or_jumps():
    step, params, state = adam()
    policy = anynan.Policy(vanishing=1e-6, bad=("vanishing",))
    assert caught(step, params, state, jnp.full(2, 1e-9), policy=policy) == "vanishing_gradient"
    tracked = anynan.jax.track(
        step, policy=anynan.Policy(spike=10, bad=("spike",)), action="record"
    )
    for size in (1, 1, 1, 1, 1, 1, 100):
        tracked(params, state, jnp.full(2, float(size)))
    (event,) = tracked.events
    assert (event.kind, event.cause.tag, event.step) == ("spike", "exploding_gradient", 6)


def test_a_divergence():
    tag = caught(*update(3e4), steps=40, stats=("absmax",))
    assert tag in ("learning_rate_divergence", "exploding_gradient")
    policy = anynan.Policy(large=1e6, bad=("large",))
    assert caught(*update(2.0), steps=40, policy=policy) in ("exploding_gradient", "beyond_limit")


def test_a_carried_state_that_grows():
    def step(h, x):
        h = jnp.tanh(x) + h * 100.0
        return h, h.mean()

    tracked = anynan.jax.track(step, advanced=anynan.Advanced(stats=("absmax",)))
    h = jnp.ones(2)
    with pytest.raises(anynan.NonFiniteError) as error:
        for _ in range(40):
            h, _ = tracked(h, jnp.ones(2))
    assert error.value.event.cause.tag == "growth_without_training"
    assert "learning rate" not in error.value.event.cause.fix


def test_every_row_is_produced_or_has_its_reason():
    made = ELSEWHERE | produced("jax") | set(NOT_IN_JAX)
    made |= {
        "bad_label", "learning_rate_divergence", "exploding_gradient", "beyond_limit",
        "vanishing_gradient", "optimizer_state_bad", "growth_without_training",
    }  # fmt: skip
    assert {rule.tag for rule in RULES} == made


def test_of_donated_weights_it_is_not_said_that_their_gradient_was_good():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        return w - jax.grad(lambda w: jnp.log(jax.nn.softmax(x @ w))[0])(w)

    tracker = anynan.jax.track(step, level="step", action="record")
    w = tracker(jnp.ones((4, 3)), jnp.ones(4))
    tracker(w + jnp.arange(3.0) * 1e4, jnp.ones(4))
    (event,) = tracker.events
    assert event.cause.tag == "weight_written"
    assert "its gradient was not seen" in event.cause.text
