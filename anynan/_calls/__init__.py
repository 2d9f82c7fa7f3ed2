"""One operation's call with whole operands, taken in a second run for whoever collects it."""
