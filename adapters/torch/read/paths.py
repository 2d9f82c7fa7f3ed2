"""Layer paths without the segments of wrappers."""

from typing import Any

import torch

# Segments that only a wrapper adds, and the classes that add one which others use, too.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_AROUND = frozenset(
    {"AveragedModel", "DataParallel", "DeepSpeedEngine", "DistributedDataParallel",
     "FullyShardedDataParallel"}
)  # fmt: skip


def clean_path(name: str, model: torch.nn.Module) -> str:
    """Drop the segments that wrappers add to a module's name.

    Args:
        name: Name of a module, a parameter or a buffer.
        model: The model it is a name in.
    """
    parts = name.split(".")
    if "module" not in parts and _WRAPPERS.isdisjoint(parts):
        return name
    kept: list[str] = []
    module: Any = model
    for part in parts:
        around = part == "module" and type(module).__name__ in _AROUND
        if part not in _WRAPPERS and not around:
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """Give the module that a distributed data-parallel wrapper calls; it has the names."""
    while type(model).__name__ == "DistributedDataParallel" and hasattr(model, "module"):
        model = model.get_submodule("module")
    return model


def join(prefix: str, path: str) -> str:
    """Join two parts of a layer path, either of which may be empty."""
    return f"{prefix}.{path}" if prefix and path else prefix or path
