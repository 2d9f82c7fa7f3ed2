"""What this room says."""

from anynan._base.messages import Message

FILE_ENDED = Message("file-ended", "{path} ends here, because it could not be written: {error}")
LINE_CUT_OFF = Message("line-cut-off", "the last line of the file is cut off, and was left out")
LINES_UNREADABLE = Message(
    "lines-unreadable", "lines of the file that cannot be read were left out: {lines}"
)
FILE_WITHOUT_END = Message(
    "file-without-end", "the file has no end: the run was killed, or is not over"
)
