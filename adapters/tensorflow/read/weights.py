"""The weights and buffers of what is tracked: their names, their values, what they were."""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._diagnosis.evidence import BadParameter
from anynan._readings.readings import ProbePoint
from anynan.tensorflow.read import probes, readings

SMALL = 1024


class Weights:
    """Name the variables of layers.

    Attributes:
        states: Variables of an optimizer of the program's own, which an update changes.
    """

    def __init__(self, layers: dict[str, Any]) -> None:
        self._of: dict[str, tuple[weakref.ref[Any], str, bool]] = {}
        self._names: dict[int, str] = {}
        self._others: dict[int, weakref.ref[Any]] = {}
        self._ends: Any = None
        self.states: list[Any] = []
        for path, layer in layers.items():
            self.add(path, layer)

    @property
    def names(self) -> list[str]:
        """List the names."""
        return list(self._of)

    def add(self, path: str, layer: Any) -> list[Any]:
        """Name the variables that a layer holds itself, and give those that were not known."""
        return self.add_all(path, own_variables(layer), getattr(layer, "_trainable_variables", ()))

    def add_all(self, path: str, variables: list[tuple[str, Any]], weights: Any = ()) -> list[Any]:
        """Name variables, and give those that were not known.

        Args:
            path: Of the layer.
            variables: With their names in the layer.
            weights: Those that are weights though they may be frozen.
        """
        kept = {id(raw(x)) for x in weights}
        made = []
        for local, variable in variables:
            held = raw(variable)
            if held is None or self.name(held) is not None:
                continue
            made.append(held)
            name = f"{path}.{local}" if path else local
            while name in self._of:
                name += "_"
            trainable = bool(getattr(variable, "trainable", True)) or id(held) in kept
            self._of[name] = (weakref.ref(held), path, not trainable)
            self._names[id(held)] = name
            self._ends = None
        return made

    def name(self, x: Any) -> str | None:
        """Give a variable's name, None if it is none of these."""
        held = raw(x)
        name = None if held is None else self._names.get(id(held))
        return name if name is not None and self._of[name][0]() is held else None

    def misses(self, x: Any) -> bool:
        """Tell whether something is a variable that was never asked for before."""
        held = raw(x)
        if held is None or self.name(held) is not None:
            return False
        other = self._others.get(id(held))
        return other is None or other() is not held

    def pass_over(self, x: Any) -> None:
        """Have a variable that is none of these not looked for again."""
        held = raw(x)
        if self.name(held) is None:
            self._others[id(held)] = weakref.ref(held)

    def layer(self, name: str) -> str:
        """Give the layer that owns a variable."""
        return self._of[name][1]

    def is_buffer(self, name: str) -> bool:
        """Tell whether a variable is no weight."""
        return name in self._of and self._of[name][2]

    def _there(self) -> Iterator[tuple[str, Any, str, bool]]:
        """Walk the variables that are not gone: name, variable, layer, whether it is no weight."""
        for name, (ref, path, buffer) in self._of.items():
            variable = ref()
            if variable is not None:
                yield name, variable, path, buffer

    def handles(self) -> dict[int, str]:
        """Name the variables by the ids of what operations take them as."""
        return {id(v.handle): name for name, v, *_ in self._there() if _local(v)}

    def holding(self, x: Any) -> str | None:
        """Name the variable that holds just these values now, None if there is none."""
        for name, held, *_ in self._there():
            alike = held.dtype == x.dtype and held.shape == x.shape and _local(held)
            if alike and read(held).numpy().tobytes() == x.numpy().tobytes():
                return name
        return None

    def trainable(self) -> list[Any]:
        """List the weights."""
        return [variable for _, variable, _, buffer in self._there() if not buffer]

    def floats(self) -> list[tuple[str, Any]]:
        """List the weights that hold real numbers, where they live first, with their layers."""
        found = [(path, parts(v)[0]) for _, v, path, buffer in self._there() if not buffer]
        return [(path, one) for path, one in found if one.dtype.is_floating]

    def replicas(self) -> int:
        """Tell over how many replicas the variables are spread."""
        return max((len(parts(v)) for _, v, *_ in self._there()), default=1)

    def value(self, name: str) -> Any:
        """Read a variable."""
        return read(self._of[name][0]())

    def keep(self, *, all_of_them: bool) -> list[tuple[Any, Any]]:
        """Hold the values of now: of the buffers, or of everything; nothing is copied yet."""
        held = [ref() for ref, _, buffer in self._of.values() if buffer or all_of_them]
        held += self.states if all_of_them else ()
        return [(v, read(v if _local(v) else v.values[0])) for v in held if v is not None]

    def variable(self, name: str) -> Any:
        """Give a variable, None if it is gone."""
        return self._of[name][0]()

    def ends(self) -> tuple[list[ProbePoint], Any]:
        """Read the ends of every variable that could be bad, in one go."""
        if self._ends is None:
            points, held = [], []
            for name, variable, path, buffer in self._there():
                if probes.is_float(variable):
                    local, dtype = name.rpartition(".")[2], probes.dtype(variable)
                    points.append(ProbePoint("", path, "parameter", local, 0, name, buffer, dtype))
                    held.append(self._of[name][0])
            every = tf.function(lambda: readings.exact([read(ref()) for ref in held]))
            # Not the function itself: its calls would be watched like the user's own.
            self._ends = points, every.get_concrete_function()
        points, run = self._ends
        return points, run().numpy()

    def bad(self, kept: list[tuple[Any, Any]]) -> list[BadParameter]:
        """List the variables that hold bad values now.

        Args:
            kept: Variables with what they held before, to be judged by that.
        """
        before = {id(variable): value for variable, value in kept}
        return [
            BadParameter(name, path, probes.measure(value), buffer)
            for name, variable, path, buffer in self._there()
            if (value := _if_bad(variable, before)) is not None
        ]

    def is_bad(self, name: str, kept: list[tuple[Any, Any]]) -> bool:
        """Tell whether one variable holds bad values now, which costs less than a summary."""
        before = {id(variable): value for variable, value in kept}
        return name in self._of and _if_bad(self._of[name][0](), before) is not None


