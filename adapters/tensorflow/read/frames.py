"""What is being collected while a model runs or is traced."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from anynan._arrays.arguments import bound, positional
from anynan._arrays.containers import leaves
from anynan._readings.readings import ProbePoint
from anynan.events import Phase
from anynan.tensorflow.read import probes

LOOPS = ("WhileBodyFuncGraph", "WhileCondFuncGraph", "CondBranchFuncGraph")


@dataclass
class Frame:
    """Collect the readings of one call of a model, in one graph or outside of all.

    Attributes:
        graph: The graph that is traced, None outside.
        replaying: True where the step runs again: nothing is written then.
        points: What is read.
        tensors: The tensors themselves, while the frame is open.
        order: All of them, and what only a replay looks at, in execution order.
        rows: What was read of the tensors, a row for each.
        fine: Whether the gradients of weights up to here are finite, once that was asked.
        before: What an earlier gradient call of the graph collected.
        xla: True where XLA compiles the graph.
    """

    graph: Any
    replaying: bool = False
    points: list[ProbePoint] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    order: list[ProbePoint] = field(default_factory=list)
    rows: Any = None
    fine: Any = None
    before: "Frame | None" = None
    xla: bool = False

    def slopes(self) -> list[Any]:
        """List the gradients of weights that were read up to here."""
        mine = zip(self.points, self.tensors, strict=True)
        found = [x for point, x in mine if point.parameter]
        return found if self.before is None else [*self.before.slopes(), *found]

    def take(
        self, x: Any, layer: str | None, phase: Phase, tensor: str, parameter: str | None = None, *,
        read: bool = True,
    ) -> None:  # fmt: skip
        """Read one tensor, or have only a replay look at it."""
        if self.graph is not None and not tf.is_symbolic_tensor(x):
            x = self.graph.capture(x)  # what a compiled function closes over has a name only so
        name = "" if self.graph is None else x.name
        point = ProbePoint(name, layer, phase, tensor, 0, parameter, dtype=probes.dtype(x))
        self.order.append(point)
        if read:
            self.points.append(point)
            self.tensors.append(x)


def here() -> Any:
    """Give the graph that is traced, None outside."""
    return tf.compat.v1.get_default_graph() if tf.inside_function() else None


def graph_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give what a compiled function is traced to for a call, None where the call will raise."""
    try:
        return fn.get_concrete_function(*args, **kwargs).graph
    except Exception:  # noqa: BLE001  the call itself raises it
        return None


def is_loop(graph: Any) -> bool:
    """Tell whether a graph is the body of a loop or a branch."""
    return type(graph).__name__ in LOOPS


def tensors(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the float tensors of a nested value, with a name for each."""
    found = leaves(value, name, parts=_values)
    return ((path, x) for path, x in found if probes.checkable(x))


def _values(x: Any) -> list[tuple[str, Any]] | None:
    if isinstance(x, tf.RaggedTensor):
        return [("", x.flat_values)]
    if isinstance(x, tf.SparseTensor | tf.IndexedSlices):
        return [("", x.values)]
    return None


def named_arguments(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a layer's call."""
    return dict(bound(positional(getattr(layer, "call", None) or layer), args, kwargs))
