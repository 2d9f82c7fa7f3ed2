"""Listen to what a tracked run says that an untracked one does not."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect the warnings of a block, each with its category."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [f"{entry.category.__name__}: {entry.message}"[:300] for entry in caught]


def events_of(events: Iterable[Any]) -> list[str]:
    """Put events into words, as ``suspect neginf forward 0.attn softmax``."""
    return [
        " ".join(
            str(part)
            for part in (
                event.severity,
                event.kind,
                event.phase,
                event.layer,
                event.operation.name if event.operation else "",
                event.cause.tag if event.cause else "",
            )
        )
        for event in events
    ]


def silence(untracked: list[str], tracked: list[str], events: Iterable[Any]) -> str:
    """Say what was heard; ``yes`` for nothing."""
    new = [said for said in dict.fromkeys(tracked) if said not in untracked]
    heard = list(dict.fromkeys(events_of(events))) + new
    return "; ".join(heard[:4]) if heard else "yes"
