"""Take the turn of a loop that makes something bad out of the loop, however long that is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import while_loop as loops

from anynan._base.patches import Patches
from anynan.tensorflow.read.frames import here, is_loop
from anynan.tensorflow.read.probes import SCOPE, is_float


@contextmanager
def parted(value: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Have loops traced as the turns before the bad one, that turn by itself, and what follows.

    ``value`` gives the value of a tensor of a graph that is still traced.
    """

    def change(run: Any) -> Any:
        def call(cond: Any, body: Any, loop_vars: Any, *args: Any, **kwargs: Any) -> Any:
            graph, most = here(), kwargs.get("maximum_iterations")
            # A loop inside of a loop stays as it is, and one that says how its shapes change.
            if graph is None or is_loop(graph) or args or kwargs.get("shape_invariants"):
                return run(cond, body, loop_vars, *args, **kwargs)
            with tf.name_scope(SCOPE):
                count = _first_bad(run, cond, body, loop_vars, kwargs)
            with tf.init_scope():
                at = int(value(graph, count))
            if at == 0:
                return run(cond, body, loop_vars, **kwargs)
            before = run(cond, body, loop_vars, **kwargs | {"maximum_iterations": at - 1})
            rest = {"maximum_iterations": None if most is None else most - at}
            return run(cond, body, several(body(*several(before))), **kwargs | rest)

        return call

    with Patches() as patches:
        patches.change(loops, "while_loop", change)
        yield


def _first_bad(run: Any, cond: Any, body: Any, loop_vars: Any, kwargs: dict[str, Any]) -> Any:
    """Count the turns up to the first that makes something bad, 0 if none does."""

    def turn(count: Any, _: Any, *values: Any) -> Any:
        made = several(body(*values))
        return (count + 1, tf.logical_and(_fine(made), _wrote_fine(made, count)), *made)

    more = lambda _, fine, *values: tf.logical_and(fine, cond(*values))  # noqa: E731
    count, fine, *_ = run(more, turn, (0, _fine(loop_vars), *loop_vars), **kwargs)
    return tf.where(fine, 0, count)


def _fine(values: Any) -> Any:
    """Tell whether the arrays that a turn hands on are finite."""
    found = [x for x in tf.nest.flatten(values) if tf.is_tensor(x)]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in found if is_float(x)])


def _wrote_fine(values: Any, count: Any) -> Any:
    """Tell whether what a turn wrote at its own place of each list is finite."""
    lists = [x for x in tf.nest.flatten(values) if isinstance(x, tf.TensorArray)]
    known = [x for x in lists if x.element_shape.is_fully_defined()]
    return _fine([x.read(tf.minimum(count, x.size() - 1)) for x in known])


def several(found: Any) -> Any:
    """Give what a loop's body hands on as several values."""
    return found if isinstance(found, list | tuple) else (found,)
