"""What every adapter vows, as one class of tests: a subclass gives the framework's programs.

A newcomer inherits ``Contract``, gives ``make`` and ``track``, and has the vows tested. What is
reported of faults is tested by ``test_operations``, over a builder.
"""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import anynan
from tests.failing import failure


@dataclass
class Subject:
    """Hold one small training program, made anew.

    Attributes:
        model: With a layer ``log`` inside, which takes the logarithm of what it is given.
        step: Trains with one batch: forward, backward and the update; returns the loss.
        good: A batch that keeps everything finite.
        bad: A batch that makes ``log`` infinite or NaN.
        state: Gives all that a second run must put back, as host arrays by name: weights,
            optimizer state, random states.
        owners: Objects that the adapter may change while it is attached: the framework's modules
            and classes, the classes of the model's layers.
    """

    model: Any
    step: Callable[[Any], Any]
    good: Any
    bad: Any
    state: Callable[[], Mapping[str, Any]]
    owners: tuple[Any, ...] = ()


class Contract:
    """Hold the vows of an adapter; see ``adapters/README.md``."""

    STEPS = 3
    # Whether the whole model can be tracked, beside the step.
    MODELS = True

    def make(self) -> Subject:
        """Make the program, from the same seed each time."""
        raise NotImplementedError

    def track(self, target: Any, **options: Any) -> Any:
        raise NotImplementedError

    # Nothing is different because somebody watches.

    @pytest.mark.parametrize("level", ["step", "layer", "operation"])
    def test_results_are_identical_with_tracking_on(self, level: str) -> None:
        plain = self.make()
        losses = [_host(plain.step(plain.good)) for _ in range(self.STEPS)]
        watched = self.make()
        with self.track(watched.step, level=level) as step:
            seen = [_host(step(watched.good)) for _ in range(self.STEPS)]
        _same({str(i): x for i, x in enumerate(losses)}, {str(i): x for i, x in enumerate(seen)})
        _same(plain.state(), watched.state())

    def test_a_clean_program_is_read_and_met_with_silence(self) -> None:
        subject = self.make()
        with warnings.catch_warnings():
            warnings.simplefilter("error", anynan.AnynanWarning)
            with self.track(subject.step) as step:
                for _ in range(self.STEPS):
                    step(subject.good)
                layers = {reading.layer for reading in step.history.select()}
        assert (step.events, step.notes, step.step) == ((), (), self.STEPS)
        assert {"log", None} <= layers

    # It comes and goes without a trace.

    def test_nothing_is_left_behind(self) -> None:
        subject = self.make()
        subject.step(subject.good)  # what the framework makes of itself at first
        before = _attributes(subject.owners)
        for _ in range(2):
            with self.track(subject.step, action="record") as step:
                step(subject.good)
                step(subject.bad)
            step.remove()
        assert _differing(before, _attributes(subject.owners)) == []

    def test_an_exception_of_the_program_passes_and_leaves_nothing(self) -> None:
        subject = self.make()
        subject.step(subject.good)
        before = _attributes(subject.owners)

        def step(x: Any) -> Any:
            subject.step(x)
            raise KeyError("the program's own")

        with self.track(step) as tracked, pytest.raises(KeyError, match="the program's own"):
            tracked(subject.good)
        assert _differing(before, _attributes(subject.owners)) == []

    def test_the_step_goes_on_as_before_once_nobody_watches(self) -> None:
        subject = self.make()
        step = self.track(subject.step)
        step(subject.good)
        step.remove()
        seen = step.step
        step(subject.bad)
        assert (step.events, step.step) == ((), seen)
        fresh = self.make()
        assert anynan.untrack(self.track(fresh.step)) is fresh.step

    def test_a_pause_sees_nothing(self) -> None:
        subject = self.make()
        with self.track(subject.step) as step:
            step(subject.good)
            step.pause()
            step(subject.bad)
            assert step.events == ()
            step.resume()
            # The weights are bad by now, and that is told.
            with pytest.raises(anynan.NonFiniteError):
                step(subject.bad)

    def test_no_array_is_kept_alive(self) -> None:
        subject = self.make()
        kept: list[Any] = []
        with self.track(subject.step) as step:
            step(subject.good)
            for _ in range(2):
                loss = step(subject.good)
                kept.append(_reference(loss))
                del loss
            gc.collect()
            assert [ref for ref in kept if ref is not None and ref() is not None] == []

    def test_a_copy_of_the_model_is_not_tracked(self) -> None:
        if not self.MODELS:
            pytest.skip("functions alone are tracked")
        subject = self.make()
        with self.track(subject.model) as tracker:
            other = copy.deepcopy(subject.model)
            _host(other(subject.bad))
            tracker.flush()
            assert tracker.events == ()

    # A second run.

    def test_the_operation_is_named_with_its_line_and_cause(self) -> None:
        subject = self.make()
        with self.track(subject.step) as step:
            step(subject.good)
            event = failure(step, subject.bad)
        assert (event.layer, event.phase, event.step) == ("log", "forward", 1)
        assert event.operation.name == "log"
        assert "log(" in event.operation.source.text
        assert event.cause.tag.startswith("log_of_")
        assert anynan.Event.from_json(event.to_json()) == event

    def test_a_model_in_the_hands_of_its_program_is_watched_too(self) -> None:
        if not self.MODELS:
            pytest.skip("functions alone are tracked")
        subject = self.make()
        with self.track(subject.model) as tracker:
            subject.step(subject.good)
            event = failure(lambda: (subject.step(subject.bad), tracker.flush()))
        assert (event.layer, event.operation.name) == ("log", "log")

    def test_a_second_run_leaves_no_trace(self) -> None:
        plain = self.make()
        for batch in (plain.good, plain.bad, plain.good):
            plain.step(batch)
        watched = self.make()
        with self.track(watched.step, action="record") as step:
            for batch in (watched.good, watched.bad, watched.good):
                step(batch)
        assert step.events[0].operation is not None, "it was run again"
        _same(plain.state(), watched.state())

    def test_a_bad_step_can_be_skipped(self) -> None:
        subject = self.make()
        with self.track(subject.step, action="skip") as step:
            step(subject.good)
            weights = subject.state()
            with pytest.warns(anynan.AnynanWarning, match="is dropped"):
                step(subject.bad)
            after = subject.state()
            moved = [key for key in weights if "weight" in key]
            assert moved
            _same({k: weights[k] for k in moved}, {k: after[k] for k in moved})

    # What cannot be watched is said.

    def test_unfit_input_gives_a_clear_error(self) -> None:
        subject = self.make()
        made = type(subject.model)
        for target, said in ((None, "None"), (3, "not int"), (made, "create an object first")):
            with pytest.raises(TypeError, match=said):
                self.track(target)
        with pytest.raises(TypeError, match="no option 'levle'"):
            self.track(subject.step, levle="step")
        if self.MODELS:
            with pytest.raises(ValueError, match="matches no layer"):
                self.track(subject.model, layers="nowhere")
            with self.track(subject.model), pytest.raises(ValueError, match="tracked already"):
                self.track(subject.model)


def _host(x: Any) -> Any:
    return np.asarray(x.detach() if hasattr(x, "detach") else x).copy()


def _reference(x: Any) -> Any:
    try:
        return weakref.ref(x)
    except TypeError:
        return None


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        a, b = np.asarray(value), np.asarray(other[name])
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name


def _attributes(owners: tuple[Any, ...]) -> dict[str, Any]:
    return {f"{owner}.{name}": x for owner in owners for name, x in vars(owner).items()}


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = before.keys() | after.keys()
    return sorted(name for name in names if before.get(name) is not after.get(name))
