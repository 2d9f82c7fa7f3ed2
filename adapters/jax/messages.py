"""What this adapter says."""

from anynan._base.messages import Message

PROGRAM_UNWATCHED = Message(
    "program-unwatched", "{name} runs unwatched: its program could not be taken apart ({why})"
)
MODEL_BUILDS = Message(
    "model-builds",
    "this call of {name} builds a Keras model, so it ran unwatched; the next calls are watched",
)
OPERATION_OPAQUE = Message(
    "operation-opaque",
    "{name} is a black box: anynan watches what comes out of it, not what happens inside{why}",
)
LAYER_UNNAMED = Message(
    "layer-unnamed",
    "no layer of {names} has a name in reports: the step calls none, or JAX traced it before "
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
    "crash-unread", "anynan could not check whether a bad value led to this: {why}{more}"
)
GRADIENTS_UNLINKED = Message(
    "gradients-unlinked", "gradients are not listed under their forward operations: {why}"
)
EFFECT_NOT_RUN = Message("effect-not-run", "{name} was not run: it only has an effect")
INSIDE_NOT_SEEN = Message("inside-not-seen", "what is inside {name} was not seen")
RAN_AS_JAX = Message(
    "ran-as-jax",
    "anynan.compare() ran this function with JAX's arrays, as it neither is nor calls a model of "
    "PyTorch or Keras: functions are compared in JAX alone",
)
CLOSED_OVER = Message(
    "closed-over",
    "{count} arrays that the function closes over stay in float32: give them as arguments to have "
    "them cast",
)
CHECKED_BY_PROGRAM = Message(
    "checked-by-program",
    "the array in which the program itself found NaN or Inf, at {place}: "
    "anynan.jax.track(the function that makes it)",
)
NAN_GIVEN = Message(
    "nan-given",
    "what made the NaN that {name} was given: anynan.jax.track(the function that makes it)",
)
WENT_ON = Message(
    "went-on",
    "a number was NaN or Inf as it was read, at {place}, and the program went on with other steps: "
    "{origin} made it",
)
COMPILED_AHEAD = Message(
    "compiled-ahead", "what you compile by {name}.lower(...).compile(): call {name} itself"
)
EAGER_CALLS = Message(
    "eager-calls",
    "jax.numpy calls outside of jit and grad whose results no step took and nothing read: "
    "anynan.jax.track(the function around them)",
)
