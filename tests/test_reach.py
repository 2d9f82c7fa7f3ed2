"""What code can reach: found by name, kept, put back; and who else is at work meanwhile."""

import gc
import io
import logging
import random
import threading
import weakref
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anynan._base.threads import busy_threads
from anynan._diagnosis.evidence import ReplayError
from anynan._reach import Exhausted, Kinds, Reach
from tests.threads import the_system_tells, waiting_for_a_pipe

number = 0


def begun(fn: Any, **given: Any) -> tuple[Reach, Any]:
    reach = Reach(fn, Kinds())
    reach.search(())
    return reach, reach.now(given.items())


def test_what_a_function_reaches_is_put_back_where_it_was() -> None:
    count, seen, own = 0, [1], SimpleNamespace(n=0, by_name=OrderedDict(a=1), recent=deque([1]))
    dice = random.Random(0)

    def step() -> None:
        global number  # noqa: PLW0603
        nonlocal count
        number += 1
        count += 1
        seen.append(count)
        own.n += 1
        own.new = own.by_name["b"] = dice.random()
        own.recent.append(2)

    reach, kept = begun(step)
    by_name, first = own.by_name, dice.getstate()
    step()
    step()
    assert reach.put_back(kept) == []
    assert (number, count, seen) == (0, 0, [1])
    assert vars(own) == {"n": 0, "by_name": {"a": 1}, "recent": deque([1])}
    assert own.by_name is by_name
    assert dice.getstate() == first


class Counted:
    total = 0
    text = "kept"


class Slotted:
    __slots__ = ("n", "seen", "unset")

    def __init__(self) -> None:
        self.n, self.seen = 0, [1]


def test_slots_and_attributes_of_classes_and_functions_are_put_back(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n2\n3\n")
    slotted, memory, counted = Slotted(), io.StringIO("a\nb\n"), Counted()

    def step() -> str:
        Counted.total += 1
        type(counted).text = "changed"
        slotted.n += 1
        slotted.seen.append(2)
        step.calls += 1  # type: ignore[attr-defined]
        return memory.readline() + lines.readline()

    step.calls = 0  # type: ignore[attr-defined]
    with (tmp_path / "lines").open() as lines:
        reach, kept = begun(step)
        seen = slotted.seen
        first = step()
        step()
        assert reach.put_back(kept) == []
        assert (Counted.total, Counted.text, slotted.n) == (0, "kept", 0)
        assert slotted.seen is seen
        assert seen == [1]
        assert step.calls == 0  # type: ignore[attr-defined]
        assert step() == first
    assert reach.put_back(reach.now([])) == []  # the file is closed by now


def test_iterators_give_a_second_run_what_they_gave_the_first() -> None:
    items = iter(range(9))
    own = SimpleNamespace(items=items)

    def step(more: Any) -> list[int]:
        return [next(items), next(own.items), next(more)]

    reach, kept = begun(step)
    with reach.lending((iter("ab"),), {}) as (args, kwargs):
        first = step(*args, **kwargs)
        reach.put_back(kept)
        with reach.again():
            assert step(*args) == first == [0, 1, "a"]
            with pytest.raises(Exhausted):
                next(items)
        assert step(*args) == [2, 3, "b"]
    assert own.items is items
    assert type(items) is type(iter(range(0)))
    assert next(items) == 4


class Frozen(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError(key)


def test_iterators_in_what_cannot_be_written_to() -> None:
    pair, frozen = (iter(range(9)), 0), Frozen(items=iter(range(9)))
    inside = [iter(range(9))]

    def step() -> list[int]:
        return [next(pair[0]), next(frozen["items"]), next(inside[0])]

    reach, kept = begun(step)
    with reach.lending((), {}):
        assert step() == [0, 0, 0]
        reach.put_back(kept)
        with pytest.raises(ReplayError, match=r"`pair\[0\]`.*a tuple, say"), reach.again():
            step()
    assert step() == [1, 1, 1]
    assert type(frozen["items"]) is type(iter(range(0)))


def test_nothing_is_kept_alive() -> None:
    own = SimpleNamespace(thing=Counted(), things=[Counted()])
    reach, kept = begun(lambda: (own.thing, own.things))
    refs = [weakref.ref(own.thing), weakref.ref(own.things[0])]
    own.thing, own.things = None, []
    del kept
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert reach.put_back(reach.now()) == []


class Raising(type):
    def __hash__(cls) -> int:
        raise TypeError

    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError(name)


def test_objects_that_raise_are_passed_over() -> None:
    class Hostile(metaclass=Raising):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    hostile, count = Hostile(), 0

    def step() -> object:
        nonlocal count
        count += 1
        return hostile

    reach, kept = begun(step)
    step()
    reach.put_back(kept)
    assert count == 0


def test_libraries_keep_their_own_state() -> None:
    logger = logging.getLogger("anynan.test")
    reach, kept = begun(lambda: logger.filters)
    logger.filters.append(lambda _: True)
    reach.put_back(kept)
    assert len(logger.filters) == 1
    logger.filters.clear()


@the_system_tells
def test_a_thread_that_waits_for_a_pipe_is_not_at_work() -> None:
    with waiting_for_a_pipe():
        assert not busy_threads()


@pytest.mark.parametrize("how", ["python", "numpy"])
def test_one_that_counts_is(how: str) -> None:
    ones, over = np.ones((300, 300)), threading.Event()

    def work() -> None:
        while not over.is_set():
            _ = sum(range(1000)) if how == "python" else ones @ ones

    thread = threading.Thread(target=work, name=how)
    thread.start()
    try:
        assert [list(busy_threads().values()) for _ in range(20)] == [[how]] * 20
    finally:
        over.set()
        thread.join()
