"""What is read of a step, what it is judged by, and what is kept of it."""
