"""The session of one tracked target: what runs, where its steps end, how classes are changed."""
