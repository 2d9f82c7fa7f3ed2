"""Find what the code of a step can reach: cells, globals, attributes, items, arguments."""

import dis
import functools
import inspect
import io
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, KeysView
from dataclasses import dataclass, field
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import numpy as np

from anynan._arrays.containers import namespace
from anynan._base.sources import is_library
from anynan._reach.queues import is_queue

# Far enough for trainers and their parts; a whole program, or its data, hangs on some objects.
DEPTH = 4
LIMIT = 5000
ITEMS = 10_000
WALKED = 64

PLAIN = (int, float, complex, bool, str, bytes, type(None), np.generic)
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)  # the narrower one first
GENERATORS: tuple[Any, ...] = (np.random.Generator, np.random.RandomState, random.Random)

_WHOLE: Any = object()  # no key of the program's can be this
_NAMING = {
    "LOAD_GLOBAL": "reads", "LOAD_NAME": "reads", "STORE_GLOBAL": "writes",
    "DELETE_GLOBAL": "writes", "STORE_ATTR": "stored",
}  # fmt: skip


class Holder:
    """Say by which way the code reaches something; the way is gone anew each time.

    So nothing is kept alive that the program drops, and what it puts in its place is met.

    Args:
        name: How the code reaches it.
        space: Gives the dict, list or cell that holds it, or None.
        key: Under which it is held; a cell has none.
    """

    __slots__ = ("key", "name", "space")

    def __init__(self, name: str, space: Callable[[], Any], key: Any = _WHOLE) -> None:
        self.name = name
        self.space = space
        self.key = key

    def get(self) -> Any:
        """Return what is held now, None if nothing is."""
        try:
            space = self.space()
            if self.key is _WHOLE:
                return space.cell_contents
            kind: Any = type(space)
            if kind is dict:
                return space.get(self.key)
            if kind is list:
                return space[self.key]
            kind = container_kind(space) or tuple
            # A dict of the program's own may make what is missing, where it is indexed.
            get = kind.get if issubclass(kind, dict) else kind.__getitem__
            return get(space, self.key)
        except (LookupError, ValueError, TypeError, AttributeError):
            return None

    def set(self, value: Any) -> bool:
        """Hold something else there; tell whether that could be done.

        No code of a container's own class runs.
        """
        try:
            space = self.space()
            if self.key is _WHOLE:
                space.cell_contents = value
            else:
                container_kind(space).__setitem__(space, self.key, value)
        except (LookupError, ValueError, TypeError, AttributeError):
            return False
        return True

    def namespace(self) -> dict[str, Any] | None:
        """Return the attributes of what is held."""
        return namespace(self.get())

    def item(self, key: Any) -> "Holder":
        """Say where an item of what is held is."""
        return Holder(f"{self.name}[{key!r:.40}]", self.get, key)

    def attribute(self, key: str) -> "Holder":
        """Say where an attribute of what is held is."""
        return Holder(f"{self.name}.{key}" if self.name else key, self.namespace, key)


class Default(Holder):
    """Say which default argument of a function something is; those come in a tuple.

    Args:
        name: Of the argument.
        fn: The function.
        at: Its place among the defaults.
    """

    __slots__ = ("_fn",)

    def __init__(self, name: str, fn: types.FunctionType, at: int) -> None:
        super().__init__(name, lambda: fn.__defaults__, at)
        self._fn = fn

    def set(self, value: Any) -> bool:
        """Give the function another default."""
        held = list(self._fn.__defaults__ or ())
        if self.key >= len(held):
            return False
        held[self.key] = value
        self._fn.__defaults__ = tuple(held)
        return True


class Slot(Holder):
    """Say which slot of an object something is in; those are no dict's.

    Args:
        name: How the code reaches it.
        owner: Gives the object, or None.
        slot: What its class has under the slot's name.
    """

    __slots__ = ("_slot",)

    def __init__(
        self, name: str, owner: Callable[[], Any], slot: types.MemberDescriptorType
    ) -> None:
        super().__init__(name, owner)
        self._slot = slot

    def get(self) -> Any:
        """Return what is held now, None if nothing is."""
        try:
            return self._slot.__get__(self.space())
        except (AttributeError, TypeError):
            return None

    def set(self, value: Any) -> bool:
        """Hold something else there; tell whether that could be done."""
        try:
            self._slot.__set__(self.space(), value)
        except (AttributeError, TypeError):
            return False
        return True


