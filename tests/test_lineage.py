"""Which operation is to blame: every rule of the lineage, on records made by hand."""

import math
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from anynan._base.summary import Summary
from anynan._diagnosis.lineage import PLACING, Lineage, Operand, OpRecord, Sink, is_mask, trace
from anynan._diagnosis.operands import constant

SIZE = 8


def holding(**counts: int) -> Summary:
    size = counts.pop("size", SIZE)
    return replace(Summary((size,), "float32", "cpu", size), **counts)  # type: ignore[arg-type]


FINE = holding()
NAN = holding(nan=1)
INF = holding(posinf=1)
NEG = holding(neginf=1)
MASK = holding(neginf=3, zero=5)


def made(*parents: int, holds: Summary = NAN, name: str = "self") -> Operand:
    """Make an operand whose bad values these records wrote."""
    return Operand(name, holds, parents=parents)


def given(source: Any, holds: Summary, label: str = "x") -> Operand:
    """Make an operand whose bad values come from outside."""
    return Operand("self", holds, source=source, label=label)


def fine() -> Operand:
    return Operand("self", FINE)


def op(index: int, name: str, *operands: Operand, out: Summary = NAN, **more: Any) -> OpRecord:
    more.setdefault("layer", "layer")
    more.setdefault("phase", "forward")
    return OpRecord(index, name, name, output=out, operands=operands, **more)


def back(index: int, name: str, *operands: Operand, **more: Any) -> OpRecord:
    return op(index, name, *operands, phase="backward", **more)


def leaves(*parents: int, kind: str = "nan", layer: str = "layer") -> Sink:
    return Sink("forward", layer, "output", parents, kind)


def loss(*parents: int, kind: str = "nan") -> Sink:
    return Sink("loss", None, "loss", parents, kind)


def lands(*parents: int, kind: str = "nan") -> Sink:
    return Sink("backward", "layer", "layer.weight", parents, kind)


def origin(verdict: Lineage) -> int | None:
    return None if verdict.origin is None else verdict.origin.index


def contained(verdict: Lineage) -> list[int]:
    return [record.index for record in verdict.contained]


# Origins.


def test_a_bad_result_of_finite_operands_is_the_origin() -> None:
    verdict = trace([op(0, "log", fine()), op(1, "add", made(0))], [leaves(1)])
    assert origin(verdict) == 0
    assert verdict.outside is None
    assert verdict.sink == leaves(1)
    assert not verdict.placed_only


def test_an_operation_without_operands_is_the_origin_of_what_it_makes() -> None:
    assert origin(trace([op(0, "random")], [leaves(0)])) == 0


def test_an_operand_that_could_not_be_seen_does_not_clear_the_operation() -> None:
    assert origin(trace([op(0, "custom", Operand("self", None))], [leaves(0)])) == 0


def test_a_nan_keeps_its_origin_through_a_long_chain() -> None:
    chain = [op(0, "divide", fine()), *(op(i, "multiply", made(i - 1)) for i in range(1, 50))]
    assert origin(trace(chain, [leaves(49)])) == 0


def test_a_nan_made_of_a_computed_inf_belongs_to_the_inf() -> None:
    records = [
        op(0, "exp", fine(), out=INF),
        op(1, "subtract", made(0, holds=INF), out=NAN),
    ]
    verdict = trace(records, [leaves(1)])
    assert origin(verdict) == 0
    assert verdict.then is records[1]


def test_a_nan_made_of_a_placed_inf_is_an_origin_of_its_own() -> None:
    records = [
        op(0, "masked_fill", fine(), out=NEG),
        op(1, "softmax", made(0, holds=NEG), out=NAN),
    ]
    verdict = trace(records, [leaves(0, kind="neginf"), leaves(1)])
    assert origin(verdict) == 1
    assert verdict.then is None


@pytest.mark.parametrize("source", ["input", "parameter"])
def test_a_nan_made_of_an_inf_from_outside_belongs_to_the_outside(source: Any) -> None:
    records = [op(0, "subtract", given(source, holding(posinf=1, zero=2)), out=NAN)]
    verdict = trace(records, [leaves(0)])
    assert (verdict.outside.source, verdict.outside.label) == (source, "x")


def test_a_nan_operand_decides_over_an_inf_operand() -> None:
    records = [
        op(0, "exp", fine(), out=INF),
        op(1, "log", fine(), out=NAN),
        op(2, "add", made(0, holds=INF), made(1), out=NAN),
    ]
    assert origin(trace(records, [leaves(2)])) == 1


