"""What a hunt may change: the arrays of an example, and the range they come in."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anynan._arrays.arguments import bound
from anynan._arrays.containers import leaves, mapped, unpacked
from anynan._reach import Holder

Array = np.ndarray
Domain = tuple[float, float] | Mapping[str, tuple[float, float]] | None

# Rows from which on a column has a range of its own.
ROWS = 8


@dataclass(frozen=True, slots=True)
class Input:
    """Hold one array that a hunt may change.

    Attributes:
        name: What the program calls it.
        example: Its numbers in the example, on the host.
        low: The smallest that come, for each feature.
        high: The largest.
        given: Whether ``domain=`` says so; else the example does.
    """

    name: str
    example: Array
    low: Array
    high: Array
    given: bool = False

    @classmethod
    def of(cls, name: str, example: Array, domain: tuple[float, float] | None) -> "Input":
        """Take the range from the domain, else from the example."""
        if domain is not None:
            low, high = (np.asarray(x, example.dtype) for x in domain)
            return cls(name, example, low, high, given=True)
        if not example.size or example.dtype == bool:
            ends = np.zeros((), example.dtype), np.ones((), example.dtype)
            return cls(name, example, *ends)
        low, high = example.min(), example.max()
        if example.ndim > 1 and len(example) >= ROWS:
            low, high = example.min(axis=0), example.max(axis=0)
        return cls(name, example, np.asarray(low), np.asarray(high))

    @property
    def fractions(self) -> bool:
        """Tell whether it holds numbers with a fraction, along which there is a slope."""
        return self.example.dtype.kind == "f"

    @property
    def width(self) -> Array:
        """Give the width of the range; where it is a point, the size of the number, or 1."""
        width = np.asarray(self.high, np.float64) - np.asarray(self.low, np.float64)
        size = np.maximum(np.abs(self.low), np.abs(self.high)).astype(np.float64)
        return np.where(width > 0, width, np.where(size > 0, size, 1.0))

    def holds(self, x: Array) -> bool:
        """Tell whether numbers are within the range."""
        if x.size == 0 or x.shape[1:] != self.example.shape[1:]:
            x = x.reshape(-1)
            return bool(x.size == 0 or (x.min() >= self.low.min() and x.max() <= self.high.max()))
        return bool(np.all((x >= self.low) & (x <= self.high)))

    def distance(self, x: Array) -> float:
        """Give the largest move from the example, in widths of the range."""
        if x.shape != self.example.shape or not x.size:
            return 0.0
        with np.errstate(all="ignore"):
            moved = np.abs(x.astype(np.float64) - self.example.astype(np.float64)) / self.width
        return float(np.nan_to_num(moved, nan=np.inf).max())

    def changes(self, x: Array) -> str:
        """Say in numbers what other numbers change, empty if nothing."""
        old = self.example
        if x.shape != old.shape:
            return f"{self.name} has the shape {x.shape}, and had {old.shape}"
        other = (x != old) & ~((x != x) & (old != old))
        if not other.any():
            return ""
        now, before = _span(x[other]), _span(old[other])
        return f"{other.sum()} of {x.size} numbers of {self.name} are {now}, and were {before}"


def _span(x: Array) -> str:
    low, high = f"{x.min():.4g}", f"{x.max():.4g}"
    return low if low == high else f"{low} to {high}"


class EndedByItselfError(Exception):
    """Stand for the end of a program that ends itself on an input."""


class Program:
    """Call a target with arrays in the places of those of its example.

    Args:
        target: What is called.
        args: The example.
        parameters: What the target calls its arguments.
        held: Where its code holds further arrays, which it leaves alone.
        is_array: Tells what an array of its framework is.

    Attributes:
        names: What the arrays are called.
        arrays: Those of the example.
        call: Takes others, and calls the target.
    """

    def __init__(
        self, target: Callable[..., Any], args: tuple[Any, ...], parameters: Sequence[str],
        held: Sequence[Holder], is_array: Callable[[Any], bool],
    ) -> None:  # fmt: skip
        given = bound(tuple(parameters), args, {})
        found = [leaf for name, value in given for leaf in leaves(value, name) if is_array(leaf[1])]
        many = len(found)
        found += [(holder.name, holder.get()) for holder in held]
        self.names: list[str] = [name for name, _ in found]
        self.arrays: list[Any] = [x for _, x in found]
        # Not the example itself: a run puts copies in the place of arrays that its code reaches.
        places = {id(x): _Place(i) for i, x in enumerate(self.arrays[:many])}
        blank = [_blank(value, places) for value in args]

        def program(*arrays: Any) -> Any:
            values = [_filled(value, arrays) for value in blank]
            before = [holder.get() for holder in held]
            try:
                for holder, x in zip(held, arrays[many:], strict=True):
                    holder.set(x)
                return target(*values)
            except SystemExit as error:  # it ends itself
                raise EndedByItselfError from error
            finally:
                for holder, x in zip(held, before, strict=True):
                    holder.set(x)

        program.__name__ = getattr(target, "__name__", type(target).__name__)
        self.call = program


@dataclass(frozen=True, slots=True)
class _Place:
    """Stand in a container where an array goes."""

    at: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """Stand for an object that is made anew of its parts."""

    make: Callable[..., Any]
    parts: dict[Any, Any]


def _blank(value: Any, places: Mapping[int, _Place]) -> Any:
    """Copy a container without its arrays."""

    def change(x: Any) -> Any:
        if id(x) in places:
            return places[id(x)]
        found = unpacked(x)
        if found is None:
            return x
        parts, make = found
        return _Parts(make, {key: _blank(item, places) for key, item in parts.items()})

    return mapped(value, change)


def _filled(value: Any, arrays: Sequence[Any]) -> Any:
    """Put arrays into such a copy, which is made anew."""

    def change(x: Any) -> Any:
        if isinstance(x, _Place):
            return arrays[x.at]
        if isinstance(x, _Parts):
            return x.make({key: _filled(item, arrays) for key, item in x.parts.items()})
        return x

    return mapped(value, change)


def domains(domain: Domain, names: Sequence[str]) -> Iterator[tuple[float, float] | None]:
    """Give the range that was asked for, for each input.

    Raises:
        TypeError: If it is no pair of numbers, and no mapping of names to such.
        ValueError: If it names no input, or is empty.
    """
    if domain is None:
        yield from (None for _ in names)
        return
    by_name = domain if isinstance(domain, Mapping) else dict.fromkeys(names, domain)
    for name, pair in by_name.items():
        if name not in names:
            msg = f"domain= names {name!r}, and the inputs are {', '.join(names) or 'none'}"
            raise ValueError(msg)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            msg = f"domain= takes (low, high), or one for each name, not {pair!r} for {name}"
            raise TypeError(msg)
        if not pair[0] <= pair[1]:
            msg = f"domain= of {name} is empty: {pair[0]} is not below {pair[1]}"
            raise ValueError(msg)
    yield from (tuple(by_name[name]) if name in by_name else None for name in names)  # type: ignore[misc]
