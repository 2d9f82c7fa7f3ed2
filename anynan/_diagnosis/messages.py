"""What this room says."""

from anynan._base.messages import Message

REPLAY_CLEAN = Message(
    "replay-clean",
    "the second run did not reproduce this, so the report names no operation: the step may "
    "have used other data, drawn other random numbers, or started from another state",
)
GRADIENT_FINITE = Message(
    "gradient-finite",
    "a second run gave this weight a finite gradient, so the report stays at layer level: what "
    "made it bad is not known. It may have been written to after the backward pass, or the first "
    "run had other data, other random numbers or another state",
)
REPLAY_PARTED = Message(
    "replay-parted",
    "the second run saw other values than the first: {parted}; so it proves nothing, and the "
    "report names no operation (code that reads its own data, counts its own steps or draws "
    "from its own generator runs differently the second time)",
)
COMPILED_ONLY = Message(
    "compiled-only",
    "the second run, uncompiled, was clean, so the report names no operation: the fault "
    "appears only in compiled code, which fuses, reorders and rounds arithmetic differently "
    "(or the code asks whether it is compiled)",
)
CALL_ALONE = Message(
    "call-alone",
    "a second run of the whole step did not show this; a second run of the model's call alone "
    "did, with the arguments of the first",
)
NOT_PUT_BACK = Message("replay-restored-not", "{who} could not restore {what}")
OPERATION_BLIND = Message("replay-operation-blind", "the second run could not read {what}: {error}")
OPERATION_UNSEEN = Message(
    "operation-unseen",
    "anynan watched every operation of the step, and none of them made this: code that it cannot "
    "watch did, or something wrote past the framework",
)
INFERRED = Message("inferred", "the cause, {what}, is inferred: {why}")
GREW = Message(
    "grew", "{jump}: the update between was probably too large, so try a lower learning rate first"
)
ALSO_BAD = Message("also-bad", "{names} too; whether it matters is not known")
MANY_WEIGHTS = Message(
    "many-weights",
    "the gradients of {count} weights are bad, and it is not known which was first{likely}; "
    "level='layer' reads them in the order in which they are computed",
)
HIDDEN_BEFORE = Message(
    "hidden-before", "the same happened earlier in `{layer}`, where it was hidden again: fix both"
)
CONTAINED = Message(
    "contained", "contained: its bad values reached no layer output, loss or gradient"
)
UNSEEN_TO_LOSS = Message(
    "unseen-to-loss",
    "its way to the loss is outside the model, where nothing is watched: track the training step "
    "function to be sure",
)
FIRST_LOOK = Message(
    "first-look", "{name} was bad when anynan first read it: nothing in this run corrupted it"
)
BUFFER_NOW = Message("buffer-now", "{name} is bad now; whether it was before this is not known")
MORE_WEIGHTS = Message("more-weights", "{count} more {word} bad too: {names}")
NO_SECOND_RUN = Message("no-second-run", "{why}")
