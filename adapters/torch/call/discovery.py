"""Find the modules that a training-step function uses."""

import functools
import gc
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from anynan._arrays.arguments import positional
from anynan._arrays.containers import stored
from anynan._reach.search import names
from anynan._steps.tracked import Handle, inside

# Python objects whose attributes are their whole state.
OPEN = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, Handle)


def find_modules(fn: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> dict[str, Any]:
    """Return name -> module for every outermost module a function can reach by name.

    Looked at are its closure, the globals it names, its defaults, ``functools.partial``
    arguments, the object it is bound to, and the arguments of a call.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, value in _reachable(fn):
        _collect(found, name, value)
    # The object that a method belongs to has no name of its own.
    given = ["" if name == "self" else name for name in positional(fn)]
    for i, value in enumerate(args):
        _collect(found, given[i] if i < len(given) else f"arg{i}", value)
    for name, value in (kwargs or {}).items():
        _collect(found, name, value)
    return _outermost(found)


def named_models(
    fn: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> dict[str, torch.nn.Module]:
    """Return name -> model for what runs; a model itself, and one alone, needs no name."""
    found = {"": fn} if isinstance(fn, torch.nn.Module) else find_modules(fn, args, kwargs)
    return {"": next(iter(found.values()))} if len(found) == 1 else found


def in_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.nn.Module]:
    """Walk the modules in a call's arguments; cheap enough for every call."""
    found: dict[str, torch.nn.Module] = {}
    for value in (*args, *kwargs.values()):
        if not _is(value, torch.Tensor):
            _collect(found, "", value)
    yield from found.values()


def find_state(fn: Any) -> dict[str, Any]:
    """Return name -> object for all with a state, and every tracker, that a function can reach.

    A state is what random generators have, and objects with ``state_dict`` and
    ``load_state_dict``: optimizers, schedulers, loss scalers, modules, metrics.
    """
    found: dict[str, Any] = {}
    for name, value in _reachable(fn):
        for path, item in _spread(name, value):
            if is_stateful(item) or isinstance(item, (*GENERATORS, Handle)):
                found.setdefault(path, item)
    return found


def is_stateful(item: Any) -> bool:
    """Tell whether an object gives its state and takes it."""
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def find_weights(fn: Any) -> dict[str, torch.Tensor]:
    """Return name -> weight for those that a function holds by itself, outside of any module."""
    return {
        path: item
        for name, value in _reachable(fn)
        for path, item in _spread(name, value)
        if isinstance(item, torch.Tensor) and item.requires_grad and item.is_leaf
    }


def after(kinds: Iterable[type]) -> set[type]:
    """Give classes and all that are made after them."""
    found = set(kinds)
    for kind in kinds:
        found |= after(kind.__subclasses__())
    return found


def living(kinds: set[type]) -> list[Any]:
    """List the objects of just these classes that are alive.

    An object of a class written in Python refers to it. To ask for what refers to one takes a
    quarter of the time of a look at all objects, which are hundreds of thousands.
    """
    return [item for item in gc.get_referrers(*kinds) if type(item) in kinds] if kinds else []


def find_iterators(fn: Any) -> list[str]:
    """Name the iterators that a function can reach: running it moves them on for good."""
    return [
        name
        for name, value in _reachable(fn)
        if isinstance(value, Iterator) and not hasattr(value, "load_state_dict")
    ]


def _spread(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Walk a value and what it holds: items, and attributes of the program's own objects."""
    yield name, value
    if isinstance(value, dict):
        items = enumerate(list(value.items()))
        inner: Any = ((_word(key, i), item) for i, (key, item) in items)
    elif isinstance(value, list | tuple):
        inner = ((str(i), item) for i, item in enumerate(value))
    elif _own(value):
        inner = list(getattr(value, "__dict__", {}).items())
    else:
        return
    for key, item in inner:
        path = f"{name}.{key}" if name else key
        if isinstance(item, dict | list | tuple):
            yield from _spread(path, item)
        else:
            yield path, item


def _word(key: Any, i: int) -> str:
    """Give a key's part of a path: to write a tensor out would read it, number by number."""
    return str(key) if isinstance(key, str | int) else f"{type(key).__name__}{i}"


def _own(value: Any) -> bool:
    """Tell whether this may be an object of the program that holds others."""
    return type(value).__module__ not in ("builtins", "types") and not isinstance(
        value, type | types.ModuleType | types.FunctionType | torch.Tensor | torch.nn.Module
    )


def _reachable(fn: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > 3:
        return
    if isinstance(fn, Handle):
        if not inside(fn).paused:  # it watches what it calls by itself
            return
        fn = inside(fn).fn
    if isinstance(fn, functools.partial):
        for i, value in enumerate(fn.args):
            yield f"arg{i}", value
        yield from fn.keywords.items()
        yield from _reachable(fn.func, depth + 1)
        return
    owner = getattr(fn, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        yield "", owner
        yield from vars(owner).items() if hasattr(owner, "__dict__") else ()
    func = getattr(fn, "__func__", fn)
    func = getattr(func, "__wrapped__", func)
    code = getattr(func, "__code__", None)
    if code is None:
        if hasattr(fn, "__dict__") and not isinstance(fn, type):
            yield from vars(fn).items()
        return
    for name, cell in zip(code.co_freevars, func.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        yield name, value
        if isinstance(value, _FUNCTIONS):
            yield from _reachable(value, depth + 1)
    for name in names(code)[0]:  # ``co_names`` lists attributes, too
        if name in func.__globals__:
            value = func.__globals__[name]
            yield name, value
            own = getattr(value, "__module__", None) == func.__module__
            if isinstance(value, _FUNCTIONS) and (own or isinstance(value, Handle)):
                yield from _reachable(value, depth + 1)
    for value in func.__defaults__ or ():
        yield "default", value
    yield from (func.__kwdefaults__ or {}).items()


def _is(value: Any, kind: Any) -> bool:
    try:
        return isinstance(value, kind)
    except Exception:  # noqa: BLE001  a proxy may raise when it is asked for its class
        return False


def _collect(found: dict[str, torch.nn.Module], name: str, value: Any) -> None:
    if _is(value, torch.nn.Module):
        if not any(value is other for other in found.values()):
            while name in found:
                name += "_"
            found[name] = value
    elif _is(value, dict):
        for i, (key, item) in enumerate(list(dict.items(value))):
            if _is(item, torch.nn.Module):
                word = _word(key, i)
                _collect(found, f"{name}.{word}" if name else word, item)
    elif _is(value, list | tuple):
        items = list.__iter__(value) if _is(value, list) else tuple.__iter__(value)
        for i, item in enumerate(items):
            if _is(item, torch.nn.Module):
                _collect(found, f"{name}.{i}", item)
    elif type(value).__module__ != "types" and not _is(
        value, type | types.ModuleType | types.FunctionType | torch.Tensor
    ):
        for key, item in stored(value):
            if _is(item, torch.nn.Module | dict | list | tuple):
                _collect(found, f"{name}.{key}" if name else key, item)


def _outermost(found: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Drop modules that sit inside another one that was found."""
    inside: set[int] = set()
    for module in found.values():
        inside |= {id(child) for child in module.modules() if child is not module}
    return {name: module for name, module in found.items() if id(module) not in inside}
