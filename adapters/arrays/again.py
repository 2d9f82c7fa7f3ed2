"""A call runs again under a tape, from what it began with, and leaves no trace.

A second run sees what the first did not, one for a bundle takes whole operands, and in one for a
trial repaired operations take the place of those that made bad values.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import array_api_compat
import numpy as np

from anynan._arrays.access import library_name, namespace
from anynan._arrays.chunked import is_chunked
from anynan._arrays.containers import leaves
from anynan._base.context import setting
from anynan._base.sources import user_source
from anynan._base.threads import busy_threads
from anynan._calls.collector import Collector, collecting
from anynan._calls.generators import take as take_generators
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.operands import light
from anynan._diagnosis.rules import repair
from anynan._diagnosis.rules.repair import BaseFixRunner, Repair
from anynan._diagnosis.trials import Attempt
from anynan._reach.messages import REPLAY_STOPPED
from anynan.arrays.bundle import host
from anynan.arrays.calls import Calls
from anynan.arrays.live import LiveTape
from anynan.arrays.names import canonical, named, params
from anynan.arrays.records import is_finite
from anynan.arrays.tape import Tape, given
from anynan.arrays.trackable import copied, is_array


class Call:
    """Hold a call: what ran, with what, and the context that it began in.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Those by name.
        context: As the call found it.

    Attributes:
        tape: What watches its first run, if that sees operations.
        random: NumPy's random state as the call found it, None where it is not known.
        containers: Lists and dicts among its arguments, with keys and items as they came in.
    """

    tape: Tape | None = None
    random: Any = None
    containers: Sequence[Any] = ()

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        context: Context,
    ) -> None:  # fmt: skip
        self.fn, self.args, self.kwargs, self.context = fn, args, kwargs, context

    @contextmanager
    def lent(self, *, making: bool = False) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Give the arguments to run the function with again.

        Args:
            making: What the function's own code makes of no array is to be watched, too.
        """
        yield copied(self.args), copied(self.kwargs)

    @property
    def is_changed(self) -> bool:
        """Tell whether its first run wrote into its arguments, as far as its tape shows."""
        tape = self.tape
        if tape is None:
            return False
        return tape.overwritten or tape.given != given(copied(self.args), copied(self.kwargs))

    def new_tape(self, session: Calls) -> LiveTape:
        """Make the tape of a second run, in the scope that the call began in."""
        return self.context.copy().run(LiveTape, session, None)

    def again(self, session: Calls, tape: Tape, *, making: bool = False) -> tuple[Any, bool]:
        """Run the call under this tape, quietly, and put everything back.

        Returns:
            What it returned, and whether it drew of NumPy's global random numbers.

        Raises:
            ReplayError: If it would move what cannot be put back.
        """
        begun, into = self.context.copy(), collecting.get()
        start = session.start_of(self.fn, self.containers)

        def run() -> tuple[Any, bool]:
            with (
                setting(collecting, into),  # it may have been set after the call began
                start.again(session.tracker.judge.say, tape.lend, tape.give),
                self.lent(making=making) as (args, kwargs),
                np.errstate(all="ignore"),  # NumPy warned in the first run
            ):
                if into is not None:
                    _take_inputs(into, args, kwargs, self.random)
                if self.random is not None:
                    np.random.set_state(self.random)  # noqa: NPY002
                drawn = str(np.random.get_state())  # noqa: NPY002
                result = session.run(tape, self.fn, args, kwargs)
                drew = drawn != str(np.random.get_state())  # noqa: NPY002
            tape.notes += start.missed
            return result, drew

        first = self.tape
        closed = first is None or first.closed
        if first is not None:
            first.closed = True  # an array of the first run is one like any other
        try:
            return begun.run(run)
        finally:
            if first is not None:
                first.closed = closed


def _take_inputs(into: Collector, args: Any, kwargs: Any, drawn: Any) -> None:
    """Take what the call was given, and the global random states as it found them."""
    take_generators(into, drawn, random.getstate())
    for name, value in [*((f"args[{i}]", x) for i, x in enumerate(args)), *kwargs.items()]:
        for label, x in leaves(value, name):
            if is_array(x):
                into.add("call", label, x, host)


