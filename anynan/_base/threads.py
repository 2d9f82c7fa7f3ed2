"""The program's other threads: which of them run at this moment."""

import os
import sys
import threading
import time
from pathlib import Path

# Where a thread stands that waits for work, a lock or another thread: functions of the standard
# library by name.
_WAITING = frozenset(
    {"_recv", "_try_wait", "_wait_for_tstate_lock", "_worker", "acquire", "accept", "get", "join",
     "poll", "read", "readinto", "recv", "recv_bytes", "result", "select", "sleep", "wait"}
)  # fmt: skip


# Seconds in which a thread that could go on would have been given the processor.
_MOMENT = 0.01


def busy_threads() -> dict[int, str]:
    """Give number and name of every other thread that runs Python code and does not wait.

    Many libraries have a thread that waits in code of their own, for a pipe or a socket. Where the
    system tells (Linux, `/proc/self/task`), one that did not run for a moment in which it could
    have waits, too; elsewhere it is taken for busy.

    Example:
        >>> from anynan._base.threads import busy_threads
        >>> busy_threads()
        {}
    """
    before = {number: _turns(thread) for number, thread in _running().items()}
    if not before:
        return {}
    time.sleep(_MOMENT)  # whoever waits for the interpreter gets it
    return {
        number: thread.name
        for number, thread in _running().items()
        if (now := _turns(thread)) is None or now != before.get(number)
    }


def _running() -> dict[int, threading.Thread]:
    """Give the other threads that do not wait in the standard library."""
    own, library = threading.get_ident(), os.path.dirname(threading.__file__)
    threads = {thread.ident: thread for thread in threading.enumerate()}
    running = {}
    for number, frame in sys._current_frames().items():  # noqa: SLF001
        file = frame.f_code.co_filename
        waits = file.startswith(library) and frame.f_code.co_name in _WAITING
        if number != own and number in threads and not waits:
            running[number] = threads[number]
        del frame  # its own holds itself in a cycle, with everything below it
    return running


def _turns(thread: threading.Thread) -> str | None:
    """Give what the system counts as a sleeping thread runs, None if it runs or nobody knows."""
    task = Path("/proc/self/task", str(thread.native_id))
    try:
        state = task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        return task.joinpath("schedstat").read_text() if state in "SD" else None
    except (OSError, IndexError):
        return None
