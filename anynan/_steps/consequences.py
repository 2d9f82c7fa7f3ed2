"""What follows from a fault that was reported before: it is counted there, and no fault of its own.

After ``action="warn"`` or a callback the program goes on with what a failed step left behind: bad
weights, a bad buffer, outputs that it hands back in, or the same batch again.
"""

import weakref
from dataclasses import replace
from typing import Any

from anynan._diagnosis.evidence import BadParameter
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps import messages, producers
from anynan._steps.inputs import BACK
from anynan._steps.notes import Notes
from anynan._steps.opened import OpenSteps
from anynan._steps.producers import Producer
from anynan._steps.record import Record
from anynan._steps.subject import Subject
from anynan._steps.weights import Weights
from anynan.errors import reason
from anynan.events import NON_FINITE, Event, Kind

MAX_INPUTS = 100
# Of what bad values that came from outside are said to be.
_CAME = ("bad_input", "bad_label")
_BAD_SINCE = ", and whose weights have been bad since; what else goes bad here is counted with this"
# What failed last of all that is tracked, in which step, and the number of that.
_failed: list[tuple["weakref.ref[Consequences]", int, int] | None] = [None]
# Of all that is tracked, what goes on with bad weights, in the order in which they went bad.
_spoilt: "weakref.WeakKeyDictionary[Consequences, int]" = weakref.WeakKeyDictionary()