def _if_bad(variable: Any, before: dict[int, Any]) -> Any:
    """Give what a variable holds, or held before where that was kept; None if it is finite."""
    if variable is None or not probes.is_float(variable):
        return None
    value = before.get(id(variable))
    value = read(variable) if value is None else value
    if value.shape.num_elements() <= SMALL:  # several operations of TensorFlow take far longer
        return None if np.isfinite(probes.on_host(value)).all() else value
    return None if bool(probes.fine(value)) else value


def own_variables(layer: Any) -> list[tuple[str, Any]]:
    """List the variables that a layer holds itself, not its sublayers."""
    if isinstance(getattr(layer, "_trainable_variables", None), list):
        from anynan.keras.layers import variables_of

        return list(variables_of(layer))
    found = []
    for name, value in vars(layer).items():
        items: dict[str, Any] = {name: value}
        if isinstance(value, list | tuple):
            items = {f"{name}.{i}": item for i, item in enumerate(value)}
        elif isinstance(value, dict) and not name.startswith("_self_"):  # TensorFlow's own list
            items = {f"{name}.{key}": item for key, item in value.items()}
        found += [pair for pair in items.items() if isinstance(pair[1], tf.Variable)]
    return found


def raw(x: Any) -> Any:
    """Give the framework's variable in a variable of Keras or its own, else None."""
    if isinstance(x, tf.Variable):
        return x
    held = getattr(x, "_value", None)
    return held if isinstance(held, tf.Variable) else None


def parts(variable: Any) -> tuple[Any, ...]:
    """Give the variables that one is spread over: itself, if it lives in one place."""
    return (variable,) if _local(variable) else tuple(variable.values)


def read(variable: Any) -> Any:
    """Read a variable without copying it."""
    if not _local(variable):
        return tf.convert_to_tensor(variable)
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _local(variable: Any) -> bool:
    """Tell whether a variable lives in one place."""
    return not hasattr(variable, "values")
