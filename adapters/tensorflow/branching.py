"""A condition in a graph whose branches cost nothing until they run."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def run_if(
    condition: Any,
    then: Any,
    inputs: Sequence[Any],
    otherwise: Callable[..., Any],
) -> Any:
    """Run one of two functions of the same tensors.

    ``tf.cond`` takes its branches apart, hands every tensor on through an operation of its own,
    and so costs as much again when the graph is made ready. Here a branch stays a function, which
    TensorFlow makes ready when it runs for the first time.

    Args:
        condition: A boolean tensor.
        then: What runs if it is true: a concrete function of the inputs.
        inputs: Tensors and resources.
        otherwise: What runs if it is not.

    Returns:
        The one tensor that both give.
    """
    other = traced(otherwise, inputs)
    (found,) = tf.raw_ops.If(
        cond=condition,
        input=list(inputs),
        Tout=[x.dtype for x in other.outputs],
        then_branch=then,
        else_branch=other,
    )
    found.set_shape(other.outputs[0].shape)
    return found


def traced(fn: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Trace a function of these tensors."""
    specs = [tf.TensorSpec(x.shape, x.dtype, name=f"x{i}") for i, x in enumerate(inputs)]
    return tf.function(fn, autograph=False).get_concrete_function(*specs)
