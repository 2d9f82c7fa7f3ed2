"""State that holds an Inf by design, and state that is bad: neither is called a weight."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.example_libraries import optimizers

import anynan
from tests.flat import split
from tests.jax_adapter.models import adam

BIG = jnp.full(2, 1e25)  # its square is beyond float32
WAYS = {
    "plain": ({}, {}),
    "donated": ({"donate_argnums": (0, 1)}, {}),
    "skip": ({}, {"action": "skip"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_second_moment_that_overflows_is_noted_by_its_own_name(way):
    jitted, options = WAYS[way]
    step, p, o = adam()
    theirs = jax.jit(step)(p, o, BIG)
    tracked = anynan.jax.track(jax.jit(step, **jitted), **split(options))
    mine = tracked(*jax.tree.map(jnp.copy, (p, o)), BIG)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), mine, theirs))
    (event,) = tracked.events
    assert (event.severity, event.kind, event.tensor) == ("suspect", "posinf", "optimizer state")
    assert event.parameter == "o.0.nu.w"
    text = tracked.report()
    assert "optimizer state" in text
    assert "weight" not in text.partition("events")[2]


def test_a_nan_in_optimizer_state_alone_is_named_there():
    def step(params, opt_state):
        return {"w": params["w"] - 1}, {"nu": {"w": jnp.log(opt_state["nu"]["w"])}}

    tracked = anynan.jax.track(step, advanced=anynan.Advanced(replay=False))
    with pytest.raises(anynan.NonFiniteError, match="written into the optimizer state") as caught:
        tracked({"w": jnp.ones(2)}, {"nu": {"w": -jnp.ones(2)}})
    event = caught.value.event
    found = event.parameter, event.tensor, event.summary.nan
    assert found == ("opt_state.nu.w", "optimizer state", 2)


def test_an_nnx_model_is_changed_in_place_by_a_tracked_step():
    def step(model, x):
        grads = nnx.grad(lambda model: model(x).sum())(model)
        weights = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda w, grad: w - grad, weights, grads))

    mine, theirs = (nnx.Linear(2, 1, rngs=nnx.Rngs(0)) for _ in range(2))
    before = jnp.copy(mine.kernel[...])
    anynan.jax.track(step)(mine, jnp.ones((1, 2)))
    step(theirs, jnp.ones((1, 2)))
    assert (mine.kernel[...] == theirs.kernel[...]).all()
    assert (mine.kernel[...] != before).all()


def test_a_weight_that_an_optimizers_state_holds_is_told_as_a_weight():
    begin, update, weights = optimizers.adam(1e-2)

    @partial(anynan.jax.track, action="record")
    def step(opt_state, x):
        def loss(w):
            return ((x * w["a"] + w["b"]) ** 2).sum()

        return update(0, jax.grad(loss)(weights(opt_state)), opt_state)

    step(begin({"a": jnp.ones(2), "b": jnp.float32(jnp.nan)}), jnp.ones(2))
    assert (step.events[0].operation.name, step.events[0].cause.tag) == ("add", "bad_parameter")
