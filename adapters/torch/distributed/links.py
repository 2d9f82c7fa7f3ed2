"""The line between the ranks: a process group of its own, with a bounded wait."""

import contextlib
import json
import sys
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from traceback import walk_stack
from typing import Any

import torch
from torch import distributed

from anynan._steps.ranks import listed
from anynan.errors import LostRankError, reason
from anynan.torch.private import backends, default_store, process_groups, set_timeout, timeout

# How long a rank waits for the others to agree; the program's own groups may wait less.
PATIENCE = timedelta(minutes=5)
# By the first update every rank that tracks at all has run a step.
GRACE = timedelta(seconds=30)
# How long those that lost a rank wait to hear from each other.
ROLL_CALL = timedelta(seconds=3)
# A replay that all ranks run may not hang longer than this where one of them fails.
REPLAY_LIMIT = timedelta(minutes=2)
_SHAPES = ("_forward_metadata_inference", "_shape_inference")


class Unlinked(Exception):  # noqa: N818  no failure: the ranks just do not act together
    """Leave the agreement: the other ranks no longer take part, and the text says why."""


class Link:
    """Exchange flags and facts with the same tracker on the other ranks.

    The group is gloo's, whatever the program's is: what is exchanged is on the host already,
    and no stream of the program waits for it.
    """

    def __init__(self, group: Any) -> None:
        self.world = weakref.ref(group)
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        base = default_store()
        self.store = distributed.distributed_c10d.PrefixStore("anynan", base)
        self.name = ""
        self.group: Any = None
        self.limit = min(PATIENCE, limit_of(group))
        self.store.set(f"tracks/{self.rank}", "")

    def open(self) -> None:
        """Meet the other ranks.

        Raises:
            Unlinked: If some of them do not track.
        """
        if not distributed.is_gloo_available():
            msg = "this PyTorch has no gloo, which ranks need to agree"
            raise Unlinked(msg)
        missing = self._silent(("tracks/",), min(GRACE, self.limit))
        if missing:
            msg = f"{listed(missing)} {'does' if len(missing) == 1 else 'do'} not track"
            raise Unlinked(msg)
        self.name = f"{self.store.add(f'links/{self.rank}', 1)}/"
        store = distributed.distributed_c10d.PrefixStore(f"anynan/{self.name}", self.store)
        try:
            self.group = distributed.ProcessGroupGloo(store, self.rank, self.size, self.limit)
        except RuntimeError as error:
            msg = f"the ranks could not be linked ({reason(error)})"
            raise Unlinked(msg) from error

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any rank: the one all-reduce of a step.

        A count of flags, never a maximum of values: reductions may drop a NaN.

        Raises:
            LostRankError: If a rank is gone.
            Unlinked: If a rank left or does not come.
        """
        if self.group is None:
            self.open()
        flags = torch.tensor([int(flag)], dtype=torch.int32, device="cpu")
        self._run(lambda: self.group.allreduce([flags]).wait())
        return bool(flags.item())

    def gather(self, fact: Any) -> list[Any]:
        """Give every rank the facts of all, in the order of the ranks; only after a failure.

        Raises:
            LostRankError: If a rank is gone.
            Unlinked: If a rank left or does not come.
        """
        text = json.dumps(fact).encode()
        size = torch.tensor([len(text)], dtype=torch.int64, device="cpu")
        sizes = self._all(size)
        padded = bytearray(text.ljust(max(map(int, sizes))))  # JSON may end in spaces
        parts = self._all(torch.frombuffer(padded, dtype=torch.uint8))
        return [json.loads(part.numpy().tobytes()) for part in parts]

    def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.zeros_like(mine) for _ in range(self.size)]
        self._run(lambda: self.group.allgather([found], [mine]).wait())
        return found

    def close(self, word: str = "left") -> None:
        """Hang up; the ranks that wait for this one are told why."""
        name, self.name = self.name, ""
        if name:
            with contextlib.suppress(RuntimeError):  # the store goes with its process
                self.store.set(f"{name}{word}/{self.rank}", "")
        self.group = None

    def _run(self, work: Any) -> None:
        # Autograd and whatever watches operations have no part in this.
        try:
            with torch.no_grad():
                work()
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: RuntimeError) -> None:
        waited = "imed out" in str(error)
        name = self.name
        self.close("lost")
        silent = self._silent((f"{name}lost/", f"{name}left/"), ROLL_CALL)
        left = [rank for rank in range(self.size) if self._has(f"{name}left/{rank}")]
        if waited or not (left or silent):
            who = listed(silent) if silent else "the ranks"
            msg = f"{who} did not come to agree on a step within {self.limit.total_seconds():g} s"
            raise Unlinked(msg) from error
        if left:
            msg = f"{listed(left)} stopped tracking"
            raise Unlinked(msg) from error
        who = f"{listed(silent)} {'are' if len(silent) > 1 else 'is'} gone"
        if not self._answers():
            who = "a rank is gone, and with it the store that the ranks share"
        msg = (
            f"{who}: the connection closed while rank {self.rank} waited to "
            "agree on a step with the other ranks; look at the output of the process that ended "
            "first"
        )
        raise LostRankError(msg) from error

    def _silent(self, words: tuple[str, ...], limit: timedelta) -> list[int]:
        """Wait until every other rank has left one of these words; list those that have not."""
        end = time.monotonic() + limit.total_seconds()
        missing = [rank for rank in range(self.size) if rank != self.rank]
        while True:
            missing = [r for r in missing if not any(self._has(f"{word}{r}") for word in words)]
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            self.store.check(["tracks/0"])
        except RuntimeError:
            return False
        return True

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError:
            return False


def limit_of(group: Any) -> timedelta:
    """Give the longest wait of a process group."""
    for backend in backends(group):
        found = timeout(backend)
        if isinstance(found, timedelta):
            return found
    return PATIENCE


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Shorten the waits of the program's gloo groups while a replay runs on all ranks."""
    changed = []
    for group in process_groups():
        for backend in backends(group):
            limit = timeout(backend)
            gloo = getattr(distributed, "ProcessGroupGloo", ())
            if isinstance(backend, gloo) and limit is not None and limit > REPLAY_LIMIT:
                set_timeout(backend, REPLAY_LIMIT)
                changed.append((backend, limit))
    try:
        yield
    finally:
        for backend, limit in changed:
            set_timeout(backend, limit)


def rehearsal() -> bool:
    """Tell whether a pipeline runs its stage on memory without values, to learn its shapes."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    return any(frame.f_code.co_name in _SHAPES for frame, _ in walk_stack(sys._getframe(1)))
