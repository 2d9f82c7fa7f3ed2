"""Find the user's own line in a Python stack."""

import linecache
import os
import sys
import sysconfig
from dataclasses import replace
from functools import lru_cache
from types import CodeType, FrameType

from anynan.events import Source

_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STDLIB = tuple(
    os.path.join(path, "")
    for name in ("stdlib", "platstdlib")
    if (path := sysconfig.get_paths().get(name))
)


@lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Tell whether a file belongs to a library, the standard library or anynan itself."""
    if is_demo(file):
        return False
    if any(part in file for part in _LIBRARY_PARTS):
        return True
    if file.startswith("<") and not file.startswith(("<stdin", "<ipython", "<doctest", "<string")):
        return True
    real = os.path.realpath(file)
    if os.path.dirname(real) in own_folders():
        return True
    return file.startswith(_STDLIB) and not file.startswith("<")


def is_demo(file: str) -> bool:
    """Tell whether a file is an adapter's demo: it stands for a user's script."""
    folder, name = os.path.split(file)
    return name == "demo.py" and os.path.realpath(folder) in own_folders()


@lru_cache(maxsize=1)
def own_folders() -> frozenset[str]:
    """Give the folders whose frames are anynan's own."""
    root = os.path.realpath(_HERE)
    folders = {root}
    for entry in os.scandir(_HERE):
        if entry.is_dir():
            folders.add(os.path.realpath(entry.path))
    return frozenset(folders)


def user_source(
    frame: FrameType | None = None,
    *,
    skip: int = 1,
    framework: str = "",
    stop: CodeType | None = None,
    fallback: Source | None = None,
) -> Source | None:
    """Return the innermost frame outside libraries, with the library frame it went through.

    Args:
        frame: Where to start; the caller's frame by default.
        skip: Frames to leave out when ``frame`` is not given.
        framework: Package whose frames say less than another library's (``torch``).
        stop: Code object at which to stop looking, as if the stack ended there.
        fallback: The user's line to name where no frame of the stack is the user's.

    Returns:
        The user's line, or the innermost library line if there is no user frame at all.
    """
    if frame is None:
        frame = sys._getframe(skip)
    library: FrameType | None = None
    inside = f"{os.sep}{framework}{os.sep}" if framework else ""
    while frame is not None and frame.f_code is not stop:
        file = frame.f_code.co_filename
        if not is_library(file):
            return describe(frame, library)
        if _folder(file) not in own_folders():
            weak = bool(inside) and library is not None and inside in _file(library)
            if library is None or (weak and inside not in file and _named_library(file)):
                library = frame
        frame = frame.f_back
    if fallback is not None and library is not None:
        return replace(fallback, via=_via(library))
    return fallback if library is None else describe(library, None)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


@lru_cache(maxsize=4096)
def _folder(file: str) -> str:
    return os.path.dirname(os.path.realpath(file))


def _named_library(file: str) -> bool:
    return any(part in file for part in _LIBRARY_PARTS)


def is_own(frame: FrameType) -> bool:
    """Tell whether a frame is anynan's."""
    return _folder(frame.f_code.co_filename) in own_folders()


def user_level() -> int:
    """Give the ``stacklevel`` with which the caller's own ``warnings.warn`` names the user's line.

    Where no frame of the stack is the user's it is the first that is not anynan's.
    """
    frame: FrameType | None = sys._getframe(1)
    level, outside = 1, 0
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return level
        if not outside and not is_own(frame):
            outside = level
        level += 1
        frame = frame.f_back
    return outside or 1


def describe(frame: FrameType, library: FrameType | None) -> Source:
    """Turn a frame into a Source."""
    code = frame.f_code
    via = None
    if library is not None:
        via = _via(library)
    text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return Source(code.co_filename, frame.f_lineno, code.co_name, text, via)


def _via(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _short(file: str) -> str:
    for part in _LIBRARY_PARTS:
        if part in file:
            return file.rpartition(part)[2]
    return os.path.basename(file)
