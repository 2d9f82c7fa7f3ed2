"""What is known of a program while all of it is watched."""

import sys
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np

from anynan._base.sources import is_library
from anynan._everywhere import Found
from anynan._steps.tracked import Tracked, inside
from anynan.errors import AnomalyError
from anynan.jax.eager import Call, Calls, bad
from anynan.jax.messages import WENT_ON
from anynan.jax.program.trace import eager as eager_now
from anynan.jax.read import probes
from anynan.jax.session.session import Session
from anynan.options import Options
from anynan.tracker import Tracker

# So many bad calls of one function are looked into.
LOOKS = 3
# What looks at a number for the program that hands it one, to write it down.
WRITERS = frozenset({"logging", "absl", "loguru", "tqdm", "rich", "json", "clu", "tensorboardX"})
# Trackers of functions that a program compiles anew in each step are kept: of the last few that
# hold little.
BETWEEN, LITTLE = 8, 1 << 20


class Look(NamedTuple):
    """Say where a program looked at a bad number.

    Attributes:
        place: The line.
        call: What made it bad; None if that is not known.
        asked: Whether the program asked if it is bad, and so knows.
    """

    place: str
    call: Call | None
    asked: bool


class Watch:
    """Hold what is known of the program, and tell of what ran outside of any step.

    Args:
        options: As for ``track``.
        found: Is given the trackers.
        look: Makes a call once more, as a tracked function; tells whether something was told.

    Attributes:
        calls: What ran operation by operation.
        read: The first bad number that the program looked at, until another step runs.
        trackers: What watches what runs outside of any jit, by its code.
        called: How many calls of each there were.
        modules: What stands for all that equinox compiles of one kind of module.
    """

    def __init__(
        self, options: Options, found: Found, look: "Callable[[Watch, Call, Iterable[Any]], bool]"
    ) -> None:
        self.options, self.found, self._look = options, found, look
        self.calls = Calls()
        self.read: Look | None = None
        self.trackers: dict[Any, Tracker] = {}
        self.called: Counter[Any] = Counter()
        self.modules: dict[Hashable, Any] = {}
        self._looked: Counter[Any] = Counter()
        # What was told as what made an array bad that a step was given, or a number that was read.
        self._followed: list[Call] = []
        # What was compiled before, by function and options: JAX itself remembers that.
        self._compiled: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
        self._between: dict[Hashable, Tracker] = {}

    def forget(self) -> None:
        """Let go of everything: the stand-ins of a program outlive the watch."""
        self.read = None
        self.calls.clear()
        self._followed.clear()
        for held in (self.trackers, self.called, self.modules, self._looked, self._between):
            held.clear()

    # What was read.

    def was_fetched(self, x: Any, host: Any) -> None:
        """Remember a bad number that the program brought to the host."""
        nan = bool(np.any(host != host))
        if nan or (probes.checkable(x) and not np.isfinite(host).all()):
            self.was_read(x, made=not nan, depth=3)

    def was_read(self, x: Any, *, made: bool = False, asked: bool = False, depth: int = 2) -> None:
        """Remember where the program looks at a bad number; a library's looks are its own affair.

        Args:
            x: The number, or the answer to a question about it.
            made: Whether it counts only if it is known what made it bad: an Inf may be what a
                search begins with.
            asked: Whether the program asked if it is bad.
            depth: How many frames away the program is.
        """
        frame: Any = sys._getframe(depth)
        while str(frame.f_globals.get("__name__")).partition(".")[0] in WRITERS:
            frame = frame.f_back
        known = self.read is not None and self.read.call is not None
        if known or is_library(frame.f_code.co_filename):
            return
        call = None
        with suppress(Exception):  # it is looked for in what the program computed
            call = self.calls.origin([x], numpys=True)
        if call is not None or not (made or self.read):
            self.read = Look(place(frame), call, asked)

    def goes_on(self) -> None:
        """Tell of what was read before a step; a note will do where the program asked itself."""
        if not eager_now():
            return
        look, self.read = self.read, None
        self.calls.goes_on()
        if look is None or look.call is None:
            return
        notes = self.found.notes
        if not look.asked:
            self.follow(look.call)
        elif not any("[went-on]" in note for note in notes):
            notes.append(WENT_ON(place=look.place, origin=look.call.place))

    # What made it.

    def outside(self, given: list[Any], weights: Iterable[Any] = ()) -> None:
        """Tell what made the bad arrays that a step was given, if that ran outside of any.

        Those of -Inf may be masks, but for weights.
        """
        arrays, call = [*bad(given), *weights], None
        with suppress(Exception):  # the step is judged all the same
            call = self.calls.origin(arrays, floats=True)
        if call is not None:
            self.follow(call, arrays)

    def follow(self, call: Call, came: Iterable[Any] = ()) -> None:
        """Tell of a call that made something bad, once for each line."""
        alike = any(call.place == each.place for each in self._followed)
        if alike or len(self._followed) >= LOOKS:
            return
        self._followed.append(call)
        try:
            self._look(self, call, came)
        except AnomalyError:
            raise
        except Exception as error:  # noqa: BLE001  the program goes on
            self.found.fail(f"what {call.place} gave", error)

    def may_look(self, key: Any) -> bool:
        """Tell whether one more bad call is looked into: a look is compiled, and takes long."""
        self._looked[key] += 1
        return self._looked[key] <= LOOKS

    # What is compiled anew.

    def again(self, made: Any, fn: Any = None, *args: Any, **given: Any) -> Hashable:
        """Give what a function that the program compiles again is known by; None the first time."""
        if isinstance(fn, types.MethodType):  # each is another, though they are equal
            return None
        try:
            key = type(made), args, tuple(sorted(given.items()))
            known = self._compiled.setdefault(fn, set())
            again = key in known
            known.add(key)
        except TypeError:  # no hash, or not to be held weakly
            return None
        return (fn, *key) if again else None

    def kept(self, key: Hashable) -> Tracker | None:
        """Give the tracker that was kept of a function that is compiled again."""
        return self._between.pop(key, None)

    def left(self, tracker: Tracker, key: Hashable) -> None:
        """End what watched a function that is gone, or keep it for the next of its kind."""
        judge = inside(tracker).judge
        session = cast("Session | None", judge.adapter)
        if key is None or session is None or session.size() > LITTLE:
            tracker.remove()
            # A bound method that lives on is the same to JAX as the next: it would not trace that.
            inside(tracker).let_go()
            return
        with judge.softly():
            session.read()
        self._between[key] = tracker
        if len(self._between) > BETWEEN:
            self._between.pop(next(iter(self._between))).remove()


def place(frame: Any) -> str:
    """Give a frame's line in few letters."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def traced_anew(trackers: Iterable[Tracked]) -> None:
    """Have functions traced anew at their next calls."""
    for tracker in trackers:
        if isinstance(tracker.judge.adapter, Session):
            tracker.judge.adapter.detach()
