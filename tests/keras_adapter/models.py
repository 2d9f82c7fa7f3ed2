"""Small models with something wrong in them, in TensorFlow's own operations."""

import keras
import tensorflow as tf

from tests.keras_backends.models import data, functional, layers, line, positive, zero

__all__ = [
    "WAYS", "Log", "Root", "compiled", "data", "functional", "layers", "line", "positive", "zero",
]  # fmt: skip

# The ways in which TensorFlow runs a model.
WAYS = {"graph": {}, "xla": {"jit_compile": True}, "eager": {"run_eagerly": True}}


class Log(keras.layers.Layer):
    def call(self, x):
        return tf.math.log(x)  # bad log


class Root(keras.layers.Layer):
    def call(self, x):
        return tf.sqrt(x)  # bad sqrt


def compiled(model, **options):
    # Plain SGD: what Adam adds to a graph, for each weight, takes longest to trace and compile.
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse", **options)
    return model
