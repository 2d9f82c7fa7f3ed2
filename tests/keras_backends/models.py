"""Small models with something wrong in them, written for any backend of Keras."""

import keras
import numpy as np

LAYERS = ["first", "block", "block.dense", "block.inner", "last", ""]
NAMES = ["first", "block.dense", "last"]


class Log(keras.layers.Layer):
    def call(self, x):
        return keras.ops.log(x)  # bad log


class Root(keras.layers.Layer):
    def call(self, x):
        return keras.ops.sqrt(x)  # bad sqrt


class Block(keras.layers.Layer):
    def __init__(self, inner, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(4, name="dense")
        self.inner = inner

    def build(self, shape):
        self.dense.build(shape)
        self.inner.build((*shape[:-1], 4))

    def call(self, x):
        return self.inner(self.dense(x))


class Subclassed(keras.Model):
    def __init__(self, inner):
        super().__init__(name="net")
        self.first = keras.layers.Dense(4, activation="sigmoid", name="first")
        self.block = Block(inner, name="block")
        self.last = keras.layers.Dense(1, name="last")

    def call(self, x):
        return self.last(self.block(self.first(x)))


def functional(inner):
    x = inputs = keras.Input((4,), name="numbers")
    x = keras.layers.Dense(4, activation="sigmoid", name="first")(x)
    x = Block(inner, name="block")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="last")(x), name="net")


def subclassed(inner):
    model = Subclassed(inner)
    model(np.zeros((1, 4), "float32"))
    return model


KINDS = {"functional": functional, "subclassed": subclassed}


def compiled(inner, kind="functional", **options):
    model = KINDS[kind](inner)
    options = {"optimizer": keras.optimizers.SGD(0.01), "loss": "mse"} | options
    model.compile(**options)
    return model


def data(rows=8):
    values = np.random.default_rng(0)
    return (
        values.uniform(0.1, 1, (rows, 4)).astype("float32"),
        values.uniform(0.1, 1, (rows, 1)).astype("float32"),
    )


def dense(model):
    return next(x for x in model._flatten_layers() if x.name == "dense")


def positive(model):
    """Give the dense layer before the fault weights for which nothing goes wrong."""
    dense(model).set_weights([np.full((4, 4), 0.2, "float32"), np.full(4, 4, "float32")])
    return model


def zero(model):
    """Make that layer give zeros."""
    dense(model).set_weights([np.zeros((4, 4), "float32"), np.zeros(4, "float32")])
    return model


def line(file, mark):
    with open(file, encoding="utf-8") as text:
        return next(i for i, row in enumerate(text, 1) if row.rstrip().endswith(f"# {mark}"))


def layers(tracker, phase):
    return {reading.layer for reading in tracker.history.last() if reading.phase == phase}
