"""A target of one framework, and the numbers in that framework's arrays: what products stand on."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from anynan._trace.op import Observe


class Target:
    """Hold what a product runs again and again; each adapter has one in its ``observe.py``.

    Args:
        target: A model, a training step, or any function.
        args: What it is called with.
        kwargs: By name.

    Attributes:
        takes: Tells whether a call is this framework's.
        shows: The framework's ``observe``.
        call: Target, arguments, and those by name.
    """

    takes: Callable[..., bool]
    shows: Observe

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.call = target, args, dict(kwargs)

    @classmethod
    def of(
        cls, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Self | None:
        """Make one; None for what is another framework's."""
        kwargs = kwargs or {}
        return cls(target, args, kwargs) if cls.takes(target, args, kwargs) else None

    def is_array(self, x: Any) -> bool:
        """Tell whether something is one of the framework's arrays of numbers."""
        raise NotImplementedError

    def host(self, x: Any) -> NDArray[Any]:
        """Bring an array to the host; what NumPy has no dtype for in float32."""
        raise NotImplementedError

    def like(self, numbers: NDArray[Any], x: Any) -> Any:
        """Make of numbers an array as ``x`` is one: dtype, device, whether it has a gradient."""
        raise NotImplementedError

    def cast(self, x: Any, dtype: str) -> Any:
        """Cast an array."""
        return x.astype(dtype)

    def numbers(self, x: Any) -> NDArray[Any] | None:
        """Give an array's numbers on the host; None for what has none with a fraction."""
        found = self.host(x) if self.is_array(x) else np.zeros(0, bool)
        return found if found.dtype.kind in "fc" else None
