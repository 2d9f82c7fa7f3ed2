"""What this room says."""

from anynan._base.messages import Message

PLAIN_ARRAY = Message(
    "plain-array",
    "a plain array was taken out of a tracked one{where} (by asarray, a conversion or compiled "
    "code): what is computed from it is not watched until it comes back",
)
ARGUMENT_OPAQUE = Message(
    "argument-opaque",
    "the argument {name} is a {kind}: operations on it are not watched, only its values when "
    "it comes in and when the call ends",
)
PATTERN_UNMATCHED = Message(
    "pattern-unmatched",
    "{option}={pattern} matched no scope in the first call; the scopes were: {known}",
)
SCALAR_DEFERRED = Message(
    "scalar-deferred",
    "the arguments of this call were not kept (Advanced(read=n) waits for n calls), so only the "
    "extremes of operands are known",
)
ARGUMENTS_OVERWRITTEN = Message(
    "arguments-overwritten",
    "the call wrote into its own arguments, so it was not run again, and only the extremes of "
    "operands are known",
)
ARRAY_PARTED = Message("array-parted", "{parted}, so only the extremes of operands are known")
