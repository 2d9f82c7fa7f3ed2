"""What one array holds, in numbers."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from anynan._base.shown import Shown


@dataclass(frozen=True, slots=True)
class Summary(Shown):
    """Describe an array by counts and finite statistics.

    Attributes:
        shape: The array's shape.
        dtype: The data type's short name, such as ``float32``.
        device: The device, as the array library prints it.
        size: Number of elements.
        nan: Number of NaN elements (a complex element is NaN if either part is).
        posinf: Number of +Inf elements (complex: any infinite, not NaN, element).
        neginf: Number of -Inf elements.
        zero: Number of exact zeros.
        subnormal: Number of subnormal elements.
        min: Smallest finite element; None for complex arrays or without finite elements.
        max: Largest finite element; None as above.
        absmax: Largest finite magnitude.
        mean: Mean of the finite elements.
        rms: Root mean square of the finite elements.
        headroom: Bits left before overflow, ``log2(finfo(dtype).max / absmax)``.
        first_bad: Index of the first NaN or Inf in C order, None if there is none.

    Example:
        >>> import anynan, numpy
        >>> anynan.summarize(numpy.array([1.0, 3.0])).mean
        2.0
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    size: int
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0
    min: float | None = None
    max: float | None = None
    absmax: float | None = None
    mean: float | None = None
    rms: float | None = None
    headroom: float | None = None
    first_bad: tuple[int, ...] | None = None

    @property
    def bad(self) -> int:
        """Count the NaN and infinite elements."""
        return self.nan + self.posinf + self.neginf

    @property
    def kind(self) -> Literal["nan", "posinf", "neginf"] | None:
        """Name the worst kind present (``nan``, ``posinf``, ``neginf``), None without any."""
        if self.nan:
            return "nan"
        if self.posinf:
            return "posinf"
        return "neginf" if self.neginf else None

    @property
    def low(self) -> float | None:
        """Give the smallest element that is no NaN, -Inf included."""
        if self.neginf:
            return -math.inf
        return self.min if self.min is not None else (math.inf if self.posinf else None)

    @property
    def high(self) -> float | None:
        """Give the largest element that is no NaN, +Inf included."""
        if self.posinf:
            return math.inf
        return self.max if self.max is not None else (-math.inf if self.neginf else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Summary":
        """Rebuild a summary from ``to_dict`` or from its JSON."""
        first = data.get("first_bad")
        return cls(
            **{
                **data,
                "shape": tuple(data["shape"]),
                "first_bad": None if first is None else tuple(first),
            }
        )
