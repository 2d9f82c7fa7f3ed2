"""What this room says."""

from anynan._runtime.messages import Message

OPERATIONS_UNSEEN = Message("operations-unseen", "level='operation' does not see every step: {why}")
NO_UPDATES = Message(
    "no-updates",
    "{option} has nothing to look at: {why}",
)
GIVEN_BY_ANOTHER = Message(
    "given-by-another",
    "what {name} is given {comes} {maker}, which was reported: what is bad because of it is no "
    "fault of its own",
)
PATIENCE = Message("patience", "skipped {n} of {most} bad steps in a row that patience= allows")
