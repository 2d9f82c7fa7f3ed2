"""The second run of a failing step, and its records."""