class OfClass(Holder):
    """Say which attribute of a class something is.

    Args:
        kind: The class.
        key: The attribute's name.
    """

    __slots__ = ()

    def __init__(self, kind: type, key: str) -> None:
        super().__init__(f"{kind.__name__}.{key}", functools.partial(_itself, kind), key)

    def get(self) -> Any:
        """Return what is held now, None if nothing is."""
        return vars(self.space()).get(self.key)

    def set(self, value: Any) -> bool:
        """Give the class another; no code of a metaclass runs."""
        type.__setattr__(self.space(), self.key, value)
        return True


def container_kind(value: Any) -> Any:
    """Give the built-in type whose methods reach into a container, None if it is none.

    A subclass may forbid what it inherits, and no code of its own is to run.
    """
    exact = type(value)
    if exact is dict or exact is list:
        return exact
    return next((kind for kind in CONTAINERS if issubclass(exact, kind)), None)


def fixed(name: str, value: Any) -> Holder:
    """Hold one object that lives as long as what holds it, as a function's owner does."""
    held = {"": value}
    return Holder(name, lambda: held, "")


def weak(name: str, value: Any) -> Holder:
    """Hold one object without keeping it alive."""
    ref = weakref.ref(value)
    return Holder(name, lambda: {"": ref()}, "")


@dataclass(frozen=True)
class Kinds:
    """Say what a framework's own objects are to the search.

    Attributes:
        arrays: Classes whose values may be written to in place.
        generators: Classes of random generators.
        iterators: Classes of iterators that another may stand for.
        modules: Classes whose attributes are a program's own only where its methods set them.
        passed: Tells whether an object is seen to elsewhere.
        inner: Yields what a library's object holds of the program's, by name.
        stays: Attributes that a module makes of itself once: a second run is not to unmake them.
    """

    arrays: tuple[type, ...] = (np.ndarray,)
    generators: tuple[type, ...] = GENERATORS
    iterators: tuple[type, ...] = ()
    modules: tuple[type, ...] = ()
    passed: Callable[[Any], bool] = lambda _: False
    inner: Callable[[Any], Iterator[tuple[str, Any]]] = lambda _: iter(())
    stays: frozenset[str] = frozenset()


@dataclass
class Found:
    """Say where everything is that a search found, each object once.

    Attributes:
        plain: Closure cells, and globals that the code writes.
        spaces: Objects with attributes of the program's own, with the names that may change;
            None for all.
        containers: Lists, dicts, sets and deques.
        generators: Random generators.
        arrays: Arrays that may be written to in place.
        iterators: Iterators.
        queues: Queues, of threads and of processes.
    """

    plain: list[Holder] = field(default_factory=list)
    spaces: list[tuple[Holder, tuple[str, ...] | None]] = field(default_factory=list)
    containers: list[Holder] = field(default_factory=list)
    generators: list[Holder] = field(default_factory=list)
    arrays: list[Holder] = field(default_factory=list)
    iterators: list[Holder] = field(default_factory=list)
    queues: list[Holder] = field(default_factory=list)


