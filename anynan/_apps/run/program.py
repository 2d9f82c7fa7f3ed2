"""A script or a module, run as Python would run it."""

import importlib.util
import os
import re
import signal
import sys
import types
import zipfile
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

from anynan._base.tracebacks import shorten, without_own
from anynan.errors import AnomalyError


class Missing(Exception):  # noqa: N818  it is no error of the program's
    """Raise when there is no such script or module."""


def load(
    name: str, arguments: list[str], *, module: bool, code: Any = None,
    scope: Mapping[str, Any] | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Make a script or a module the program: ``__main__``, ``sys.argv`` and ``sys.path``.

    Args:
        name: Path of a script or of a folder with a ``__main__.py``; name of a module, or of a
            command that a package installed beside this Python, such as ``torchrun``.
        arguments: The program's own.
        module: Whether it is the name of a module.
        code: What runs in a script's place: the script, changed.
        scope: What its globals hold beside.

    Returns:
        What runs it. Its ``__main__`` stays: what runs at exit may need it.

    Raises:
        Missing: If there is none.
    """
    name = _script(name, module=module)
    held = not module and (os.path.isdir(name) or zipfile.is_zipfile(name))
    if not sys.flags.safe_path or held:
        place = name if held else os.path.dirname(os.path.abspath(name))
        sys.path[0] = os.getcwd() if module else place
    main: Any = types.ModuleType("__main__")
    if module or held:
        spec = _module(name) if module else PathFinder.find_spec("__main__", [name])
        loader: Any = None if spec is None else spec.loader
        code = None if spec is None or loader is None else loader.get_code(spec.name)
        if spec is None or code is None:
            msg = f"can't find '__main__' module in {name!r}" if held else f"no code in {name}"
            raise Missing(msg)
        main.__file__, main.__package__ = spec.origin, spec.parent
    else:
        spec, main.__file__, main.__package__ = None, os.path.abspath(name), None
        loader = SourceFileLoader("__main__", main.__file__)
        try:
            code = code or loader.source_to_code(loader.get_data(name), main.__file__)
        except OSError as error:
            msg = f"can't open file {name!r}: {error.strerror}"
            raise Missing(msg) from None
    main.__spec__, main.__loader__, main.__builtins__ = spec, loader, __builtins__
    sys.argv[:] = [main.__file__ if module else name, *arguments]
    sys.modules["__main__"] = main
    vars(main).update(scope or {})
    return lambda: exec(code, main.__dict__)  # noqa: S102  it is what a program is


def _script(name: str, *, module: bool) -> str:
    """Give the script behind a command of this environment's; the name itself if it is none."""
    path = os.path.join(os.path.dirname(sys.executable), name)
    if module or os.path.exists(name) or not os.path.isfile(path):
        return name
    with open(path, "rb") as file:
        return path if re.match(rb"#!.*python", file.readline()) else name


def _module(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise Missing(str(error)) from None
    if spec is None or spec.loader is None:
        msg = f"No module named {name}"
        raise Missing(msg)
    return spec


def run(program: Callable[[], None]) -> tuple[int, BaseException | None]:
    """Run a program to its end.

    Returns:
        Its exit status, and the exception that it ended by, if any.
    """
    try:
        program()
    except SystemExit as error:
        return _status(error.code), error
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the program's
        _show(error)
        # As a shell tells of a program that a signal ended.
        return (128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1), error
    return 0, None


def _status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Print a traceback as Python would have, were the program its own."""
    if isinstance(error, AnomalyError):
        shorten(error)
    without_own(error)
    sys.excepthook(type(error), error, error.__traceback__)
