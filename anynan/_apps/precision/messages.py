"""What this room says."""

from anynan._base.messages import Message

NOT_CAST = Message(
    "not-cast",
    "what a {kind} holds was not cast to {dtype}: give arrays in dicts, lists, tuples or "
    "dataclasses",
)
DOES_NOT_RUN = Message(
    "does-not-run-in-dtype",
    "the target does not run in {dtype} ({why}): anynan tells what breaks from its numbers in "
    "float32",
)
