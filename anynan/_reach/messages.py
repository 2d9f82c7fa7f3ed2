"""What this room says."""

from anynan._base.messages import Message

STATE_MISSED = Message(
    "replay-state-missed", "the second run did not begin with the first run's value of {what}"
)
ITERATOR_UNHELD = Message(
    "iterator-unheld",
    "the code reaches the iterator `{name}`, for which nothing can stand where it is held (as in a "
    "tuple), and a second run might take from it: hold it in a list, or hand each batch in as an "
    "argument",
)
ANOTHER_THREAD = Message(
    "another-thread",
    "another thread ({name}) is at work, so counters and containers that the code changes were not "
    "put back: the second run began with what the first left in them, and may have changed them",
)
REPLAY_STOPPED = Message("replay-stopped", "the second run stopped {where}")
