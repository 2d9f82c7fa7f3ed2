"""Do something once a module is imported, whenever that is."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[], object]) -> Callable[[], None]:
    """Call a function after a module was imported; at once if it was already.

    Args:
        name: Of the module.
        then: Called once; what it raises reaches the program's import.

    Returns:
        What takes it back, if it was not called yet.
    """
    if name in sys.modules:
        then()
        return lambda: None
    finder = _Waiting(name, then)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Waiting(MetaPathFinder):
    """Find one module as Python would, and have it call back when it is loaded."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        self.leave()  # the others find it, and this must not be asked again
        spec: ModuleSpec | None = None
        finders: list[Any] = [*sys.meta_path, PathFinder]
        for finder in finders:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        loader: Any = None if spec is None else spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            run, then = loader.exec_module, self._then

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the loader stays in the module's spec
                run(module)
                then()

            loader.exec_module = exec_module
        return spec
