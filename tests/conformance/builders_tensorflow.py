"""How TensorFlow builds and tracks the programs of ``recipes_operations``.

TensorFlow is imported by the first program: it takes seconds, and may come only after PyTorch.
"""

import functools
from typing import Any

import anynan
from tests.backends import Backend, Space
from tests.conformance.recipes_operations import StepRecipe, layered
from tests.flat import split

# What is varied: how the step is compiled, and the options of ``track``.
# Whether they differ in more than when a value is read.
DIFFER = True
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"compiled": None},
    "graph": {"compiled": False},
    "xla": {"compiled": True},
}
CAUSE_VARIANTS = {"graph": VARIANTS["graph"]}

# Recipes that TensorFlow, or one way of running it, cannot follow, and why.
DIFFERENCES = {
    **dict.fromkeys(
        ["where_gradient_trap[eager]", "where_gradient_trap[graph]"],
        "TensorFlow's own kernel takes the slope of a square root for 0 where the gradient that "
        "comes in is 0; XLA's does not",
    ),
    "near_the_end_of_the_dtype[graph]": "TensorFlow's graph optimizer moves the factor, and makes "
    "a NaN that is not in the code: tensorflow_adapter/test_functions.py",
}

# Where a fix is tried.
TRIES = {backend for backend in Backend if backend.library == "tensorflow"}


class Ops:
    """Hand out TensorFlow's functions under the array API's names."""

    def __init__(self, tf: Any) -> None:
        self.sum, self.max, self.minimum = tf.reduce_sum, tf.reduce_max, tf.minimum
        self.log, self.exp, self.sqrt, self.acos = tf.math.log, tf.exp, tf.sqrt, tf.acos
        self.where, self.matmul = tf.where, tf.matmul
        self.concat, self.softmax = tf.concat, functools.partial(tf.nn.softmax, axis=-1)
        self.stop_gradient, self.array = tf.stop_gradient, tf.constant
        self.log1p, self.atanh, self.acosh, self.sin = tf.math.log1p, tf.atanh, tf.acosh, tf.sin
        self.xlogy, self.rsqrt, self.lgamma = tf.math.xlogy, tf.math.rsqrt, tf.math.lgamma
        self.igamma = tf.math.igamma
        self.remainder, self.atan2, self.mean = tf.math.floormod, tf.atan2, tf.reduce_mean
        self.log_softmax = functools.partial(tf.nn.log_softmax, axis=-1)
        self.astype, self.float32, self.linalg = tf.cast, tf.float32, tf.linalg
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        self.losses_of_class_1 = functools.partial(cross_entropy, [1])


class Program:
    def __init__(
        self, recipe: StepRecipe, space: Space, *, compiled: bool | None, **options: Any
    ) -> None:
        import tensorflow as tf

        ops = Ops(tf)
        self.space, self.dtype = space, recipe.dtype
        self.weight = tf.Variable(space.array([1.0], recipe.dtype))
        net = layered(tf.Module, recipe, ops, self.weight)

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = recipe.loss(ops, net(x))
            return loss, tape.gradient(loss, net.scale.weight)

        fn = step if compiled is None else tf.function(step, jit_compile=compiled)
        self.tracker: anynan.Tracker = anynan.tensorflow.track(fn, **split(options))

    def step(self, values: Any) -> None:
        self.tracker(self.space.array(values, self.dtype))

    def spoil(self) -> None:
        """Write NaN into the weight, between two steps."""
        self.weight.assign([float("nan")])
