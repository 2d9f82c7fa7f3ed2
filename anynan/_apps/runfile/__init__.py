"""A tracked run as lines of JSON: written while it runs, read back as a ``Run``."""
