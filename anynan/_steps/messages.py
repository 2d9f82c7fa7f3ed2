"""What this room says."""

from anynan._runtime.messages import Message

LAYER_UNWATCHED = Message("layer-unwatched", "{what} is not watched: {error}")
