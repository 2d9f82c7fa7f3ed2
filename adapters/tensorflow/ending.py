"""What is looked at when a step ends."""

from dataclasses import replace
from typing import TYPE_CHECKING

from anynan._arrays.summary import Summary
from anynan._diagnosis.agreement import parting
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._readings.readings import Rows
from anynan.errors import AnomalyError
from anynan.tensorflow import updates
from anynan.tensorflow.frames import Step

if TYPE_CHECKING:
    from anynan.tensorflow.session import Session

DIFFERS = (
    "level='operation' runs each step a second time, and believes nothing of a second run that "
    "saw other values than the first"
)


def end_step(session: "Session") -> None:
    """Close this thread's step, and have what is left of it judged."""
    state, tracker = session.state(), session.tracker
    updated, backward = state.updated, state.backward
    state.open = state.held = state.backward = False
    state.outputs = []
    error = None
    try:
        if session.options.parameters and backward:
            _read_weights(session, updated=updated)
    except AnomalyError as found:
        error = found
    rows = tracker.judge.close_step()
    try:
        if rows is not None:
            if session.options.level == "operation" and rows.failed is None:
                _every_operation(session, rows, state.step)
            tracker.judge.settle(rows)
            if rows.failed is not None and updated:
                tracker.judge.went_through(rows)
            if rows.failed is None and rows.lo:
                tracker.judge.known_clean(rows.step)
                if updated and not session.options.parameters:
                    tracker.judge.updated(rows.step)
    finally:
        state.step = None
    if error is not None:
        raise error


def _read_weights(session: "Session", *, updated: bool) -> None:
    """Read every weight and buffer after a step that took gradients: one read more."""
    state, rows = session.state(), session.tracker.judge.rows()
    if rows.failed is not None:
        return
    if updated:
        session.tracker.judge.updated(rows.step)
    spots, values = session.weights.ends()
    state.after = True
    try:
        session.judge(session.places(spots), values, last=False)
        session.tracker.judge.review(rows)
    finally:
        state.after = False


def bad_parameters(session: "Session") -> list[BadParameter]:
    """List the weights and buffers that are bad, with what the optimizers keep for them.

    What the step itself made of them explains none of its readings: where they were kept they are
    judged as they were before it.
    """
    open_ = session.state()
    rows = session.tracker.judge.rows() if open_.after else None
    kept = [] if open_.after or open_.step is None else open_.step.kept
    found = []
    for item in session.weights.bad(kept):
        state = updates.state_of(session, session.weights.variable(item.name))
        gradient = None if rows is None else _gradient(rows, item)
        found.append(replace(item, state=state, gradient=gradient))
    return found


def _gradient(rows: Rows, item: BadParameter) -> Summary | None:
    """Give what this step read of a weight's gradient: its ends."""
    for order, site in enumerate(rows.sites):
        if site.parameter == item.name and site.phase == "backward":
            lo, hi = rows.lo[order], rows.hi[order]
            return replace(
                item.summary, nan=0, posinf=0, neginf=0, zero=0, subnormal=0, min=lo, max=hi,
                absmax=max(abs(lo), abs(hi)), mean=None, rms=None, first_bad=None,
            )  # fmt: skip
    return None


def _every_operation(session: "Session", rows: Rows, step: Step | None) -> None:
    """Run a step again that went well, and look at every operation of it."""
    from anynan.tensorflow.replay import replay

    if step is None:
        return
    try:
        seen = replay(session, step, failed=False)
    except ReplayError as error:
        session.tracker.judge.say(f"level='operation' does not see every step: {error}")
        return
    parted = parting(rows, rows.reading(len(rows.lo) - 1), seen.passed) if rows.lo else None
    if parted is not None:
        session.tracker.judge.say(f"{DIFFERS}: {parted}")
        return
    session.tracker.judge.operations(rows, seen)
