"""How JAX builds and tracks the programs of ``recipes_operations``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import anynan
from tests.backends import Backend, Space
from tests.conformance.recipes_operations import StepRecipe
from tests.flat import split

# What is varied, and the options of ``track`` for it.
# Whether they differ in more than when a value is read.
DIFFER = False
VARIANTS: dict[str, dict[str, Any]] = {"step": {}}

# Recipes that an older JAX cannot follow, and why.
DIFFERENCES: dict[str, str] = {}
if jax.__version_info__ < (0, 8):
    DIFFERENCES["entropy_without_forward_nan"] = (
        "the origin is taken for a -Inf inside xlogy there, of unknown cause"
    )
    DIFFERENCES["placed"] = (
        "a function of JAX's that was traced before keeps the line that called it then"
    )

# Where a fix is tried.
TRIES = {Backend.JAX} if hasattr(jax, "make_user_context") else set[Backend]()


class Ops:
    """Hand out the array API's functions, and the few that it lacks."""

    def __init__(self, space: Space) -> None:
        self._space = space
        # No function of Python's stands between the recipe's line and the operation.
        self.softmax = functools.partial(jax.nn.softmax, axis=-1)
        self.stop_gradient = jax.lax.stop_gradient
        self.array = functools.partial(jnp.array, dtype=None)
        self.log_softmax = functools.partial(jax.nn.log_softmax, axis=-1)
        self.logit, self.xlogy = jax.scipy.special.logit, jax.scipy.special.xlogy
        self.rsqrt, self.lgamma, self.igamma = jax.lax.rsqrt, jax.lax.lgamma, jax.lax.igamma
        self.sample_var = functools.partial(jnp.var, ddof=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space.xp, name)


class Program:
    def __init__(self, recipe: StepRecipe, space: Space, **options: Any) -> None:
        self.space, self.dtype = space, recipe.dtype
        ops = Ops(space)
        self.params = {"scale": {"weight": space.array([1.0], recipe.dtype)}}

        def loss(params: Any, x: Any) -> Any:
            with jax.named_scope("scale"):
                x = x * params["scale"]["weight"]
            with jax.named_scope("body"):
                x = recipe.body(ops, x)
            with jax.named_scope("after"):
                x = recipe.after(ops, x)
            return recipe.loss(ops, x)

        self.tracker: anynan.Tracker = anynan.jax.track(jax.value_and_grad(loss), **split(options))

    def step(self, values: Any) -> None:
        self.tracker(self.params, self.space.array(values, self.dtype))

    def spoil(self) -> None:
        """Write NaN into the weight, between two steps."""
        self.params = {"scale": {"weight": self.space.array([float("nan")], self.dtype)}}
