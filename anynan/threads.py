"""The program's other threads: which of them run at this moment."""

import os
import sys
import threading

# Where a thread stands that waits for work, a lock or another thread.
_WAITING = frozenset(
    {"connection.py", "queue.py", "queues.py", "selectors.py", "socket.py", "ssl.py",
     "subprocess.py", "synchronize.py", "thread.py", "threading.py"}
)  # fmt: skip


def busy_threads() -> dict[int, str]:
    """Give number and name of every other thread that runs Python code and does not wait.

    Example:
        >>> from anynan.threads import busy_threads
        >>> busy_threads()
        {}
    """
    own, library = threading.get_ident(), os.path.dirname(threading.__file__)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    busy = {}
    for number, frame in sys._current_frames().items():  # noqa: SLF001
        file = frame.f_code.co_filename
        waits = file.startswith(library) and os.path.basename(file) in _WAITING
        if number != own and number in names and not waits:
            busy[number] = names[number]
    return busy
