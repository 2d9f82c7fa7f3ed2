"""What is watched: layers by path, the model they are of, their variables."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anynan._base.identity import SetByIdentity
from anynan._readings.patterns import choose
from anynan.options import Options
from anynan.tensorflow.read.weights import Weights


class Layers:
    """Know what is watched, and keep none of it alive.

    Args:
        find: Gives the layers that there are now, by path.
        model: What was tracked, None for a function.
        options: Which layers are wanted.

    Attributes:
        chosen: Paths of the layers that are read.
        looped: Paths of those that ran inside a loop or a branch of a graph.
        weights: Their variables.
    """

    def __init__(self, find: Callable[[], dict[str, Any]], model: Any, options: Options) -> None:
        self._find, self._options = find, options
        self._model = weakref.ref(model) if model is not None else None
        layers = find()
        self._known = {path: weakref.ref(layer) for path, layer in layers.items()}
        self._foreign: SetByIdentity[Any] = SetByIdentity()
        self.chosen = self._choose(layers, whole=self.whole())
        self.looped: set[str] = set()
        self.weights = Weights(layers)

    def whole(self) -> bool:
        """Tell whether every layer is built: else some, or their weights, are still to come."""
        return all(getattr(layer, "built", True) for layer in self.alive().values())

    def _choose(self, layers: dict[str, Any], *, whole: bool) -> set[str]:
        options = self._options
        overrides = options.policy.overrides
        return set(choose(layers, options.layers, options.exclude, overrides, whole=whole))

    def lacks(self, layer: Any) -> bool:
        """Tell whether a layer that runs in a step of these is to be looked for among them."""
        return layer not in self._foreign

    def grow(
        self, layer: Any, parts: Mapping[str, Any], sources: Sequence[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Take up what came since: layers, and the variables of all of them.

        Args:
            layer: One that runs, and was not known; None if none does.
            parts: It and the layers in it, by path.
            sources: Variables that were not known: of a function's step they are weights.

        Returns:
            The new layers by path, and the new variables.
        """
        alive = self.alive()
        known = {id(one) for one in alive.values()}
        fresh: dict[str, Any] = {}
        for path, one in self._find().items():
            if id(one) not in known:
                name = path
                while name in alive or name in fresh:
                    name += "_"
                fresh[name] = one
        if layer is not None and not any(layer is one for one in fresh.values()):
            if self._model is None:
                name = getattr(layer, "name", type(layer).__name__)  # a module may not have one
                names = {f"{name}.{path}".rstrip("."): one for path, one in parts.items()}
                fresh |= {path: one for path, one in names.items() if id(one) not in known}
            else:
                self.pass_over(layer)
        if fresh:
            alive |= fresh
            self._known = {path: weakref.ref(one) for path, one in alive.items()}
            self.chosen = self._choose(alive, whole=False)
        made = [x for path, one in alive.items() for x in self.weights.add(path, one)]
        for x in sources:
            if self._model is None:
                made += self.weights.add_all("", [(str(x.name).partition(":")[0], x)])
            else:
                self.weights.pass_over(x)
        return fresh, made

    def pass_over(self, layer: Any) -> None:
        """Look at a layer no more."""
        self._foreign.add(layer)

    def model(self) -> Any:
        """Give the tracked model, None if there is none or it is gone."""
        return None if self._model is None else self._model()

    def alive(self) -> dict[str, Any]:
        """Give every layer that is still there, by its path."""
        found = {path: ref() for path, ref in self._known.items()}
        return {path: layer for path, layer in found.items() if layer is not None}

    def expected(self) -> list[str]:
        """List the layers that ought to be read when they run."""
        return [path for path in self._known if path in self.chosen - self.looped - {""}]
