"""What a notebook shows as a picture of itself, and ``print`` in words."""

from collections.abc import Callable
from typing import Any

# Reports put it into words, and stand above this room: the package sets it.
as_html: Callable[[Any], str] = repr
as_text: Callable[[Any], str] = repr


class Shown:
    """Be shown as static HTML by Jupyter."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return as_html(self)
