"""The program's other threads: which of them run at this moment."""

import os
import sys
import threading

# Where a thread stands that waits for work, a lock or another thread: functions of the standard
# library by name.
_WAITING = frozenset(
    {"_recv", "_try_wait", "_wait_for_tstate_lock", "_worker", "acquire", "accept", "get", "join",
     "poll", "read", "readinto", "recv", "recv_bytes", "result", "select", "sleep", "wait"}
)  # fmt: skip


def busy_threads() -> dict[int, str]:
    """Give number and name of every other thread that runs Python code and does not wait.

    Example:
        >>> from anynan._runtime.threads import busy_threads
        >>> busy_threads()
        {}
    """
    own, library = threading.get_ident(), os.path.dirname(threading.__file__)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    busy = {}
    for number, frame in sys._current_frames().items():  # noqa: SLF001
        file = frame.f_code.co_filename
        waits = file.startswith(library) and frame.f_code.co_name in _WAITING
        if number != own and number in names and not waits:
            busy[number] = names[number]
        del frame  # its own holds itself in a cycle, with everything below it
    return busy
