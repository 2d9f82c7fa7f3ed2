"""Which rank's finding is the story."""

from dataclasses import replace

import pytest

from anynan._steps.ranks import Claim, choose, confirm, listed, with_others
from anynan.events import Event


def forward(rank: int, order: int, **fields: object) -> Claim:
    return replace(Claim(rank, 3, order, "forward"), **fields)  # type: ignore[arg-type]


def backward(rank: int, order: int, **fields: object) -> Claim:
    return replace(Claim(rank, 3, order, "backward"), **fields)  # type: ignore[arg-type]


def summed(rank: int) -> Claim:
    """The gradient of a weight, which every rank reads after it was summed."""
    return backward(rank, 40, parameter="last.weight")


def test_no_claim_is_no_story() -> None:
    assert choose([], staged=False) is None


@pytest.mark.parametrize("staged", [False, True])
def test_an_earlier_step_comes_first(staged: bool) -> None:
    early = replace(backward(1, 30), step=2)
    assert choose([forward(0, 1), early], staged=staged) == early


def test_the_first_position_wins_whatever_the_rank() -> None:
    claims = [summed(0), backward(1, 12), forward(2, 5), forward(3, 7)]
    assert choose(claims, staged=False) == claims[2]


def test_an_input_is_first_where_the_ranks_run_one_program() -> None:
    bad_batch = Claim(3, 3, 0, "input", came_in=True)
    assert choose([forward(0, 5), bad_batch], staged=False) == bad_batch


def test_equal_positions_go_to_the_lowest_rank() -> None:
    assert choose([forward(2, 5), forward(1, 5)], staged=False) == forward(1, 5)


def test_a_stage_that_got_bad_inputs_is_not_where_it_began() -> None:
    sent = Claim(1, 3, 0, "input", came_in=True)
    assert choose([sent, forward(0, 7)], staged=True) == forward(0, 7)


def test_in_stages_a_forward_pass_is_before_any_backward_pass() -> None:
    assert choose([backward(0, 2), forward(1, 9)], staged=True) == forward(1, 9)


def test_a_stage_that_got_bad_gradients_is_not_where_it_began() -> None:
    claims = [backward(0, 4, came_in=True), backward(1, 9), backward(2, 5, came_in=True)]
    assert choose(claims, staged=True) == claims[1]


def test_a_gradient_that_is_bad_everywhere_came_in_at_the_last_stage() -> None:
    claims = [backward(rank, 4 + rank, came_in=True) for rank in range(3)]
    assert choose(claims, staged=True) == claims[2]


def test_an_input_that_is_bad_everywhere_came_in_at_the_first_stage() -> None:
    claims = [Claim(rank, 3, 0, "input", came_in=True) for rank in (2, 0, 1)]
    assert choose(claims, staged=True) == claims[1]


def test_a_summed_gradient_is_the_story_of_the_rank_that_made_it() -> None:
    claims = [summed(0), summed(1), summed(2)]
    assert confirm(claims[0], claims, ["", "", "made"]) == claims[2]


def test_what_was_made_on_the_chosen_rank_stays_its_story() -> None:
    claims = [summed(0), summed(1)]
    assert confirm(claims[0], claims, ["made", "made"]) == claims[0]


def test_a_story_that_no_replay_shows_stays_where_it_was() -> None:
    claims = [forward(0, 5), forward(1, 7)]
    assert confirm(claims[0], claims, ["", "made"]) == claims[0]
    assert confirm(summed(0), [summed(0), summed(1)], ["", ""]) == summed(0)


def test_what_another_rank_sent_is_the_story_of_the_sender() -> None:
    claims = [forward(0, 9), forward(1, 1), forward(2, 4)]
    assert confirm(claims[1], claims, ["made", "sent", "sent"]) == claims[0]


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


def test_ranks_in_words() -> None:
    assert [listed([2]), listed([0, 1]), listed([0, 1, 5])] == [
        "rank 2",
        "ranks 0 and 1",
        "ranks 0, 1 and 5",
    ]
