"""A failing call in a folder: its tensors, its operation as a script, and the event."""
