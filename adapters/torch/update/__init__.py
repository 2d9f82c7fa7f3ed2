"""Before and after an optimizer changes the weights."""
