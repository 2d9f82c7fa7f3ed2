"""What this room says."""

from anynan._base.messages import Message

UNLOOKED = Message("unlooked", "{what} could not be read: {error}")
BATCH_UNREAD = Message("batch-unread", "{error}")
