"""Events and trackers in words."""
