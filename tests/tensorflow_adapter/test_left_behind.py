"""What a second run and a tracker leave behind: nothing."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan

SEAMS = [
    (tf.GradientTape, "gradient"),
    (tf.GradientTape, "__enter__"),
    (keras.layers.Layer, "__call__"),
    (keras.optimizers.Optimizer, "apply"),
]


def test_a_second_run_leaves_what_the_code_counts_and_draws_as_its_own_run_did():
    def run(*, tracked):
        counts, noise = {"calls": 0}, np.zeros(2)

        def step(x):
            counts["calls"] += 1
            noise[...] += random.random() + np.random.rand()  # noqa: NPY002
            return tf.math.log(tf.reduce_sum(x) * 0 - 1)

        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        if tracked:
            step = anynan.tensorflow.track(step, action="record")
        step(tf.ones(2))
        if tracked:
            (event,) = step.events
            assert event.operation.name == "log"
            step.remove()
        return counts, noise.tolist(), random.random(), np.random.rand()  # noqa: NPY002

    assert run(tracked=True) == run(tracked=False)


@pytest.mark.parametrize("how", ["model", "function"])
def test_no_class_stays_changed_once_nothing_is_tracked(how):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    before = [getattr(*seam) for seam in SEAMS]
    tracker = anynan.tensorflow.track(model if how == "model" else (lambda x: model(x)))
    changed = [getattr(*seam) for seam in SEAMS]
    tracker.remove()
    assert changed != before
    assert [getattr(*seam) for seam in SEAMS] == before
