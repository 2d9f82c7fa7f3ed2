"""What drives a tracked function of array code: the adapter behind ``anynan.track``."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from types import MethodType
from typing import Any

import numpy as np

from anynan._arrays.containers import leaves
from anynan._arrays.measures import measure
from anynan._base.summary import Summary
from anynan._calls.collector import Collector
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._reach.messages import REPLAY_STOPPED
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps.framework import EVERY_OPERATION, Escalation
from anynan._steps.tracked import Tracked
from anynan.arrays.again import Call, attempt, bundled
from anynan.arrays.bundle import DIALECT
from anynan.arrays.calls import Calls, each_pattern
from anynan.arrays.deferred import DeferredTape
from anynan.arrays.errorlog import ErrorLog
from anynan.arrays.live import LiveTape
from anynan.arrays.messages import (
    ARGUMENTS_OVERWRITTEN,
    ARRAY_PARTED,
    CALL_NOT_AGAIN,
    PATTERN_UNMATCHED,
    SCALAR_DEFERRED,
)
from anynan.arrays.parting import divergence
from anynan.arrays.refusals import explain
from anynan.arrays.step_level import StepLevel
from anynan.arrays.tape import Tape, given, now
from anynan.arrays.trackable import is_array


class ArraySession(Calls):
    """Watch a function of array code: its arguments, its operations, what leaves its scopes.

    Attributes:
        step_level: Runs calls on their own arrays, at ``level="step"``.
    """

    def __init__(self, tracker: Tracked) -> None:
        super().__init__(tracker)
        self.step_level = StepLevel(self, self.in_full)
        self._unread: list[tuple[DeferredTape, Call | None]] = []
        self._seen_scopes = False

    # The contract of ``anynan._steps.adapter.Adapter``.

    def detach(self) -> None:
        """Leave nothing behind."""
        self._unread.clear()

    def read(self) -> None:
        """Bring the flags of finished calls to the host and judge them."""
        unread, self._unread = self._unread, []
        for tape, call in unread:
            self._local.again = tape, call
            try:
                try:
                    tape.finish()
                except Exception as error:  # noqa: BLE001  the call itself went well
                    tape.failed("the flags of a call", error)
                    continue
                assert tape.rows is not None
                self._judge(tape, tape.rows)
            finally:
                self._local.again = None

    def replay(self, reading: Reading) -> Replay:
        """Run a call again where its operands can be seen, or tell what is known without."""
        if self.step_level.is_running:
            return self.step_level.replay(reading)
        again: tuple[DeferredTape, Call | None] | None = getattr(self._local, "again", None)
        if again is None:
            msg = "the call is over and its arguments are gone"
            raise ReplayError(msg)
        tape, call = again
        reason = self._not_again(tape, call)
        if call is not None and reason is None:
            try:
                seen_by = call.new_tape(self)
                call.again(self, seen_by)
                seen = seen_by.replay()
            except ReplayError as error:
                reason = CALL_NOT_AGAIN(error=error)
            except Exception as error:  # noqa: BLE001  the first run's own records are left
                reason = REPLAY_STOPPED(where=f"at {type(error).__name__} {error}".rstrip())
            else:
                parted = divergence(tape.replay(), seen)
                if parted is None:
                    return seen
                reason = ARRAY_PARTED(parted=parted)
        seen = tape.replay()
        if reason:
            seen.notes.append(reason)
        return seen

    def _not_again(self, tape: DeferredTape, call: Call | None) -> str | None:
        """Say why a call is not run again, None if it can be."""
        if any(node.array is not None for node in tape.nodes):
            return ""  # what is not computed yet was kept, and is measured as it is
        if call is None:
            if self.options.read == "auto":
                return ""  # no function was called: there is nothing to run again
            return SCALAR_DEFERRED()
        if call.is_changed or tape.is_changed():
            return ARGUMENTS_OVERWRITTEN()
        return None

    @property
    def dialect(self) -> str:
        """Name NumPy, whose functions the script of a bundle calls, whatever the arrays."""
        return DIALECT.framework

    def capture(self, reading: Reading, into: Collector) -> None:
        """Run the failing call again for a bundle."""
        call: Call | None = getattr(self._local, "call", None)
        if self.step_level.is_running or call is None:
            super().capture(reading, into)
        else:
            bundled(self, call, into)

    def escalation(self) -> Escalation | None:
        """Watch every operation of the next calls, unless code refused to be watched so."""
        return None if self.step_level.refused else EVERY_OPERATION

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the call again with operations repaired, where its arguments are as they were."""
        if self.step_level.is_running:
            return self.step_level.attempt(repairs)
        call: Call | None = getattr(self._local, "call", None)
        tape = None if call is None else call.tape
        if call is None or tape is None or tape.rows is None or tape.rows.number != reading.step:
            return None
        return attempt(self, call, tape, repairs)

    def measure(self, value: Any) -> Summary:
        """Summarise an array."""
        return measure(value)

    # One call.

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step, and judge what it saw."""
        if now.get() is not None:
            return fn(*args, **kwargs)  # inside another tracked function, which owns the step
        reached = self._reached
        if reached is None or reached.fn != fn:
            reached = self.reached(fn)
        if reached.is_due():
            reached.look()
        if self.tracker.judge.escalator.level != "step":
            return self.in_full(fn, args, kwargs)
        if reached.is_empty and type(fn) is not MethodType:
            return self.step_level.call(fn, args, kwargs)
        return self.begun(fn, args, kwargs, self.step_level.call)

    def in_full(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step with all that may be wanted of it kept."""
        near = self.tracker.judge.level == "step" and self._are_near(args, kwargs)
        run = self.step_level.read if near else self._call
        if getattr(self._local, "start", None) is not None:  # it was kept already
            return run(fn, args, kwargs)
        return self.begun(fn, args, kwargs, run)

    def begun(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        run: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Run a call with what a second run of it needs at hand."""
        if not self.options.replay:
            return run(fn, args, kwargs)
        reached = self.reached(fn)
        with reached.lending(args, kwargs) as lent:
            self._local.start = reached.begin(*lent)
            try:
                return run(fn, *lent)
            finally:
                self._local.start = None

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step under a tape."""
        rows = self.tracker.judge.rows()
        lazy = self._is_lazy(args, kwargs)
        call = self._local.call = Call(fn, args, kwargs, copy_context())
        call.random = np.random.get_state() if lazy else None  # noqa: NPY002
        tape: Tape = (DeferredTape if lazy else LiveTape)(self, rows, ErrorLog(call.context))
        tape.given = given(args, kwargs)
        call.tape = tape
        try:
            try:
                result = self.run(tape, fn, args, kwargs)
            except BaseException as error:
                explain(error)
                # What broke the step may be what anynan looks for: judge it, then let it go on.
                with self.tracker.judge.carried_by(error, rows):
                    self.tracker.judge.raised(rows, error, partial(tape.ended, error))
                    self.end(tape, rows, call)
                raise
            self.end(tape, rows, call)
        finally:
            self._local.call = None
        return result

    def _is_lazy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.options.read == "immediate" or self.tracker.judge.level == "operation":
            return False  # every operation is looked at as it runs, so nothing is left to read
        if self.options.read != "auto":
            return True
        return not self._are_near(args, kwargs)

    def _are_near(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not kwargs and all(type(x) is np.ndarray for x in args):  # seen without a walk
            return True
        return all(self.is_near(x) for _, x in leaves((args, kwargs), "") if is_array(x))

    def end(self, tape: Tape, rows: Step, call: Call | None) -> None:
        """End a call, or a block of code: judge what it left, now or with later ones."""
        self.tracker.judge.close_step()
        self._tell_patterns()
        if not isinstance(tape, DeferredTape):
            self._judge(tape, rows)
            return
        every = self.options.read if isinstance(self.options.read, int) else 1
        # Calls that wait for a later read would keep all their arguments alive.
        if every > 1:
            rows.forget_arrays()
        self._unread.append((tape, call if every == 1 else None))
        if (rows.number + 1) % every == 0:
            self.read()

    def _judge(self, tape: Tape, rows: Step) -> None:
        try:
            if self.options.level == "operation" and rows.failed is None:
                self.tracker.judge.review(rows)
                self.tracker.judge.operations(rows, tape.replay)
        finally:
            try:
                self.tracker.judge.settle(rows)
            finally:
                rows.forget_arrays()

    # Patterns.

    def _tell_patterns(self) -> None:
        if self._seen_scopes:
            return
        self._seen_scopes = True
        for option in ("layers", "exclude"):
            for pattern in each_pattern(getattr(self.options, option) or ()):
                if str(pattern) not in self._matched:
                    known = ", ".join(sorted(self._paths)) or "none"
                    said = PATTERN_UNMATCHED
                    self.tracker.judge.say(said(option=option, pattern=repr(pattern), known=known))
