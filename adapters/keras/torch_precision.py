"""Run a Keras model on PyTorch, with the names of Keras."""

from collections.abc import Mapping
from typing import Any

import keras
import torch

from anynan.keras.torch_backend import KerasModels
from anynan.options import Options
from anynan.torch.call.discovery import named_models
from anynan.torch.observe import takes
from anynan.torch.precision import Narrowed as TorchNarrowed


class Narrowed(TorchNarrowed):
    """Run one target in narrow dtypes."""

    @staticmethod
    def takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a target is a Keras model, or a step of one."""
        found = named_models(target, args, kwargs).values()
        mine = any(isinstance(model, keras.layers.Layer) for model in found)
        return mine and takes(target, args, kwargs)

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(target, args, kwargs)
        fn = self._sight.fn
        models = KerasModels(Options(), None if isinstance(fn, torch.nn.Module) else fn)
        self._sight.models = models
        self.layers = {
            path: layer
            for name, model in named_models(target, args, kwargs).items()
            for path, layer in models.named(name, model).items()
        }


narrowed_of = Narrowed.of
