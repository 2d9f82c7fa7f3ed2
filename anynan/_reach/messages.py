"""What this room says."""

from anynan._base.messages import Message

STATE_MISSED = Message(
    "replay-state-missed", "the second run did not start with the first run's value of {what}"
)
ITERATOR_UNHELD = Message(
    "iterator-unheld",
    "the code reaches the iterator `{name}` through something that cannot be changed (a "
    "tuple, say), so a second run might take from it: keep it in a list, or pass each batch "
    "as an argument",
)
ANOTHER_THREAD = Message(
    "another-thread",
    "another thread ({name}) was running, so counters and containers that the code changes "
    "were not restored: the second run started with what the first left in them, and may have "
    "changed them",
)
REPLAY_STOPPED = Message("replay-stopped", "the second run stopped {where}")
