"""Which rank's finding is the story, when several processes train together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from anynan._readings.step import Step
from anynan._steps.judge import Judge
from anynan._steps.messages import RANKS_TOO
from anynan.events import Event, Phase

_CLASSES: dict[str, int] = {"loss": 1, "backward": 2, "optimizer": 3}


@dataclass(frozen=True, slots=True)
class Claim:
    """Say what one rank found bad first.

    Attributes:
        rank: Which rank.
        step: Step, from 0.
        order: Position among the rank's readings of that step.
        phase: Phase of the reading.
        parameter: Name of the weight, where the reading is of its gradient: ranks that share
            their gradients all see it.
        came_in: True if the values were bad on arrival, and another rank may have sent them.
        roots: Which calls of the tracked model or step to run again; empty where none can be.
    """

    rank: int
    step: int
    order: int
    phase: Phase
    parameter: str | None = None
    came_in: bool = False
    roots: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Claim":
        """Rebuild a claim from ``to_dict``."""
        return cls(**{**data, "roots": tuple(data["roots"])})


def choose(claims: Sequence[Claim], *, staged: bool) -> Claim | None:
    """Choose the claim that the others follow from, the same one on every rank.

    Ranks that run one program make their readings in the same order, so the first position
    wins, whatever the rank. Stages of a pipeline do not: there a forward pass comes before a
    backward pass, and what was bad on arrival began elsewhere.

    Args:
        claims: One from each rank that found something.
        staged: True if the ranks run stages of a pipeline.

    Example:
        >>> from anynan._steps.ranks import Claim, choose
        >>> late, early = Claim(0, 3, 40, "backward"), Claim(1, 3, 7, "forward")
        >>> choose([late, early], staged=False).rank
        1
    """
    if not claims:
        return None
    first = min(claim.step for claim in claims)
    claims = [claim for claim in claims if claim.step == first]
    if not staged:
        return min(claims, key=lambda claim: (claim.order, claim.rank))

    def key(claim: Claim) -> tuple[int, bool, bool, int, int]:
        part = _CLASSES.get(claim.phase, 0)
        # Where all of it came in, the stage it first came into: the last one, going backward.
        sent = 0 if not claim.came_in else claim.rank if not part else -claim.rank
        return part, claim.parameter is not None, claim.came_in, sent or claim.order, claim.rank

    return min(claims, key=key)


def confirm(chosen: Claim, claims: Sequence[Claim], shown: Sequence[str]) -> Claim:
    """Pass the story to a rank whose replay shows where it began, if the chosen one's does not.

    A weight's gradient is summed over the ranks before it is read, so all of them find it at
    the same position, and only where it was made a replay without the sum shows it again.

    Args:
        chosen: What ``choose`` gave.
        claims: What it chose from.
        shown: What each rank's replay showed: ``"made"`` here, ``"sent"`` by another rank, or
            nothing bad.
    """
    own = shown[chosen.rank]
    if own == "made" or (not own and chosen.parameter is None):
        return chosen
    others = [claim for claim in claims if shown[claim.rank] == "made"]
    if own != "sent":
        others = [claim for claim in others if claim.parameter == chosen.parameter]
    return choose(others, staged=own == "sent") or chosen


def excuse(judge: Judge, rows: Step, key: tuple[Any, ...], reason: str) -> None:
    """Take over what another rank's replay has shown to be no failure.

    Args:
        judge: This rank's judge.
        rows: Its open rows.
        key: Layer, phase and kind of the reading.
        reason: Why it is none.
    """
    layer, phase, kind = key
    judge.monitor.downgraded[(layer, phase, kind)] = reason
    held = None if rows.held is None else rows.held.reading
    if rows.held is None or held is None:
        return
    if held.site.parameter is None and (held.layer, held.phase, rows.held.kind) == tuple(key):
        rows.defer(None)
        judge.triage.go_on(rows, held)


def with_others(event: Event, chosen: Claim, claims: Sequence[Claim]) -> Event:
    """Note on an event which other ranks found something bad by the end of the step."""
    ranks = sorted(claim.rank for claim in claims if claim.rank != chosen.rank)
    if not ranks:
        return event
    note = RANKS_TOO(ranks=listed(ranks), first=event.rank)
    return replace(event, notes=(*event.notes, note))


def listed(ranks: Sequence[int]) -> str:
    """Name ranks in words."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