def test_a_placed_inf_beside_a_computed_one_does_not_hide_it() -> None:
    records = [
        op(0, "full", out=INF),
        op(1, "exp", fine(), out=INF),
        op(2, "add", made(0, holds=INF), made(1, holds=INF), out=holding(nan=1, posinf=1)),
    ]
    verdict = trace(records, [leaves(2)])
    assert origin(verdict) == 1
    assert not verdict.placed_only


@pytest.mark.parametrize("name", sorted(PLACING))
def test_a_nan_is_never_only_placed(name: str) -> None:
    verdict = trace([op(0, name, fine(), out=NAN), op(1, "add", made(0))], [leaves(1)])
    assert origin(verdict) == 0
    assert not verdict.placed_only


def test_a_nan_constant_is_no_mask() -> None:
    records = [op(0, "multiply", fine(), constant("other", math.nan), out=NAN)]
    verdict = trace(records, [leaves(0)])
    assert origin(verdict) == 0
    assert verdict.outside.source == "constant"
    assert not verdict.placed_only


def test_a_placed_nan_that_stays_inside_is_contained() -> None:
    verdict = trace([op(0, "where", fine(), out=NAN)], [])
    assert verdict.origin is None
    assert [record.index for record in verdict.contained] == [0]


def test_records_need_not_be_numbered_from_zero() -> None:
    records = [op(7, "log", fine()), op(12, "add", made(7))]
    assert origin(trace(records, [leaves(12)])) == 7


def test_parents_that_were_not_recorded_leave_an_origin_here() -> None:
    assert origin(trace([op(5, "add", made(3))], [leaves(5)])) == 5


# Placed values and masks.


@pytest.mark.parametrize("name", sorted(PLACING))
def test_placing_is_never_an_origin_while_it_stays_in_the_layers(name: str) -> None:
    verdict = trace([op(0, name, fine(), out=INF)], [leaves(0, kind="posinf")])
    assert verdict.origin is None
    assert verdict.placed_only
    assert verdict.contained == []


def test_placing_passes_on_what_was_computed() -> None:
    records = [op(0, "log", fine(), out=NAN), op(1, "where", made(0), out=NAN)]
    assert origin(trace(records, [leaves(1)])) == 0


def test_a_computed_value_stays_real_beside_placed_ones() -> None:
    records = [
        op(0, "masked_fill", fine(), out=NEG),
        op(1, "exp", fine(), out=INF),
        op(2, "where", made(0, holds=NEG), made(1, holds=INF), out=holding(neginf=1, posinf=1)),
    ]
    assert origin(trace(records, [leaves(2, kind="posinf")])) == 1


@pytest.mark.parametrize("source", ["input", "buffer"])
def test_a_mask_from_outside_is_no_origin(source: Any) -> None:
    records = [op(0, "add", fine(), given(source, MASK), out=holding(neginf=3))]
    verdict = trace(records, [leaves(0, kind="neginf")])
    assert (verdict.origin, verdict.outside) == (None, None)
    assert verdict.placed_only


@pytest.mark.parametrize("source", ["input", "buffer"])
def test_a_fully_masked_row_is_the_softmaxs_doing(source: Any) -> None:
    records = [
        op(0, "add", fine(), given(source, MASK), out=holding(neginf=3)),
        op(1, "softmax", made(0, holds=holding(neginf=3)), out=NAN),
    ]
    verdict = trace(records, [leaves(1)])
    assert origin(verdict) == 1
    assert verdict.outside is None


def test_an_incoming_neginf_beside_other_numbers_is_no_mask() -> None:
    records = [op(0, "subtract", given("input", holding(neginf=1, zero=1)), out=NAN)]
    verdict = trace(records, [leaves(0)])
    assert verdict.outside.source == "input"


@pytest.mark.parametrize(
    ("summary", "mask"),
    [
        (holding(neginf=3, zero=5), True),
        (holding(neginf=8), True),
        (holding(zero=8), False),
        (holding(neginf=3, zero=4), False),
        (holding(neginf=3, zero=4, nan=1), False),
        (holding(neginf=3, zero=4, posinf=1), False),
        (holding(size=0), False),
    ],
)
def test_a_mask_holds_zeros_and_neginf_and_nothing_else(summary: Summary, mask: bool) -> None:
    assert is_mask(summary) is mask


