"""Ranks as threads of one process: the programs, anynan and what is exchanged are real.

Only what carries it is another: PyTorch's own group of threads stands in for gloo. The threads
take turns, and one hands over only where it waits for another; so nothing that a whole process
shares, such as random numbers, depends on chance.
"""

import functools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.testing._internal.distributed import multi_threaded_pg as threaded

import tests.torch_adapter.ranks_script  # noqa: F401  # lists the programs
from anynan.torch.distributed import links
from tests.torch_adapter.rank_parts import SCENARIOS, hearing

# How long a rank waits for the others: much longer than any scenario takes.
LIMIT = 60


class Turns:
    """Let one thread work at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = False

    def take(self, ready: Callable[[], bool] = lambda: True) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: ready() and not self._working, LIMIT):
                msg = "the other ranks did not come"
                raise RuntimeError(msg)
            self._working = True

    def hand_over(self, seconds: float = 0.0) -> None:
        with self._changed:
            self._working = False
            self._changed.notify_all()
            if seconds:
                self._changed.wait(seconds)

    def sleep(self, seconds: float) -> None:
        self.hand_over(seconds)
        self.take()

    def meet(self, collective: Any, rank: int, data: Any) -> Any:
        """Wait until every rank has come with its data; the last one does the work."""
        collective._data[rank] = data
        collective._count += 1
        if collective._count == collective._world_size:
            collective._collective.work(collective._data)
            collective._done = True
        ended = threaded.ProcessLocalGroup._terminate.is_set
        self.hand_over()
        self.take(lambda: collective._done or ended())
        if not collective._done:
            msg = "another rank failed"
            raise RuntimeError(msg)
        return threaded.ret_work(data)


class Line(threaded.ProcessLocalGroup):
    """What the ranks agree over."""

    pg_name = ""  # a property that asks the program's groups

    def __init__(self, store: Any, rank: int, size: int, limit: object) -> None:
        super().__init__(rank, size)
        self.pg_name = store.compare_set("name", "", str(id(self))).decode()


@functools.cache
def run(ranks: int, scenario: str) -> list[dict[str, Any]]:
    """Give what each rank saw of a scenario of ``SCENARIOS``."""
    seen: list[Any] = [None] * ranks
    failed: list[BaseException] = []
    store, turns = distributed.HashStore(), Turns()

    def be(rank: int) -> None:
        distributed.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        turns.take()
        try:
            seen[rank] = SCENARIOS[scenario]()
            distributed.barrier()
        except Exception as error:
            failed.append(error)
            threaded.ProcessLocalGroup._terminate.set()
        finally:
            distributed.destroy_process_group()
            turns.hand_over()

    def meet(collective: Any, rank: int, data: Any) -> Any:
        return turns.meet(collective, rank, data)

    clock = SimpleNamespace(sleep=turns.sleep, monotonic=time.monotonic)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    try:
        with (
            hearing(),
            patch.object(threaded.Collective, "join", meet),
            patch.object(distributed, "ProcessGroupGloo", Line),
            patch.object(links, "time", clock),
        ):
            threads = [threading.Thread(target=be, args=(rank,)) for rank in range(ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failed:
        raise failed[0]
    return seen
