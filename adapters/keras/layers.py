"""The layers and variables of a Keras model, by the names that every backend gives them."""

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

from anynan._base.patches import Patches
from anynan._base.sources import GRAPHS
from anynan._reach import named

_SETTINGS = (
    "learning_rate", "weight_decay", "beta_1", "beta_2", "epsilon", "momentum", "rho",
)  # fmt: skip

# Of an operation of a functional graph Keras keeps no line but its own.
GRAPHS.add(os.path.join("keras", "src", "ops"))


class Weight(NamedTuple):
    """Describe one variable of a model.

    Attributes:
        name: Its layer's path and its own name: ``block.dense.kernel``.
        layer: Path of the layer that holds it.
        variable: The Keras variable.
        buffer: True for what is never trained, such as running statistics; a frozen weight is.
    """

    name: str
    layer: str
    variable: Any
    buffer: bool


def refuse_unbuilt(model: Any) -> None:
    """Refuse a model whose layers and weights are not all there.

    Raises:
        ValueError: If it is not built.
    """
    if not model.built:
        msg = (
            f"this {type(model).__name__} is not built yet, so its layers and weights are not all "
            "there: call it on a batch once, or model.build(input_shape), before tracking it"
        )
        raise ValueError(msg)


def unbuilt_in(target: Any, args: Iterable[Any]) -> list[Any]:
    """List the models that a call uses by name or is given, and that are not built yet."""
    used = (target, *args, *named(inspect.unwrap(target)).values())
    return [x for x in used if isinstance(x, keras.layers.Layer) and not x.built]


def refuse_unbuilt_in(target: Any, args: Iterable[Any]) -> None:
    """Refuse what uses a model that is not built, where a run that is put back cannot build it.

    PyTorch's modules would lose what was built, and JAX's would hold tracers.

    Raises:
        ValueError: If one is not.
    """
    for model in unbuilt_in(target, args) if keras.backend.backend() != "tensorflow" else ():
        refuse_unbuilt(model)


def takes_training(model: Any) -> bool:
    """Tell whether a call of it can say that it is no training."""
    names = inspect.signature(model.call).parameters.values()
    return any(x.name == "training" or x.kind is x.VAR_KEYWORD for x in names)


def layers_of(model: Any) -> dict[str, Any]:
    """Give a model's layers by path: Keras's own, joined by dots, without the model's name.

    The layers of a model inside the model go by its path: Keras itself names them as if they
    stood alone.
    """
    import keras

    root = model.path or model.name
    found = {"": model}
    seen = {id(model)}
    todo = [("", model)]
    while todo:
        around, outer = todo.pop(0)
        for layer in _children(outer):
            if not isinstance(layer, keras.layers.Layer) or id(layer) in seen:
                continue
            seen.add(id(layer))
            if type(layer).__name__ == "InputLayer":
                continue
            path = (layer.path or layer.name).removeprefix(f"{root}/").replace("/", ".")
            if around and not path.startswith(f"{around}."):
                path = f"{around}.{layer.name}"
            while path in found:
                path += "_"
            found[path] = layer
            todo.append((path, layer))
    return found


def weights_of(layers: dict[str, Any]) -> list[Weight]:
    """List the variables that layers hold, each once."""
    found: list[Weight] = []
    names: set[str] = set()
    seen: set[int] = set()
    for path, layer in layers.items():
        for local, variable in variables_of(layer):
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            name = f"{path}.{local}" if path else local
            while name in names:
                name += "_"
            names.add(name)
            weight = any(variable is x for x in layer._trainable_variables)
            found.append(Weight(name, path, variable, not (variable.trainable or weight)))
    return found


def moments_of(optimizer: Any, variable: Any) -> Iterator[tuple[str, Any]]:
    """Walk what an optimizer keeps for a weight: ``momentum``, ``velocity``, by short names.

    Keras puts the name of the weight before these, of a variable of TensorFlow's own as well.
    """
    called = getattr(variable, "path", None) or variable.name
    start = called.replace("/", "_").replace(":", "_") + "_"
    for other in getattr(optimizer, "variables", ()):
        name = other.path.rpartition("/")[2]
        if name.startswith(start) and tuple(other.shape) == tuple(variable.shape):
            yield name.removeprefix(start), other


def settings_of(optimizer: Any) -> dict[str, float]:
    """Give the numbers that an optimizer works with, by name.

    A schedule counts updates: of the last two, which a step may end with, its number is one that
    is not finite, or else the last.
    """
    found = {name: getattr(optimizer, name, None) for name in _SETTINGS}
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        updates = int(optimizer.iterations)
        rates = [float(rate(optimizer.iterations - i)) for i in (1, 2) if i <= updates]
        bad = [each for each in rates if not math.isfinite(each)]
        found["learning_rate"] = next(iter([*bad, *rates]), None)
    return {name: float(x) for name, x in found.items() if x is not None}


def symbolic() -> bool:
    """Tell whether Keras runs a model only to find out shapes."""
    try:
        from keras.src.backend.common.symbolic_scope import in_symbolic_scope
    except ImportError:  # pragma: no cover - another version of Keras
        return False
    return bool(in_symbolic_scope())


def is_symbolic(args: Any, kwargs: Any) -> bool:
    """Tell whether a layer is called on shapes, to be part of a model, and not on numbers."""
    import keras

    return any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten((args, kwargs)))


def _children(layer: Any) -> list[Any]:
    found = getattr(layer, "_layers", None)
    return list(found) if isinstance(found, list | tuple) else list(getattr(layer, "layers", ()))


def variables_of(layer: Any) -> Iterator[tuple[str, Any]]:
    """Walk the variables that a layer holds itself, not its sublayers."""
    for kind in ("_trainable_variables", "_non_trainable_variables"):
        for variable in getattr(layer, kind, ()):
            yield variable.name, variable
    for seed in getattr(layer, "_seed_generators", None) or ():
        yield f"{seed.name}.state", seed.state


@contextmanager
def watching(
    layers: Mapping[str, Any], before: Callable[..., Any], after: Callable[..., Any]
) -> Iterator[None]:
    """Stand at the calls of layers.

    Args:
        layers: The layers by their paths.
        before: Called with path, layer, arguments and keywords; gives others, or None.
        after: Called with path, layer, arguments, keywords and what the layer made.
    """
    paths = {id(layer): path for path, layer in layers.items()}

    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(layer))
            if path is None or is_symbolic(args, kwargs):
                return original(layer, *args, **kwargs)
            changed = before(path, layer, args, kwargs)
            if changed is not None:
                _keep_masks((args, kwargs), changed)
                args, kwargs = changed
            out = original(layer, *args, **kwargs)
            after(path, layer, args, kwargs, out)
            return out

        return call

    with Patches() as patches:
        patches.change(keras.layers.Layer, "__call__", watched)
        yield


def _keep_masks(old: Any, new: Any) -> None:
    """Carry the masks over that Keras hangs on tensors."""
    for x, y in zip(keras.tree.flatten(old), keras.tree.flatten(new), strict=True):
        mask = getattr(x, "_keras_mask", None)
        if mask is not None and y is not x:
            y._keras_mask = mask


def same_draws(weights: list[Any]) -> list[tuple[Any, Any]]:
    """Give the states of random generators, each with what both sides begin with."""
    states = [weight.variable for weight in weights if weight.name.endswith(".state")]
    return [(x, np.array([0, i], np.uint32)) for i, x in enumerate(states) if x.shape == (2,)]
