"""What counts as bad, and what is done about it."""
