"""Which rank's finding is the story."""

from dataclasses import replace
from typing import Any

import pytest

from anynan._steps.ranks import Claim, choose, confirm, with_others
from anynan.events import Event


def forward(rank: int, order: int) -> Claim:
    return Claim(rank, 3, order, "forward")


def backward(rank: int, order: int, **fields: Any) -> Claim:
    return Claim(rank, 3, order, "backward", **fields)


def summed(rank: int) -> Claim:
    """The gradient of a weight, which every rank reads after it was summed."""
    return backward(rank, 40, parameter="last.weight")


def came(rank: int) -> Claim:
    return Claim(rank, 3, 0, "input", came_in=True)


EARLY = replace(backward(1, 30), step=2)
LAST = backward(1, 9)
# Whether the ranks are stages of one model, what they claim, and whose claim is the story.
CHOSEN: dict[str, tuple[bool, list[Claim], Claim | None]] = {
    "no claim is no story": (False, [], None),
    "an earlier step comes first": (False, [forward(0, 1), EARLY], EARLY),
    "the first position wins whatever the rank": (
        False, [summed(0), backward(1, 12), forward(2, 5), forward(3, 7)], forward(2, 5),
    ),
    "equal positions go to the lowest rank": (False, [forward(2, 5), forward(1, 5)], forward(1, 5)),
    "a stage that got bad inputs is not where it began": (
        True, [came(1), forward(0, 7)], forward(0, 7),
    ),
    "in stages a forward pass is before any backward pass": (
        True, [backward(0, 2), forward(1, 9)], forward(1, 9),
    ),
    "a stage that got bad gradients is not where it began": (
        True, [backward(0, 4, came_in=True), LAST, backward(2, 5, came_in=True)], LAST,
    ),
    "an input that is bad everywhere came in at the first stage": (
        True, [came(2), came(0), came(1)], came(0),
    ),
}  # fmt: skip
# What is claimed, what a second run on each rank shows, and whose the story is after it.
CONFIRMED: dict[str, tuple[list[Claim], int, list[str], int]] = {
    "a summed gradient is the story of the rank that made it": (
        [summed(0), summed(1), summed(2)], 0, ["", "", "made"], 2,
    ),
    "what was made on the chosen rank stays its story": (
        [summed(0), summed(1)], 0, ["made", "made"], 0,
    ),
    "a fault of another place does not take it over": (
        [summed(0), backward(1, 12)], 0, ["", "made"], 0,
    ),
    "what another rank sent is the story of the sender": (
        [forward(0, 9), forward(1, 1), forward(2, 4)], 1, ["made", "sent", "sent"], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOSEN)
def test_the_story_is_that_of_one_claim(case: str) -> None:
    staged, claims, story = CHOSEN[case]
    assert choose(claims, staged=staged) == story


@pytest.mark.parametrize("case", CONFIRMED)
def test_a_second_run_says_whose_story_it_is(case: str) -> None:
    claims, chosen, shown, story = CONFIRMED[case]
    assert confirm(claims[chosen], claims, shown) == claims[story]


def test_a_claim_survives_json() -> None:
    claim = replace(summed(2), roots=(0, 3), came_in=True)
    assert Claim.from_dict(claim.to_dict()) == claim


def test_the_event_says_who_else_was_bad() -> None:
    event = Event("torch", "last", "forward", "nan", "bad", 3, rank=1)
    claims = [forward(rank, rank) for rank in (3, 1, 0)]
    (note,) = with_others(event, claims[1], claims).notes
    assert note == (
        "ranks 0 and 3 had bad readings in this step, too; the first was on rank 1 [ranks-too]"
    )
    assert with_others(event, claims[1], claims[1:2]) == event
