"""Write layer paths into the name stack while a function is traced.

flax linen and haiku do so themselves. For flax nnx and equinox the ``__call__`` of the classes
that are in the model is wrapped in ``jax.named_scope`` as long as the trace lasts: nothing is
left of it at run time.
"""

import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from anynan._base.patches import Patches
from anynan._base.walks import walk

_local = threading.local()
_lock = threading.RLock()


@contextmanager
def named(tree: Any, names: set[str]) -> Iterator[set[str]]:
    """Name the modules of a tree while a trace lasts.

    Args:
        tree: Anything that may hold modules: arguments, a function's closure.
        names: Filled with the class names that stand at the root of a path.

    Yields:
        The paths that were written so far.
    """
    roots = [module for module in _roots(tree) if not _scaffold(type(module))]
    # A jitted function that was traced before brings its names along from then.
    names.update(type(module).__name__ for module in roots)
    kinds = {kind for module in roots for kind in _classes(module)} | _nnx_classes()
    with _lock:
        outer = getattr(_local, "names", None), getattr(_local, "written", None)
        _local.names, _local.written = names, set()
        try:
            with Patches() as patches:
                for kind in kinds:
                    if "__call__" in vars(kind):
                        patches.put(kind, "__call__", _wrapped(vars(kind)["__call__"]))
                yield _local.written
        finally:
            _local.names, _local.written = outer


def _wrapped(call: Any) -> Any:
    @functools.wraps(call)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = getattr(_local, "names", None)
        if names is None:  # another thread, which traces nothing of ours
            return call.__get__(self, type(self))(*args, **kwargs)
        stack: list[tuple[Any, dict[int | type, str], str]] = _local.__dict__.setdefault(
            "stack", []
        )
        if stack and stack[-1][0] is self:  # a subclass that calls its base's
            return call.__get__(self, type(self))(*args, **kwargs)
        # Modules that are split and merged again are new objects: the innermost module around
        # knows its parts by identity.
        path = None
        for owner, table, _ in reversed(stack):
            # One that was rebuilt, by vmap or a solver, is the only one of its class there.
            if id(self) in table or type(self) in table:
                path = table.get(id(self)) or table[type(self)]
                outer = next((p for o, _, p in reversed(stack) if o is owner), "")
                path = f"{outer}/{path}" if outer else path
                break
        here = stack[-1][2] if stack else ""
        if path is None:
            step = type(self).__name__
            if not stack:
                names.add(step)
            path = f"{here}/{step}" if here else step
        rest = path[len(here) + 1 :] if here and path.startswith(here + "/") else path
        stack.append((self, table_of(self), path))
        _local.written.add(path)
        try:
            with jax.named_scope(rest):
                return call.__get__(self, type(self))(*args, **kwargs)
        finally:
            stack.pop()

    return scoped


def table_of(module: Any) -> dict[int | type, str]:
    """Give the path of every module inside a module, by identity, and by class if it is alone."""
    inside = [(".".join(path), item) for path, item in _walk(module) if path]
    kinds = Counter(type(item) for _, item in inside)
    table: dict[int | type, str] = {type(x): path for path, x in inside if kinds[type(x)] == 1}
    table.update((id(item), path) for path, item in inside)
    return table


def _walk(module: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    seen = {id(module)}
    todo: list[tuple[tuple[str, ...], Any]] = [((), module)]
    while todo:
        path, item = todo.pop()
        if _is_module(item) and not isinstance(item, Sequence | Mapping):
            yield path, item
            inner = _fields(item)
        elif isinstance(item, Mapping):
            inner = [(str(key), child) for key, child in item.items()]
        elif isinstance(item, Sequence) and not isinstance(item, str):
            inner = [(str(i), child) for i, child in enumerate(item)]
        else:
            continue
        for name, child in inner:
            opened = isinstance(child, Sequence | Mapping) or _is_module(child)
            if opened and id(child) not in seen:
                seen.add(id(child))
                todo.append(((*path, name), child))


def _fields(item: Any) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item)]
        return [(name, getattr(item, name)) for name in names if hasattr(item, name)]
    return [(name, value) for name, value in vars(item).items() if not name.startswith("_pytree")]


def _scaffold(kind: type) -> bool:
    """Tell a class that equinox's own functions are made of from a layer."""
    return kind.__module__.startswith("equinox.") and not kind.__module__.startswith("equinox.nn")


def _nnx_classes() -> set[type]:
    """Give all classes of nnx modules: ``nnx.merge`` makes modules while a trace lasts."""
    nnx = sys.modules.get("flax.nnx")
    kinds = [] if nnx is None else nnx.Module.__subclasses__()
    return {kind for kind in walk(kinds, type.__subclasses__) if "__call__" in vars(kind)}


def merges(fn: Any) -> bool:
    """Tell whether a function makes nnx modules of their state, by the name in its code."""
    if "flax.nnx" not in sys.modules:
        return False
    whole = getattr(inspect.unwrap(fn), "__code__", None)

    def inner(code: types.CodeType) -> list[types.CodeType]:
        return [x for x in code.co_consts if isinstance(x, types.CodeType)]

    return any("merge" in code.co_names for code in walk([whole] if whole else [], inner))


def _bases() -> tuple[type, ...]:
    modules = (sys.modules.get(name) for name in ("flax.nnx", "equinox"))
    kinds = (getattr(module, "Module", None) for module in modules)  # one may not be whole yet
    return tuple(kind for kind in kinds if isinstance(kind, type))


def _is_module(item: Any) -> bool:
    return isinstance(item, _bases()) if _bases() else False


def _roots(tree: Any) -> list[Any]:
    if not _bases():
        return []
    found: list[Any] = []
    seen: set[int] = set()
    todo = [tree]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if _is_module(item):
            found.append(item)
        elif isinstance(item, list | tuple):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, types.FunctionType):
            todo += [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
            todo.append(item.__dict__.get("__wrapped__"))
        elif isinstance(item, types.MethodType):
            todo += [item.__func__, item.__self__]
        elif isinstance(item, functools.partial):
            todo += [item.func, item.args, item.keywords]
        else:  # of a jitted function its own, and what nnx.Optimizer and the like work on
            todo += [_held(item, "__wrapped__"), _held(item, "model")]
    return found


def _held(item: Any, name: str) -> Any:
    """Give what an object really holds: one that makes up attributes when asked is not asked."""
    try:
        return object.__getattribute__(item, "__dict__").get(name)
    except AttributeError:
        return None


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _classes(module: Any) -> set[type]:
    """Give the classes of a model's modules, and their bases, that define a call."""
    base = _bases()
    return {
        kind
        for _, item in _walk(module)
        for kind in type(item).__mro__
        if issubclass(kind, base)
        and kind not in base
        and "__call__" in vars(kind)
        and not _scaffold(kind)
    }
