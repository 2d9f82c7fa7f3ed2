"""What breaks first in half precision in a Keras model, on every backend alike."""

import keras
import numpy as np

import anynan

X = np.ones((4, 8), np.float32)


class Gated(keras.layers.Layer):
    """Overflow between two layers: 400 * 400 is beyond float16."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        wide = {
            "kernel_initializer": "zeros",
            "bias_initializer": keras.initializers.Constant(400.0),
        }
        self.gate = keras.layers.Dense(8, name="gate", **wide)
        self.up = keras.layers.Dense(8, name="up", **wide)
        small = keras.initializers.Constant(2.5e-3)
        self.down = keras.layers.Dense(8, name="down", kernel_initializer=small)

    def call(self, x):
        return self.down(keras.ops.silu(self.gate(x)) * self.up(x))


def net():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Dense(8, name="first"),
            Gated(name="mlp"),
            keras.layers.Rescaling(1e-3),
            keras.layers.Dense(4, name="last"),
        ]
    )
    model(X)
    return model


def finite(model):
    return bool(np.isfinite(keras.ops.convert_to_numpy(model(X))).all())


def test_a_product_between_two_layers_is_found_and_the_code_of_the_plan_cures_it():
    model = net()
    report = anynan.precision(model, X)
    found = report.first()
    assert (found.name, found.layer, found.kind) == ("multiply", "mlp", "overflow")
    assert "silu(self.gate(x)) * self.up(x)" in found.source.text
    assert report.plan.finite
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    assert policies == {"float32"}
    for layer in model._flatten_layers():
        layer.dtype_policy = "mixed_float16"
    assert not finite(model)
    exec(report.code, {"model": model})
    assert finite(model)
    assert model.layers[0].compute_dtype == "float16"


def test_bfloat16_fits():
    assert anynan.precision(net(), X, dtype="bfloat16").fits
