"""What this adapter says."""

from anynan._base.messages import Message

STALE_GRAPH = Message(
    "stale-graph",
    "a tf.function that was traced before track() runs the tracked layers, and holds no check: "
    "call track() before the function runs for the first time, or make the function anew",
)
NESTED_GRADIENT = Message(
    "nested-gradient",
    "the forward pass ran in a tf.function of its own inside the tape: the gradients of its "
    "weights are read, those of its layers' outputs are not",
)
REPLICAS_FULL = Message(
    "replicas-full",
    "the step was traced so often on several replicas that there is no room for more readings: "
    "its last traces are not read",
)
JACOBIAN = Message(
    "jacobian", "GradientTape.jacobian is vectorised: what goes on inside of it is not read"
)
BATCH_INSIDE = Message(
    "batch-inside", "{why}: give it the batch as an argument, and the operation is named"
)
REPLICAS = Message(
    "replicas",
    "the step runs on several replicas, which cannot be run again: the report stays at layer level",
)
NESTED_FUNCTION = Message(
    "nested-function", "what runs in a nested function is not run again by itself"
)
NOT_UNDER_TAPE = Message(
    "not-under-tape",
    "what the gradient is of was not made by operations that ran under the tape, outside of "
    "compiled functions: anynan.tensorflow.track on the function around it names the operation",
)
DREW_OTHERS = Message("drew-others", "{drawn} drew other numbers when the step was run again")
GRAPH_OPTIMIZED = Message(
    "graph-optimized",
    "the graph ran as TensorFlow's optimizer made it, which moves factors, and was run again as it "
    "was written: tf.config.optimizer.set_experimental_options({{'disable_meta_optimizer': True}}) "
    "in front of the step shows whether the fault is the optimizer's",
)
LOOP_UNOPENED = Message(
    "loop-unopened",
    "the inside of a {what} of the graph is not looked into: written as a Python loop, or called "
    "as a plain function, its operations are named",
)
