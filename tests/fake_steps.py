"""Tracked steps over the fake adapter, and what they are asked."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anynan
from tests.fake_adapter import Layer, Model, Output, track
from tests.flat import split

NAN, INF = float("nan"), float("inf")
GOOD, BAD = [1.0, 2.0], [1.0, -2.0]  # the model takes a logarithm


def make() -> Model:
    return Model(
        Layer("embed", ("multiply",), np.asarray(1.0)),
        Layer("blocks.0", ("log",)),
        Layer("blocks.1", ("copy",)),
        Layer("head", ("multiply",), np.asarray(0.5)),
    )


def step_of(model: Model) -> Callable[[Any], Output]:
    def step(batch: Any) -> Output:
        """Run forward, backward and the update."""
        loss = model(batch).loss()
        loss.backward()
        model.update(0.01)
        return loss

    return step


def training(layer: str = "blocks.0") -> tuple[Model, Callable[[Any], Any]]:
    """Give a model of three layers, the middle one a logarithm, and a step that trains it."""
    model = Model(
        Layer("embed", ("multiply",), np.asarray(1.5)),
        Layer(layer, ("log",)),
        Layer("head", ("multiply",), np.asarray(0.5)),
    )
    return model, step_of(model)


def tracked(model: Model | None = None, **options: Any) -> tuple[Model, Any]:
    model = model or make()
    return model, track(step_of(model), model=model, **split(options))


def rooted() -> Model:
    """Make a model whose gradient is infinite where its input is 0."""
    return Model(Layer("embed", ("multiply",), np.asarray(1.0)), Layer("norm", ("sqrt",)))


def one(*operations: str, weight: float | None = None) -> Model:
    return Model(Layer("layer", operations, None if weight is None else np.asarray(weight)))


def forward_only(model: Model, **options: Any) -> Any:
    return track(lambda batch: model(batch).loss(), model=model, **split(options))


def failure(call: Callable[..., Any], *args: Any) -> anynan.AnomalyError:
    with pytest.raises(anynan.AnomalyError) as caught:
        call(*args)
    return caught.value


def event_of(tracker: Any, batch: Any) -> Any:
    return failure(tracker, batch).event