def test_a_constant_is_placed() -> None:
    records = [op(0, "multiply", fine(), given("constant", INF), out=INF)]
    assert trace(records, [leaves(0, kind="posinf")]).placed_only


def test_a_finite_operand_from_outside_is_nobodys_fault() -> None:
    verdict = trace([op(0, "log", given("input", FINE))], [leaves(0)])
    assert (origin(verdict), verdict.outside) == (0, None)


# Placed Inf and new Inf are told apart by count.


def added(count: int, *operands: Operand, size: int = SIZE) -> list[OpRecord]:
    return [
        op(0, "masked_fill", fine(), out=holding(neginf=3)),
        op(1, "add", made(0, holds=holding(neginf=3)), *operands,
           out=holding(neginf=count, size=size)),
    ]  # fmt: skip


def test_as_many_inf_as_were_placed_are_the_placed_ones() -> None:
    assert trace(added(3), [leaves(1, kind="posinf")]).placed_only


def test_one_inf_more_than_was_placed_is_new() -> None:
    assert origin(trace(added(4), [leaves(1, kind="posinf")])) == 1


def test_a_placed_inf_is_counted_once_for_each_place_it_is_broadcast_to() -> None:
    assert trace(added(12, size=32), [leaves(1, kind="posinf")]).placed_only
    assert origin(trace(added(13, size=32), [leaves(1, kind="posinf")])) == 1


def test_a_sum_over_placed_inf_makes_none_of_its_own() -> None:
    assert trace(added(1, size=1), [leaves(1, kind="posinf")]).placed_only


def test_overlapping_masks_add_up_to_no_more() -> None:
    other = Operand("other", holding(neginf=3), source="constant")
    assert trace(added(3, other), [leaves(1, kind="posinf")]).placed_only


def test_a_posinf_made_of_placed_neginf_is_an_origin() -> None:
    records = [
        op(0, "masked_fill", fine(), out=holding(neginf=3)),
        op(1, "negative", made(0, holds=holding(neginf=3)), out=holding(posinf=3)),
    ]
    assert origin(trace(records, [leaves(1, kind="posinf")])) == 1


# Harm, and what is contained.


def test_without_a_sink_every_origin_is_contained() -> None:
    verdict = trace([op(0, "log", fine()), op(1, "sqrt", fine())], [])
    assert contained(verdict) == [0, 1]
    assert (verdict.origin, verdict.sink, verdict.placed_only) == (None, None, False)


def test_nothing_bad_gives_an_empty_verdict() -> None:
    assert trace([], []) == Lineage()


def test_only_the_origin_is_contained_not_what_descends_from_it() -> None:
    records = [op(0, "log", fine()), op(1, "add", made(0)), op(2, "multiply", made(1))]
    assert contained(trace(records, [])) == [0]


def test_a_guarded_origin_is_contained_beside_a_harmful_one() -> None:
    records = [op(0, "log", fine()), op(1, "sqrt", fine()), op(2, "add", made(1))]
    verdict = trace(records, [leaves(2)])
    assert (origin(verdict), contained(verdict)) == (1, [0])


def test_an_origin_that_only_later_does_harm_is_not_contained() -> None:
    records = [op(0, "log", fine()), op(1, "sqrt", fine())]
    verdict = trace(records, [leaves(0), loss(1)])
    assert (origin(verdict), contained(verdict)) == (0, [])


@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "parameter"])
def test_every_kind_of_sink_is_harm(phase: Any) -> None:
    sink = Sink(phase, "layer", "x", (0,), "nan")
    verdict = trace([op(0, "log", fine())], [sink])
    assert origin(verdict) == 0
    assert verdict.sink is sink


def test_a_neginf_alone_that_leaves_a_layer_is_no_harm() -> None:
    verdict = trace([op(0, "log", fine(), out=NEG)], [leaves(0, kind="neginf")])
    assert (verdict.origin, verdict.sink) == (None, None)


@pytest.mark.parametrize("sink", [loss(0, kind="neginf"), lands(0, kind="neginf")])
def test_a_neginf_in_a_loss_or_a_gradient_is_harm(sink: Sink) -> None:
    assert origin(trace([op(0, "log", fine(), out=NEG)], [sink])) == 0


def test_a_computed_neginf_is_the_origin_once_something_bad_follows() -> None:
    records = [
        op(0, "log", fine(), out=NEG),
        op(1, "multiply", made(0, holds=NEG), out=NAN, layer="next"),
    ]
    verdict = trace(records, [leaves(0, kind="neginf"), leaves(1, layer="next")])
    assert origin(verdict) == 0
    assert verdict.sink == leaves(1, layer="next")
    assert verdict.then is records[1]


