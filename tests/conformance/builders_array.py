"""How ``anynan.track`` runs the programs of ``recipes_operations``: array code, forward only."""

import functools
from typing import Any

import anynan
from tests.backends import Backend, Space
from tests.conformance.recipes_operations import StepRecipe
from tests.flat import split

BACKENDS = (Backend.NUMPY, Backend.STRICT, Backend.TORCH_STANDARD, Backend.JAX, Backend.DASK)

# What is varied, and the options of ``track`` for it; whether they differ in more than when a value
# is read.
DIFFER = False
VARIANTS: dict[str, dict[str, Any]] = {
    "immediate": {"level": "layer", "read": "immediate"},
    "step": {"level": "layer", "read": "end"},
}
CAUSE_VARIANTS = {"immediate": VARIANTS["immediate"]}

# Where a fix is tried: not where a look at a value computes it.
TRIES = set(BACKENDS) - {Backend.DASK}

# Recipes that array code cannot follow, and why.
_BACKWARD = "array code has no gradients of its own"
DIFFERENCES = {
    "sqrt_gradient_at_zero": _BACKWARD,
    "where_gradient_trap": _BACKWARD,
    "where_gradient_trap_of_inf": _BACKWARD,
    "softmax_fully_masked": "the standard has no softmax: written by hand, it is the shift by "
    "the largest element that fails, inf_minus_inf",
    "bad_parameter": "array code does not say which arrays are weights: a bad one is bad input",
}


class Ops:
    """Hand out the array API's functions, and the few that it lacks."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._xp: Any = anynan.arrays.namespace(space.xp)
        self.sample_var = functools.partial(self._xp.var, correction=1.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def array(self, values: Any) -> Any:
        row = values[0] if isinstance(values[0], list) else values
        kind = "bool" if isinstance(row[0], bool) else "float32"
        return self._xp.asarray(values, dtype=getattr(self._xp, kind))

    def softmax(self, x: Any) -> Any:
        grown = self._xp.exp(x - self._xp.max(x, axis=-1, keepdims=True))
        return grown / self._xp.sum(grown, axis=-1, keepdims=True)

    def stop_gradient(self, x: Any) -> Any:
        return x


class Program:
    def __init__(self, recipe: StepRecipe, space: Space, **options: Any) -> None:
        self.space, self.dtype = space, recipe.dtype
        ops = Ops(space)
        self.weight = space.array([1.0], recipe.dtype)

        def step(x: Any, weight: Any) -> Any:
            with anynan.scope("scale"):
                x = x * weight
            with anynan.scope("body"):
                x = recipe.body(ops, x)
            with anynan.scope("after"):
                x = recipe.after(ops, x)
            return recipe.loss(ops, x)

        self.tracker: anynan.Tracker = anynan.track(step, **split(options))

    def step(self, values: Any) -> None:
        self.tracker(self.space.array(values, self.dtype), self.weight)

    def spoil(self) -> None:
        """Write NaN into the weight, between two steps."""
        self.weight = self.space.array([float("nan")], self.dtype)
