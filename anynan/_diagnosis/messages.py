"""What this room says."""

from anynan._base.messages import Message

REPLAY_CLEAN = Message(
    "replay-clean",
    "the replay did not reproduce this, so the report stays at layer level: the step may have "
    "taken other data, drawn other random numbers, or begun in another state",
)
GRADIENT_FINITE = Message(
    "gradient-finite",
    "a second run gave this weight a finite gradient, so the report stays at layer level: what "
    "made it bad is not known. It may have been written to after the backward pass, or the first "
    "run had other data, other random numbers or another state",
)
REPLAY_PARTED = Message(
    "replay-parted",
    "the replay saw other values than the first run: {parted}; so it proves nothing, and the "
    "report stays at layer level (code that takes its own data, counts its own steps or draws "
    "from its own generator runs differently the second time)",
)
COMPILED_ONLY = Message(
    "compiled-only",
    "the step was run again uncompiled, and was clean: the fault appears only when compiled, where "
    "arithmetic is fused, reordered and rounded elsewhere (or the code asks whether it is "
    "compiled), so the report stays at layer level",
)
CALL_ALONE = Message(
    "call-alone",
    "a second run of the whole step did not show this; one of the model's own call did, with the "
    "arguments of the first time",
)
NOT_PUT_BACK = Message("replay-restored-not", "{who} could not put back {what}")
OPERATION_BLIND = Message(
    "replay-operation-blind", "{what} could not be looked at in the replay: {error}"
)
OPERATION_UNSEEN = Message(
    "operation-unseen",
    "every operation of the step was watched, and none was seen making this: it came from code "
    "that cannot be watched, or was written past the framework",
)
INFERRED = Message("inferred", "that {what} did it is inferred: {why}")
ALSO_BAD = Message("also-bad", "{names} too; whether it matters is not known")
MANY_WEIGHTS = Message(
    "many-weights",
    "the gradients of {count} weights are bad, and which was first is not known{likely}; "
    "level='layer' reads them in the order in which they are made",
)
HIDDEN_BEFORE = Message(
    "hidden-before",
    "the same happened before in `{layer}`, where it was hidden again: mend both",
)
CONTAINED = Message(
    "contained", "contained: its bad values reached no layer output, loss or gradient"
)
