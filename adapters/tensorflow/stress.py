"""What a hunt needs of TensorFlow: to run a target, and the slope of a distance."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._apps.stress.edges import Edge
from anynan._apps.stress.lab import Array, Lab, Watch
from anynan._arrays.arguments import positional
from anynan.tensorflow.observe import TensorflowTarget, untouched
from anynan.tensorflow.tracking import track


class TensorflowLab(TensorflowTarget, Lab):
    """Run a model, a training step or a function on changed inputs."""

    door = staticmethod(track)
    imports = ("import tensorflow as tf",)

    def __init__(self, target: Any, *given: Any) -> None:
        super().__init__(target, *given)
        python: Any = getattr(target, "python_function", target)
        self.parameters = positional(getattr(python, "call", python))
        self.trains = "optimizer" in self.phases()

    def code(self, x: Any) -> str:
        """Write an array of the same dtype."""
        return f"tf.cast({{}}, tf.{x.dtype.name})"

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put back what runs change."""
        return untouched(program)

    def sloped(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Take the gradient of what a program gives."""

        def sloped(*xs: Any) -> Any:
            floats = [x for x in xs if x.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(floats)
                out = program(*xs)
                fractions = [x for x in tf.nest.flatten(out) if tf.as_dtype(x.dtype).is_floating]
            return out, tape.gradient(fractions, floats)

        sloped.__name__ = getattr(program, "__name__", "target")
        return sloped

    def slopes(
        self, program: Callable[..., Any], xs: Sequence[Any], watch: Watch
    ) -> list[Array | None]:
        """Run a program, and differentiate its smallest distance from an edge to its inputs."""
        floats, site = [x for x in xs if x.dtype.is_floating], watch.wanted
        with tf.GradientTape() as tape:
            tape.watch(floats)
            self.observe(program, xs, watch)
            kept = [x for x in watch.kept if np.size(x)]
            found = [] if site is None else [_distance(site.edge, x) for x in kept]
            least = tf.reduce_min(tf.stack(found)) if found else None
        slopes = iter([None] * len(floats) if least is None else tape.gradient(least, floats))
        grads = [next(slopes) if x.dtype.is_floating else None for x in xs]
        return [None if g is None else self.host(tf.convert_to_tensor(g)) for g in grads]


lab_of = TensorflowLab.of


def _distance(edge: Edge, x: Any) -> Any:
    distances = edge.distances(tf.cast(x, tf.float32))
    return tf.reduce_min(tf.where(tf.math.is_finite(distances), distances, np.inf))
