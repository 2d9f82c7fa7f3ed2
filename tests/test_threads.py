"""Which other threads are at work while a step would run again."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from anynan._runtime.threads import busy_threads


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


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the system does not tell who waits"
)
def test_a_thread_that_waits_for_a_pipe_is_not_at_work() -> None:
    """As those of compilers' workers, notebooks and loggers do, in code of their own."""
    out, into = os.pipe()
    waits = threading.Thread(target=lambda: os.read(out, 1))
    waits.start()
    assert not busy_threads()
    os.write(into, b"x")
    waits.join()
    os.close(out)
    os.close(into)


@pytest.mark.parametrize("how", ["python", "numpy"])
def test_one_that_counts_is(how: str) -> None:
    ones = np.ones((300, 300))
    work = (lambda: sum(range(1000))) if how == "python" else (lambda: ones @ ones)
    with beside(work, how):
        for _ in range(20):
            assert list(busy_threads().values()) == [how]
