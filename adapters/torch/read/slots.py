"""Where readings land: on the host at once (CPU), or in device buffers read once a step."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from anynan._readings.monitor import Monitor
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan.events import Phase
from anynan.torch.read.probes import (
    DTYPE_MAX,
    DTYPE_NAME,
    EXTRA,
    NATIVE,
    bring,
    ends,
    ends_into,
    plain,
    read_ends,
    readable,
)

Placed = Callable[[list[float]], None]
_FLOATS = (torch.float32, torch.float64)


class ImmediateSlots:
    """Read each probe as it is made: on a CPU that costs nothing."""

    deferred = False

    def __init__(self, extra: tuple[str, ...]) -> None:
        self._extra = extra
        self._scratch: dict[torch.dtype, tuple[Any, Any]] = {}

    def write(self, rows: Step, site: Site, call: int, x: torch.Tensor) -> bool | None:
        """Append one reading of a tensor.

        Returns:
            Whether it needs judging; None, and nothing is appended, if it cannot be looked at.
        """
        entry = self._scratch.get(x.dtype)
        if entry is not None and x.is_cpu and ends_into(x, entry[0]):
            lo, hi = entry[1]
        else:
            values = readable(x)
            if values is None:
                return None
            lo, hi = read_ends(values)
            if entry is None and values.dtype in _FLOATS:
                self._prepare(values.dtype)
        if self._extra:
            values = plain(x)
            assert values is not None
            stats = tuple(EXTRA[name](values).item() for name in self._extra)
            rows.add_stats(len(rows.lo), stats)
        rows.add(site, call, lo, hi)
        limit = site.limit
        return not (-limit <= lo and hi <= limit)

    def _prepare(self, dtype: torch.dtype) -> None:
        # A buffer made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            buffer = torch.zeros(2, dtype=dtype, device="cpu")
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        self._scratch[dtype] = ((buffer[0], buffer[1]), view)

    def read(self) -> None:
        """Do nothing: everything is on the host already."""


class _Bank:
    """Hold preallocated rows of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, size: int) -> None:
        self.dtype, self.device, self.size = dtype, device, size
        with torch.inference_mode(False), torch.no_grad():
            self.buffer = torch.zeros((2, size), dtype=dtype, device=device)
            self.pairs = list(zip(self.buffer[0].unbind(), self.buffer[1].unbind(), strict=True))
        self.used = 0


class DeferredSlots:
    """Leave probes on the device, and bring them to the host in one read."""

    deferred = True

    def __init__(self, extra: tuple[str, ...]) -> None:
        self._extra = extra
        self._banks: dict[tuple[torch.dtype, torch.device], list[_Bank]] = {}
        self._open: dict[tuple[torch.dtype, torch.device], _Bank] = {}  # the last, with free rows
        self._where: list[tuple[Step, _Bank, int]] = []
        self._later: list[tuple[Placed, torch.Tensor]] = []
        self._stats: list[torch.Tensor] = []
        self._stats_of: list[tuple[Step, int]] = []

    def write(self, rows: Step, site: Site, call: int, x: torch.Tensor) -> bool | None:
        """Append one reading of a tensor; it is judged at the read.

        Returns:
            False; None, and nothing is appended, if it cannot be looked at.
        """
        bank = self._open.get((x.dtype, x.device))
        if bank is None or not ends_into(x, bank.pairs[bank.used]):
            values = readable(x)
            if values is None:
                return None
            bank = self._bank(values.dtype, values.device)
            pair = bank.pairs[bank.used]
            low, high = ends(values)
            pair[0].copy_(low)
            pair[1].copy_(high)
        self._where.append((rows, bank, bank.used))
        bank.used += 1
        if bank.used == bank.size:
            del self._open[(bank.dtype, bank.device)]
        if self._extra:
            values = plain(x)
            assert values is not None
            self._stats.extend(EXTRA[name](values) for name in self._extra)
            self._stats_of.append((rows, len(rows.sites)))
        rows.reserve(site, call)
        return False

    def later(self, values: torch.Tensor, place: Placed) -> None:
        """Bring values along in the next read, and hand them on once the rows are there."""
        self._later.append((place, values))

    def _bank(self, dtype: torch.dtype, device: torch.device) -> _Bank:
        """Return a bank with a free row."""
        key = dtype if dtype in NATIVE else torch.float32, device
        bank = self._open.get(key)
        if bank is None:
            banks = self._banks.setdefault(key, [])
            bank = self._open[key] = _Bank(*key, banks[-1].size * 2 if banks else 64)
            banks.append(bank)
        return bank

    def read(self) -> None:
        """Bring what was written since the last read to the host: one read per device."""
        if not self._where and not self._later:
            return
        banks = [bank for banks in self._banks.values() for bank in banks if bank.used]
        later, self._later = self._later, []
        tensors = [bank.buffer[:, : bank.used] for bank in banks]
        tensors += self._stats
        tensors += [values for _, values in later]
        columns = bring(tensors)
        ends_of = {id(bank): columns[i] for i, bank in enumerate(banks)}
        waiting = Counter(id(rows) for rows, _, _ in self._where)
        steps = {id(rows): rows for rows, _, _ in self._where}
        whole = {key: rows for key, rows in steps.items() if not rows.keep_whole(waiting[key])}
        found: dict[int, tuple[list[float], list[float]]] = {key: ([], []) for key in whole}
        for rows, bank, at in self._where:
            if id(rows) not in whole:
                continue
            values, (lo, hi) = ends_of[id(bank)], found[id(rows)]
            site = rows.sites[len(rows.lo) + len(lo)]
            hi.append(values[bank.used + at])
            lo.append(-hi[-1] if site.bound else values[at])
        for rows in whole.values():
            rows.fill(*found[id(rows)])
        width = len(self._extra)
        stats = columns[len(banks) : len(columns) - len(later)]
        for i, (rows, order) in enumerate(self._stats_of):
            rows.add_stats(order, (x for (x,) in stats[i * width : (i + 1) * width]))
        # The last first: what it puts in leaves the places of those before as they are.
        for place, _ in reversed(later):
            place(columns.pop())
        self._where.clear()
        self._stats.clear()
        self._stats_of.clear()
        for key, banks in self._banks.items():
            # The largest bank is enough for every later step of this size.
            del banks[:-1]
            banks[-1].used = 0
            self._open[key] = banks[-1]


Slots = ImmediateSlots | DeferredSlots


def site_of(
    monitor: Monitor, layer: str | None, phase: Phase, name: str, x: torch.Tensor,
    parameter: str | None = None, *, bound: bool = False, buffer: bool = False,
) -> Site:  # fmt: skip
    """Return the slot of a tensor."""
    dtype = DTYPE_NAME.get(x.dtype) or str(x.dtype).removeprefix("torch.")
    limit = DTYPE_MAX.get(x.dtype)
    return monitor.site(
        layer, phase, name, dtype, limit, parameter=parameter, bound=bound, buffer=buffer
    )
