"""Layer paths: the same forward and backward, whatever the library calls its layers."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import anynan
from tests.failing import failure
from tests.jax_adapter.models import OPTIMIZER, same

X = jnp.linspace(0.1, 1, 12).reshape(3, 4)


def paths(tracked, phase="forward"):
    return {reading.layer for reading in tracked.history if reading.phase == phase}


class NnxBlock(nnx.Module):
    def __init__(self, rngs, bad=False):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.bad = bad

    def __call__(self, x):
        x = self.up(self.norm(x))
        return jnp.log(x) if self.bad else x


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs, bad=True)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def test_an_nnx_layer_is_named_and_the_model_is_left_alone():
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    before = NnxBlock.__call__, nnx.Linear.__call__
    event = failure(anynan.jax.track(nnx_step), model, optimizer, X)
    assert (event.layer, event.phase, event.operation.name) == ("blocks.1", "forward", "log")
    assert event.operation.source.text == "return jnp.log(x) if self.bad else x"
    assert (NnxBlock.__call__, nnx.Linear.__call__) == before


class EqxNet(eqx.Module):
    blocks: list
    act: callable

    def __call__(self, x):
        for block in self.blocks:
            x = self.act(block(x))
        return x


def eqx_step(model, opt_state, x):
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


def test_equinox_models_come_and_go_as_arguments():
    keys = jax.random.split(jax.random.key(0), 2)
    model = EqxNet([eqx.nn.Linear(4, 4, key=key) for key in keys], jnp.tanh)
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    tracked = anynan.jax.track(eqx.filter_jit(eqx_step))
    mine, theirs = (model, state), (model, state)
    for _ in range(2):
        *mine, loss = tracked(*mine, X)
        *theirs, expected = eqx.filter_jit(eqx_step)(*theirs, X)
    assert same(eqx.filter(mine, eqx.is_array), eqx.filter(theirs, eqx.is_array))
    assert loss == expected
    assert mine[0].act is jnp.tanh
    assert paths(tracked) == {"", "blocks.0", "blocks.1"}
    updated = {r.site.parameter for r in tracked.history if r.phase == "optimizer"}
    assert updated >= {"blocks.0.weight", "blocks.1.bias"}


def test_haiku_paths():
    class Block(hk.Module):
        def __call__(self, x):
            return jnp.log(hk.Linear(4, name="up")(x) * 0 - 1)

    def forward(x):
        return hk.Sequential([hk.Linear(4, name="first"), Block(name="block")], name="net")(x)

    net = hk.without_apply_rng(hk.transform(forward))
    params = net.init(jax.random.key(0), X)
    tracked = anynan.jax.track(lambda params, x: net.apply(params, x).sum(), action="record")
    tracked(params, X)
    found = tracked.events[0]
    assert (found.layer, found.operation.name) == ("net.block", "log")
    assert {"net", "net.first", "net.block", "net.block.up"} <= paths(tracked)


def test_named_scopes_and_calls_of_one_layer():
    def fn(x):
        with jax.named_scope("first"):
            x = x * 2
        with jax.named_scope("twice"):
            x = x - 1
        x = x + 3
        with jax.named_scope("twice"):
            x = jnp.log(x - 10)
        return x.sum()

    event = failure(anynan.jax.track(fn), X)
    assert (event.layer, event.call, event.operation.name) == ("twice", 1, "log")
    assert [name for name, _ in event.trail] == ["first", "twice"]


def test_an_nnx_model_that_is_split_and_merged_has_its_layers():
    definition, state = nnx.split(NnxNet(nnx.Rngs(0)))

    @jax.jit
    def step(state, x):
        return jax.value_and_grad(lambda state: nnx.merge(definition, state)(x).mean())(state)

    step(state, X)
    event = failure(anynan.jax.track(step), state, X)
    assert (event.layer, event.phase, event.call) == ("blocks.1", "forward", 0)


def test_a_part_that_is_rebuilt_has_its_own_name_and_no_scaffolding_around_it():
    class Field(eqx.Module):
        lin: eqx.nn.Linear

        def __call__(self, y):
            return jnp.log(self.lin(y) - 100)

    class Model(eqx.Module):
        field: Field

        def __call__(self, y):
            body = eqx.filter_jit(lambda field, y: jax.vmap(field)(y[None])[0])
            solve = jax.named_call(
                lambda y: jax.lax.fori_loop(0, 2, lambda _, y: body(self.field, y), y),
                name="inner-loop",
            )
            return solve(y).sum()

    model = Model(Field(eqx.nn.Linear(3, 3, key=jax.random.key(0))))
    tracked = anynan.jax.track(eqx.filter_jit(lambda model, y: model(y)))
    event = failure(tracked, model, jnp.ones(3))
    assert event.layer == "field"
