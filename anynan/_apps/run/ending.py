"""How a program ended that ``anynan run`` ran: what was read and what was not, what was bad."""

import re
from collections import deque
from collections.abc import Callable
from typing import Any

from anynan._apps.run.messages import (
    ENDED_BEFORE,
    MADE_ELSEWHERE,
    NOTHING_RAN,
    NOTHING_WATCHED,
)
from anynan._apps.run.told import SHOWN, Heard
from anynan._base.escaping import name as printed
from anynan._base.sources import located
from anynan._base.tracebacks import last_own
from anynan._diagnosis.rules.evidence import plural
from anynan._everywhere import Found, is_bad
from anynan._reports.report import folded
from anynan._steps.failures import names_bad
from anynan._steps.record import MAX_EVENTS, fault_of, may_follow
from anynan._steps.tracked import started
from anynan.errors import AnomalyError
from anynan.events import Event, Source

_ASKS = re.compile(r"(?<![a-z])(isnan|isinf|isfinite|nan|inf)(?![a-z])", re.IGNORECASE)


class Own:
    """Hear of what the program tracks by itself.

    Attributes:
        heard: Every event, whoever told it, with its number.
        then: Hears of each event at once.
    """

    then: Callable[[Event], object] | None = None

    def __init__(self) -> None:
        self._before = started["trackers"]
        self.heard: deque[tuple[int, Event]] = deque(maxlen=MAX_EVENTS)

    def hear(self, turn: int, event: Event) -> None:
        """Take up an event, whoever told it; a direct check is told where it stands."""
        if event.phase != "value":
            self.heard.append((turn, event))
            if self.then is not None:
                self.then(event)

    def trackers(self, found: Found) -> int:
        """Count the program's own trackers: those that were not found for it."""
        return max(0, started["trackers"] - self._before - found.added)

    def events(self, found: Found) -> list[tuple[int, Event]]:
        """List what the program's own trackers told, with the number of each."""
        others = {turn for turn, _ in found.numbered()}
        return [(turn, event) for turn, event in self.heard if turn not in others]


class Ending:
    """Hold how the program ended.

    Args:
        found: What was watched.
        own: What the program tracked by itself.
        met: What NumPy met, in lines.
        error: What the program ended by, if it was an exception.
        heard: What came of the processes that it started.
    """

    def __init__(
        self, found: Found, own: Own, met: list[str], error: BaseException | None, heard: Heard
    ) -> None:
        self._found, self._met, self._error, self._heard = found, met, error, heard
        self._own = own.events(found)
        self._trackers = own.trackers(found)
        self._source = None if error is None else _place(error)
        self._death = _death(error, self._source)
        pairs = sorted([*found.numbered(), *self._own], key=lambda pair: pair[0])
        self.events = [event for _, event in pairs]
        self.bad = list(filter(is_bad, self.events))

    @property
    def harms(self) -> tuple[str, ...]:
        """List what the program came to harm by that no tracker read."""
        return (*([self._death] if self._death else []), *self._found.harms)

    @property
    def harmed(self) -> bool:
        """Tell whether something was bad, by whatever was seen of it."""
        return bool(self.bad or self.harms or self._heard.harmed)

    @property
    def broken(self) -> bool:
        """Tell whether an exception ended the program."""
        return self._error is not None and not isinstance(self._error, SystemExit)

    def lines(self) -> list[str]:
        """Say what was watched, what came of it, and what was not watched."""
        told = [f"anynan: {self._death}"] if self._death else []
        if self._trackers or self._own:
            bad = sum(is_bad(event) for _, event in self._own)
            told.append(
                f"anynan: the program calls track itself: {plural(self._trackers, 'tracker')}, "
                f"{bad or 'nothing'} bad reported"
            )
        broken = isinstance(self._error, Exception)  # what its step would have read is not known
        told += [*self._found.lines(SHOWN, harmed=broken), *self._met]
        told += self._heard.lines
        if not (self._heard.any or any(line.startswith("anynan: ") for line in told)):
            told[:0] = _unseen(self._error, partly=any(x.startswith("  unwatched") for x in told))
        if self._death and not self.bad:
            function = "" if self._source is None else printed(self._source.function)
            way = f": track `{function}` to see it" if function.isidentifier() else ""
            told.append(f"  note      {MADE_ELSEWHERE(way=way)}")
        return told

    def listed(self) -> list[str]:
        """List what was bad, in the order in which it was seen."""
        own: list[Event] = []
        after: dict[str, None] = {}  # what else went bad by one of these, in order
        faults: dict[Any, str] = {}
        for event in self.bad:
            fault = None if event.phase == "input" else fault_of(event)
            first = faults.setdefault(fault, event.target)
            if own and (may_follow(event) or (fault is not None and first != event.target)):
                after[event.target] = None
            else:
                own.append(event)
        for event in own:
            after.pop(event.target, None)
        lines = folded(own, which=self._found.several)
        more = [f"{len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        told = [f"  event     {line}" for line in lines[:SHOWN] + more]
        follows = f"  follows   bad after this, and perhaps because of it: {', '.join(after)}"
        return told + ([follows] if after else [])


def _unseen(error: BaseException | None, *, partly: bool) -> list[str]:
    if _told_by_us(error):
        return []
    if error is not None and not isinstance(error, SystemExit):
        return [ENDED_BEFORE()]
    return [NOTHING_WATCHED() if partly else NOTHING_RAN()]


def _told_by_us(error: BaseException | None) -> bool:
    """Tell whether an exception is a report of anynan's, or was raised from one."""
    while error is not None:
        if isinstance(error, AnomalyError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _death(error: BaseException | None, source: Source | None) -> str:
    """Say that the program died of a NaN or an Inf, where its exception names one."""
    if error is None or _told_by_us(error):
        return ""
    if not (names_bad(error) or _asks(error, source)):
        return ""
    text = f"the program died of NaN or Inf: {type(error).__name__}"
    if source is not None:
        text += f" at {printed(source.place)} in {printed(source.function)}"
        text += f": {printed(source.text)}" if source.text else ""
    return text


def _asks(error: BaseException, source: Source | None) -> bool:
    """Tell whether the line of a failed assertion asks for NaN or Inf."""
    if not isinstance(error, AssertionError) or source is None:
        return False
    return _ASKS.search(source.text or "") is not None


def _place(error: BaseException) -> Source | None:
    """Give the innermost line of the program's own that an exception passed."""
    last = last_own(error)
    if last is None:
        return None
    frame = last.tb_frame
    return located(frame.f_code, last.tb_lineno, offset=last.tb_lasti, scope=frame.f_globals)