def bundled(session: Calls, call: Call, into: Collector) -> None:
    """Run a call that is under way once more, and take its operations whole.

    Raises:
        ReplayError: If its arguments are not as they were.
    """
    if call.is_changed:
        msg = "the call wrote into its own arguments, so it was not run again"
        raise ReplayError(msg)
    try:
        with setting(collecting, into):
            call.again(session, call.new_tape(session))
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001  the function may fail as it did
        into.notes.append(REPLAY_STOPPED(where=f"at {type(error).__name__}"))


def attempt(session: Calls, call: Call, tape: Tape, chosen: Sequence[Repair]) -> Attempt | None:
    """Run a call again with operations repaired.

    It may be in the middle of its first run. What it began with is not known then, and the first
    operation that is repaired must find the operands that the first run's had.

    Args:
        session: Whose call it is.
        call: The call.
        tape: What saw the operations that are repaired.
        chosen: The repairs.
    """
    if tape.leaky or tape.overwritten or call.is_changed or busy_threads():
        return None
    if any(is_chunked(x) for _, x in leaves((call.args, call.kwargs), "")):
        return None  # to look at each of its results is to compute it
    records = tape.replay().records
    first = next((r for r in records if chosen[0].is_of(r.name, r.source, r.layer)), None)
    if first is None:
        return None
    mended, repairs = call.new_tape(session), _Repairs(chosen, first)
    mended.around = repairs.around
    try:
        _, drew = call.again(session, mended)
    except Exception:  # noqa: BLE001  then nothing is told of it
        return None
    if drew or not repairs.whole:
        return None
    seen = mended.replay()
    return None if seen.notes else Attempt(seen, "call")


class _Repairs(BaseFixRunner):
    """Have repaired operations of a call take the place of those that made bad values.

    Args:
        chosen: What to repair; one that is named later stands inside of one named before.
        first: What the first run saw of the first of them.
    """

    def __init__(self, chosen: Sequence[Repair], first: OpRecord) -> None:
        super().__init__(chosen)
        self._first = first
        self._agreed: bool | None = None

    @property
    def whole(self) -> bool:
        """Tell whether every repair took its place, and the call ran as it did."""
        return super().whole and self._agreed is True

    def around(
        self, name: str, function: Callable[..., Any], like: Any, layer: str | None
    ) -> Callable[..., Any]:
        """Give what to run in an operation's place: itself, unless it is one of those."""
        word = canonical(name)
        if word not in self.names:
            return function
        found = self.of(word, user_source(framework=library_name(like)), layer)
        words = repair.Namespace(namespace(like) or np, array_api_compat.device(like))

        def repaired(*args: Any, **kwargs: Any) -> Any:
            def own(*new: Any) -> Any:
                return function(*new, *args[len(new) :], **kwargs)

            def expression(item: Repair, inside: Callable[..., Any], *new: Any) -> Any:
                given = *new, *args[len(new) :]
                operands = dict(named(word, given, kwargs))
                return repair.run(item, words, inside, operands, params(word, given, kwargs))

            def filled(item: Repair, inside: Callable[..., Any], *new: Any) -> Any:
                return repair.neutral(words, inside(*new))

            with np.errstate(all="ignore"):
                out = own()
                self._meet(found, [x for _, x in named(word, args, kwargs)], out)
                new = self.made(found, repair.around(found, own, expression, filled))
            return out if new is None else new

        return repaired if found else function

    def _meet(self, found: Sequence[Repair], operands: Sequence[Any], out: Any) -> None:
        """Look whether the first bad result is of the operands that the first run had.

        Args:
            found: The repairs.
            operands: What the operation was given.
            out: What it gives unrepaired.
        """
        bad = is_array(out) and not is_finite(out)
        if self._agreed is None and bad and self.repairs[0] in found:
            arrays = [x for x in operands if is_array(x)]
            known = [x.summary for x in self._first.operands if x.summary is not None]
            known = [summary for summary in known if summary.device != "host"]
            self._agreed = len(arrays) == len(known) and all(
                _alike(light(x), summary) for x, summary in zip(arrays, known, strict=True)
            )


def _alike(now: Any, then: Any) -> bool:
    """Tell whether two operands have the same form and the same ends."""
    ends = [
        (x.shape, x.dtype, x.nan > 0, x.posinf > 0, x.neginf > 0, *map(_end, (x.min, x.max)))
        for x in (now, then)
    ]
    bad = any(x.nan or x.posinf or x.neginf for x in (now, then))
    return ends[0][:5] == ends[1][:5] and (bad or ends[0] == ends[1])


def _end(value: float | None) -> float:
    return math.nan if value is None else value
