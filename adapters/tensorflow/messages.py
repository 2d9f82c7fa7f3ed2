"""What this adapter says."""

from anynan._runtime.messages import Message

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
INSIDE_LOOP = Message(
    "inside-loop",
    "{layer} runs inside a loop or a branch, and is read where that ends",
)
