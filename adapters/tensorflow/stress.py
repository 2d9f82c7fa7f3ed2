"""What a hunt needs of TensorFlow: to run a target, and the slope of a distance."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._apps.stress.edges import Edge
from anynan._apps.stress.lab import Array, Lab, Watch
from anynan._arrays.arguments import positional
from anynan.tensorflow.observe import layers_of, observe, takes, untouched
from anynan.tensorflow.tracking import track


def lab_of(target: Any, example: tuple[Any, ...]) -> Lab | None:
    """Give the lab of a model, a step or a function; None for what is not TensorFlow's."""
    return TensorflowLab(target, example) if takes(target, example, {}) else None


class TensorflowLab(Lab):
    """Run a model, a training step or a function on changed inputs."""

    door = staticmethod(track)
    imports = ("import tensorflow as tf",)

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.target, self.args = target, args
        python: Any = getattr(target, "python_function", target)
        self.parameters = positional(getattr(python, "call", python))
        self.shows = partial(observe, layers=layers_of(target))
        phases: set[str] = set()
        self.observe(target, args, lambda op: phases.add(op.phase))
        self.trains = "optimizer" in phases

    def is_array(self, x: Any) -> bool:
        """Tell what an array is that a hunt may change."""
        return isinstance(x, tf.Tensor) and x.dtype != tf.string

    def host(self, x: Any) -> Array:
        """Bring a tensor to the host; a bfloat16 in float32."""
        x = tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x
        return np.asarray(x)

    def like(self, new: Array, x: Any) -> Any:
        """Make a tensor of the same dtype."""
        return tf.cast(tf.constant(new), x.dtype)

    def code(self, x: Any) -> str:
        """Write an array of the same dtype."""
        return f"tf.cast({{}}, tf.{x.dtype.name})"

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put back what runs change."""
        return untouched(program)

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


def _distance(edge: Edge, x: Any) -> Any:
    distances = edge.distances(tf.cast(x, tf.float32))
    return tf.reduce_min(tf.where(tf.math.is_finite(distances), distances, np.inf))
