"""Two of everything: one that is tracked, one that is not, and what both must have in common."""

import gc
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import anynan

# What a program may do with a tracker at any time.
DOORS = ["pause", "resume", "flush", "clear", "report", "metrics", "remove"]
SEEDS = st.integers(0, 999)


@contextmanager
def quiet() -> Iterator[None]:
    """Let every warning pass: a walk looks at values, not at what is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(what: Callable[[], Any]) -> Any:
    """Give what a program returns, or what it raises in a form that can be compared."""
    try:
        return what()
    except anynan.AnomalyError:
        raise
    except Exception as error:
        return type(error).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(error))


def threaded(call: Callable[[], Any]) -> Any:
    """Run something in another thread, and give what it gives or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(outcome, call).result()


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def generators() -> dict[str, Any]:
    state = np.random.get_state()  # noqa: NPY002
    return {"python": hash(random.getstate()), "numpy": (state[1].tobytes(), *state[2:])}  # type: ignore[index]


def _ours(found: Any) -> list[Any]:
    """Choose what is of anynan: imports and threads of others come and go meanwhile."""
    return [item for item in found if type(item).__module__.startswith("anynan")]


def process() -> dict[str, Any]:
    return {
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace()),
        "threads": [t.name for t in threading.enumerate() if "anynan" in t.name],
        "streams": (sys.stdout, sys.stderr),
        "warnings": (warnings.showwarning, list(warnings.filters)),
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "finders": (_ours(sys.meta_path), _ours(sys.path_hooks)),
        "environment": dict(os.environ),
        "numpy": (np.geterr(), np.geterrcall()),
    }


def assert_process(before: dict[str, Any], after: dict[str, Any], where: str = "") -> None:
    """Compare what a process was with what it is, and name what differs."""
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert not changed, f"{where}: {changed}"


class Doors:
    """Use a tracker as a program may at any time; a mixin for walks that hold one.

    Attributes:
        before: What the process was like, once the walk has begun.
        tracker: The tracker, None while nothing is tracked.
        was_bad: Whether a bad value is known to have come by.
    """

    before: Any = None
    tracker: Any = None
    was_bad = False
    process = staticmethod(process)

    @precondition(lambda self: self.tracker is not None)
    @rule(what=st.sampled_from(DOORS))
    def use(self, what: str) -> None:
        with quiet():
            try:
                getattr(self.tracker, what)()
            except anynan.AnomalyError:
                assert self.was_bad
        if what == "remove":
            self.end()

    def end(self) -> None:
        with quiet():
            self.tracker.remove()
        assert self.was_bad or not self.tracker.count("bad")
        assert all(event.to_json() for event in self.tracker.events)
        assert self.tracker.report() and repr(self.tracker)
        self.tracker = None

    def teardown(self) -> None:
        if self.tracker is not None:
            self.end()
        if self.before is not None:
            assert_process(self.before, self.process())
