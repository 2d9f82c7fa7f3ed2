"""What is tracked: its steps, what counts as bad in them, and what is done about it."""
