"""A thread that waits as those of compilers' workers, notebooks and loggers do."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anynan._base.threads import busy_threads

the_system_tells = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the system does not tell who waits"
)


@contextmanager
def waiting_for_a_pipe() -> Iterator[None]:
    """Have a thread wait in code of its own, and go on when it has come to wait."""
    out, into = os.pipe()
    thread = threading.Thread(target=lambda: os.read(out, 1))
    thread.start()
    try:
        until = time.monotonic() + 60
        while busy_threads() and time.monotonic() < until:
            pass  # it is on its way, and a laden machine may hold it up
        yield
    finally:
        os.write(into, b"x")
        thread.join()
        os.close(out)
        os.close(into)
