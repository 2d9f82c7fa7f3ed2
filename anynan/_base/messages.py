"""Messages with names: what a warning or a note says, and the slug that it ends in."""

import re
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CATALOGUE = "messages.py"  # what each room calls its own
_SLUG = re.compile(r" \[([a-z]+(?:-[a-z]+)*)\]$")
_known: dict[str, str] = {}


class Message:
    """Hold the text of one message; called with its values, it gives the whole.

    Example:
        >>> from anynan._base.messages import Message
        >>> Message("unlooked", "{what} could not be read: {error}")(what="x", error="gone")
        'x could not be read: gone [unlooked]'
    """

    __slots__ = ("slug", "text")

    def __init__(self, slug: str, text: str) -> None:
        if _known.setdefault(slug, text) != text:
            msg = f"two messages have the name {slug!r}"
            raise ValueError(msg)
        self.slug, self.text = slug, text

    def __call__(self, **values: Any) -> str:
        """Fill in the values. One that is a message itself goes in without its slug."""
        return f"{self.text.format(**{k: _bare(v) for k, v in values.items()})} [{self.slug}]"


def slug_of(text: str) -> str:
    """Return the slug that a text ends in, empty where it has none."""
    found = _SLUG.search(text)
    return "" if found is None else found[1]


def left(texts: Iterable[str], ignored: Iterable[str]) -> tuple[str, ...]:
    """Return the texts without those that are to be ignored."""
    return tuple(text for text in texts if slug_of(text) not in ignored)


def known() -> dict[str, str]:
    """Return the text of each message by its slug, in all rooms, loaded or not."""
    here = Path(__file__)
    package = here.parents[1]
    rooms = [*package.glob(f"*/{CATALOGUE}"), *package.glob(f"*/*/{CATALOGUE}")]
    for path in sorted(rooms):
        if path.parent != here.parent:  # by its file: a package may need its framework
            runpy.run_path(str(path))
    return dict(_known)


def _bare(value: Any) -> Any:
    return _SLUG.sub("", value) if isinstance(value, str) else value
