"""What this adapter says."""

from anynan._base.messages import Message

PROGRAM_UNWATCHED = Message(
    "program-unwatched", "{name} runs unwatched: its program could not be taken apart ({why})"
)
OPERATION_OPAQUE = Message(
    "operation-opaque",
    "{name} is run as it is: its inside is not watched, only what comes out of it{why}",
)
LAYER_UNNAMED = Message(
    "layer-unnamed",
    "no layer of {names} was named: a jitted function inside was traced before it was tracked; "
    "track it before its first call",
)
SKIP_INSIDE = Message(
    "skip-inside",
    "{option} drops no update inside the caller's own jit, grad, vmap or pmap: track the "
    "outermost function, which takes and returns the weights",
)
CALLBACK_AGAIN = Message("callback-again", "{what} was called again in the replay")
