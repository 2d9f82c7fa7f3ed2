"""How far an update moves the weights, from a sample of each, in one step of so many."""

import threading
from typing import Any

import tensorflow as tf

from anynan._readings.moves import due, moved, stride
from anynan._readings.step import Step
from anynan.tensorflow.read.weights import Weights, read


class Moves(threading.local):
    """Keep samples of the weights from the beginning of a step to its end.

    Args:
        every: One step in so many is looked at; None for none.
        weights: The weights.
    """

    def __init__(self, every: int | None, weights: Weights) -> None:
        self._every, self._weights = every, weights
        self._step = -1
        self._kept: list[tuple[str, Any, Any]] = []

    def before(self, step: int) -> None:
        """Keep the weights as they are, if it is this step's turn."""
        if not due(self._every, step) or step == self._step:
            return
        self._step = step
        self._kept = [(layer, one, _sample(one)) for layer, one in self._weights.floats()]

    def after(self, rows: Step, *, trained: bool) -> None:
        """Write how far they have moved into the step's rows."""
        kept, self._kept = self._kept, []
        if not kept or not trained or rows.number != self._step or rows.failed is not None:
            return
        pairs = []
        for _, one, old in kept:
            start, end = _wide(old), _wide(_sample(one))
            pairs.append(tf.cast(tf.stack([tf.norm(end - start), tf.norm(start)]), tf.float64))
        moved(
            rows, [(layer, one.shape) for layer, one, _ in kept], tf.stack(pairs).numpy().tolist()
        )


def _sample(variable: Any) -> Any:
    return tf.reshape(read(variable), [-1])[:: stride(variable.shape)]


def _wide(x: Any) -> Any:
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
