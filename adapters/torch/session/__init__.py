"""A tracked model or function, from its hooks to its removal."""
