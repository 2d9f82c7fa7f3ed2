"""Sessions of TensorFlow 1 in a watched program: each run that gives numbers is a step."""

import gc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from anynan import _everywhere
from anynan.options import Options
from anynan.tensorflow.session import runs
from anynan.tensorflow.watchall import watch_all
from tests.keras_adapter.models import line

v1 = tf.compat.v1
X, Y = np.arange(6.0).reshape(2, 3) / 6, np.eye(2)


@contextmanager
def graph(*, watched=True):
    """Make a graph of the old kind, and watch what is run of it."""
    found = _everywhere.Found()
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        end = watch_all(Options(action="record"), found) if watched else lambda: None
        yield found
        end()


@contextmanager
def begun():
    """Open a session whose variables have their first values."""
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        yield session


def classify(resource):
    """Make a classifier whose logarithm meets 0 where the input is large."""
    x, y = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.float32, [None, 2])
    w = v1.get_variable("w", [3, 2], initializer=v1.zeros_initializer(), use_resource=resource)
    p = tf.nn.softmax(tf.matmul(x, w))
    loss = -tf.reduce_mean(y * tf.math.log(p))  # the logarithm
    return x, y, loss, v1.train.GradientDescentOptimizer(0.1).minimize(loss)


def ran(scales, *, resource=False, watched=True):
    with graph(watched=watched) as found:
        x, y, loss, train = classify(resource)
        with begun() as session:
            feeds = [{x: scale * X, y: Y} for scale in scales]
            out = [session.run({"train": train, "loss": loss}, feed)["loss"] for feed in feeds]
    return out, found


@pytest.mark.parametrize("resource", [False, True])
def test_a_run_that_updates_weights_names_operation_and_line(resource):
    out, found = ran([1.0, 1.0, 1e4], resource=resource)
    assert not np.isfinite(out[2])
    (event,) = found.events
    assert (event.operation.name, event.phase, event.step) == ("log", "loss", 2)
    assert event.operation.source.line == line(__file__, "the logarithm")
    assert event.cause.tag == "log_of_zero"
    assert event.operation.inputs[0].min == 0


def test_a_clean_program_gives_the_same_numbers_and_no_word():
    out, found = ran([1.0] * 4)
    assert out == ran([1.0] * 4, watched=False)[0]
    assert found.events == []


def test_a_run_without_an_update_is_a_step_and_one_without_numbers_is_none():
    with graph() as found:
        x = v1.placeholder(tf.float32, [])
        root, parts = tf.sqrt(x), [tf.argmax([1, 2])]
        with v1.Session() as session:
            for value in (4.0, -1.0):
                session.run([root, root * 2], {x: value})
            session.run(parts)
        (tracker,) = found.living()
        assert len(tracker.history) == 2
    (event,) = found.events
    assert event.operation.name == "sqrt"


@pytest.mark.parametrize("asked", [["train"], ["train", "loss"], ["loss", "train", "slope"]])
def test_a_gradient_that_is_bad_is_read_where_the_loss_is_finite(asked):
    with graph() as found:
        w = v1.get_variable("w", initializer=[1.0, 0.0], use_resource=False)
        loss = tf.math.log(w)[0]  # the slope of what is left out
        (slope,) = tf.gradients(loss, w)
        train = v1.train.GradientDescentOptimizer(0.1).apply_gradients([(slope, w)])
        with begun() as session:
            known = {"train": train, "loss": loss, "slope": slope}
            session.run([known[name] for name in asked])
            session.run([train, loss])
    event = found.events[0]
    assert event.step == 0
    assert event.operation.source.line == line(__file__, "the slope of what is left out")


def test_the_second_run_is_given_what_the_first_one_drew():
    def drawn(watched):
        out = []
        with graph(watched=watched) as found, v1.Session() as session:
            share = tf.reduce_max(tf.nn.dropout(tf.ones(4), rate=0.5))
            score = share * tf.math.log(share)
            while np.isfinite(out).all():
                out.append(session.run(score) if len(out) % 2 else session.run([score])[0])
        return out, found

    out, found = drawn(True)
    assert np.array_equal(out, drawn(False)[0], equal_nan=True)
    (event,) = found.events
    assert (event.operation.name, event.notes) == ("log", ())


def test_a_run_that_cannot_be_watched_is_as_it_is_and_that_is_said(monkeypatch):
    def refuses(*_):
        raise ValueError("a graph of another kind")

    monkeypatch.setattr(runs, "Part", refuses)
    out, found = ran([1.0])
    assert np.isfinite(out).all()
    said = "a run of a session: ValueError: a graph of another kind"
    assert any(said in text for text in found.lines())


def test_graphs_that_are_gone_are_not_kept():
    end, graphs = watch_all(Options(action="record"), _everywhere.Found()), []
    for _ in range(4):
        with tf.Graph().as_default() as made:
            x, y, loss, train = classify(resource=True)
            with begun() as session:
                session.run([train, loss], {x: X, y: Y})
            graphs.append(weakref.ref(made))
    del made, session, x, y, loss, train
    gc.collect()
    assert sum(ref() is not None for ref in graphs) <= 1  # that of the last step
    end()
