"""From a bad reading to its origin and its cause."""
