"""The name of a value that is read."""

from dataclasses import dataclass

from anynan.events import Phase


@dataclass(frozen=True, slots=True)
class Spot:
    """Name a value that is read.

    Attributes:
        value: Number of the value.
        layer: Layer path, None outside every layer.
        phase: Phase of the reading.
        tensor: Which tensor.
        call: Which call of the layer.
        parameter: Name of the weight it belongs to.
        buffer: True for what is carried along and not trained.
    """

    value: int
    layer: str | None
    phase: Phase
    tensor: str
    call: int = 0
    parameter: str | None = None
    buffer: bool = False
