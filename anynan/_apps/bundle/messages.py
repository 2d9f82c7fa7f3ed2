"""What this room says."""

from anynan._base.messages import Message

BUNDLE_UNSAVED = Message("bundle-unsaved", "no bundle was saved: {error}")
OPERATION_NOT_MET = Message(
    "operation-not-met", "the second run did not come to the operation that the event names"
)
