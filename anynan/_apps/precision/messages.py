"""What this room says."""

from anynan._base.messages import Message

DOES_NOT_RUN = Message(
    "does-not-run-in-dtype",
    "the target does not run in {dtype} ({why}): anynan tells what breaks from its numbers in "
    "float32",
)
