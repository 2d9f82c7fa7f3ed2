"""What breaks first in half precision, in Keras and TensorFlow."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from tests.keras_backends.compare_checks import (
    Gated,
    test_a_product_between_two_layers_is_found_and_the_code_of_the_plan_cures_it,  # noqa: F401
    test_bfloat16_fits,  # noqa: F401
)


def test_a_training_step_is_run_with_the_layers_it_uses():
    model = keras.Sequential([keras.layers.Dense(4, name="one"), Gated(name="mlp")])
    x = np.ones((4, 8), np.float32)
    model(x)
    before = [keras.ops.convert_to_numpy(v) for v in model.variables]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(x), tf.float32))
        return loss, tape.gradient(loss, model.trainable_variables)

    report = anynan.precision(step, tf.constant(x), plan=False)
    assert (report.first().name, report.first().layer) == ("multiply", "mlp")
    assert {row.phase for row in report.rows} >= {"forward", "backward"}
    after = [keras.ops.convert_to_numpy(v) for v in model.variables]
    assert all(map(np.array_equal, before, after))
    assert all(layer.compute_dtype == "float32" for layer in model.layers)


def test_a_module_whose_variables_stay_float32_never_fits():
    class Scale(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable([2.0, 3.0])

        def __call__(self, x):
            return x * self.w

    report = anynan.precision(Scale(), tf.constant([1.0, 1.0]))
    assert not report.fits
    assert report.sentence().startswith("not known")
    with pytest.raises(ValueError, match="TensorFlow without Keras has no autocast"):
        anynan.precision(Scale(), tf.constant([1.0, 1.0]), how="autocast")
