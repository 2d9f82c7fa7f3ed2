"""Find the user's own line in a Python stack."""

import linecache
import os
import re
import sys
import sysconfig
import time
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from anynan.events import Source

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Of code without a file, what is the user's: typed, or sent to another process by cloudpickle.
_TYPED = ("<stdin", "<ipython", "<doctest", "<string", "<dynamic-code")
_BEGAN = time.time()
# Where libraries keep what runs an operation of a graph, which was written in another line.
GRAPHS: set[str] = set()
_LINES = 8  # of an expression that are quoted in one
_COMMENT = re.compile(r"\s*(?<!\S)#[^'\"]*$")
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
    if file.startswith("<") and not file.startswith(_TYPED):
        return True
    if _in_anynan(file):
        return True
    return file.startswith(_STDLIB) and not file.startswith("<")


def is_demo(file: str) -> bool:
    """Tell whether a file is a demo of anynan's own: it stands for a user's script."""
    return os.path.basename(file) == "demo.py" and _in_anynan(file)


@lru_cache(maxsize=4096)
def is_anynans(file: str) -> bool:
    """Tell whether a file's frames are anynan's own, and no demo's."""
    return _in_anynan(file) and not is_demo(file)


@lru_cache(maxsize=4096)
def _in_anynan(file: str) -> bool:
    return os.path.realpath(file).startswith(_own_folders())


@lru_cache(maxsize=1)
def _own_folders() -> tuple[str, ...]:
    # In a checkout an adapter is reached through a link.
    linked = [entry.path for entry in os.scandir(_HERE) if entry.is_dir()]
    return tuple(os.path.join(os.path.realpath(path), "") for path in (_HERE, *linked))


# What a decorator makes hands on, and says nothing of where a library was.
_WRAPPERS = frozenset({"wrapped", "wrapper"})


def is_own(frame: FrameType) -> bool:
    """Tell whether a frame is anynan's."""
    return _in_anynan(frame.f_code.co_filename)


def user_source(
    frame: FrameType | None = None, *, skip: int = 1, framework: str = "",
    stop: CodeType | None = None, fallback: Source | None = None,
) -> Source | None:  # fmt: skip
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
        if not is_library(file) and (is_demo(file) or not _generated(frame.f_globals)):
            return describe(frame, library, framework)
        if not _in_anynan(file) and frame.f_code.co_name not in _WRAPPERS:
            weak = bool(inside) and library is not None and inside in _file(library)
            if library is None or (weak and inside not in file and _named_library(file)):
                library = frame
        frame = frame.f_back
    if fallback is not None and library is not None:
        return gone_through(
            fallback, library.f_code, library.f_lineno, framework, library.f_globals
        )
    return fallback if library is None else describe(library, None)


def _generated(scope: dict[str, Any]) -> bool:
    """Tell whether a library wrote the file that this code is in, to import it as its own."""
    name = scope.get("__name__")
    return isinstance(name, str) and "." in name and _from_library(name.partition(".")[0])


