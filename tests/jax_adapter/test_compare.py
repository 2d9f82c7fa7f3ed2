"""Where a JAX port parts from a PyTorch model, and two JAX functions from each other."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anynan

pytestmark = pytest.mark.tier(2)

nn = pytest.importorskip("flax.linen")
X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)


class Block(nn.Module):
    eps: float = 1e-5
    scale: float = 1.0

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(epsilon=self.eps, name="norm")(x)
        h = jnp.tanh(nn.Dense(32, name="up")(h))
        h = h * self.scale
        return x + nn.Dense(16, name="down")(h)


class Net(nn.Module):
    eps: float = 1e-5
    scale: float = 1.0

    @nn.compact
    def __call__(self, x):
        x = Block(self.eps, name="blocks_0")(x)
        x = Block(self.eps, self.scale, name="blocks_1")(x)
        return nn.Dense(5, name="head")(x)


@pytest.fixture(scope="module")
def params():
    return Net().init(jax.random.key(0), X)


def port(params, **settings):
    return lambda x: Net(**settings).apply(params, x)


def test_a_layers_own_arithmetic_is_named_with_its_line(params):
    found = anynan.compare(port(params), port(params, scale=1.01), X)
    assert found.place.layer == "blocks_1"
    assert found.operation.other_source is not None
    assert "h = h * self.scale" in str(found)


def linear(held):
    """Make PyTorch's layer of the weights of a dense one."""
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(*held["kernel"].shape)
    layer.weight.data = torch.tensor(np.array(held["kernel"]).T.copy())
    layer.bias.data = torch.tensor(np.array(held["bias"]))
    return layer


def stacked(params, count=3):
    """Give the weights of several blocks, stacked."""
    block = params["params"]["blocks_0"]
    sizes = np.linspace(1.0, 1.2, count, dtype=np.float32)
    return jax.tree.map(lambda x: jnp.stack([x * size for size in sizes]), block)


def scanned(weights):
    def model(x):
        def body(x, held):
            return Block(name="again").apply({"params": held}, x), None

        return jax.lax.scan(body, x, weights)[0]

    return model


def test_every_turn_of_a_scan_is_compared(params):
    weights = stacked(params)
    right = anynan.compare(scanned(weights), scanned(weights), X)
    assert right.ratio == 0
    for way in ("forward", "backward"):
        seen = {(row.layer, row.call) for row in right.rows if row.way == way}
        assert {("again.up", 0), ("again.up", 1), ("again.up", 2), ("again.norm", 2)} <= seen
    wrong = copy.deepcopy(weights)
    wrong["down"]["kernel"] = wrong["down"]["kernel"].at[1].multiply(1.01)
    found = anynan.compare(scanned(weights), scanned(wrong), X)
    assert (found.place.layer, found.place.call) == ("again.down", 1)
    assert found.sentence().startswith("first in `again.down`, call 2, ")


def test_a_scan_is_compared_with_layers_one_by_one(params):
    weights = stacked(params)

    def unrolled(scale):
        def model(x):
            for i in range(3):
                held = jax.tree.map(lambda w, i=i: w[i], weights)
                module = Block(scale=scale if i == 2 else 1.0, name=f"layers_{i}")
                x = module.apply({"params": held}, x)
            return x

        return model

    right = anynan.compare(unrolled(1.0), scanned(weights), X)
    assert right.place is None, str(right)
    assert len([row for row in right.rows if row.ratio is not None and row.way == "forward"]) >= 12
    found = anynan.compare(unrolled(1.01), scanned(weights), X)
    assert (found.place.layer, found.place.other) == ("layers_2", "again")
    assert found.operation is not None
    assert "h = h * self.scale" in str(found)


class Routed(nn.Module):
    """Send each row to one of four experts."""

    first: float
    second: float

    @nn.compact
    def __call__(self, x):
        ties = jnp.array([self.first, self.second, 0.0, 0.0])
        weight, chosen = jax.lax.top_k(nn.Dense(4, name="gate")(x) * 0 + ties, 1)
        experts = jax.random.normal(jax.random.key(1), (4, 16, 16))
        x = jnp.einsum("bi,bij->bj", x, experts[chosen[:, 0]]) * weight
        return nn.Dense(2, name="out")(x)


def test_a_choice_that_differs_ends_the_comparison_or_is_followed():
    params = Routed(1.0, 2.0).init(jax.random.key(0), X)
    ties = 1.0, 1.0 + 3.6e-7
    a, b = (lambda x, t=t: Routed(*t).apply(params, x) for t in (ties, ties[::-1]))
    found = anynan.compare(a, b, X)
    assert found.place is None, str(found)
    assert "`topk` in the model's own code chooses otherwise" in found.sentence()
    assert "jax.lax.top_k(" in str(found)
    assert [row.layer for row in found.rows] == ["gate"]
    held = anynan.compare(a, b, X, follow=True)
    assert held.place is None, str(held)
    assert {row.layer for row in held.rows} == {"gate", "out", ""}
    assert {row.way for row in held.rows} == {"forward", "backward"}


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="up")(x)
        x = nn.Dropout(0.5, deterministic=False, name="drop")(x)
        return nn.Dense(2, name="head")(x)


def test_a_port_is_held_to_the_dropout_of_the_first_and_a_wrong_kernel_is_named():
    torch = pytest.importorskip("torch")
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = Dropping().init(rngs, X)
    layers = {name: linear(held) for name, held in params["params"].items()}
    net = torch.nn.ModuleDict(layers | {"drop": torch.nn.Dropout(0.5)})
    net.forward = lambda x: net["head"](net["drop"](net["up"](x)))

    def port(x):
        return Dropping().apply(params, x, rngs=rngs)

    for a, b in ((net, port), (port, net)):
        found = anynan.compare(a, b, X)
        assert found.place is None, str(found)
        assert found.differs
        held = anynan.compare(a, b, X, follow=True)
        assert held.place is None, str(held)
        assert not held.differs
        assert {row.layer for row in held.rows} == {"up", "drop", "head", ""}
    params["params"]["up"]["kernel"] = params["params"]["up"]["kernel"][::-1]
    wrong = anynan.compare(net, port, X)
    assert wrong.place.layer == "up"
    assert "weight  up.weight is nowhere in the second" in str(wrong)


def test_a_function_of_another_framework_is_told_what_it_was_taken_for():
    with pytest.raises(TypeError) as caught:
        anynan.compare(np.asarray, np.asarray, np.ones(3))
    assert "functions are compared in JAX alone" in str(caught.value.__notes__)
