"""The adapters that were imported: each is asked first about arrays of its own kind."""

from typing import Any, Protocol

from anynan._base.summary import Summary


class Reader(Protocol):
    """Read the arrays of one framework in its own way.

    Without a reader an array is read through the array API standard; an adapter registers
    one where the standard is slower or does not reach (tracers, distributed tensors).
    """

    def owns(self, x: Any, /) -> bool:
        """Tell whether this reader is the one for ``x``; cheap, never raises."""
        ...

    def probe(self, x: Any, /) -> tuple[float, float] | None:
        """Keep the contract of ``anynan._arrays.probe.probe``."""
        ...

    def summarize(self, x: Any, /) -> Summary:
        """Keep the contract of ``anynan._arrays.measures.measure``."""
        ...


_readers: list[Reader] = []


def register(reader: Reader) -> None:
    """Ask this reader before the generic path; registering it twice changes nothing."""
    if reader not in _readers:
        _readers.append(reader)


def reader_of(x: Any) -> Reader | None:
    """Return the reader that owns ``x``, None if no adapter does."""
    for reader in _readers:
        if reader.owns(x):
            return reader
    return None
