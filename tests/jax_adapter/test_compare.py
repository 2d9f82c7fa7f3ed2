"""Where a JAX port parts from a PyTorch model, and two JAX functions from each other."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anynan

nn = pytest.importorskip("flax.linen")
X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)


class Block(nn.Module):
    eps: float = 1e-5
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm(epsilon=self.eps, name="norm")(x)
        h = jnp.tanh(nn.Dense(32, name="up")(h))
        h = h * self.scale
        return x + nn.Dense(16, name="down")(h)


class Net(nn.Module):
    eps: float = 1e-5
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = Block(self.eps, name="blocks_0")(x)
        x = Block(self.eps, self.scale, name="blocks_1")(x)
        return nn.Dense(5, name="head")(x)


@pytest.fixture(scope="module")
def params() -> Any:
    return Net().init(jax.random.key(0), X)


def port(params: Any, **settings: float) -> Any:
    return lambda x: Net(**settings).apply(params, x)


def test_the_same_function_is_identical(params: Any) -> None:
    found = anynan.compare(port(params), port(params), X)
    assert found.place is None
    assert found.ratio == 0


def test_a_layers_own_arithmetic_is_named_with_its_line(params: Any) -> None:
    found = anynan.compare(port(params), port(params, scale=1.01), X)
    assert found.place is not None
    assert found.place.layer == "blocks_1"
    assert found.operation is not None
    assert found.operation.other_source is not None
    assert "h = h * self.scale" in str(found)


def test_a_lower_precision_is_rounding(params: Any) -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    found = anynan.compare(port(params), lambda x: Net().apply(half, x.astype(jnp.bfloat16)), X)
    assert found.place is None, str(found)


def torch_twin(params: Any) -> Any:
    torch = pytest.importorskip("torch")

    class TorchBlock(torch.nn.Module):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)
            self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
            for name in ("up", "down"):
                layer = getattr(self, name)
                layer.weight.data = torch.tensor(np.array(held[name]["kernel"]).T.copy())
                layer.bias.data = torch.tensor(np.array(held[name]["bias"]))

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class TorchNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            held = params["params"]
            blocks = [TorchBlock(held[f"blocks_{i}"]) for i in range(2)]
            self.blocks = torch.nn.ModuleList(blocks)
            self.head = torch.nn.Linear(16, 5)
            self.head.weight.data = torch.tensor(np.array(held["head"]["kernel"]).T.copy())
            self.head.bias.data = torch.tensor(np.array(held["head"]["bias"]))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return TorchNet()


def test_a_right_port_is_within_rounding_forward_and_backward(params: Any) -> None:
    found = anynan.compare(torch_twin(params), port(params), X)
    assert found.place is None, str(found)
    ways = [row.way for row in found.rows if row.ratio is not None]
    assert ways.count("forward") == 10
    assert ways.count("backward") >= 8
    assert not found.holes


def test_the_wrong_layer_of_a_port_is_named(params: Any) -> None:
    found = anynan.compare(torch_twin(params), port(params, eps=1e-3), X)
    assert found.place is not None
    assert (found.place.layer, found.place.other) == ("blocks.0.norm", "blocks_0.norm")


def test_a_kernel_that_was_ported_wrong_is_named(params: Any) -> None:
    wrong = copy.deepcopy(params)
    kernel = wrong["params"]["blocks_1"]["down"]["kernel"]
    wrong["params"]["blocks_1"]["down"]["kernel"] = kernel[::-1]
    found = anynan.compare(torch_twin(params), port(wrong), X)
    assert found.place is not None
    assert found.place.layer == "blocks.1.down"
    assert "weight  blocks.1.down.weight is nowhere in the second" in str(found)


def test_layers_inside_a_loop_are_said_not_to_be_seen(params: Any) -> None:
    def looped(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return Block(name="again").apply({"params": params["params"]["blocks_0"]}, x), None

        return jax.lax.scan(body, x, None, length=2)[0]

    found = anynan.compare(looped, looped, X)
    assert any("inside a loop of JAX" in note for note in found.notes)
