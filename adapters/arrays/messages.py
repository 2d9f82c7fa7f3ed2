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
NUMPY_LOG = Message(
    "numpy-log",
    "NumPy's error log of this call has: {log}, which probably made the value that the program "
    "then refused",
)
NUMPY_LOG_UNREAD = Message(
    "numpy-log-unread",
    "NumPy's error log of this call has: {log}. The call returned and wrote nothing that could be "
    "read, so whether this does harm is not known: return the arrays, or give them to anynan.check",
)
STAND_IN_REFUSED = Message(
    "stand-in-refused",
    "anynan: in a tracked function an array is a stand-in (TrackedArray), which this code did "
    "not take: give it the plain array{where}, numpy.asarray(x), or pause the tracker",
)
NUMPY_LOG_FIRST = Message("numpy-log-first", "{why}; NumPy's error log of the first run has: {log}")
UNSEEN_AGAIN = Message(
    "unseen-again", "a second run gave the same value, and did not see which operation made it"
)
OUT_OF_SIGHT = Message("out-of-sight", "{why}{guess}")
CALL_NOT_AGAIN = Message("call-not-again", "the call was not run again: {error}")
NUMPY_HARM = Message(
    "numpy-harm", "whether it did harm is not known: anynan.track(function) follows it"
)
NUMPY_UNWATCHED = Message(
    "numpy-unwatched", "NumPy's arrays are not watched: anynan.track(function) finds where it began"
)
