"""What this room says."""

from anynan._base.messages import Message

TYPE_UNREAD = Message("type-unread", "numbers of the type {dtype} are not looked at")
SCALES_ONLY = Message("scales-only", "{kind}: the scales of its blocks were looked at")
TRANSPOSED = Message("transposed", "in Fortran's order: shape and index are those of its transpose")
TAKEN_FOR = Message("taken-for", "read as {dtype}")
WHOLE_STORAGE = Message("whole-storage", "not contiguous: its whole storage was looked at")