@lru_cache(maxsize=1024)
def _from_library(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return isinstance(file, str) and _named_library(file)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _named_library(file: str) -> bool:
    return any(part in file for part in _LIBRARY_PARTS)


def describe(frame: FrameType, library: FrameType | None, framework: str = "") -> Source:
    """Turn a frame into a Source."""
    code = frame.f_code
    found = located(code, frame.f_lineno, offset=frame.f_lasti, scope=frame.f_globals)
    if library is None:
        return found
    return gone_through(found, library.f_code, library.f_lineno, framework, library.f_globals)


def gone_through(
    found: Source, code: CodeType, line: int, framework: str, scope: dict[str, Any] | None = None
) -> Source:
    """Add the library's place that the way led through.

    Args:
        found: The user's line.
        code: The library's code.
        line: Which line of it.
        framework: Package whose text says only that it was called.
        scope: The globals it ran in.
    """
    inside = f"{os.sep}{framework}{os.sep}" if framework else ""
    file = code.co_filename
    text = _via_text(file, line, inside, scope)
    return replace(found, via=way(file, line, code.co_name), via_text=text)


def way(file: str, line: int, function: str) -> str:
    """Name a library's place that the way led through.

    Args:
        file: The library's file.
        line: Which line of it.
        function: The function there.
    """
    place = f"{_short(file)}:{line} in {function}"
    built = function == "call" and os.path.dirname(file).endswith(tuple(GRAPHS))
    return f"{place}, of a graph that this line builds or runs" if built else place


def located(
    code: CodeType, line: int, *, offset: int = -1, scope: dict[str, Any] | None = None
) -> Source:
    """Turn a place in a code object into a Source, without the way it went.

    Args:
        code: What ran.
        line: Line of the place.
        offset: Which instruction it is, as a frame's ``f_lasti`` says.
        scope: The globals it ran in.
    """
    raw, changed = quoted(code.co_filename, line, code=code, scope=scope)
    text = raw.strip()
    start = end = None
    if text and offset >= 0:
        text, start, end = _part(code, offset, line, raw, scope)
    return Source(
        code.co_filename, line, code.co_name, text,
        column=start, end_column=end, changed=changed,
    )  # fmt: skip


def quoted(
    file: str, line: int, *, function: str = "", code: CodeType | None = None,
    scope: dict[str, Any] | None = None,
) -> tuple[str, bool]:  # fmt: skip
    """Return a line of a file, if the file still says what was imported.

    Args:
        file: Path of the file.
        line: Which line.
        function: The function that ran there, where its code is not at hand.
        code: The code that ran there.
        scope: The globals it ran in.

    Returns:
        The line, empty if there is none; and whether the file was changed since.
    """
    text = linecache.getline(file, line, scope)
    entry = linecache.cache.get(file)
    # Text that is no file's (a notebook's cell) stays; an older file was read as it is now.
    if not text or entry is None or len(entry) != 4 or not entry[1] or entry[1] < _BEGAN:
        return text, False
    now = _codes(file, entry[1], "".join(entry[2]))
    if code is not None:
        same = code in now
    else:
        same = any(
            made.co_name == function and line in {number for _, _, number in made.co_lines()}
            for made in now
        )
    return (text, False) if same else ("", True)


@lru_cache(maxsize=16)
def _codes(file: str, written: float, text: str) -> frozenset[CodeType]:
    """Compile a file as it is now, and give the code of every function in it."""
    del written  # part of the key, so that the text need not be compared
    try:
        found = [compile(text, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):  # being edited just now
        return frozenset()
    for code in found:
        found += [item for item in code.co_consts if isinstance(item, CodeType)]
    return frozenset(found)


def position(code: CodeType, offset: int) -> tuple[int | None, ...]:
    """Give where an instruction's code stands: first and last line, first and last column.

    Args:
        code: What ran.
        offset: Which instruction it is, as a frame's ``f_lasti`` says.
    """
    return next(islice(code.co_positions(), offset // 2, None), (None,) * 4)


def _part(
    code: CodeType, offset: int, line: int, raw: str, scope: dict[str, Any] | None
) -> tuple[str, int | None, int | None]:
    """Find what an instruction belongs to: its lines in one, and the columns of its own code."""
    text = raw.strip()
    first, last, start, end = position(code, offset)
    if first != line or last is None or start is None or end is None:
        return text, None, None
    begin = _characters(raw, start)
    if last == first:
        finish = _characters(raw, end)
    else:
        # Its first line alone would hide the operator, or the method, of an expression.
        rest = [linecache.getline(code.co_filename, n, scope) for n in range(first + 1, last + 1)]
        if last - first >= _LINES or not all(rest):
            return text, *_fitting(begin, len(text), text)
        before = [text, *(each.strip() for each in rest[:-1])]
        before = [part for each in before if (part := _COMMENT.sub("", each))]
        joined = " ".join(before)
        ending = rest[-1].strip()
        finish = len(joined) + 1 + _characters(rest[-1], end)
        text = f"{joined} {ending}"
    return text, *_fitting(begin, finish, text)


def _characters(raw: str, column: int) -> int:
    """Turn a column in bytes into one in characters, counted from the line's first letter."""
    indent = len(raw) - len(raw.lstrip())
    return len(raw.encode(errors="replace")[:column].decode(errors="ignore")) - indent


def _fitting(start: int, end: int, text: str) -> tuple[int | None, int | None]:
    return (start, end) if 0 <= start < end <= len(text) else (None, None)


def _via_text(file: str, line: int, inside: str, scope: dict[str, Any] | None) -> str:
    """Quote a library's line; the framework's own would only say that it was called."""
    stdlib = file.startswith(_STDLIB) and not _named_library(file)
    if stdlib or (inside and inside in file):
        return ""
    return linecache.getline(file, line, scope).strip()


def _short(file: str) -> str:
    for part in _LIBRARY_PARTS:
        if part in file:
            return file.rpartition(part)[2]
    return os.path.basename(file)
