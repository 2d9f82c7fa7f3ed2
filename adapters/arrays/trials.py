"""One more run of a call with operations repaired, to see whether a fix helps."""

import contextvars
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anynan._arrays.access import namespace
from anynan._arrays.chunked import is_chunked
from anynan._arrays.containers import leaves
from anynan._base import context
from anynan._base.sources import user_source
from anynan._base.threads import busy_threads
from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.rules import repair as repairs
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan.arrays.live import LiveTape, is_finite
from anynan.arrays.names import canonical, named, params
from anynan.arrays.records import light
from anynan.arrays.tape import Tape, given
from anynan.arrays.trackable import copied, is_array
from anynan.arrays.tracked import TrackedArray, is_tracked, strip

if TYPE_CHECKING:
    from anynan.arrays.session import ArraySession


class Call(NamedTuple):
    """Hold a call that is watched, and the context that it began in."""

    tape: Tape
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    began: contextvars.Context


def attempt(session: "ArraySession", call: Call, chosen: Sequence[Repair]) -> Attempt | None:
    """Run a call again with operations repaired, and leave no trace.

    It may be in the middle of its first run. What it began with is not known then, and the first
    operation that is repaired must find the operands that the first run's had.

    Args:
        session: Whose call it is.
        call: The call.
        chosen: The repairs.
    """
    tape, args, kwargs = call.tape, copied(call.args), copied(call.kwargs)
    if tape.leaky or tape.overwritten or tape.given != given(args, kwargs) or busy_threads():
        return None
    if any(is_chunked(x) for _, x in leaves((args, kwargs), "")):
        return None  # to look at each of its results is to compute it
    first = next((r for r in tape.replay().records if _is_of(chosen[0], r)), None)
    if first is None:
        return None
    began = call.began.copy()
    mended = began.run(MendedTape, session, chosen, first)
    drawn = str(np.random.get_state())  # noqa: NPY002  what the function may draw from
    closed, tape.closed = tape.closed, True  # an array of the first run is one like any other
    try:
        start = session.start_of(call.fn)
        with start.again(session.tracker.judge.say, mended):
            began.run(run_again, session, mended, call.fn, args, kwargs)
            as_before = drawn == str(np.random.get_state())  # noqa: NPY002
    except Exception:  # noqa: BLE001  then nothing is told of it
        return None
    finally:
        tape.closed = closed
    if not as_before or not mended.whole:
        return None
    seen = mended.replay()
    return None if seen.notes or start.missed else Attempt(seen, "call")


def run_again(session: "ArraySession", *what: Any) -> None:
    """Run a call under another tape, quietly: NumPy warned of it in the first run."""
    with context.replay_context(), np.errstate(all="ignore"):
        session.run(*what)


class MendedTape(LiveTape):
    """Watch a call in which repaired operations take the place of those that made bad values.

    Args:
        session: Whose call it is.
        chosen: What to repair; one that is named later stands inside of one named before.
        first: What the first run saw of the first of them.
    """

    def __init__(self, session: "ArraySession", chosen: Sequence[Repair], first: OpRecord) -> None:
        super().__init__(session, None)
        self._chosen, self._first = list(chosen), first
        self._names = {item.operation for item in chosen}
        self._used: set[Repair] = set()
        self._agreed: bool | None = None

    @property
    def whole(self) -> bool:
        """Tell whether every repair took its place, and the call ran as it did."""
        return self._used == set(self._chosen) and self._agreed is True

    def operate(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], *, writes: Any = None,
    ) -> Any:  # fmt: skip
        """Run one operation, repaired where it is one of those."""
        word = canonical(name)
        if word in self._names and not self.closed and not is_tracked(writes):
            found: list[TrackedArray] = []
            strip([*args, *kwargs.values()], found)
            if found:
                library = type(found[0]._raw).__module__.partition(".")[0]
                source, layer = user_source(framework=library), context.scope_path()
                layer = None if layer == self.base else layer
                wanted = [item for item in self._chosen if item.is_of(word, source, layer)]
                if wanted:
                    mended = _Mended(self, word, function, wanted, namespace(found[0]._raw))
                    return super().operate(name, mended, args, kwargs)
        return super().operate(name, function, args, kwargs, writes=writes)

    def met(self, wanted: Sequence[Repair], operands: Sequence[Any], out: Any) -> None:
        """Note that a repair took its place; the first bad result was to be of the same operands.

        Args:
            wanted: The repairs.
            operands: What the operation was given.
            out: What it gives unrepaired.
        """
        self._used.update(wanted)
        bad = is_array(out) and not is_finite(out)
        if self._agreed is None and bad and self._chosen[0] in wanted:
            arrays = [x for x in operands if is_array(x)]
            known = [x.summary for x in self._first.operands if x.summary is not None]
            known = [summary for summary in known if summary.device != "host"]
            self._agreed = len(arrays) == len(known) and all(
                _alike(light(x), summary) for x, summary in zip(arrays, known, strict=True)
            )


class _Mended:
    """Stand for the function of one operation."""

    def __init__(
        self, tape: MendedTape, word: str, function: Callable[..., Any], wanted: list[Repair],
        xp: Any,
    ) -> None:  # fmt: skip
        self._tape, self._word, self._function = tape, word, function
        self._wanted, self._words = wanted, repairs.Namespace(np if xp is None else xp)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            out = self._function(*args, **kwargs)
            operands = dict(named(self._word, args, kwargs))
            self._tape.met(self._wanted, list(operands.values()), out)
            return self._run(self._wanted, args, kwargs)

    def _run(
        self, left: Sequence[Repair], args: tuple[Any, ...], kwargs: dict[str, Any], *new: Any
    ) -> Any:
        """Run what is left of the repairs, the last of them around the function itself."""
        args = (*new, *args[len(new) :])
        if not left:
            return self._function(*args, **kwargs)
        item, *rest = left
        inner = partial(self._run, rest, args, kwargs)
        if not item.expression:
            return repairs.neutral(self._words, inner())
        operands, options = dict(named(self._word, args, kwargs)), params(self._word, args, kwargs)
        return repairs.run(item, self._words, inner, operands, options)


def _is_of(repair: Repair, record: OpRecord) -> bool:
    return repair.is_of(record.name, record.source, record.layer)


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
