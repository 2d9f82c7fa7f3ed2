"""What a tracker's options mean for its programs."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Hold what a tracker's options mean for its programs."""

    names: tuple[str, ...] = ()
    layers: bool = True
    backward: bool = True
    gradients: bool = False
    ends: bool = False
    extra: tuple[str, ...] = ()
    parameters: bool = False
    donate: bool = True
    drops: bool = False
    raises: bool = False
    plain: bool = False
    # Arguments that come back and only count up, as metrics do; -1 for the first result.
    tallies: frozenset[Hashable] = frozenset()

    def restores(self, donated: tuple[int, ...]) -> bool:
        """Tell whether a bad step gives the old state back."""
        # A donated state is lost when the step is over: so is a replay, if it does not come back.
        return self.drops or (self.raises and bool(donated))
