"""What this room says."""

from anynan._base.messages import Message

FILE_ENDED = Message("file-ended", "{path} ends here, because it could not be written: {error}")
