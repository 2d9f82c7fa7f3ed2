"""How PyTorch builds and tracks the programs of ``recipes_operations``."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

import anynan
from tests.backends import Backend, Space
from tests.conformance.recipes_operations import StepRecipe
from tests.flat import split

# Whether they differ in more than when a value is read.
DIFFER = False
# What is varied, and the options of ``track`` for it.
VARIANTS: dict[str, dict[str, Any]] = {"immediate": {"read": "immediate"}, "step": {"read": "end"}}
# The causes also where a model is tracked, not a step.
CAUSE_VARIANTS: dict[str, dict[str, Any]] = {**VARIANTS, "model": {"model": True}}

# Where a fix is tried.
TRIES = {backend for backend in Backend if backend.library == "torch"}

DIFFERENCES = {
    "placed[model]": "where a model is tracked its loss is not read, and an infinity may leave it",
}


class Ops:
    """Hand out the array API's functions, and the few that it lacks."""

    def __init__(self, space: Space) -> None:
        self._space = space
        # No function of Python's stands between the recipe's line and the operation.
        self.softmax = functools.partial(torch.softmax, dim=-1)
        self.stop_gradient = Tensor.detach
        self.array = functools.partial(torch.tensor, device=space.device)
        self.log_softmax = functools.partial(nn.functional.log_softmax, dim=-1)
        target = torch.tensor([1], device=space.device)
        self.losses_of_class_1 = functools.partial(nn.functional.cross_entropy, target=target)
        self.logit, self.xlogy, self.rsqrt = torch.logit, torch.xlogy, torch.rsqrt
        self.lgamma, self.linalg, self.astype = torch.lgamma, torch.linalg, Tensor.to
        self.igamma = torch.special.gammainc
        self.var = functools.partial(torch.var, correction=0)
        self.sample_var = torch.var

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space.xp, name)


class Layer(nn.Module):
    """Compute something; where there is a weight, of what it multiplies."""

    def __init__(self, call: Any, weight: Tensor | None = None) -> None:
        super().__init__()
        self.call, self.weight = call, None if weight is None else nn.Parameter(weight)

    def forward(self, x: Tensor) -> Any:
        return self.call(x if self.weight is None else x * self.weight)


class Program:
    def __init__(
        self, recipe: StepRecipe, space: Space, *, model: bool = False, **options: Any
    ) -> None:
        self.space, self.dtype = space, recipe.dtype
        ops = Ops(space)
        self.weight = space.array([1.0], recipe.dtype)
        layers = {
            "scale": Layer(lambda x: x, self.weight),
            "body": Layer(functools.partial(recipe.body, ops)),
            "after": Layer(functools.partial(recipe.after, ops)),
        }
        net = nn.Sequential()
        for name, layer in layers.items():
            net.add_module(name, layer)

        def step(x: Tensor) -> Tensor:
            net.zero_grad()
            loss: Tensor = recipe.loss(ops, net(x))
            loss.backward()
            return loss

        self.tracker: anynan.Tracker = anynan.torch.track(net if model else step, **split(options))
        self.run = step if model else self.tracker

    def step(self, values: Any) -> None:
        self.run(self.space.array(values, self.dtype))

    def spoil(self) -> None:
        """Write NaN into the weight, between two steps."""
        with torch.no_grad():
            self.weight.fill_(float("nan"))
