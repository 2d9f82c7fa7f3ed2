"""The name of a tensor that is read."""

from dataclasses import dataclass

from anynan.events import Phase

# What watching adds to a graph is in this name scope.
SCOPE = "anynan"


@dataclass(slots=True)
class Spot:
    """Name one tensor that is read.

    Attributes:
        layer: Layer path, None outside every watched layer.
        phase: Phase of the reading.
        tensor: Which tensor (``output``, ``grad``).
        dtype: Short dtype name.
        dtype_max: The dtype's largest finite value.
        name: The tensor's name in its graph, empty where there is no graph.
        parameter: Name of the weight it belongs to.
        buffer: True for a variable that is not trained.
    """

    layer: str | None
    phase: Phase
    tensor: str
    dtype: str
    dtype_max: float
    name: str = ""
    parameter: str | None = None
    buffer: bool = False
