"""What this room says."""

from anynan._runtime.messages import Message

NOT_PUT_BACK = Message("replay-restored-not", "{who} could not put back {what}")
