"""Products on top of the core: each could be taken out, and nothing below would change."""
