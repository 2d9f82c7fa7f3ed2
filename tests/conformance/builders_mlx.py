"""How MLX builds and tracks the programs of ``recipes_operations``."""

import functools
from typing import Any

import mlx.core as mx
from mlx import nn

import anynan
from tests.backends import Backend, Space
from tests.conformance.recipes_operations import StepRecipe, layered
from tests.flat import split

# Whether they differ in more than when a value is read.
DIFFER = False
# What is varied, and the options of ``track`` for it.
VARIANTS: dict[str, dict[str, Any]] = {
    "step": {},
    "compiled": {"compiled": True, "ignore": "inside-unseen"},
}
CAUSE_VARIANTS = {"step": VARIANTS["step"]}

# Where a fix is tried.
TRIES = {Backend.MLX}

DIFFERENCES = {
    "masked_scores_leave_a_layer[compiled]": "of a compiled step only the ends are read",
}


class Ops:
    """Hand out the array API's functions, and the few that it lacks."""

    def __init__(self, space: Space) -> None:
        self._space = space

    # No function of Python's stands between the recipe's line and the operation.

    @property
    def softmax(self) -> Any:
        return functools.partial(mx.softmax, axis=-1)

    @property
    def sample_var(self) -> Any:
        return functools.partial(mx.var, ddof=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space.xp, name)


class Program:
    def __init__(
        self, recipe: StepRecipe, space: Space, *, compiled: bool = False, **options: Any
    ) -> None:
        self.space, self.dtype = space, recipe.dtype
        ops = Ops(space)
        net = self.net = layered(nn.Module, recipe, ops, space.array([1.0], recipe.dtype))
        gradients = nn.value_and_grad(net, lambda x: recipe.loss(ops, net(x)))

        def step(x: Any) -> Any:
            return gradients(x)

        state = [net.state]
        fn = mx.compile(step, inputs=state, outputs=state) if compiled else step
        self.tracker: anynan.Tracker = anynan.mlx.track(fn, **split(options))

    def step(self, values: Any) -> None:
        self.tracker(self.space.array(values, self.dtype))

    def spoil(self) -> None:
        """Write NaN into the weight, between two steps."""
        self.net.scale.weight = self.space.array([float("nan")], self.dtype)
