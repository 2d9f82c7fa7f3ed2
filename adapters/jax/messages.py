"""What this adapter says."""

from anynan._base.messages import Message

PROGRAM_UNWATCHED = Message(
    "program-unwatched", "{name} runs unwatched: its program could not be taken apart ({why})"
)
OPERATION_OPAQUE = Message(
    "operation-opaque",
    "{name} is a black box: anynan watches what comes out of it, not what happens inside{why}",
)
LAYER_UNNAMED = Message(
    "layer-unnamed",
    "no layer of {names} has a name in reports: JAX traced a jitted function inside before "
    "you tracked it; call track() before its first call",
)
SKIP_INSIDE = Message(
    "skip-inside",
    "{option} cannot drop an update inside your own jit, grad, vmap or pmap: track the "
    "outermost function, which takes and returns the weights",
)
CALLBACK_AGAIN = Message("callback-again", "the second run called {what} again")
PART_UNREAD = Message("part-unread", "the inside of a part of the step could not be read ({error})")
CRASH_UNREAD = Message(
    "crash-unread", "anynan could not look whether a bad value led to this: {why}{more}"
)