class Search:
    """Walk once through everything a function can reach by name.

    Args:
        fn: The function of a step, or what it is called by; None for no code.
        more: Where further objects are: arguments, the parts of a model.
        kinds: What the framework's own objects are.

    Attributes:
        found: What there is.
    """

    def __init__(self, fn: Any, more: Iterable[Holder], kinds: Kinds) -> None:
        self.found = Found()
        self._kinds = kinds
        self._seen: dict[int, Any] = {}
        self._stored: set[str] = set()
        self._classes: dict[type, None] = {}
        self._bound: Any = None  # the object whose method the step is
        if fn is not None:
            self._code(fn, 0)
        for holder in more:
            self._value(holder, 1)
        for kind in self._classes:
            self._class(kind)

    def _code(self, fn: Any, depth: int) -> None:
        """Walk what a callable's code reads: its cells, its globals, what it is bound to."""
        if depth > DEPTH or id(fn) in self._seen:
            return
        if isinstance(fn, functools.partial):
            self._seen[id(fn)] = fn
            given = [(f"args[{i}]", value) for i, value in enumerate(fn.args)]
            for name, value in [*given, *fn.keywords.items()]:
                self._value(fixed(name, value), depth)
            self._code(fn.func, depth + 1)
            return
        owner = getattr(fn, "__self__", None)
        fn = inspect.unwrap(getattr(fn, "__func__", fn))
        if self._bound is None and isinstance(fn, types.FunctionType):
            self._bound = owner
        if not isinstance(fn, types.FunctionType):
            owner, fn = fn, inspect.unwrap(_found(type(fn), "__call__") or _nothing)
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            self._value(fixed("self", owner), depth)
        if isinstance(fn, types.FunctionType) and id(fn) not in self._seen:
            self._seen[id(fn)] = fn
            self._function(fn, type(owner), depth)

    def _function(self, fn: types.FunctionType, owner: type, depth: int) -> None:
        reads, written, stored = names(fn.__code__)
        self._stored |= stored
        if namespace(fn):
            self.found.spaces.append((weak(fn.__name__, fn), None))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            holder = Holder(name, functools.partial(_itself, cell))
            self.found.plain.append(holder)
            self._value(holder, depth)
        given = fn.__defaults__ or ()
        first = fn.__code__.co_argcount - len(given)
        for i, name in enumerate(fn.__code__.co_varnames[first:][: len(given)]):
            self._value(Default(name, fn, i), depth)
        for name in fn.__kwdefaults__ or ():
            self._value(Holder(name, functools.partial(getattr, fn, "__kwdefaults__"), name), depth)
        for name in reads | written:
            if name in fn.__globals__:
                holder = Holder(name, functools.partial(_itself, fn.__globals__), name)
                if name in written:
                    self.found.plain.append(holder)
                self._value(holder, depth)
        # What a method calls on its own object is code of the step, too.
        if not is_own(owner):
            return
        for name in fn.__code__.co_names if depth < DEPTH else ():
            method = _found(owner, name)
            if isinstance(method, types.FunctionType) and id(method) not in self._seen:
                self._seen[id(method)] = method
                self._function(method, owner, depth + 1)

    def _value(self, holder: Holder, depth: int) -> None:
        value = holder.get()
        kind: Any = type(value)
        try:
            if depth <= DEPTH and not issubclass(kind, PLAIN):
                self._sort(value, kind, holder, depth)
        except Exception:  # noqa: BLE001, S110  an object may raise at every question
            pass

    def _sort(self, value: Any, kind: Any, holder: Holder, depth: int) -> None:
        new = id(value) not in self._seen
        if issubclass(kind, self._kinds.arrays):
            if new:
                self._seen[id(value)] = value
                self.found.arrays.append(holder)
            return
        if issubclass(kind, io.IOBase) and new and _goes_back(value):
            self.found.generators.append(holder)
        if is_iterator(kind) and not is_own(kind):  # a program's own has its state in attributes
            self.found.iterators.append(holder)
        if issubclass(kind, type):
            self._classes[value] = None
        elif issubclass(kind, types.FunctionType | types.MethodType | functools.partial):
            if new and len(self._seen) <= LIMIT and _is_own_code(value):
                self._code(value, depth + 1)
        elif new and len(self._seen) <= LIMIT:
            self._seen[id(value)] = value
            self._enter(value, kind, holder, depth)

    def _enter(self, value: Any, kind: Any, holder: Holder, depth: int) -> None:
        """Look at what is seen for the first time, and into what holds more."""
        kinds = self._kinds
        if kinds.passed(value):  # it may be a dict of the framework's, too
            return
        if issubclass(kind, kinds.generators):
            self.found.generators.append(holder)
        elif is_queue(value):
            self.found.queues.append(holder)
        elif issubclass(kind, types.ModuleType | types.CodeType | types.FrameType):
            return
        elif issubclass(kind, CONTAINERS) or kind is tuple:
            self._container(value, holder, depth)
        elif issubclass(kind, kinds.modules):
            self._module(value, holder, depth)
        else:
            for name, item in kinds.inner(value):
                if item is not None:
                    self._value(fixed(f"{holder.name}.{name}", item), depth + 1)
            if is_own(kind):
                self._object(value, kind, holder, depth)
            elif value is self._bound:
                # A library's object whose method is the step, as a Trainer, counts in it, too.
                self.found.spaces.append((holder, None))
                for name, item in list((namespace(value) or {}).items()):
                    if isinstance(item, CONTAINERS):
                        self._value(holder.attribute(name), depth + 1)

    def _object(self, value: Any, kind: Any, holder: Holder, depth: int) -> None:
        """Look into an object of the program's own."""
        self._classes[kind] = None
        for name, slot in slots(kind).items():
            own = Slot(f"{holder.name}.{name}", holder.get, slot)
            self.found.plain.append(own)
            self._value(own, depth + 1)
        if namespace(value) is not None:
            self.found.spaces.append((holder, None))
            for key in list(namespace(value) or ()):
                if type(key) is str:
                    self._value(holder.attribute(key), depth + 1)

    def _class(self, kind: type) -> None:
        """Note those plain attributes of a class that the code sets somewhere."""
        for owner in kind.__mro__ if is_own(kind) else ():
            held = vars(owner) if is_own(owner) else {}
            self.found.plain += [
                OfClass(owner, name)
                for name in self._stored.intersection(held)
                if isinstance(held[name], PLAIN)
            ]

    def _container(self, value: Any, holder: Holder, depth: int) -> None:
        if type(value) is not tuple:
            self.found.containers.append(holder)
        keys: Any = dict.keys(value) if issubclass(type(value), dict) else range(len(value))
        if isinstance(value, set) or len(keys) > WALKED:
            return
        for key in list(keys):
            self._value(holder.item(key), depth + 1)

    def _module(self, value: Any, holder: Holder, depth: int) -> None:
        """Look at those attributes of a layer that its code sets while it runs."""
        kind: Any = type(value)
        held = namespace(value) or {}
        names = (sets(kind) | self._stored) - self._kinds.stays
        moving = tuple(name for name in names if name in held)
        moving = tuple(name for name in moving if isinstance(held[name], PLAIN))
        if moving:
            self.found.spaces.append((holder, moving))
        if not is_own(kind):
            return
        for key, item in list(held.items()):
            if not key.startswith("_") and not isinstance(item, PLAIN):
                self._value(holder.attribute(key), depth + 1)


