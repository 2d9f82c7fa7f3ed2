"""What this room says."""

from anynan._base.messages import Message

_NUMPY = "and NumPy met no overflow, division by zero or invalid value"
NOTHING_RAN = Message(
    "nothing-ran",
    f"anynan: no model or compiled function of the program's own ran, {_NUMPY}",
)
NOTHING_WATCHED = Message("nothing-watched", f"anynan: nothing that ran was watched, {_NUMPY}")
ENDED_BEFORE = Message(
    "ended-before", "anynan: the program ended before a model or compiled function ran"
)
MADE_ELSEWHERE = Message(
    "made-elsewhere", "nothing that anynan read was bad, so it was made elsewhere{way}"
)
PROCESS_UNWATCHED = Message("process-unwatched", "what {what} ran: start it there with anynan run")
