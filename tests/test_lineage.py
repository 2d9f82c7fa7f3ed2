"""Which operation is to blame: every rule of the lineage, on records made by hand."""

import math
import time
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


def told(verdict: Lineage) -> dict[str, Any]:
    """Give what a verdict says, records by their numbers."""
    then, outside = verdict.then, verdict.outside
    return {
        "origin": origin(verdict),
        "then": None if then is None else then.index,
        "contained": [record.index for record in verdict.contained],
        "outside": None if outside is None else (outside.source, outside.label),
        "placed_only": verdict.placed_only,
        "sink": verdict.sink,
    }


def added(count: int, *operands: Operand, size: int = SIZE) -> list[OpRecord]:
    """Add to a mask of three -Inf, with so many of them in the result."""
    return [
        op(0, "masked_fill", fine(), out=holding(neginf=3)),
        op(1, "add", made(0, holds=holding(neginf=3)), *operands,
           out=holding(neginf=count, size=size)),
    ]  # fmt: skip


LOG = op(0, "log", fine())
MASKED = op(0, "masked_fill", fine(), out=NEG)
LEAVES_MASKED = leaves(0, kind="neginf")
OVERFLOW = op(0, "exp", fine(), out=INF)
CASES: dict[str, tuple[list[OpRecord], list[Sink], dict[str, Any]]] = {
    # Origins.
    "a bad result of finite operands is the origin": (
        [LOG, op(1, "add", made(0))], [leaves(1)],
        {"origin": 0, "then": None, "outside": None, "sink": leaves(1), "placed_only": False},
    ),
    "a NaN made of a computed Inf belongs to the Inf": (
        [OVERFLOW, op(1, "subtract", made(0, holds=INF), out=NAN)], [leaves(1)],
        {"origin": 0, "then": 1},
    ),
    "a NaN operand decides over an Inf operand": (
        [OVERFLOW, op(1, "log", fine()), op(2, "add", made(0, holds=INF), made(1))],
        [leaves(2)], {"origin": 1},
    ),
    "a NaN constant is no mask": (
        [op(0, "multiply", fine(), constant("other", math.nan))], [leaves(0)],
        {"origin": 0, "outside": ("constant", "value"), "placed_only": False},
    ),
    "a NaN made of an Inf from outside belongs to the outside": (
        [op(0, "subtract", given("input", holding(posinf=1, zero=2)))], [leaves(0)],
        {"outside": ("input", "x")},
    ),
    "a placed NaN that stays inside is contained": (
        [op(0, "where", fine())], [], {"origin": None, "contained": [0]},
    ),
    # Placed values and masks.
    "an incoming -Inf beside other numbers is no mask": (
        [op(0, "subtract", given("input", holding(neginf=1, zero=1)))], [leaves(0)],
        {"outside": ("input", "x")},
    ),
    "a constant is placed": (
        [op(0, "multiply", fine(), given("constant", INF), out=INF)], [leaves(0, kind="posinf")],
        {"placed_only": True},
    ),
    "a finite operand from outside is nobody's fault": (
        [op(0, "log", given("input", FINE))], [leaves(0)], {"origin": 0, "outside": None},
    ),
    # Placed Inf and new Inf are told apart by count.
    "one Inf more than was placed is new": (added(4), [leaves(1, kind="posinf")], {"origin": 1}),
    "a placed Inf is counted once for each place it is broadcast to": (
        added(12, size=32), [leaves(1, kind="posinf")], {"placed_only": True},
    ),
    "a sum over placed Inf makes none of its own": (
        added(1, size=1), [leaves(1, kind="posinf")], {"placed_only": True},
    ),
    "a +Inf made of placed -Inf is an origin": (
        [op(0, "masked_fill", fine(), out=holding(neginf=3)),
         op(1, "negative", made(0, holds=holding(neginf=3)), out=holding(posinf=3))],
        [leaves(1, kind="posinf")], {"origin": 1},
    ),
    # Harm, and what is contained.
    "without a sink every origin is contained, and nothing that descends from one": (
        [LOG, op(1, "sqrt", fine()), op(2, "add", made(0))], [],
        {"contained": [0, 1], "origin": None, "sink": None, "placed_only": False},
    ),
    "an origin that only later does harm is not contained": (
        [LOG, op(1, "sqrt", fine())], [leaves(0), loss(1)], {"origin": 0, "contained": []},
    ),
    "a -Inf alone that leaves a layer is no harm": (
        [op(0, "log", fine(), out=NEG)], [LEAVES_MASKED], {"origin": None, "sink": None},
    ),
    "a -Inf in a loss is harm": (
        [op(0, "log", fine(), out=NEG)], [loss(0, kind="neginf")], {"origin": 0},
    ),
    "a computed -Inf is the origin once something bad follows": (
        [op(0, "log", fine(), out=NEG), op(1, "multiply", made(0, holds=NEG), layer="next")],
        [LEAVES_MASKED, leaves(1, layer="next")],
        {"origin": 0, "sink": leaves(1, layer="next"), "then": 1},
    ),
    "a placed Inf in the loss is the placing's doing": (
        [op(0, "where", fine(), out=INF)], [loss(0, kind="posinf")],
        {"origin": 0, "placed_only": False},
    ),
    "a mask does not speak for bad values that nobody was seen writing": (
        [MASKED], [LEAVES_MASKED, leaves()], {"placed_only": False},
    ),
    # Several faults.
    "of faults that meet the earliest is named": (
        [op(0, "sqrt", fine()), op(1, "log", fine()), op(2, "add", made(1), made(0))], [loss(2)],
        {"origin": 0, "contained": []},
    ),
    "where a contained fault and a placed one come first the harmful one is named": (
        [MASKED, op(1, "log", fine()), op(2, "softmax", made(0, holds=NEG))],
        [LEAVES_MASKED, leaves(2)], {"origin": 2, "contained": [1], "then": None},
    ),
    # From outside.
    "what a record wrote counts over where the storage came from": (
        [op(0, "divide", fine()),
         op(1, "matmul", Operand("weight", NAN, parents=(0,), source="parameter", label="w"))],
        [leaves(1)], {"origin": 0, "outside": None},
    ),
    "uninitialised memory counts from where it is read": (
        [LOG, op(1, "add", given("uninitialised", NAN, "buffer"))], [leaves(1)],
        {"outside": ("uninitialised", "buffer"), "contained": [0]},
    ),
    # The backward pass.
    "a gradient gone bad on finite values is the node's own": (
        [back(4, "sqrt", Operand("grad", FINE), out=INF, forward=2)],
        [lands(4, kind="posinf")], {"origin": 4},
    ),
    "a bad incoming gradient belongs to who made it": (
        [back(0, "sqrt", Operand("grad", FINE), out=INF),
         back(1, "multiply", made(0, holds=INF, name="grad"))],
        [lands(1)], {"origin": 0, "then": 1},
    ),
    "a gradient of a bad forward value is credited to the forward operation": (
        [LOG, back(1, "log", Operand("grad", FINE), forward=0)], [lands(1)], {"origin": 0},
    ),
    # The first Inf and the first NaN.
    "then is the first NaN and not a later one": (
        [OVERFLOW, op(1, "multiply", made(0, holds=INF), out=INF),
         op(2, "subtract", made(1, holds=INF)), op(3, "subtract", made(1, holds=INF)),
         op(4, "add", made(2))],
        [leaves(4)], {"then": 2},
    ),
    "then descends from the origin": (
        [OVERFLOW, op(1, "log", fine()), op(2, "subtract", made(0, holds=INF))],
        [leaves(0, kind="posinf"), leaves(2)], {"origin": 0, "then": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_is_that_of_its_sentence(case: str) -> None:
    records, sinks, expected = CASES[case]
    found = told(trace(records, sinks))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("name", sorted(PLACING))
def test_a_placed_inf_is_no_origin_while_it_stays_in_the_layers_and_a_nan_is_one(name: str) -> None:
    verdict = trace([op(0, name, fine(), out=INF)], [leaves(0, kind="posinf")])
    assert (verdict.origin, verdict.contained, verdict.placed_only) == (None, [], True)
    verdict = trace([op(0, name, fine(), out=NAN), op(1, "add", made(0))], [leaves(1)])
    assert (origin(verdict), verdict.placed_only) == (0, False)


@pytest.mark.parametrize("source", ["input", "buffer"])
def test_a_mask_from_outside_is_no_origin_and_a_masked_row_the_softmaxs_doing(source: Any) -> None:
    added = op(0, "add", fine(), given(source, MASK), out=holding(neginf=3))
    verdict = trace([added], [LEAVES_MASKED])
    assert (verdict.origin, verdict.outside, verdict.placed_only) == (None, None, True)
    verdict = trace([added, op(1, "softmax", made(0, holds=holding(neginf=3)))], [leaves(1)])
    assert (origin(verdict), verdict.outside) == (1, None)


def test_a_mask_holds_zeros_and_neginf_and_nothing_else() -> None:
    assert is_mask(MASK)
    assert is_mask(holding(neginf=8))
    for others in ({"zero": 4}, {"zero": 4, "nan": 1}, {"zero": 4, "posinf": 1}):
        assert not is_mask(holding(neginf=3, **others))
    assert not is_mask(holding(zero=8))
    assert not is_mask(holding(size=0))


def test_where_the_policy_forbids_neginf_a_computed_one_is_harm_and_a_mask_is_not() -> None:
    computed = trace([op(0, "log", fine(), out=NEG)], [LEAVES_MASKED], neginf=True)
    assert origin(computed) == 0
    masked = trace([MASKED], [LEAVES_MASKED], neginf=True)
    assert (masked.origin, masked.placed_only) == (None, True)


@pytest.mark.parametrize("source", ["input", "parameter", "buffer", "uninitialised", "unknown"])
def test_nan_from_outside_is_named_with_its_source(source: Any) -> None:
    records = [op(0, "matmul", given(source, NAN, "encoder.weight")), op(1, "add", made(0))]
    verdict = trace(records, [leaves(1)])
    assert told(verdict)["outside"] == (source, "encoder.weight")
    assert origin(verdict) == 0  # where it was read
    assert (verdict.contained, verdict.placed_only) == ([], False)


# A replay may hold every operation of a long step.
MANY = 20_000


@pytest.mark.tier(2)
def test_many_faults_that_meet_are_fast() -> None:
    records = [op(0, "log", fine()), op(1, "add", made(0))]
    for i in range(2, MANY, 2):  # a recurrent sum with a new fault in each step
        records += [op(i, "log", fine()), op(i + 1, "add", made(i), made(i - 1))]
    seconds = []
    for _ in range(3):  # the shortest time counts, as other processes share the cores
        start = time.thread_time()
        verdict = trace(records, [*map(leaves, range(MANY)), loss(MANY - 1)])
        seconds.append(time.thread_time() - start)
    assert (origin(verdict), verdict.contained) == (0, [])
    assert min(seconds) < 1
