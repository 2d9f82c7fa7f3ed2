"""Tensors that are ragged, sparse, empty, of text, or drawn anew."""

import pytest
import tensorflow as tf

import anynan
from tests.failing import failure

pytestmark = pytest.mark.tier(2)


def test_ragged_strings_integers_and_empty_batches():
    class Rag(tf.Module):
        def __call__(self, x):
            return tf.strings.length(x) if x.dtype == tf.string else tf.math.log(x)

    module = Rag()
    with anynan.tensorflow.track(module):
        module(tf.constant([["a", "bc"]]))
        module(tf.zeros((0, 4)))
        module(tf.ragged.constant([[1.0], [2.0, 3.0]]))
        with pytest.raises(anynan.NonFiniteError):
            module(tf.ragged.constant([[1.0], [-2.0, 3.0]]))


def test_the_values_of_a_sparse_tensor_are_looked_at():
    class Scale(tf.Module):
        def __call__(self, x):
            return tf.sparse.map_values(tf.math.log, x)

    def sparse(value):
        return tf.SparseTensor([[0, 1], [1, 0]], [1.0, value], (2, 2))

    module = Scale()
    with anynan.tensorflow.track(module):
        module(sparse(2.0))
        event = failure(module, sparse(-2.0))
    assert (event.kind, event.phase) == ("nan", "forward")


def test_numbers_that_are_drawn_anew_are_said():
    class Noisy(tf.Module):
        @tf.function
        def __call__(self, x):
            return tf.math.log(x - tf.random.uniform(x.shape, 2.0, 3.0))

    module = Noisy()
    with anynan.tensorflow.track(module), pytest.raises(anynan.NonFiniteError) as caught:
        module(tf.ones(3))
    assert caught.value.event.operation.name == "log"
    assert "RandomUniform drew other numbers in the second run" in str(caught.value)
