"""Layer paths, without the segments that wrappers add."""

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_path(name: str) -> str:
    """Drop the segments that wrappers add to a module's name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def join(prefix: str, path: str) -> str:
    """Join two parts of a layer path, either of which may be empty."""
    return f"{prefix}.{path}" if prefix and path else prefix or path
