"""Tracked functions and modules of plain TensorFlow."""

import inspect
import weakref
from typing import Any

import tensorflow as tf

from anynan._steps.tracker import Tracker
from anynan.options import Options
from anynan.tensorflow.session import Session
from anynan.tensorflow.tracking import begin, is_keras, refuse_twice


def track_module(module: Any, options: Options) -> Tracker:
    """Watch a ``tf.Module``."""
    refuse_twice(module)
    if not callable(module):
        msg = (
            f"this {type(module).__name__} has no __call__, so it never runs as a whole: track "
            "the function that uses it"
        )
        raise TypeError(msg)
    session = Session(modules_of(module), module, options)
    return begin(session, weakref.ref(module), type(module).__name__)


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


def track_function(fn: Any, options: Options) -> Tracker:
    """Watch a function, and the models that it uses."""
    layers: dict[str, Any] = {}
    found = models_in(fn)
    keras = False
    for name, model in found.items():
        if is_keras(model):
            from anynan.keras.layers import layers_of

            keras, inside = True, layers_of(model)
        else:
            inside = modules_of(model)
        for path, layer in inside.items():
            whole = path if len(found) == 1 else f"{name}.{path}" if path else name
            layers[whole] = layer
    session = Session(layers, None, options)
    session.weights.add_all("", [(k, v) for k, v in names_in(fn).items() if is_variable(v)])
    session.with_keras = keras
    return begin(session, fn, getattr(fn, "__name__", type(fn).__name__))


def is_variable(x: Any) -> bool:
    """Tell whether something is a variable of TensorFlow."""
    return isinstance(x, tf.Variable)


def names_in(fn: Any) -> dict[str, Any]:
    """Give what a function's names mean: in its closure and its globals."""
    python = getattr(fn, "python_function", fn)
    try:
        names = inspect.getclosurevars(getattr(python, "__wrapped__", python))
    except TypeError:
        return {}
    return {**names.globals, **names.nonlocals}


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
        runs = value.built if is_keras(value) else module and callable(value)
        if runs and not any(value is known for known in found.values()):
            found[name] = value
    return found
