"""Import what an adapter needs; do something once a module is imported, whenever that is."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def need(module: str, title: str, has: str) -> None:
    """Import the library that an adapter is for.

    Args:
        module: Its module.
        title: What it is called.
        has: A name in it, by which it is told from another of that name.

    Raises:
        ImportError: If it is not there, with the command that installs it.
    """
    package = module.partition(".")[0]
    found = None
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, package):  # it is there, and something that it needs is not
            raise
    if not hasattr(found, has):
        msg = f'anynan.{package} needs {title}: pip install "anynan[{package}]"'
        raise ImportError(msg)


def when_imported(name: str, then: Callable[[], object]) -> Callable[[], None]:
    """Call a function once a module is whole; at once if it was imported already.

    Args:
        name: Of the module.
        then: Called once; what it raises reaches the program's import.

    Returns:
        What takes it back, if it was not called yet.
    """
    module = sys.modules.get(name)
    if module is not None:
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "_initializing", False) and type(spec) in (ModuleSpec, _Loading):
            assert spec is not None
            return _when_whole(spec, then)
        then()
        return lambda: None
    finder = _Waiting(name, then)
    sys.meta_path.insert(0, finder)
    return finder.leave


def _when_whole(spec: ModuleSpec, then: Callable[[], object]) -> Callable[[], None]:
    """Call a function when an import that is under way has succeeded."""
    spec.__class__ = _Loading
    waiting: list[Callable[[], object]] = spec.__dict__.setdefault(_WAITING, [])
    waiting.append(then)

    def leave() -> None:
        if then in waiting:
            waiting.remove(then)

    return leave


_WAITING = "_anynan_waiting"


class _Loading(ModuleSpec):
    """Be the spec of a module while it is imported: Python notes there when that is over."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            waiting = self.__dict__.pop(_WAITING, [])
            object.__setattr__(self, "__class__", ModuleSpec)
            while waiting and self.name in sys.modules:
                waiting.pop(0)()


class _Waiting(MetaPathFinder):
    """Find one module as Python would, and have it call back when it is loaded."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then
        self._asks = False

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._asks:
            return None
        spec: ModuleSpec | None = None
        finders: list[Any] = [*sys.meta_path, PathFinder]
        self._asks = True  # the others find it
        try:
            for finder in finders:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    break
        finally:
            self._asks = False
        if spec is not None and type(spec) in (ModuleSpec, _Loading):
            _when_whole(spec, self._loaded)
        return spec

    def _loaded(self) -> None:
        self.leave()  # only now: it may be looked for without being imported, or fail
        self._then()