def _found(kind: type, name: str) -> Any:
    """Give what a class has under a name, as it is stored."""
    return next((vars(owner)[name] for owner in kind.__mro__ if name in vars(owner)), None)


def _goes_back(stream: Any) -> bool:
    """Tell whether a stream can be read again from an earlier place, and is no log."""
    memory = isinstance(stream, io.StringIO | io.BytesIO)
    if stream.closed or not (stream.seekable() and stream.readable()):
        return False
    return memory or not stream.writable()


def _itself(space: Any) -> Any:
    return space


@lru_cache(maxsize=1024)
def slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Give the slots of a class and of those it is made of, by name."""
    return {
        name: slot
        for owner in reversed(kind.__mro__)
        for name, slot in vars(owner).items()
        if isinstance(slot, types.MemberDescriptorType) and is_own(owner)
    }


def _nothing() -> None:
    """Stand for the code of what has none."""


def is_iterator(kind: Any) -> bool:
    """Tell whether objects of a class are iterators, or queues in which nothing can stand."""
    try:
        return hasattr(kind, "__next__") or kind is SimpleQueue
    except Exception:  # noqa: BLE001  a metaclass may raise
        return False


def _is_own_code(fn: Any) -> bool:
    """Tell whether a function's code is the program's own, or a partial's is to be looked at."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(inspect.unwrap(getattr(fn, "__func__", fn)), "__code__", None)
    return code is not None and not is_library(code.co_filename)


def is_own(kind: Any) -> bool:
    """Tell whether a class is the program's own, not a library's."""
    try:
        return _is_own(kind)
    except Exception:  # noqa: BLE001  a metaclass may raise when it is hashed
        return False


@lru_cache(maxsize=1024)
def _is_own(kind: type) -> bool:
    if kind is types.SimpleNamespace:
        return True
    if kind.__module__ == "__main__":  # what is typed at a prompt has no file
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not is_library(file)


@lru_cache(maxsize=1024)
def names(code: types.CodeType) -> tuple[KeysView[str], KeysView[str], KeysView[str]]:
    """Name the globals that code reads, those it writes, and the attributes it sets, in order."""
    found: dict[str, dict[str, None]] = {"reads": {}, "writes": {}, "stored": {}}
    for instruction in dis.get_instructions(code):
        kind = _NAMING.get(instruction.opname)
        if kind is not None:
            found[kind][instruction.argval] = None
    reads, writes, stored = found.values()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for mine, inner in zip((reads, writes, stored), names(constant), strict=True):
                mine.update(dict.fromkeys(inner))
    return reads.keys(), writes.keys(), stored.keys()


@lru_cache(maxsize=1024)
def sets(kind: type) -> frozenset[str]:
    """Name the attributes that a class's methods set once an object of it is made."""
    found: set[str] = set()
    for owner in kind.__mro__:
        if not is_own(owner):
            continue
        for name, stored in vars(owner).items():
            method = inspect.unwrap(getattr(stored, "__func__", stored))
            if name != "__init__" and isinstance(method, types.FunctionType):
                found |= names(method.__code__)[2]
    return frozenset(found)


def named(fn: Any) -> dict[str, Any]:
    """Give what a function's own code names around it: in its closure, and in its globals."""
    try:
        names = inspect.getclosurevars(fn)
    except TypeError:  # no function of Python's
        return {}
    return {**names.globals, **names.nonlocals}
