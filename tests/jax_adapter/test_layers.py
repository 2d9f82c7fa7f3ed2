"""Layer paths: the same forward and backward, whatever the library calls its layers."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import anynan
from tests.failing import failure
from tests.jax_adapter.models import same

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
    def __init__(self, rngs, bad=False):
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs, bad)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.bn(self.drop(x))


def nnx_step(model, optimizer, x):
    def loss_fn(model):
        return (model(x) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("wrap", [nnx.jit, lambda f: f], ids=["jitted", "plain"])
@pytest.mark.tier(2)
def test_nnx_models_and_optimizers_are_changed_in_place(wrap):
    def trained(step):
        model = NnxNet(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2, 0.9), wrt=nnx.Param)
        losses = [step(model, optimizer, X) for _ in range(2)]
        return losses, nnx.state((model, optimizer))

    tracked = anynan.jax.track(wrap(nnx_step))
    mine, theirs = trained(tracked), trained(nnx.jit(nnx_step))
    assert same(mine[0], theirs[0])
    close = jax.tree.map(
        lambda a, b: bool(jnp.allclose(a, b, 1e-5, 1e-6)), *map(raw, (mine[1], theirs[1]))
    )
    assert jax.tree.all(close)
    assert tracked.events == ()
    assert paths(tracked) == {
        "", "blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.1", "blocks.1.norm", "blocks.1.up",
        "drop", "bn",
    }  # fmt: skip


def raw(state):
    keys = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return jax.tree.map(keys, nnx.to_pure_dict(state))


def test_an_nnx_layer_is_named_and_the_model_is_left_alone():
    model = NnxNet(nnx.Rngs(0), bad=True)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    before = NnxBlock.__call__, nnx.Linear.__call__
    event = failure(anynan.jax.track(nnx_step), model, optimizer, X)
    assert (event.layer, event.phase, event.operation.name) == ("blocks.1", "forward", "log")
    assert event.operation.source.text == "return jnp.log(x) if self.bad else x"
    assert (NnxBlock.__call__, nnx.Linear.__call__) == before


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    bad: bool

    def __call__(self, x):
        x = self.up(self.norm(x))
        return jnp.sqrt(x * x) if self.bad else x


class EqxNet(eqx.Module):
    blocks: list
    act: callable

    def __init__(self, bad=False):
        self.act = jnp.tanh
        keys = jax.random.split(jax.random.key(0), 2)
        self.blocks = [
            EqxBlock(eqx.nn.LayerNorm(4), eqx.nn.Linear(4, 4, use_bias=False, key=key), bad)
            for key in keys
        ]

    def __call__(self, x):
        for block in self.blocks:
            x = self.act(block(x))
        return x


def eqx_step(model, opt_state, x):
    @eqx.filter_value_and_grad
    def loss_fn(model):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    loss, grads = loss_fn(model)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


OPTIMIZER = optax.adam(1e-2)


@pytest.mark.parametrize("wrap", [eqx.filter_jit, lambda f: f], ids=["jitted", "plain"])
def test_equinox_models_come_and_go_as_arguments(wrap):
    model = EqxNet()
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    tracked = anynan.jax.track(wrap(eqx_step))
    mine, theirs = (model, state), (model, state)
    for _ in range(2):
        *mine, loss = tracked(*mine, X)
        *theirs, expected = eqx.filter_jit(eqx_step)(*theirs, X)
    assert same(eqx.filter(mine, eqx.is_array), eqx.filter(theirs, eqx.is_array))
    assert loss == expected
    assert mine[0].act is jnp.tanh
    assert paths(tracked) == {
        "", "blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.1", "blocks.1.norm", "blocks.1.up",
    }  # fmt: skip
    assert {r.site.parameter for r in tracked.history if r.phase == "optimizer"} >= {
        "blocks.0.up.weight", "blocks.1.norm.bias",
    }  # fmt: skip


@pytest.mark.tier(2)
def test_an_equinox_gradient_is_named():
    model = EqxNet(bad=True)
    model = eqx.tree_at(lambda m: m.blocks[1].up.weight, model, jnp.zeros((4, 4)))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    event = failure(anynan.jax.track(eqx_step), model, state, X)
    assert (event.layer, event.phase, event.operation.name) == ("blocks.1", "backward", "sqrt")


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
    event = tracked.events[0]
    assert (event.layer, event.operation.name) == ("net.block", "log")
    assert {"net", "net.first", "net.block", "net.block.up"} <= paths(tracked)


def test_a_linen_model_has_no_name_of_its_own_and_two_have():
    class Small(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2, name="out")(x)

    class Other(Small):
        pass

    net, other = Small(), Other()
    params = net.init(jax.random.key(0), X)
    alone = anynan.jax.track(lambda params, x: net.apply(params, x).sum())
    alone(params, X)
    assert paths(alone) == {"", "out"}
    both = anynan.jax.track(lambda p, x: (net.apply(p, x) + other.apply(p, x)).sum())
    both(params, X)
    assert {"Small.out", "Other.out"} <= paths(both)


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


def split_net():
    class Block(nnx.Module):
        def __init__(self, rngs, *, bad):
            self.lin, self.bad = nnx.Linear(4, 4, rngs=rngs), bad

        def __call__(self, x):
            x = self.lin(x)
            return jnp.log(x - 100) if self.bad else x

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = Block(rngs, bad=False), Block(rngs, bad=True)

        def __call__(self, x):
            return self.second(self.first(x))

    definition, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, x):
        def loss(state):
            return nnx.merge(definition, state)(x).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value

    return step, state


@pytest.mark.parametrize("way", ["plain", "jitted", "called"])
def test_an_nnx_model_that_is_split_and_merged_has_its_layers(way):
    step, state = split_net()
    step = step if way == "plain" else jax.jit(step)
    if way == "called":
        step(state, jnp.ones((2, 4)))
    event = failure(anynan.jax.track(step), state, jnp.ones((2, 4)))
    assert (event.layer, event.phase, event.call) == ("second", "forward", 0)


@pytest.mark.tier(2)
def test_a_model_with_a_loop_in_it_is_called_once():
    class Recurrent(eqx.Module):
        cell: eqx.nn.GRUCell
        out: eqx.nn.Linear

        def __call__(self, xs):
            def step(h, x):
                return self.cell(x, h), None

            h, _ = jax.lax.scan(step, jnp.zeros(4), xs)
            return self.out(1 / (h - h))

    keys = jax.random.split(jax.random.key(0))
    model = Recurrent(eqx.nn.GRUCell(3, 4, key=keys[0]), eqx.nn.Linear(4, 2, key=keys[1]))

    def loss(model, x):
        return (jax.vmap(model)(x) ** 2).mean()

    tracked = anynan.jax.track(eqx.filter_jit(eqx.filter_value_and_grad(loss)))
    with pytest.raises(anynan.NonFiniteError) as caught:
        tracked(model, jnp.ones((5, 7, 3)))
    event = caught.value.event
    assert (event.layer, event.call, event.operation.name) == ("", 0, "divide")
    assert "(call" not in str(caught.value)


@pytest.mark.parametrize("scaffolding", ["checkpointed-fwd", "inner-loop"])
def test_a_part_that_is_rebuilt_has_its_own_name_and_no_scaffolding_around_it(scaffolding):
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
                name=scaffolding,
            )
            return solve(y).sum()

    model = Model(Field(eqx.nn.Linear(3, 3, key=jax.random.key(0))))
    tracked = anynan.jax.track(eqx.filter_jit(lambda model, y: model(y)))
    event = failure(tracked, model, jnp.ones(3))
    assert event.layer == "field"


def test_two_calls_of_one_layer_are_two():
    class Model(eqx.Module):
        lin: eqx.nn.Linear

        def __call__(self, x):
            for _ in range(2):
                x = jnp.log(jnp.tanh(self.lin(x)) + 1.5) - 3
            return x.sum()

    model = Model(eqx.nn.Linear(3, 3, key=jax.random.key(0)))
    tracked = anynan.jax.track(eqx.filter_jit(lambda m, x: m(x)), action="record")
    tracked(model, jnp.ones(3))
    assert {r.call for r in tracked.history if r.layer == "lin"} == {0, 1}
