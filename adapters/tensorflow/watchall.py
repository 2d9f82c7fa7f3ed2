"""Find the steps of a program: what runs under a tape, and the compiled functions that hold one."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from anynan._base.identity import ByIdentity
from anynan._base.sources import is_anynans, is_library
from anynan._everywhere import Found, spoiled
from anynan._steps.messages import UNMEASURED
from anynan._steps.tracked import Tracked
from anynan.errors import reason
from anynan.options import Options
from anynan.tensorflow.graphs.operations import BACKWARD
from anynan.tensorflow.messages import FUNCTION_UNWATCHED
from anynan.tensorflow.read.frames import Frame, graph_of
from anynan.tensorflow.replay.steps import Step
from anynan.tensorflow.session import runs
from anynan.tensorflow.session.seams import SEAMS
from anynan.tensorflow.session.session import Session


class Wide(Session):
    """Watch what runs under a tape of the program's own, and its compiled functions.

    A session of the user's own, or of a model that ``fit`` trains, keeps what is its own.

    Args:
        tracker: Judges.

    Attributes:
        passed: Names of compiled functions that take no gradient: what they give is not read.
    """

    runs_alone = True

    def __init__(self, tracker: Tracked) -> None:
        super().__init__(dict, None, tracker)
        self.passed: dict[str, None] = {}
        self._trains: ByIdentity[Any, bool] = ByIdentity()
        self._sessions = runs.watch(self._ran, self._free, self._not_run)

    def detach(self) -> None:
        """Put back also how sessions run."""
        self._sessions.undo()
        super().detach()

    def _free(self) -> bool:
        """Tell whether what a session runs now is a step of the program's own."""
        return not (self.paused or self.state.depth or self.state.replaying or self.others())

    def _not_run(self, error: Exception) -> None:
        """Say that a run of a session is not watched."""
        self.tracker.judge.say(UNMEASURED(what="a run of a session", error=reason(error)))

    def _ran(self, ran: runs.Ran, values: list[Any]) -> None:
        """Read what a run of a session gave, and judge it."""
        self.steps.open(Step(None, (), {}, made=ran.program))
        self.state.updated = ran.writes
        frame = Frame(None)
        for (name, _), x in zip(ran.fetched, values, strict=True):
            frame.take(tf.constant(x), None, "loss", name)
        self.calls.flush(frame, backward=False)

    def adopt(self, layer: Any, *, known: bool) -> None:
        """Watch a model that runs under a tape, or in a compiled function of the program's."""
        inside = self.state.tapes or self.state.depth
        if inside and not known and not self.others():
            super().adopt(layer, known=known)

    def others(self) -> bool:
        """Tell whether another session is at work: what runs then is its own."""
        states = [session.state for session in SEAMS.sessions if session is not self]
        return any(
            s.depth or s.held or s.fits or s.replaying or s.frame is not None for s in states
        )

    def runs(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a compiled function that is called is a step of the program's own."""
        if tf.inside_function() or self.state.depth or self.state.tapes or self.state.replaying:
            return False
        code = getattr(getattr(fn, "python_function", None), "__code__", None)
        file = "" if code is None else code.co_filename
        if not file or is_library(file) or is_anynans(file) or self.others():
            return False
        if fn not in self._trains:
            self.trace_first(fn, args, kwargs)
            graph = graph_of(fn, args, kwargs)
            nodes = () if graph is None else graph.get_operations()
            trains = self._trains[fn] = any(BACKWARD in node.name for node in nodes)
            if code is not None and not trains:
                self.passed[code.co_name] = None
        return self._trains[fn]


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch each loop of the program's own: a gradient that it takes is a step of the program.

    Args:
        options: As for ``track``.
        found: Is given the tracker.

    Returns:
        What undoes it; the tracker stays.
    """
    tracker = Tracked(_the_program, options, "the program")
    wide = Wide(tracker)
    found.add(wide.start())
    wide.calls.trail()

    def end() -> None:
        for name in () if len(tracker.history) else wide.passed:
            found.unwatched(FUNCTION_UNWATCHED(name=name))
        spoiled(tracker, found)

    return end


def _the_program() -> None:
    """Stand for a program, which is no function."""
