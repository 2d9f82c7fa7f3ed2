"""What this room says."""

from anynan._base.messages import Message

STEPS_UNSEEN = Message("steps-unseen", "level='operation' does not see every step: {why}")
NO_UPDATES = Message("no-updates", "{option} has nothing to judge: {why}")
GIVEN_BY_ANOTHER = Message(
    "given-by-another",
    "the input of {name} {comes} {maker}, which was reported: what goes bad because of it is "
    "not reported again",
)
MAY_FOLLOW = Message(
    "may-follow",
    "this may follow from step {step} of {maker}, which was reported{since}: fix that first",
)
NUMPY_BEFORE = Message(
    "numpy-before", "NumPy met before this: {errors}; what came in bad may be from there"
)
MADE_BEFORE = Message("made-before", "known by its time: {what}")
INPUT_COMPUTED = Message(
    "input-computed",
    "your code computed this input, last by {operation}, before it called {name}: {instead} names "
    "the operation that made it bad",
)
INPUT_TRAINED = Message(
    "input-trained",
    "your code trains this input, which has a gradient of its own: it is not data, and an update "
    "may have made it bad before {name} was called; {instead} watches that, too",
)
MAY_HAVE_RAISED = Message(
    "may-have-raised",
    "the exception that ended this step may be because of it: what it was raised over is finite, "
    "but this NaN may have decided what that was",
)
PATIENCE = Message(
    "patience", "skipped {n} of {most} bad steps in a row that Advanced(patience={most}) allows"
)
EXPECTED_HARM = Message(
    "expected-harm", "expected where it was made ({why}), but it did harm outside"
)
NOT_REPLAYED_AGAIN = Message("not-replayed-again", "not run again: the first {n} like this were")
REPLAY_FAILED = Message("replay-failed", "the second run failed: {error}")
WATCHED_CLOSELY = Message("watched-closely", "{what}, until this comes back and is named")
WEIGHTS_BAD_SINCE = Message(
    "weights-bad-since",
    "{since} (action={action}): what goes bad because of it counts as its consequence",
)
MODEL_GONE = Message(
    "model-gone",
    "the model no longer existed when anynan read this, so its last step cannot be run again",
)
LAYER_UNWATCHED = Message("layer-unwatched", "{what} is not watched: {error}")
INSIDE_LOOP = Message(
    "inside-loop", "{layer} runs inside a loop or a branch, and is read when that ends"
)
WATCHED_FOUND = Message("watched-found", "found because {what}")
WATCHED_OVER = Message(
    "watched-over",
    "what was not reproduced in step {since} did not come back in {steps} steps: {over}",
)
UNMEASURED = Message("unmeasured", "{what}: {error}")
RANKS_TOO = Message(
    "ranks-too", "{ranks} had bad readings in this step, too; the first was on rank {first}"
)
SAME_INPUT = Message(
    "same-input", "the same bad values came in as in step {step}, which was reported"
)
ALLOW_IT = Message("allow-it", "if this is intended: {policy}")
METRIC_BAD = Message(
    "metric-bad",
    "{name} is {value} at the end of an epoch, and nothing else that was read was bad: the metric "
    "itself probably made it, such as 0/0 where a class has no samples",
)
