"""The guard on gradient norms: a jump above the running median, or next to nothing."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from anynan._readings.policy import Policy
from anynan.events import Kind

# Updates over which a norm's running median is taken, and how many it needs.
WINDOW = 100
FEWEST = 5
# What an event about a norm names as its tensor.
NORM = "gradient norm"


@dataclass(frozen=True, slots=True)
class Finding:
    """Say what the guard saw in one step's gradient norms.

    Attributes:
        kind: ``spike`` or ``vanishing``.
        layer: The layer whose own weights it is about; empty for all weights together.
        norm: The norm in question.
        total: The norm over all weights.
        median: The running median it is compared with, for a spike.
        largest: The layer with the largest norm, that norm and its own running median.
        layers: (layer, norm) in the model's order, where the norm fades from layer to layer.
        growth: (step, norm), oldest first, the present one last.
        news: False while a finding of the steps right before goes on.
    """

    kind: Kind
    layer: str
    norm: float
    total: float
    median: float | None = None
    largest: tuple[str, float, float | None] | None = None
    layers: tuple[tuple[str, float], ...] = ()
    growth: tuple[tuple[int, float], ...] = ()
    news: bool = True


class Guard:
    """Compare each update's gradient norms with those of the updates before.

    Args:
        policy: Its ``spike`` is compared with the norm over all weights, its ``vanishing`` with
            that and with each layer's own; an override's with the layers it names.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        policies = (policy, *policy.overrides.values())
        self.on = any(p.spike is not None or p.vanishing is not None for p in policies)
        self._past: dict[tuple[str, str | None], deque[tuple[int, float]]] = {}
        self._ongoing: set[tuple[str, str, str | None]] = set()
        self._at: dict[str, Policy] = {}
        self._spike: dict[str, float | None] = {}

    def clear(self) -> None:
        """Forget the norms seen so far."""
        self._past.clear()
        self._ongoing.clear()

    def judge(self, step: int, norms: Mapping[str, float], group: str = "") -> list[Finding]:
        """Judge one update, and count its norms among those that the next is compared with.

        Args:
            step: The step it belongs to.
            norms: L2 norm of the gradients of each layer's own weights.
            group: Name of what is updated together: norms of two optimizers are not comparable.

        Returns:
            Nothing if a norm is not finite: that is judged by the readings themselves.
        """
        total = math.hypot(*norms.values())
        if not norms or not math.isfinite(total):
            return []
        medians: dict[str | None, float | None] = {None: self._count(group, None, step, total)}
        for layer, norm in norms.items():
            medians[layer] = self._count(group, layer, step, norm)
        return [*self._spikes(group, norms, total, medians), *self._vanishing(group, norms, total)]

    def _count(self, group: str, layer: str | None, step: int, norm: float) -> float | None:
        """Give the median of the past norms if it will be asked for, then add this one."""
        past = self._past.get((group, layer))
        if past is None:
            past = self._past[(group, layer)] = deque(maxlen=WINDOW)
        wanted = layer is None or self._own_spike(layer) is not None
        found = self._median(past) if wanted else None
        past.append((step, norm))
        return found

    @staticmethod
    def _median(past: deque[tuple[int, float]]) -> float | None:
        return median(norm for _, norm in past) if len(past) >= FEWEST else None

    def _policy(self, layer: str) -> Policy:
        found = self._at.get(layer)
        if found is None:
            found = self._at[layer] = self.policy.at(layer)
        return found

    def _own_spike(self, layer: str) -> float | None:
        """Return the ratio that an override sets for a layer's own norm, None if none does."""
        if layer not in self._spike:
            self._spike[layer] = self.policy.named(layer).get("spike")
        return self._spike[layer]

    def _spikes(
        self, group: str, norms: Mapping[str, float], total: float,
        medians: Mapping[str | None, float | None],
    ) -> list[Finding]:  # fmt: skip
        found = []
        for layer, usual in medians.items():
            norm = total if layer is None else norms[layer]
            ratio = self.policy.spike if layer is None else self._own_spike(layer)
            high = ratio is not None and usual is not None and norm > ratio * usual
            news = self._begins(high, (group, "spike", layer))
            if not high:
                continue
            largest = None
            if layer is None and len(norms) > 1:
                name = max(norms, key=lambda each: norms[each])
                before = list(self._past[(group, name)])[:-1]
                largest = name, norms[name], self._median(deque(before))
            found.append(
                Finding(
                    "spike", layer or "", norm, total, usual, largest,
                    growth=tuple(self._past[(group, layer)]), news=news,
                )
            )  # fmt: skip
        return found

    def _vanishing(self, group: str, norms: Mapping[str, float], total: float) -> list[Finding]:
        floor = self.policy.vanishing
        low = floor is not None and total < floor
        news = self._begins(low, (group, "vanishing", None))
        faint = []
        for layer, norm in norms.items():
            own = self._policy(layer).vanishing
            below = own is not None and norm < own
            fresh = self._begins(below, (group, "vanishing", layer))
            if below:
                faint.append((not fresh, norm, layer))
        if low:
            growth = tuple(self._past[(group, None)])
            return [Finding("vanishing", "", total, total, growth=growth, news=news)]
        if not faint:
            return []
        # One finding for all of them: the faintest of those that are new.
        known, norm, layer = min(faint)
        growth = tuple(self._past[(group, layer)])
        layers = tuple(norms.items())
        return [
            Finding("vanishing", layer, norm, total, layers=layers, growth=growth, news=not known)
        ]

    def _begins(self, there: bool, key: tuple[str, str, str | None]) -> bool:
        """Note whether something goes on; tell whether it was not there before."""
        if not there:
            self._ongoing.discard(key)
            return False
        fresh = key not in self._ongoing
        self._ongoing.add(key)
        return fresh
