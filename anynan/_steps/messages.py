"""What this room says."""

from anynan._base.messages import Message

STEPS_UNSEEN = Message("steps-unseen", "level='operation' does not see every step: {why}")
NO_UPDATES = Message("no-updates", "{option} has nothing to look at: {why}")
GIVEN_BY_ANOTHER = Message(
    "given-by-another",
    "what {name} is given {comes} {maker}, which was reported: what is bad because of it is no "
    "fault of its own",
)
PATIENCE = Message("patience", "skipped {n} of {most} bad steps in a row that patience= allows")
EXPECTED_HARM = Message(
    "expected-harm", "expected where it was made ({why}), but it came to harm outside"
)
NOT_REPLAYED_AGAIN = Message(
    "not-replayed-again", "not replayed again: the first {n} like this were"
)
REPLAY_FAILED = Message("replay-failed", "the replay failed: {error}")
BUNDLE_UNSAVED = Message("bundle-unsaved", "no bundle was saved: {error}")
WATCHED_CLOSELY = Message("watched-closely", "{what}, until this comes back and is named")
WEIGHTS_BAD_SINCE = Message(
    "weights-bad-since",
    "{since} (action={action}): what is bad because of it is counted there, and not looked into",
)
LAYER_UNWATCHED = Message("layer-unwatched", "{what} is not watched: {error}")
INSIDE_LOOP = Message(
    "inside-loop",
    "{layer} runs inside a loop or a branch, and is read where that ends",
)
