"""What stops a step, given as the event that its report is of."""

from collections.abc import Callable
from typing import Any

import pytest

import anynan


def failure(call: Callable[..., object], *args: Any, **options: Any) -> Any:
    """Call something that must end in a report, and give the report's event.

    To the type checker it is `Any`.
    """
    with pytest.raises(anynan.NonFiniteError) as caught:
        call(*args, **options)
    return caught.value.event
