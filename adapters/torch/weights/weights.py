"""Weights and buffers: looked at when tracking starts and when a step fails."""

import math
import weakref
from collections.abc import Iterator

import torch

from anynan._diagnosis.evidence import BadParameter
from anynan._readings.monitor import Monitor
from anynan._readings.policy import reading_kind
from anynan._readings.readings import Site
from anynan.torch.call.models import Models
from anynan.torch.call.rootcall import RootCall
from anynan.torch.read.paths import clean_path, join
from anynan.torch.read.probes import DTYPE_NAME, all_ends, measure, nonfinite, plain
from anynan.torch.read.slots import site_of
from anynan.torch.weights.optimizers import Optimizers


class Weights:
    """Look at the weights and buffers of one tracker.

    Args:
        monitor: Makes the slots.
        models: What is watched.
        optimizers: What holds the weights.
    """

    def __init__(self, monitor: Monitor, models: Models, optimizers: Optimizers) -> None:
        self._monitor, self._models, self._optimizers = monitor, models, optimizers
        # What was asked for by name last, and where it is: a module and its attribute.
        self._asked: tuple[str, weakref.ref[torch.nn.Module], str] | None = None

    def all(self) -> list[tuple[str, torch.Tensor]]:
        """List weights and buffers by their full clean names."""
        return [*self._models.parameters(), *self._models.buffers()]

    def readings(self) -> Iterator[tuple[Site, torch.Tensor]]:
        """Walk what is to be read, with its slots."""
        weights = {name for name, _ in self._models.parameters()}
        for name, x in self.all():
            if x.dtype in DTYPE_NAME:
                layer, _, local = name.rpartition(".")
                buffer = name not in weights
                yield site_of(self._monitor, layer, "parameter", local, x, name, buffer=buffer), x

    def is_bad(self, name: str) -> bool:
        """Tell whether one weight or buffer holds a NaN or an Inf now."""
        asked = self._asked
        if asked is None or asked[0] != name:
            asked = self._asked = self._find(name)
        module = None if asked is None else asked[1]()
        if asked is None or module is None:  # of no module, but of an optimizer
            return nonfinite(dict(self.all()).get(name))
        return nonfinite(getattr(module, asked[2], None))

    def _find(self, name: str) -> "tuple[str, weakref.ref[torch.nn.Module], str] | None":
        for prefix, model in self._models.living():
            for path, module in model.named_modules():
                for local in (*module._parameters, *module._buffers):
                    clean = clean_path(f"{path}.{local}" if path else local, model)
                    if join(prefix, clean) == name:
                        return name, weakref.ref(module), local
        return None

    def bad(self, *, read: bool = False, root: RootCall | None = None) -> list[BadParameter]:
        """List weights with a NaN or an Inf and buffers with a NaN or +Inf.

        Args:
            read: Leave out what a call only writes: running statistics while training.
            root: Leave out the buffers that this call wrote.
        """
        found = []
        wrote = self._models.statistics() if read else {}
        if root is not None and root.began is not None:
            wrote |= root.began.wrote()
        weights = {name for name, _ in self._models.parameters()}
        spoils = self._models.options.policy.spoils
        held: set[int] | None = None
        settings: dict[int, dict[str, float]] = {}
        looked = [
            (name, x, values)
            for name, x in self.all()
            if not wrote.get(id(x)) and (values := plain(x)) is not None
        ]
        ends = all_ends([values for _, _, values in looked])
        for (name, x, _), (lo, hi) in zip(looked, ends, strict=True):
            if -math.inf < lo and hi < math.inf:
                continue
            layer = name.rpartition(".")[0]
            buffer = name not in weights
            if not spoils(reading_kind(lo, hi), layer, buffer=buffer):
                continue
            gradient = x.grad if x.is_leaf else None
            if gradient is not None and nonfinite(gradient):
                gradient = None  # made by the bad weight, after the update
            if held is None:
                held, settings = self._optimizers.holds(), self._optimizers.settings()
            state = {key: measure(value) for key, value in self._optimizers.moments(x).items()}
            # What one that is gone wrote is not put to those that are left.
            known = any(each.bad for each in state.values()) or not self._optimizers.gone
            found.append(
                BadParameter(
                    name, layer, measure(x), buffer,
                    None if gradient is None else measure(gradient), state,
                    id(x) in held, lost=not known, before=root is None or id(x) in wrote,
                    settings=settings.get(id(x), {}),
                )
            )  # fmt: skip
        return found
