"""What this room says."""

from anynan._base.messages import Message

RENAMED = Message("renamed", "{old} is now {new}; the old name works until 0.2")
REPORT_UNWRITTEN = Message("report-unwritten", "the report could not be written: {error}")
