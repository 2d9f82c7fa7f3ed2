"""The core makes records from a stream of operations, and puts back what a call began with."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._base.context import replaying
from anynan._base.summary import Summary
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import trace
from anynan._diagnosis.recorder import Recorder
from anynan._diagnosis.records import Origin
from anynan._reach import Began, Kinds, Reach
from anynan._trace.op import LinkedOp
from anynan.events import Phase


class Reader:
    """Read NumPy's arrays."""

    def is_finite(self, x: Any) -> bool:
        return bool(np.isfinite(x).all())

    def span(self, x: Any) -> tuple[float, float] | None:
        return (math.nan, math.nan) if np.isnan(x).any() else (float(np.min(x)), float(np.max(x)))

    def measure(self, x: Any) -> Summary:
        return anynan.summarize(x)

    light = measure

    def on_host(self, x: Any) -> Any:
        return np.asarray(x)


class Numbers(LinkedOp):
    """Show what NumPy computed."""

    wider: Any = None

    @property
    def inputs(self) -> Sequence[tuple[str, Any]]:
        return [(label, x) for label, x in self.given if hasattr(x, "dtype")]

    def rerun(self, inputs: Any = None, dtype: str | None = None) -> Sequence[Any]:
        return [self.wider]


def op(
    number: int, name: str, given: list[tuple[str, Any, Any]], made: Any,
    of: LinkedOp | None = None, layer: str | None = "layer",
) -> Numbers:  # fmt: skip
    phase: Phase = "backward" if of else "forward" if layer else "loss"
    found = Numbers(number, name, name, (layer, 0, phase, None), [x[:2] for x in given], {}, of)
    found.operands = {label: key for label, _, key in given}
    found.grown = [key for label, x, key in given if hasattr(x, "dtype")]
    found.made = [made]
    found.results = [(number, 0)]
    return found


def outside(key: Any, _: Any) -> Origin:
    return Origin((), "parameter", key[1]) if key[0] == "weight" else Origin((), "input", "x")


X = np.array([1.0, 0.0])


def recorder() -> Recorder:
    return Recorder(Reader(), outside, lambda _: None)


def test_a_nan_has_the_operation_that_made_its_infinity_for_its_parent() -> None:
    seen = recorder()
    with np.errstate(all="ignore"):
        logs = np.log(X)
        seen.see(op(0, "log", [("self", X, ("array", 1))], logs))
        product = logs * 0.0
        seen.see(op(1, "multiply", [("self", logs, (0, 0)), ("other", 0.0, None)], product))
    seen.arrive("forward", "layer", "output", product, (1, 0))
    found = seen.replay([])
    lineage = trace(found.records, found.sinks)
    assert lineage.origin is not None and lineage.then is not None
    assert (lineage.origin.name, lineage.then.name) == ("log", "multiply")
    assert found.records[1].operands[0].parents == (0,)
    assert [(x.layer, x.tensor) for x in found.passed] == [("layer", "output")]


def test_what_came_in_bad_is_named_by_its_key() -> None:
    seen = recorder()
    weight = np.array([math.nan])
    seen.see(op(0, "multiply", [("self", X, ("array", 1)), ("other", weight, ("weight", "w"))],
                X * weight))  # fmt: skip
    (record,) = seen.replay([]).records
    assert [(x.source, x.label) for x in record.operands] == [(None, None), ("parameter", "w")]


def test_a_gradient_descends_from_the_operations_that_took_its_value() -> None:
    seen = recorder()
    root = op(0, "sqrt", [("self", X, ("weight", "w"))], np.sqrt(X))
    total = op(1, "sum", [("self", np.sqrt(X), (0, 0))], np.float64(1.0), layer=None)
    for each in (root, total):
        seen.see(each)
    ones = np.ones(2)
    seen.see(op(2, "sum", [("grad", np.ones(()), None)], ones, total))
    with np.errstate(all="ignore"):
        slope = 0.5 / np.sqrt(X)
    seen.see(op(3, "sqrt", [("grad", ones, None), ("self", X, None)], slope, root))
    seen.land("w", "", slope)
    (record,), (sink,) = seen.replay([]).records, seen.replay([]).sinks
    assert (record.phase, record.name, record.feeds) == ("backward", "sqrt", ("sum",))
    assert (sink.phase, sink.label, sink.parents) == ("backward", "w", (0,))


def test_a_bad_loss_is_seen_before_its_gradients() -> None:
    seen = recorder()
    with np.errstate(all="ignore"):
        loss = op(0, "log", [("self", X, ("weight", "w"))], np.log(X), layer=None)
        seen.see(loss)
        seen.see(op(1, "log", [("grad", np.ones(2), None), ("self", X, None)], 1 / X, loss))
    assert [(sink.phase, sink.parents) for sink in seen.sinks] == [("loss", (0,))]


def test_an_overflow_is_measured_in_a_wider_dtype() -> None:
    seen = recorder()
    half = np.array([60000.0], np.float16)
    with np.errstate(all="ignore"):
        found = op(0, "square", [("self", half, ("array", 1))], half * half)
    found.wider = half.astype(np.float32) ** 2
    seen.see(found)
    assert seen.records[0].wide == pytest.approx(3.6e9, rel=0.01)


def test_what_only_the_ends_were_read_of_is_compared_at_its_ends() -> None:
    seen = recorder()
    seen.arrive("forward", "layer", "output", X, (0, 0))
    seen.arrive("loss", None, "loss", np.float64(1.0), (1, 0))
    assert [x.layer for x in seen.replay([], ends=True).passed] == [None]


# What a call began with.


class Call(Began):
    def content(self, x: Any) -> Any:
        return x.copy()

    def refill(self, x: Any, content: Any) -> None:
        x[...] = content


class Model:
    def __init__(self) -> None:
        self.count, self.parts = 0, {"w": [1.0]}


def test_a_second_run_finds_what_the_first_found_and_leaves_no_trace() -> None:
    model, x = Model(), np.ones(2)
    counter = {"n": 0}

    def step(x: Any) -> float:
        model.count += 1
        model.parts["w"] = [2.0]
        counter["n"] += 1
        x[0] = 7.0
        return np.random.rand()  # noqa: NPY002

    reach = Reach(step, Kinds(passed=lambda value: isinstance(value, Model)))
    reach.search([])
    call = Call(step, (x,), {}, [model], reach)
    call.keep(x)
    drawn = step(x)
    with call.again(pytest.fail):
        assert (model.count, model.parts, counter["n"], x[0]) == (0, {"w": [1.0]}, 0, 1.0)
        assert replaying()
        assert step(x) == drawn
    assert (model.count, model.parts, counter["n"], x[0]) == (1, {"w": [2.0]}, 1, 7.0)


def test_what_is_taken_from_an_iterator_cannot_be_given_back() -> None:
    batches = iter([1, 2, 3])

    def step() -> int:
        return next(batches)

    reach = Reach(step, Kinds())
    reach.search([])
    call = Call(step, (), {}, [], reach)
    with pytest.raises(ReplayError), call.again(pytest.fail):
        step()
    assert next(batches) == 1
