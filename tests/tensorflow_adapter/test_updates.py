"""Weights that a program writes by itself, and numbers that it prints, have operation and line."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras_adapter.models import line
from tests.tensorflow_adapter.watching import watched

X = tf.constant(np.random.default_rng(0).normal(size=(8, 3)), tf.float32)
STEPS, BAD = 4, 2


class Own(keras.optimizers.Optimizer):
    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.moments = self.add_optimizer_variables(variables, "moment")

    def update_step(self, gradient, variable, learning_rate):
        moment = self.moments[self._get_variable_index(variable)]
        self.assign_add(moment, gradient)
        fine = tf.cast(self.iterations != BAD, tf.float32)
        self.assign_sub(variable, moment / tf.norm(moment * fine))  # own update

    def get_config(self):
        return {}


@pytest.mark.parametrize("way", ["eager", "graph", "fit", "fit eagerly"])
def test_the_arithmetic_of_an_optimizer_of_ones_own_is_told_with_its_line(way):
    net, optimizer = keras.Sequential([keras.layers.Dense(1)]), Own(learning_rate=0.1)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(X) ** 2)
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)

    def run():
        if way.startswith("fit"):
            net.compile(optimizer, "mse", run_eagerly=way != "fit", jit_compile=False)
            net.fit(X, X[:, :1], batch_size=2, verbose=0)
        else:
            one = tf.function(step) if way == "graph" else step
            for _ in range(STEPS):
                one()

    event = watched(run).events[0]
    assert (event.step, event.operation.name) == (BAD, "divide"), event
    assert event.operation.source.line == line(__file__, "own update")


def loop(write):
    """Train, and write a weight of another model by hand after each step."""
    net, target = (keras.Sequential([keras.layers.Dense(1)]) for _ in range(2))
    target(X)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(X) - target(X)) ** 2)
        weights = net.trainable_variables + target.trainable_variables
        keras.optimizers.SGD(0.01).apply(tape.gradient(loss, weights), weights)

    def run():
        for i in range(STEPS):
            step()
            write(target.trainable_variables[0].value, tf.constant(float(i != BAD)))

    return run


def by_hand(weight, scale):
    weight.assign(weight / tf.norm(scale))  # written by hand


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_that_is_written_between_steps_is_told_with_its_line(compiled):
    write = tf.function(by_hand, autograph=False) if compiled else by_hand
    event = watched(loop(write)).events[0]
    assert (event.phase, event.operation.name) == ("loss", "divide")
    assert event.operation.source.line == line(__file__, "written by hand")


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_are_written_well_make_no_steps_and_no_events(compiled):
    def write(weight, scale):
        weight.assign(weight * (1 - 0 * scale))

    found = watched(loop(tf.function(write) if compiled else write))
    assert not found.events
    assert f"in {STEPS} steps" in found.lines()[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_number_that_is_printed_where_nothing_trains_is_told_with_its_line(compiled):
    def spread(x):
        return x / (x - x)  # spread of one

    def run():
        one = tf.function(spread) if compiled else spread
        for _ in range(2000):  # more than is kept
            float(tf.reduce_sum(X))
        assert not np.isfinite(float(tf.reduce_mean(one(X))))

    (event,) = watched(run).events
    assert (event.operation.name, event.notes) == ("divide", ())
    assert event.operation.source.line == line(__file__, "spread of one")
