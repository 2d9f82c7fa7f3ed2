"""Which of the watched weights an optimizer holds, and the slots of their gradients."""

import math
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from anynan._base.identity import ByIdentity
from anynan._readings.monitor import Monitor
from anynan._readings.readings import Site
from anynan.torch.call.discovery import after, living
from anynan.torch.call.models import Models
from anynan.torch.private import was_made
from anynan.torch.read.slots import site_of

_HALF = (torch.float16, torch.bfloat16)
# So many updates back an optimizer that is gone may have spoilt a weight.
LATELY = 4


class Held:
    """List the watched parameters of one optimizer.

    Attributes:
        size: Number of parameters the optimizer held when this list was made.
        parameters: Those that are watched.
        sites: Their gradient slots.
        limit: The tightest of the slots' limits.
        dtype: What their norms are computed in, None for their own dtype.
    """

    def __init__(self, size: int, parameters: list[torch.Tensor], sites: list[Site]) -> None:
        self.size, self.parameters, self.sites = size, parameters, sites
        self.limit = min((site.limit for site in sites), default=math.inf)
        self.dtype = norm_dtype(parameters)


class Optimizers:
    """Remember what each optimizer holds.

    Args:
        monitor: Makes the slots.
        models: What is watched.

    Attributes:
        known: Whether an optimizer holds a watched weight; None until somebody looked.
    """

    def __init__(self, monitor: Monitor, models: Models) -> None:
        self._monitor, self._models = monitor, models
        self._held: ByIdentity[Any, Held] = ByIdentity()
        self.known: bool | None = None
        self._bad: ByIdentity[Any, dict[int, dict[str, float]]] = ByIdentity()
        self._updaters: deque[weakref.ref[Any]] = deque(maxlen=LATELY)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note who updates, and its numbers that are not finite: a schedule may set others then."""
        self._updaters.append(weakref.ref(optimizer))
        found = {}
        for i, group in enumerate(optimizer.param_groups):
            for name, x in group.items():
                if isinstance(x, float) and x - x != 0:
                    found[i] = {name: x}
        if found or (self._bad and optimizer in self._bad):
            self._bad[optimizer] = found

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        """List the watched parameters that an optimizer holds, with their gradient slots."""
        groups = optimizer.param_groups
        size = sum([len(group["params"]) for group in groups])
        entry = self._held.get(optimizer)
        if entry is None or entry.size != size:
            names = {id(p): name for name, p in self._models.parameters()}
            mine = [p for group in groups for p in group["params"] if id(p) in names]
            sites = [gradient_site(self._monitor, names[id(p)], p) for p in mine]
            entry = self._held[optimizer] = Held(size, mine, sites)
        return entry

    def unheld(self) -> Held:
        """List the watched parameters that have a gradient."""
        mine = self._models.with_gradient()
        sites = [gradient_site(self._monitor, name, p) for name, p in mine]
        return Held(len(mine), [p for _, p in mine], sites)

    def forget(self) -> None:
        """Look anew at what each holds: other weights are watched now."""
        self._held.clear()

    def mine(self) -> set[int]:
        """Give the ids of the optimizers seen so far that hold a watched weight."""
        return {id(optimizer) for optimizer, held in self._held.items() if held.parameters}

    def exist(self) -> bool:
        """Tell whether any optimizer holds a watched weight; looked for once."""
        if self.known is None:
            known = {id(p) for _, p in self._models.parameters()}
            self.known = bool(known and find_optimizers(known))
        return self.known

    def moments(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give the tensors that optimizers keep for a weight, by name."""
        return {
            str(key): value
            for optimizer in list(self._held)
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, torch.Tensor) and value.numel()
        }

    def settings(self) -> dict[int, dict[str, float]]:
        """Give the numbers that optimizers work with where they update a weight, by its id."""
        found: dict[int, dict[str, float]] = {}
        for optimizer in list(self._held):
            bad = self._bad.get(optimizer, {})
            defaults = getattr(optimizer, "defaults", None) or {}
            for number, group in enumerate(optimizer.param_groups):
                numbers: dict[str, float] = {}
                for name, value in {**defaults, **group}.items():
                    many = value if isinstance(value, tuple) else (value,)
                    for i, x in enumerate(many if name != "params" else ()):
                        single = isinstance(x, torch.Tensor) and x.numel() == 1
                        if single or (isinstance(x, float | int) and not isinstance(x, bool)):
                            numbers[f"{name}[{i}]" if len(many) > 1 else name] = float(x)
                numbers |= bad.get(number, {})
                for p in group["params"]:
                    found[id(p)] = found.get(id(p), {}) | numbers
        return found

    def holds(self) -> set[int]:
        """Give the ids of the weights that an optimizer seen so far holds."""
        return {id(p) for held in self._held.values() for p in held.parameters}

    @property
    def gone(self) -> bool:
        """Tell whether one that updated lately is gone, and with it what its state was."""
        return any(ref() is None for ref in self._updaters)


def find_optimizers(parameters: set[int]) -> list[torch.optim.Optimizer]:
    """Look for living optimizers that hold any of these parameters (by id)."""
    return [
        item
        for item in living({kind for kind in after([torch.optim.Optimizer]) if was_made(kind)})
        if any(id(p) in parameters for group in item.param_groups for p in group["params"])
    ]


def norm_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype | None:
    """Choose what norms are computed in: half precision overflows early, and is coarse."""
    found = {p.dtype for p in parameters}
    if len(found) == 1 and not found.intersection(_HALF):
        return None
    return torch.float64 if torch.float64 in found else torch.float32


def gradient_site(monitor: Monitor, name: str, p: torch.Tensor) -> Site:
    """Return the slot that holds the norm of a weight's gradient."""
    layer, _, local = name.rpartition(".")
    return site_of(monitor, layer, "backward", f"grad of {local}", p, name, bound=True)


def exact_site(monitor: Monitor, site: Site) -> Site:
    """Return the slot that holds a gradient's ends instead of its norm."""
    return monitor.site(
        site.layer, site.phase, site.tensor, site.dtype, site.dtype_max, parameter=site.parameter
    )
