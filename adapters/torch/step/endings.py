"""Read and judge the steps that are over."""

from typing import TYPE_CHECKING

from anynan._steps.monitor import Rows
from anynan.torch.call.state import State
from anynan.torch.step import scalers as scaling

if TYPE_CHECKING:
    from anynan.torch.session.session import Session


def settle(session: "Session", state: State) -> None:
    """Read what is unread of a thread, and conclude its ended steps."""
    state.slots.read()
    ended, state.ended = state.ended, []
    while ended:
        rows = ended.pop(0)
        if not state.slots.deferred:
            rows.judged = len(rows.lo)
        conclude(session, state, rows)


def conclude(session: "Session", state: State, rows: Rows) -> None:
    """Judge what is left of an ended step."""
    tracker = session.tracker
    try:
        tracker.judge(rows)
        reading = rows.pending
        if reading is not None and rows.scale is None and not scaling.worked(state.scales):
            rows.pending = None  # no scaler had a part in this step
            tracker.fail(rows, reading, reading.kind or "nan")
    finally:
        tracker.settle(rows)
    session.ranks.concluded(session, state, rows)


def read_open(session: "Session", state: State) -> None:
    """Read and judge what a thread has so far."""
    settle(session, state)
    if state.rows is None:
        return
    state.slots.read()
    session.tracker.judge(state.rows)
    if state.depth == 0 and state.rows.pending is not None:
        rows = session.tracker.close_step()
        if rows is not None:
            try:
                conclude(session, state, rows)
            finally:
                state.reset()


def read_rest(session: "Session", state: State) -> None:
    """Read and judge what a thread that is not this one left."""
    state.idle = True
    state.slots.read()
    unread, state.ended = [*state.ended, state.rows], []
    state.rows = None
    for rows in unread:
        if rows is not None:
            conclude(session, state, rows)
