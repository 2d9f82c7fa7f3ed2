"""Run a failing call again, operation by operation."""
