"""What a step of MLX began with: arrays are kept as other handles on the same values."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from anynan._reach import Began, Reach
from anynan.mlx.layers import Layers


class Root(Began):
    """Hold a call as it began.

    Args:
        fn: What was called.
        args: With what.
        kwargs: By name.
        layers: The models and optimizers that it runs.
        reach: What else its code reaches, None for a model's.

    Attributes:
        weights: The weights that it began with.
        cotangents: The gradients that came into a model's outputs.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        layers: Layers, reach: Reach | None = None,
    ) -> None:  # fmt: skip
        held = [model for _, model in layers.roots()] + layers.optimizers
        super().__init__(fn, args, kwargs, held, reach)
        self.weights = layers.weights()
        self.cotangents: dict[str, Any] = {}
        # For a bundle: what MLX draws from, and the states of NumPy's and Python's generators.
        self.key = mx.random.state[0]

    def random(self) -> list[Callable[[], object]]:
        """Give what puts MLX's key back; it is read on the host where that is done."""
        key = mx.random.state[0]

        def restore() -> None:
            high, low = key.tolist()
            mx.random.seed(high << 32 | low)  # which makes just this key of it

        return [restore]

    def content(self, x: Any) -> Any:
        """Give another handle on what an array holds."""
        return mx.stop_gradient(x)

    def refill(self, x: Any, content: Any) -> None:
        """Have an array hold what it held."""
        mx.array.__setitem__(x, Ellipsis, content)
