"""What a second run and a tracker leave behind: nothing."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import anynan

SEAMS = [
    *((tf.GradientTape, x) for x in ("gradient", "jacobian", "batch_jacobian")),
    *((tf.GradientTape, x) for x in ("__enter__", "__exit__")),
    *((keras.Model, f"make_{x}_function") for x in ("train", "test", "predict")),
    (keras.layers.Layer, "__call__"),
    (keras.optimizers.Optimizer, "apply"),
    (keras.optimizers.LossScaleOptimizer, "apply"),
    (type(tf.function(len)), "__call__"),
]


def test_what_a_fixed_run_counts_draws_and_keeps_is_put_back():
    def run(*, tracked):
        counts, noise, seen = {"calls": 0}, np.zeros(2), []

        def step(x):
            counts["calls"] += 1
            noise[...] += random.random() + np.random.rand()  # noqa: NPY002
            ratio = tf.reduce_sum(x * 0 / (x * 0))
            seen.append(str(float(ratio)))
            return ratio

        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        if tracked:
            step = anynan.tensorflow.track(step, action="record")
        step(tf.ones(2))
        if tracked:
            (event,) = step.events
            assert (event.operation.name, event.tried.outcome) == ("divide", "finite")
            step.remove()
        return counts, noise.tolist(), seen, random.random(), np.random.rand()  # noqa: NPY002

    assert run(tracked=True) == run(tracked=False)


@pytest.mark.parametrize("how", ["model", "function"])
def test_no_class_stays_changed_once_nothing_is_tracked(how):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    before = [getattr(*seam) for seam in SEAMS]
    tracker = anynan.tensorflow.track(model if how == "model" else (lambda x: model(x)))
    changed = [getattr(*seam) for seam in SEAMS]
    tracker.remove()
    tracker.remove()
    assert changed != before
    assert [getattr(*seam) for seam in SEAMS] == before
