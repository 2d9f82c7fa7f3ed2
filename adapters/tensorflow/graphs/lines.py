"""The user's line behind an operation of a graph."""

import os
from typing import Any

from anynan._base.sources import is_anynans, is_library, quoted, way
from anynan.events import Source

PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def source(traceback: Any) -> Source | None:
    """Find the innermost frame outside of libraries, and the library frame it went through."""
    frames = [frame for frame in reversed(list(traceback)) if not is_anynans(frame.filename)]
    library = None
    for frame in frames:
        if not is_library(frame.filename):
            return _source(frame, library)
        if library is None or (_inside(library) and not _inside(frame) and _named(frame)):
            library = frame
    return None if library is None else _source(library, None)


def _inside(frame: Any) -> bool:
    return f"{os.sep}tensorflow{os.sep}" in frame.filename


def _named(frame: Any) -> bool:
    return any(part in frame.filename for part in PARTS)


def _source(frame: Any, library: Any) -> Source:
    text, changed = quoted(frame.filename, frame.lineno, function=frame.name)
    via = None
    if library is not None and not _inside(library):
        via = way(library.filename, library.lineno, library.name)
    return Source(frame.filename, frame.lineno, frame.name, text.strip(), via, changed=changed)


def gradient_function(traceback: Any) -> str | None:
    """Name TensorFlow's function that computes a gradient, the innermost there is."""
    for frame in reversed(list(traceback)):
        if _inside(frame) and frame.name.startswith("_") and "Grad" in frame.name:
            return str(frame.name)
        if frame.name == "gradient" and frame.filename.endswith("backprop.py"):
            return None
    return None


def in_gradient(traceback: Any) -> bool:
    """Tell whether an operation was made while a tape made gradients."""
    asked = ("gradient", "jacobian", "batch_jacobian")
    return any(x.name in asked and x.filename.endswith("backprop.py") for x in traceback)
