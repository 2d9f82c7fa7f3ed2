"""What this adapter says."""

from anynan._base.messages import Message

STALE_GRAPH = Message(
    "stale-graph",
    "a tf.function that runs the tracked layers was traced before track(), so it holds no "
    "checks: call track() before the function's first call, or make a new tf.function",
)
NESTED_GRADIENT = Message(
    "nested-gradient",
    "the forward pass ran in its own tf.function inside the tape: the gradients of its "
    "weights are read, but not those of its layers' outputs",
)
REPLICAS_FULL = Message(
    "replicas-full",
    "the step was traced so often on several replicas that there is no room for more "
    "readings: its last traces are not read",
)
JACOBIAN = Message(
    "jacobian", "GradientTape.jacobian runs vectorised: what happens inside is not read"
)
BATCH_INSIDE = Message(
    "batch-inside", "{why}: pass the batch as an argument, and the report names the operation"
)
REPLICAS = Message(
    "replicas",
    "the step runs on several replicas and cannot be run again, so the report names no operation",
)
NESTED_FUNCTION = Message("nested-function", "a nested function cannot be run again on its own")
NOT_UNDER_TAPE = Message(
    "not-under-tape",
    "what this is the gradient of was not computed under the tape, or inside a compiled "
    "function: track the function around it with anynan.tensorflow.track, and the report "
    "names the operation",
)
FUNCTION_UNWATCHED = Message(
    "function-unwatched",
    "{name}, a tf.function that takes no gradient: anynan.tensorflow.track({name})",
)
DREW_OTHERS = Message("drew-others", "{drawn} drew other numbers in the second run")
GRAPH_OPTIMIZED = Message(
    "graph-optimized",
    "the first run used the graph that TensorFlow's optimizer rewrote, which moves factors; "
    "the second run used the graph as you wrote it: call "
    "tf.config.optimizer.set_experimental_options({{'disable_meta_optimizer': True}}) before "
    "the step to see whether the optimizer makes the fault",
)
LOOP_UNOPENED = Message(
    "loop-unopened",
    "the inside of a {what} of the graph is not watched: write it as a Python loop, or call "
    "it as a plain function, and the report names its operations",
)
