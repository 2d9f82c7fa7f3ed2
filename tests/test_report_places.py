"""Where a report says it happened: in a function, a layer or the loss, in every framework."""

import json
import warnings
from typing import Any

import numpy as np
import pytest

import anynan
from anynan.events import Event


def _framework(name: str) -> tuple[Any, Any]:
    """Give a framework's ``track`` and what makes its arrays."""
    if name == "numpy":
        return anynan.track, np.asarray
    if name == "torch":
        torch: Any = pytest.importorskip("torch")
        return anynan.torch.track, torch.tensor
    if name == "jax":
        jax: Any = pytest.importorskip("jax")
        return anynan.jax.track, jax.numpy.asarray
    tf: Any = pytest.importorskip("tensorflow")
    return anynan.tensorflow.track, tf.constant


FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")


def normalise(x: Any) -> Any:
    return x / (x - x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_function_without_layers_has_no_loss_and_no_step(name: str) -> None:
    track, array = _framework(name)

    def preprocess(x: Any) -> Any:
        return normalise(x) + 1.0

    with pytest.raises(anynan.NonFiniteError) as caught:
        track(preprocess)(array([[1.0, 2.0], [0.0, 4.0]]))
    title, *rows = str(caught.value).split("\n")
    assert title.removesuffix(", outside every layer") == "NaN first appeared in `normalise`"
    for word in ("loss", "step", "layer", "surfaced"):
        assert not any(word in row for row in rows), word
    event = caught.value.event
    assert event.target == "function preprocess"
    assert Event.from_dict(json.loads(event.to_json())).target == event.target


def test_the_number_that_a_step_returns_is_the_loss() -> None:
    jax = pytest.importorskip("jax")
    tracked = anynan.jax.track(
        lambda x: jax.numpy.log(x).sum(), advanced=anynan.Advanced(replay=False)
    )
    with pytest.raises(anynan.NonFiniteError, match="NaN first appeared in the loss of step 0"):
        tracked(jax.numpy.array([-1.0]))


def test_code_between_the_layers_of_a_step_is_named_by_its_function() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 1)

    def log_density(x: Any) -> Any:
        return torch.log(x * 0).sum()

    def step(x: Any) -> Any:
        return log_density(model(x))

    with warnings.catch_warnings(), pytest.raises(anynan.NonFiniteError) as caught:
        warnings.simplefilter("ignore")
        anynan.torch.track(step)(torch.ones(2, 3))
    title = str(caught.value).split("\n", maxsplit=1)[0]
    assert title == "-Inf first appeared in `log_density`, outside every layer"
