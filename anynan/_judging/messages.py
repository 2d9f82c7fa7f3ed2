"""What this room says."""

from anynan._runtime.messages import Message

OPERATIONS_UNSEEN = Message("operations-unseen", "level='operation' does not see every step: {why}")
NO_UPDATES = Message(
    "no-updates",
    "{option} has nothing to look at: {why}",
)
GIVEN_BY_ANOTHER = Message(
    "given-by-another",
    "what {name} is given {comes} {maker}, which was reported: nothing that follows from it is put "
    "down to {name}",
)
PATIENCE = Message("patience", "skipped {n} of {most} bad steps in a row that patience= allows")
