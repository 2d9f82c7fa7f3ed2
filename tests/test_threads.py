"""Which other threads are at work while a step would run again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from anynan._base.threads import busy_threads
from tests.threads import the_system_tells, waiting_for_a_pipe


@contextmanager
def beside(work: Callable[[], object], name: str) -> Iterator[None]:
    """Repeat some work in another thread."""
    over, began = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        while not over.is_set():
            work()

    thread = threading.Thread(target=run, name=name)
    thread.start()
    began.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@the_system_tells
def test_a_thread_that_waits_for_a_pipe_is_not_at_work() -> None:
    with waiting_for_a_pipe():
        assert not busy_threads()


@pytest.mark.parametrize("how", ["python", "numpy"])
def test_one_that_counts_is(how: str) -> None:
    ones = np.ones((300, 300))
    work = (lambda: sum(range(1000))) if how == "python" else (lambda: ones @ ones)
    with beside(work, how):
        for _ in range(20):
            assert list(busy_threads().values()) == [how]
