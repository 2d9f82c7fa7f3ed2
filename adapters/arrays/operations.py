"""One operation of array code, as the tape that ran it tells it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import FrameType
from typing import Any

import numpy as np

from anynan._arrays.access import dtype_name, library_name, namespace
from anynan._arrays.chunked import sized
from anynan._arrays.containers import mapped
from anynan._base import context
from anynan._base.sources import user_source
from anynan._trace.op import Op, RerunError
from anynan.arrays.names import is_number, named, params
from anynan.arrays.trackable import is_array
from anynan.arrays.tracked import TrackedArray, is_tracked, strip
from anynan.errors import reason
from anynan.events import Phase, Source


class ArrayOp(Op):
    """Tell of one operation; its line is known while it is shown.

    Args:
        base: The scope that the call itself was made in.
        name: What the operation is called.
        raw: What it was called by.
        function: What ran.
        args: Its positional arguments, tracked arrays among them.
        kwargs: Its arguments by name.
        results: What it gave.
        before: Copy of what was overwritten, None where there is none.
        writes: The array that was written to; None where a new one was made.

    Attributes:
        writes: The same.
    """

    def __init__(
        self, base: str | None, name: str, raw: str, function: Callable[..., Any],
        args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[TrackedArray],
        before: Any, writes: TrackedArray | None,
    ) -> None:  # fmt: skip
        library, layer = library_name(results[0]._raw), context.scope_path()
        self.number, self.call = 0, 0
        self.name, self.kernel, self.raw = name, name, f"{library}.{raw.strip('_')}"
        self.layer = None if layer == base else layer
        self.phase: Phase = "forward"
        self.written, self.expected = writes is not None, context.expectations()
        self.writes, self._library = writes, library
        self._function, self._args, self._kwargs = function, args, kwargs
        self._results, self._before = results, before
        self._frame: FrameType | None = sys._getframe(1)  # until it was shown

    def over(self) -> None:
        """Keep no frame of it: it was shown."""
        self._frame = None

    @cached_property
    def source(self) -> Source | None:
        """Give the user's line."""
        return None if self._frame is None else user_source(self._frame, framework=self._library)

    @cached_property
    def given(self) -> list[tuple[str, Any]]:
        """List what it works on by name: arrays, tracked ones as they are, and numbers."""
        options = {key: x for key, x in self._kwargs.items() if key != "key"}
        found = named(self.name, self._args, options)
        return [(k, x) for k, x in found if is_tracked(x) or is_array(x) or is_number(x)]

    @cached_property
    def inputs(self) -> Sequence[tuple[str, Any]]:
        """Give the arrays of fractions it works on, by name."""
        plain = [(label, self.plain(x)) for label, x in self.given]
        return [(label, x) for label, x in plain if _is_fraction(x)]

    @property
    def outputs(self) -> Sequence[Any]:
        """Give what it made."""
        return [x._raw for x in self._results]

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """Give its plain arguments."""
        return params(self.name, self._args, self._kwargs)

    @property
    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Give what it was called with, of plain arrays."""
        plain = {key: self.plain(x) for key, x in self._kwargs.items()}
        return [self.plain(x) for x in self._args], plain

    def plain(self, x: Any) -> Any:
        """Give an argument without tracked arrays, and as it was before it was written to."""
        if self.writes is not None and x is self.writes and self._before is not None:
            return self._before
        return strip(x, [])

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> Sequence[Any]:
        """Run it once more, and give what it makes then.

        Raises:
            RerunError: If it writes into an array, or cannot compute in that dtype.
        """
        if self.writes is not None:
            msg = f"{self.name} writes into an array that was there before"
            raise RerunError(msg)
        new = {id(x): (inputs or {}).get(label, x) for label, x in self.given}

        def change(value: Any) -> Any:
            value = self.plain(new.get(id(value), value))
            if dtype is None or not _is_real(value):
                return value
            xp = namespace(value)
            return xp.astype(value, getattr(xp, dtype, dtype))

        try:
            with np.errstate(all="ignore"):
                options = {key: x for key, x in self._kwargs.items() if key != "out"}
                made = self._function(*mapped(self._args, change), **mapped(options, change))
        except Exception as error:
            raise RerunError(reason(error)) from error
        return list(made) if isinstance(made, tuple | list) else [made]


def _is_real(x: Any) -> bool:
    return is_array(x) and "float" in dtype_name(x)


def _is_fraction(x: Any) -> bool:
    return (_is_real(x) or (is_array(x) and "complex" in dtype_name(x))) and sized(x)
