"""What this room says."""

from anynan._base.messages import Message

TYPE_UNREAD = Message("type-unread", "numbers of the type {dtype} are not read")
SCALES_ONLY = Message("scales-only", "{kind}: only the scales of its blocks were read")
TRANSPOSED = Message("transposed", "in Fortran's order: shape and index are those of its transpose")
TAKEN_FOR = Message("taken-for", "read as {dtype}")
WHOLE_STORAGE = Message("whole-storage", "not contiguous: its whole storage was read")