def test_a_computed_neginf_is_harm_where_the_policy_forbids_it() -> None:
    records = [op(0, "log", fine(), out=NEG)]
    verdict = trace(records, [leaves(0, kind="neginf")], neginf=True)
    assert origin(verdict) == 0


def test_a_mask_stays_a_mask_where_the_policy_forbids_neginf() -> None:
    records = [op(0, "masked_fill", fine(), out=NEG)]
    verdict = trace(records, [leaves(0, kind="neginf")], neginf=True)
    assert verdict.origin is None
    assert verdict.placed_only


def test_a_placed_inf_in_the_loss_is_the_placings_doing() -> None:
    verdict = trace([op(0, "where", fine(), out=INF)], [loss(0, kind="posinf")])
    assert origin(verdict) == 0
    assert not verdict.placed_only


def test_bad_values_that_nobody_was_seen_writing_are_not_called_placed() -> None:
    verdict = trace([], [leaves()])
    assert not verdict.placed_only
    assert (verdict.origin, verdict.sink) == (None, None)


def test_a_mask_does_not_speak_for_bad_values_that_nobody_was_seen_writing() -> None:
    records = [op(0, "masked_fill", fine(), out=NEG)]
    assert not trace(records, [leaves(0, kind="neginf"), leaves()]).placed_only


# Several faults.


def test_of_independent_faults_the_first_harmful_one_is_named() -> None:
    records = [op(0, "log", fine()), op(1, "sqrt", fine()), op(2, "divide", fine())]
    verdict = trace(records, [leaves(1), leaves(2, layer="next")])
    assert (origin(verdict), contained(verdict)) == (1, [0])


def test_of_faults_that_meet_the_earliest_is_named() -> None:
    records = [
        op(0, "sqrt", fine()),
        op(1, "log", fine()),
        op(2, "add", made(1), made(0)),
    ]
    verdict = trace(records, [loss(2)])
    assert (origin(verdict), contained(verdict)) == (0, [])


def test_where_a_contained_fault_and_a_placed_one_come_first_the_harmful_one_is_named() -> None:
    records = [
        op(0, "masked_fill", fine(), out=NEG),
        op(1, "log", fine()),
        op(2, "softmax", made(0, holds=NEG), out=NAN),
    ]
    verdict = trace(records, [leaves(0, kind="neginf"), leaves(2)])
    assert (origin(verdict), contained(verdict)) == (2, [1])


# From outside.


@pytest.mark.parametrize("source", ["input", "parameter", "buffer", "uninitialised", "unknown"])
def test_nan_from_outside_is_named_with_its_source(source: Any) -> None:
    records = [
        op(0, "matmul", given(source, NAN, "encoder.weight")),
        op(1, "add", made(0)),
    ]
    verdict = trace(records, [leaves(1)])
    assert (verdict.outside.source, verdict.outside.label) == (source, "encoder.weight")
    assert origin(verdict) == 0  # where it was read
    assert verdict.contained == []
    assert not verdict.placed_only


def test_what_a_record_wrote_counts_over_where_the_storage_came_from() -> None:
    weight = Operand("weight", NAN, parents=(0,), source="parameter", label="w")
    verdict = trace([op(0, "divide", fine()), op(1, "matmul", weight)], [leaves(1)])
    assert (origin(verdict), verdict.outside) == (0, None)


def test_an_origin_before_a_bad_input_is_read_is_named() -> None:
    records = [op(0, "log", fine()), op(1, "add", made(0), given("input", NAN))]
    verdict = trace(records, [leaves(1)])
    assert (origin(verdict), verdict.outside) == (0, None)


def test_uninitialised_memory_counts_from_where_it_is_read() -> None:
    records = [op(0, "log", fine()), op(1, "add", given("uninitialised", NAN, "buffer"))]
    verdict = trace(records, [leaves(1)])
    assert verdict.outside.source == "uninitialised"
    assert contained(verdict) == [0]


# The backward pass.


def test_a_gradient_gone_bad_on_finite_values_is_the_nodes_own() -> None:
    records = [back(0, "sqrt", Operand("grad", FINE), Operand("result", FINE), out=INF)]
    assert origin(trace(records, [lands(0, kind="posinf")])) == 0


