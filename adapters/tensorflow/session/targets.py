"""What is in a target: the submodules of a module, the models that a function uses."""

import inspect
import sys
import weakref
from typing import Any

import tensorflow as tf

from anynan._base.sources import is_library
from anynan._reach import named

_DEEP = 3  # functions that call each other, where a model is looked for


def is_keras(target: Any) -> bool:
    """Tell whether something is a layer or a model of Keras, without importing Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(target, keras.layers.Layer)


def modules_of(module: Any) -> dict[str, Any]:
    """Give a module's callable submodules by path: its attributes' names, joined by dots."""
    found = {"": module}
    seen = {id(module)}
    todo = [("", module)]
    while todo:
        prefix, outer = todo.pop(0)
        for name, child in _children(outer):
            if id(child) in seen:
                continue
            seen.add(id(child))
            path = f"{prefix}.{name}" if prefix else name
            todo.append((path, child))
            if callable(child):  # one that only holds others never runs
                found[path] = child
    return found


def _children(module: Any) -> list[tuple[str, Any]]:
    found = []
    for name, value in vars(module).items():
        if name.startswith("_self_"):  # TensorFlow's own list of the same modules
            continue
        items: list[tuple[str, Any]] = [(name, value)]
        if isinstance(value, list | tuple):
            items = [(f"{name}.{i}", item) for i, item in enumerate(value)]
        elif isinstance(value, dict):
            items = [(f"{name}.{key}", item) for key, item in value.items()]
        found += [(key, item) for key, item in items if isinstance(item, tf.Module)]
    return found


def layers_in(fn: Any) -> dict[str, Any]:
    """Give the layers of the models that a function uses."""
    layers: dict[str, Any] = {}
    found = models_in(fn)
    for name, model in found.items():
        for path, layer in parts_of(model).items():
            whole = path if len(found) == 1 else f"{name}.{path}" if path else name
            layers[whole] = layer
    return layers


def parts_of(model: Any) -> dict[str, Any]:
    """Give a model's layers by path."""
    if not is_keras(model):
        return modules_of(model)
    from anynan.keras.layers import layers_of

    return layers_of(model)


def parts_while_alive(model: "weakref.ref[Any]") -> dict[str, Any]:
    """Give a model's layers by path, none once it is gone."""
    living = model()
    return {} if living is None else parts_of(living)


def variables_in(fn: Any) -> list[tuple[str, Any]]:
    """List the variables that a function uses by name."""
    return [(name, x) for name, x in names_in(fn).items() if isinstance(x, tf.Variable)]


def names_in(fn: Any, depth: int = 0) -> dict[str, Any]:
    """Give what a function's names mean: in its closure and its globals, and in functions there."""
    python = getattr(fn, "python_function", fn)
    found = named(getattr(python, "__wrapped__", python))
    for value in list(found.values()) if depth < _DEEP else ():
        inner = getattr(value, "python_function", value)
        if inspect.isfunction(inner) and not is_library(inner.__code__.co_filename):
            found = {**names_in(inner, depth + 1), **found}
    return found


def models_in(fn: Any) -> dict[str, Any]:
    """Find the models that a function uses: in its closure and its globals."""
    python = getattr(fn, "python_function", fn)
    python = getattr(python, "__wrapped__", python)
    found: dict[str, Any] = {}
    owner = getattr(python, "__self__", None)
    if isinstance(owner, tf.Module) or is_keras(owner):
        found[type(owner).__name__] = owner
    for name, value in names_in(fn).items():
        module = isinstance(value, tf.Module) and not isinstance(value, tf.Variable)
        runs = is_keras(value) or (module and callable(value))
        if runs and not any(value is known for known in found.values()):
            found[name] = value
    return found
