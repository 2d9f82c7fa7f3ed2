"""What this room says."""

from anynan._base.messages import Message

BUNDLE_UNSAVED = Message("bundle-unsaved", "no bundle was saved: {error}")
