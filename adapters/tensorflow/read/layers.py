"""What is watched: layers by path, the model they are of, their variables."""

import weakref
from typing import Any

from anynan._readings.patterns import choose
from anynan.options import Options
from anynan.tensorflow.read.weights import Weights


class Layers:
    """Know what is watched, and keep none of it alive.

    Args:
        layers: By path.
        model: What was tracked, None for a function.
        options: Which layers are wanted.

    Attributes:
        chosen: The layers that are read.
        looped: Paths of those that ran inside a loop or a branch of a graph.
        weights: Their variables.
    """

    def __init__(self, layers: dict[str, Any], model: Any, options: Options) -> None:
        self.chosen = choose(layers, options.layers, options.exclude)
        self.looped: set[str] = set()
        self.weights = Weights(layers)
        self._known = {path: weakref.ref(layer) for path, layer in layers.items()}
        self._model = weakref.ref(model) if model is not None else None

    def model(self) -> Any:
        """Give the tracked model, None if there is none or it is gone."""
        return None if self._model is None else self._model()

    def alive(self) -> dict[str, Any]:
        """Give every layer that is still there, by its path."""
        found = {path: ref() for path, ref in self._known.items()}
        return {path: layer for path, layer in found.items() if layer is not None}

    def expected(self) -> list[str]:
        """List the layers that ought to be read when they run."""
        return [path for path in self.chosen if path and path not in self.looped]
