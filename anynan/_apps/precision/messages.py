"""What this room says."""

from anynan._base.messages import Message

ROUNDED_INSTEAD = Message(
    "rounded-instead",
    "the target does not run with how={how!r} ({why}): anynan rounded every result of a float32 "
    "run instead",
)