def test_a_bad_incoming_gradient_belongs_to_who_made_it() -> None:
    records = [
        back(0, "sqrt", Operand("grad", FINE), out=INF),
        back(1, "multiply", made(0, holds=INF, name="grad"), out=NAN),
    ]
    verdict = trace(records, [lands(1)])
    assert origin(verdict) == 0
    assert verdict.then is records[1]


def test_a_gradient_of_a_bad_forward_value_is_credited_to_the_forward_operation() -> None:
    records = [
        op(0, "log", fine(), out=NAN),
        back(1, "log", Operand("grad", FINE), out=NAN, forward=0),
    ]
    verdict = trace(records, [lands(1)])
    assert origin(verdict) == 0
    assert verdict.origin.phase == "forward"


def test_a_hidden_forward_inf_becomes_the_origin_through_its_gradient() -> None:
    records = [
        op(0, "log", fine(), out=NEG),
        back(1, "log", Operand("grad", FINE), made(0, holds=NEG, name="result"), out=NAN),
    ]
    verdict = trace(records, [lands(1)])
    assert (origin(verdict), verdict.contained) == (0, [])
    assert verdict.then is records[1]


def test_a_gradient_of_a_masked_value_is_the_nodes_own() -> None:
    records = [
        op(0, "masked_fill", fine(), out=NEG),
        back(1, "softmax", Operand("grad", FINE), made(0, holds=NEG), out=NAN, forward=0),
    ]
    assert origin(trace(records, [lands(1)])) == 1


def test_a_forward_record_that_is_not_in_the_replay_gives_no_credit() -> None:
    records = [back(4, "sqrt", Operand("grad", FINE), out=INF, forward=2)]
    assert origin(trace(records, [lands(4, kind="posinf")])) == 4


# The first Inf and the first NaN.


def test_then_is_the_first_nan_and_not_a_later_one() -> None:
    records = [
        op(0, "exp", fine(), out=INF),
        op(1, "multiply", made(0, holds=INF), out=INF),
        op(2, "subtract", made(1, holds=INF), out=NAN),
        op(3, "subtract", made(1, holds=INF), out=NAN),
        op(4, "add", made(2), out=NAN),
    ]
    assert trace(records, [leaves(4)]).then is records[2]


def test_then_descends_from_the_origin() -> None:
    records = [
        op(0, "exp", fine(), out=INF),
        op(1, "log", fine(), out=NAN),
        op(2, "subtract", made(0, holds=INF), out=NAN),
    ]
    verdict = trace(records, [leaves(0, kind="posinf"), leaves(2)])
    assert origin(verdict) == 0
    assert verdict.then is records[2]


def test_an_origin_of_nan_has_no_then() -> None:
    records = [op(0, "log", fine(), out=NAN), op(1, "add", made(0), out=NAN)]
    assert trace(records, [leaves(1)]).then is None


def test_an_overflow_that_stays_inf_has_no_then() -> None:
    records = [op(0, "exp", fine(), out=INF), op(1, "add", made(0, holds=INF), out=INF)]
    assert trace(records, [leaves(1, kind="posinf")]).then is None


# It stays fast: a replay may hold every operation of a long step.

MANY = 20_000


def timed(records: list[OpRecord], sinks: list[Sink]) -> tuple[Lineage, float]:
    """Trace three times; give the shortest time, as other processes share the cores."""
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        verdict = trace(records, sinks)
        seconds.append(time.thread_time() - start)
    return verdict, min(seconds)


def test_a_long_chain_with_a_sink_at_every_step_is_fast() -> None:
    chain = [op(0, "log", fine()), *(op(i, "add", made(i - 1)) for i in range(1, MANY))]
    verdict, seconds = timed(chain, [leaves(i) for i in range(MANY)])
    assert origin(verdict) == 0
    assert seconds < 1


def many_faults() -> list[OpRecord]:
    """Make a recurrent sum with a new fault in each step."""
    records = [op(0, "log", fine()), op(1, "add", made(0))]
    for i in range(2, MANY, 2):
        records += [op(i, "log", fine()), op(i + 1, "add", made(i), made(i - 1))]
    return records


def test_many_faults_that_meet_are_fast_and_all_harmful() -> None:
    verdict, seconds = timed(many_faults(), [loss(MANY - 1)])
    assert origin(verdict) == 0
    assert verdict.contained == []
    assert seconds < 1


def test_many_faults_that_meet_take_little_memory() -> None:
    records = many_faults()
    tracemalloc.start()
    trace(records, [loss(MANY - 1)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
