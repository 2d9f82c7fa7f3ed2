"""Run a suite's cases, each in a process of its own, within bounds of time and memory."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.wild.rows import Row, from_dict, state_of_anynan, versions_of
from tests.wild.suites import Suite

PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
STILL = 0.1  # less than this many seconds of the processor is no progress


def _list(module: str, sample: bool, pipe: Connection) -> None:
    suite = importlib.import_module(module)
    pipe.send(list(suite.SAMPLE if sample else suite.cases()))


def _run(module: str, name: str, case: str, log: str, pipe: Connection) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    began = 0.0

    def send(row: Row) -> None:
        nonlocal began
        now = sum(os.times()[:4])
        row.seconds, began = round(now - began, 2), now
        pipe.send(asdict(row))

    try:
        suite = importlib.import_module(module)
        gc.freeze()  # the packages' own objects: collecting among them takes seconds
        for row in suite.run(case):
            send(row)
    except Exception as error:
        where = traceback.format_exc()[-1500:]
        send(Row(name, case, error=f"{type(error).__name__}: {error}\n{where}"))
    pipe.send(None)


def _used(process: int) -> tuple[int, float]:
    """Give the bytes a process and its children hold and the seconds of the processor they took.

    0 where that cannot be seen.
    """
    folder = Path(f"/proc/{process}")
    try:
        pages = int((folder / "statm").read_text(encoding="ascii").split()[1])
        times = (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
        below = (folder / f"task/{process}/children").read_text(encoding="ascii")
    except (OSError, IndexError, ValueError):
        return 0, 0.0
    held, took = pages * PAGE, sum(map(int, times.split()[11:15])) / TICKS
    for child in below.split():
        held_there, took_there = _used(int(child))
        held, took = held + held_there, took + took_there
    return held, took


class Runner:
    def __init__(self, name: str, suite: Suite, module: str) -> None:
        self.name, self.suite, self.module = name, suite, module
        method = "forkserver" if self.suite.fork else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if self.suite.fork:
            self._context.set_forkserver_preload([module])
        # What a row must have been made with to count as done.
        self.key = versions_of(suite.packages), state_of_anynan(suite.adapters)

    def _start(self, target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=target, args=(*args, theirs))
        process.start()
        theirs.close()
        return process, ours

    def cases(self, *, sample: bool) -> list[str]:
        """List the cases, in a process that has the suite's packages to itself."""
        process, pipe = self._start(_list, self.module, sample)
        try:
            return pipe.recv()
        except EOFError:
            msg = f"the suite {self.name} could not be imported"
            raise RuntimeError(msg) from None
        finally:
            process.join()

    def run(self, cases: list[str], jobs: int) -> Iterator[Row]:
        """Run cases, ``jobs`` at a time, and give their rows as they come."""
        waiting = list(reversed(cases))
        running: list[_Running] = []
        with tempfile.TemporaryDirectory() as folder:
            while waiting or running:
                while waiting and len(running) < jobs:
                    log = Path(folder) / f"{len(waiting)}.log"
                    running.append(_Running(self, waiting.pop(), log))
                wait([one.pipe for one in running], timeout=0.3)
                for one in list(running):
                    for row in one.rows():
                        row.versions, row.anynan = self.key
                        yield row
                    if one.ended:
                        running.remove(one)


class _Running:
    def __init__(self, runner: Runner, case: str, log: Path) -> None:
        self.case, self.log, self.ended, self._suite = case, log, False, runner.suite
        self.name = runner.name
        self.process, self.pipe = runner._start(_run, runner.module, self.name, case, str(log))
        self.moved, self.took = time.monotonic(), 0.0

    def rows(self) -> Iterator[Row]:
        """Give what has come, and a row of its own for an end by force."""
        ended = ""
        try:
            while not self.ended and self.pipe.poll():
                data = self.pipe.recv()
                if data is None:
                    self.ended = True
                else:
                    yield from_dict(data)
        except EOFError:
            self.process.join()
            ended = f"died: {self._how()}"
        held, took = _used(self.process.pid)
        if took > self.took + STILL:
            self.moved, self.took = time.monotonic(), took
        if not self.ended and not ended:
            limit = self._suite.seconds
            if held > self._suite.gigabytes * 2**30:
                allowed = f"{self._suite.gigabytes:g} allowed"
                ended = f"stopped: held {held / 2**30:.1f} GiB of {allowed}"
            elif took > limit:
                ended = f"stopped: took longer than {limit:g} s of the processor"
            elif time.monotonic() - self.moved > limit:
                ended = f"stopped: stood still for {limit:g} s"
        if ended:
            tail = self.log.read_text(errors="replace")[-600:] if self.log.exists() else ""
            error = f"{ended}\n{tail}".strip()
            yield Row(self.name, self.case, error=error, seconds=round(max(took, self.took), 2))
            self.ended = True
        if self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)  # the rows are here; exits may hang
            self.process.join()
            self.log.unlink(missing_ok=True)

    def _how(self) -> str:
        code = self.process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"
