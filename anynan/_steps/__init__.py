"""A tracker: its steps, its readings, its history."""
