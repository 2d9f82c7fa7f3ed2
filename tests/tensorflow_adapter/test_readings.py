"""What is read of a tensor in a graph tells what is bad, for every dtype, size and compiler."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan
from anynan.tensorflow.read import readings
from tests.failing import failure
from tests.tiers import first

NAN, INF = np.nan, np.inf
DTYPES = ["float32", "float16", "float8_e5m2", "bfloat16", "float64", "complex64"]
SHAPES = [(), (1,), (3,), (40, 3), (2, 3, 300)]
# One element alone is another case for a sum only, and XLA compiles each by itself.
FEW = [(), (3,), (2, 3, 300)]


LOOKS = {
    "exact": (readings.exact, False),
    "exact under XLA": (lambda tensors: readings.exact(tensors, xla=True), True),
    "scaled": (lambda tensors: readings.scaled(tensors, tf.identity(SCALE)), True),
}
SCALE = tf.Variable(readings.SCALE)


def rows(name, tensors):
    look, jit = LOOKS[name]
    run = tf.function(lambda *tensors: look(tensors), jit_compile=jit)
    return readings.read(run(*tensors).numpy())


def filled(shape, dtype, *bad):
    """Make a tensor of the largest numbers there are, with some bad values."""
    dtype = tf.as_dtype(dtype)
    top = float(dtype.real_dtype.max if dtype.is_complex else dtype.max)
    x = np.full(shape, top, np.complex128 if dtype.is_complex else np.float64)
    x.flat[: len(bad)] = bad
    return tf.cast(tf.constant(x), dtype)


@pytest.mark.parametrize("dtype", first(2, DTYPES))
@pytest.mark.parametrize("look", LOOKS)
def test_a_reading_tells_what_is_bad(look, dtype):
    tensors, expected = [], []
    for shape in FEW if look == "exact under XLA" else SHAPES:
        for value in (1.0, NAN, INF, -INF):
            if value == -INF and dtype.startswith("complex"):
                continue
            tensors.append(filled(shape, dtype, value))
            expected.append(value)
    low, high, there = rows(look, tensors)
    assert there.all()
    for lo, hi, value in zip(low, high, expected, strict=True):
        if value == 1.0:
            assert np.isfinite([lo, hi]).all()
        elif np.isnan(value):
            assert np.isnan([lo, hi]).all()
        elif dtype.startswith("complex"):  # the other part of an infinite product may be NaN
            assert not np.isfinite([lo, hi]).all()
        else:
            assert value in (lo, hi)
            assert -value not in (lo, hi)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_bad_reading_among_others_is_not_fine(value):
    good, bad = tf.ones(3), tf.constant([1.0, value])
    assert bool(readings.all_fine(readings.exact([good, good])))
    assert not bool(readings.all_fine(readings.exact([good, bad])))


def test_readings_of_several_dtypes_stay_in_their_order():
    tensors = [tf.constant(x, dtype) for x, dtype in ((1.0, "float32"), (2.0, "float16"))] * 2
    low, _, _ = rows("exact", [tensors[0], tensors[1], tensors[2] + 2])
    assert low.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("jit", "shape"), [(False, (64, 3)), (False, (192,)), (True, (64, 3))])
def test_the_largest_numbers_are_fine_and_a_nan_among_them_is_found(jit, shape):
    model = keras.Sequential([keras.Input(shape[1:]), keras.layers.Activation("linear")])
    with anynan.keras.track(model, action="record") as tracker:
        run = tf.function(lambda x: model(x) + 0.0, jit_compile=jit)
        x = np.tile(np.float32([3e38, -3e38, 1e-40]), 64).reshape(shape)
        run(tf.constant(x))
        assert not tracker.events
        x.flat[7] = np.nan
        x.flat[8] = np.inf
        run(tf.constant(x))
    assert [event.kind for event in tracker.events] == ["nan"]


# What the compiler could join with a factor of the reading's own.
FACTORS = {
    "over": lambda x: x / 1e-38,
    "twice": lambda x: (x * 1e20) * 1e20,
    "matmul": lambda x: x @ (tf.transpose(x) * 1e37),
    "sum": lambda x: tf.reduce_sum(x * 1e38, -1),
}


class Layer(tf.Module):
    def __init__(self, fn):
        super().__init__("layer")
        self.fn = fn

    def __call__(self, x):
        return self.fn(x)


# A graph folds constants into small tensors; XLA fuses large ones.
@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize(
    ("jit", "shape"), [(False, (2, 2)), pytest.param(True, (64, 128), marks=pytest.mark.tier(2))]
)
def test_an_overflow_through_a_constant_is_not_lost(name, shape, jit):
    layer = Layer(FACTORS[name])
    with anynan.tensorflow.track(layer):
        step = tf.function(lambda x: tf.reduce_sum(tf.tanh(layer(x))), jit_compile=jit)
        event = failure(step, tf.fill(shape, 10.0))
    assert (event.layer, event.kind) == ("", "posinf")
    assert event.operation is not None


@pytest.mark.parametrize("jit", first(1, [False, True]))
def test_infs_of_both_signs_are_no_nan(jit):
    layer = Layer(lambda x: 1 / x)
    with anynan.tensorflow.track(layer, action="record") as tracker:
        step = tf.function(layer.__call__, jit_compile=jit)
        step(tf.constant([1.0, 2.0, 3.0]))
        step(tf.constant([0.0, -0.0, 1.0]))
    (event,) = tracker.events
    assert (event.kind, event.operation.name) == ("posinf", "divide")
    kinds = [r.kind for r in tracker.history if r.phase == "forward"]
    assert kinds == [None, "posinf"]
