"""What a hunt asks of Keras: whether a model is built. The rest its backend answers."""

from typing import Any

from anynan.keras.layers import refuse_unbuilt_in


def lab_of(target: Any, args: tuple[Any, ...]) -> None:
    """Refuse what uses a model that is not built."""
    refuse_unbuilt_in(target, args)
