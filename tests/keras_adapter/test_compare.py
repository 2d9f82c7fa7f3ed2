"""Where a PyTorch port parts from a Keras model, and one Keras model from another."""

import keras
import numpy as np
import pytest

import anynan
from tests.keras_backends.compare_checks import *  # noqa: F403

pytestmark = pytest.mark.tier(2)

torch = pytest.importorskip("torch")
X = np.random.default_rng(0).standard_normal((2, 8, 8, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="conv")(inputs)
    x = keras.layers.BatchNormalization(name="norm", epsilon=1e-3)(x)
    x = keras.layers.ReLU(name="act")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(5, name="head")(x))


class Port(torch.nn.Module):
    """The same network, with images the other way round and kernels turned."""

    def __init__(self, model, eps=1e-3):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4, eps=eps)
        self.act, self.pool = torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
        self.head = torch.nn.Linear(4, 5)
        for name, turn in (("conv", (3, 2, 0, 1)), ("head", (1, 0))):
            kernel, bias = (torch.tensor(x) for x in model.get_layer(name).get_weights())
            getattr(self, name).weight.data = kernel.permute(turn).contiguous()
            getattr(self, name).bias.data = bias
        self.eval()

    def forward(self, x):
        x = self.act(self.norm(self.conv(x.permute(0, 3, 1, 2))))
        return self.head(self.pool(x).flatten(1))


def test_a_right_port_is_within_rounding(model):
    found = anynan.compare(model, Port(model), X)
    assert found.place is None, str(found)
    forward = [row for row in found.rows if row.way == "forward" and row.ratio is not None]
    assert [row.layer for row in forward] == ["conv", "norm", "act", "pool", "head", ""]
    ways = {row.layer: row.way for row in found.rows if row.ratio is not None}
    assert ways["head"] == ways["norm"] == "backward"


def test_the_wrong_layer_of_a_port_is_named(model):
    found = anynan.compare(model, Port(model, eps=1e-5), X)
    assert found.place.layer == "norm"
    assert not found.settings, "PyTorch means something else by momentum"


def test_keras_on_another_backend_is_compared_by_a_file(model, tmp_path):
    anynan.comparing.capture(model, X).save(tmp_path / "keras.npz")
    original = anynan.comparing.Capture.load(tmp_path / "keras.npz")
    found = anynan.compare(Port(model, eps=1e-5), original, X)
    assert found.place.layer == "norm"
