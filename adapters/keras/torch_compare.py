"""One side of a comparison: a Keras model on PyTorch."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anynan._apps.compare.captures import RunRequest
from anynan.keras.layers import layers_of, refuse_unbuilt, same_draws, watching, weights_of
from anynan.torch.compare import TorchSide


class KerasSide(TorchSide):
    """Run a Keras model as PyTorch does, with the names of Keras."""

    backend = "keras on torch"
    can_widen = False  # its layers cast to a dtype of their own

    def __init__(self, model: Any) -> None:
        refuse_unbuilt(model)
        self.layers = layers_of(model)
        self.call = functools.partial(model, training=False)
        self.compiled, self.paths = [], {}
        self._weights = weights_of(self.layers)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk the variables, each once, by name."""
        for weight in self._weights:
            yield weight.name, weight.variable._value

    @contextmanager
    def standing(
        self, paths: dict[torch.nn.Module, str], before: Callable[[str], Any],
        after: Callable[..., Any],
    ) -> Iterator[None]:  # fmt: skip
        """Stand at the calls of layers: Keras calls no hooks."""

        def begin(path: str, *call: Any) -> Any:
            return before(path)(*call)

        def end(path: str, *call: Any) -> None:
            after(*call)

        with watching(self.layers, begin, end):
            yield

    @contextmanager
    def _kept(self, batch: tuple[Any, ...], notes: list[str]) -> Iterator[None]:
        """Put variables back afterwards."""
        held = [(x, x.detach().clone()) for _, x in self.weights()]
        try:
            with torch.random.fork_rng():
                yield
        finally:
            for x, before in held:
                x.data.copy_(before)

    @contextmanager
    def _moved(self, wish: RunRequest) -> Iterator[None]:
        with super()._moved(wish):
            for state, start in same_draws(self._weights):
                state.assign(start)
            yield
