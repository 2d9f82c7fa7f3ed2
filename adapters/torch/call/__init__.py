"""One call of what is tracked: what it began with, and what its thread knows."""