class Consequences:
    """Know what earlier failed steps left behind.

    Attributes:
        anywhere: Whether what is tracked trains what may be used anywhere.
        inputs: Steps that failed by what came in, by a key that knows the same bad values again.
        continued: The last failed step after which the program went on.
        corrupting: The step since which weights are bad: its update was made all the same, or it
            found them so.
        inherited: Whose bad weights these were as tracking began, in words; empty otherwise.
    """

    def __init__(
        self, subject: Subject, record: Record, notes: Notes, weights: Weights, steps: OpenSteps
    ) -> None:
        self._subject, self._record, self._notes = subject, record, notes
        self._weights, self._steps = weights, steps
        self.anywhere = subject.anywhere
        self.inputs: dict[Any, Step] = {}
        self.continued: Step | None = None
        self.corrupting: Step | None = None
        # What was seen to come of bad weights; None where all may.
        self._seen: set[tuple[Any, ...]] | None = None
        self._cleared = False  # whether a clean step came after them
        # Another that is tracked, whose bad weights are why this one is bad.
        self._because: Consequences | None = None
        self.inherited = ""
        # The one of these weights by which a later step sees that they still are bad.
        self._witness: BadParameter | None = None
        self._looked: weakref.ref[Step] | None = None  # the step in which it was found bad
        self._back: int | None = None  # the last step that was given what it gave before
        # The last step that was bad, and the one whose event stands for it.
        self._bad: tuple[int, Step | None] = -1, None
        self._said = ""  # which of these faults was mentioned last
        record.replaced.append(weakref.WeakMethod(self._replace))

    def _replace(self, event: Event, new: Event) -> None:
        """Have steps that failed by an event know its successor."""
        for step in (self.continued, self.corrupting, self._bad[1], *self.inputs.values()):
            if step is not None and step.failed is event:
                step.failed = new

    # Is it one?

    def explain(self, step: Step, reading: Reading, kind: Kind, later: int) -> bool:
        """Tell whether a reading is bad because of an earlier fault; count it there then."""
        if kind not in NON_FINITE or reading.phase == "input":
            return False
        if self._handed_back(step, later):
            return True
        first = self.corrupting
        if first is None or first is step or reading.step < first.number:
            return False
        if self._seen is not None and (self._cleared or reading.key(kind) not in self._seen):
            return False
        if self._repaired(step):
            return False
        self._count(step, first, 1 + later, self._since(first))
        return True

    def _handed_back(self, step: Step, later: int) -> bool:
        """Tell whether a model was given what it gave itself in a step that was reported."""
        last, first = self._bad
        again = self._back == last == step.number - 1  # as it was the last time
        for item in step.pending_inputs:
            named: Producer | None = step.makers.get(item.reading.site.tensor)
            sure = named is not None and named.certain
            producer = named if sure else step.makers.get(BACK) or named
            mine = producer is not None and producer.itself and producer.step == last
            if first is not None and (again or mine):
                self._back = step.number
                sure = again or (mine and producer is not None and producer.certain)
                came = "comes from" if sure else "is bad, and came after"
                said = f"the input of {self.name} {came} its own step {first.failed.step}"
                self._count(step, first, 1 + later, f"{said}, which was reported")
                return True
        return False

    def explain_event(self, step: Step, event: Event, key: tuple[Any, ...]) -> bool:
        """Tell whether an event is about a weight or a buffer that an earlier step corrupted."""
        if event.phase == "input" and self._handed_back(step, event.spread.count):
            return True
        mine = self.corrupting is not None or not self._subject.found
        if not mine and event.phase in ("parameter", "optimizer"):
            self.inherit(self._weights.bad())  # a step that was found, too, may have written them
        first, earlier, name = self.corrupting, self.continued, event.parameter
        if first is not None and first is not step and event.phase in ("parameter", "optimizer"):
            same = not self._cleared or name == first.failed.parameter
            if same and name not in self._weights.bad_buffers():
                if self._seen is not None:
                    self._seen.add(key)
                self._count(step, first, 1 + event.spread.count, self._since(first))
                return True
        if earlier is None or event.phase != "parameter" or earlier.number >= step.number:
            return False
        weights = self._weights
        clean = weights.clean is not None and weights.clean > earlier.number
        if clean or name not in weights.bad_buffers() or name in weights.intended:
            return False
        number = earlier.failed.step
        said = f"{name} has been bad since step {number}, which was reported and went on"
        self._count(step, earlier, 1 + event.spread.count, said)
        return True

    def is_corrupted(self, step: Step | None = None) -> bool:
        """Tell whether weights are bad since a step before, which was reported."""
        first = self.corrupting
        if first is None or (step is not None and (first is step or step.number < first.number)):
            return False
        return not (self._seen is not None and self._cleared) and not self._repaired(step)

    def _repaired(self, step: Step | None = None) -> bool:
        """Look at one weight that was bad, at all only where it is good; forget it if they are.

        In one step they are looked at once. What cannot be looked at counts as bad still: the
        program goes on all the same.
        """
        if step is not None and self._looked is not None and self._looked() is step:
            return False
        if self._because is not None and self._ran(self._because):
            return False
        self._because = None
        try:
            if self._witness is None or not self._subject.adapter.is_bad(self._witness):
                bad = self._weights.bad()
                self._witness = min(bad, key=lambda item: item.summary.size, default=None)
        except Exception as error:  # noqa: BLE001  never break the user's program
            what = "the weights could not be read again"
            self._notes.say(messages.UNMEASURED(what=what, error=reason(error)))
            return False
        if self._witness is None:
            self.corrupting = None
            _spoilt.pop(self, None)
        elif step is not None:
            self._looked = weakref.ref(step)
        return self._witness is None

    def _elsewhere(self) -> "Consequences | None":
        """Give another that went on with bad weights beside this; None if there is none."""
        return next((x for x in list(_spoilt) if x is not self and self._ran(x)), None)

    def _ran(self, other: "Consequences") -> bool:
        """Tell whether another ran with bad weights since the last step of this one ended."""
        here = other.anywhere or _spoilt.get(other, -1) >= self._steps.since
        return here and other.goes_on_spoilt

    def _failed_before(self) -> tuple[str, int, str] | None:
        """Give another that failed since the last step of this one ended, and in which step."""
        last = _failed[0]
        other = None if last is None else last[0]()
        if last is None or other is None or other is self or last[2] < self._steps.since:
            return None
        return other.name, last[1], ""

    @property
    def goes_on_spoilt(self) -> bool:
        """Tell whether it is still tracked, with bad weights."""
        return self._subject.watched_by is not None and self.is_corrupted()

    @property
    def name(self) -> str:
        """Give the name of what is tracked."""
        return self._subject.name

    def inherit(self, found: list[BadParameter]) -> bool:
        """Tell whether weights that tracking finds bad are those of another that was reported.

        As where a program goes on with a part of a model that went bad as a whole.
        """
        if self._subject.action in ("raise", "skip"):
            return False
        for other in [x for x in list(_spoilt) if x is not self and x.goes_on_spoilt]:
            first = other.corrupting
            if first is None or not other.signs().issuperset(map(_sign, found)):
                continue
            mine = Step(-1)  # before every step of these
            mine.failed = first.failed
            self._spoil(mine, None)
            self.inherited = self._said = _goes_on(other)
            self._notes.remark(self._bad_since())
            return True
        return False

    def signs(self) -> set[tuple[Any, ...]]:
        """Give by what the weights that are bad are known again."""
        return set(map(_sign, self._weights.bad()))

    def _since(self, first: Step) -> str:
        other = self._because
        if self.inherited:
            return self.inherited
        if other is not None and other.corrupting is not None:
            return _goes_on(other)
        step = first.failed.step
        if self._seen is not None:
            return f"the weights have been bad since step {step}, which was reported and went on"
        return (
            f"the weights have been bad since the update of step {step}, which was reported and "
            "went through"
        )

    def _count(self, step: Step, first: Step, count: int, said: str) -> None:
        """Count what is bad in a step as spread of the event of an earlier one."""
        event: Event = first.failed
        count += event.spread.count
        step.follows, self._bad = True, (step.number, first)
        if self in _spoilt:
            _spoilt[self] = producers.turn()
        step.failed = first.failed = replace(event, spread=replace(event.spread, count=count))
        step.skip = step.skip or self._subject.action == "skip"
        self._record.replace(event, first.failed)
        if said != self._said:
            self._said = said
            self._notes.mention(self._bad_since())

    def _bad_since(self) -> str:
        action = self._subject.options.action
        name = repr(action) if isinstance(action, str) else "a function"
        return messages.WEIGHTS_BAD_SINCE(since=self._said, action=name)

    # What may follow from a step.

    def goes_on(self, step: Step) -> bool:
        """Tell whether the program goes on with what a failed step of its own left behind."""
        return not (step.follows or self._stops(step))

    def _stops(self, step: Step) -> bool:
        return self._subject.action in ("raise", "skip") or step.skip

    def begin(self, step: Step, event: Event) -> Event:
        """Remember a step that found weights bad, if the program goes on with them.

        Returns:
            The event; it says whose bad weights it may be because of.
        """
        other, event = self._because_of(event)
        _failed[0] = weakref.ref(self), step.number, producers.turn()
        found = event.phase in ("parameter", "optimizer") and event.kind in NON_FINITE
        goes_on = not self._stops(step) or self._subject.action == "skip"
        if not goes_on or event.parameter in self._weights.bad_buffers():
            return event
        if found:
            seen: set[tuple[Any, ...]] = set()
            if event.order < len(step.lo) and event.rank == self._subject.adapter.rank():
                reading = step.reading(event.order)
                seen.add(reading.key(reading.kind))
            self._spoil(step, seen)
        elif other is not None:
            self._spoil(step, None)
            self._because = other
        return event

    def _because_of(self, event: Event) -> "tuple[Consequences | None, Event]":
        """Find another because of which an event of what came in may be; note it there."""
        tag = None if event.cause is None else event.cause.tag
        came = event.operation is None or event.phase == "input" or tag in _CAME
        came = came or (tag == "written_constant" and event.kind == "nan")  # computed unwatched
        if not came or event.kind not in NON_FINITE:
            return None, event
        other, made = self._elsewhere(), None
        if other is not None and other.corrupting is not None:
            made = other.name, other.corrupting.failed.step, _BAD_SINCE
        elif tag == "outside_the_model":  # the loss is made of another's output, too
            near = producers.producer(self._subject, None, self._steps.since)
            made = self._failed_before() if near is None else (near.name, near.step, "")
        if made is not None:
            note = messages.MAY_FOLLOW(maker=made[0], step=made[1], since=made[2])
            event = replace(event, notes=(*event.notes, note))
        return other, event

    def _spoil(self, step: Step, seen: set[tuple[Any, ...]] | None) -> None:
        self.corrupting, self._seen, self._cleared, self._because = step, seen, False, None
        self.inherited = ""
        _spoilt[self] = producers.turn()

    def ended(self, number: int) -> Step | None:
        """Give the step of this number, if it failed, and ended before its update."""
        last = self.continued
        return last if last is not None and last.number == number else None

    def applied(self, step: Step) -> None:
        """Note that a failed step's update was made all the same: what is bad later may be its."""
        if self.goes_on(step):
            self._spoil(step, None)

    def settle(self, step: Step) -> None:
        """Note what an ended step leaves behind; look at the weights once after a clean one."""
        if step.failed is not None and self.goes_on(step):
            self.continued, self._bad = step, (step.number, step)
        if self.corrupting is None or step.failed is not None:
            self._cleared = False
        elif not self._cleared and self._subject.watched_by is not None:
            self._cleared = not self._repaired()

    def begin_again(self, step: Step) -> None:
        """Let what failed as weights were looked at before a step not fail the step."""
        if self.corrupting is step:
            self.corrupting = Step(step.number)
            self.corrupting.failed = step.failed
        step.failed = None

    # The same input again.

    def remember_input(self, key: Any, step: Step) -> None:
        """Remember a step that failed by what came in, if the program goes on.

        Args:
            key: By which the same bad values are known again.
            step: The step.
        """
        failed: Event | None = step.failed
        if failed is not None and failed.phase == "input" and self.goes_on(step):
            self.inputs[key] = step
            if len(self.inputs) > MAX_INPUTS:
                del self.inputs[next(iter(self.inputs))]

    def came_again(self, step: Step, first: Step) -> None:
        """Count a step that was given what failed an earlier one; it is not looked into."""
        said = messages.SAME_INPUT(step=first.failed.step)
        self._count(step, first, 1, said)


def _goes_on(other: Consequences) -> str:
    """Say whose weights have been bad since which step, of one that has such."""
    assert other.corrupting is not None
    number = other.corrupting.failed.step
    return f"{other.name} goes on with weights that have been bad since its step {number}"


def _sign(item: BadParameter) -> tuple[Any, ...]:
    """Give what a weight has in common with itself in another model, where its path is another."""
    x = item.summary
    return item.name.rpartition(".")[2], x.shape, x.dtype, x.nan, x.posinf, x.neginf
