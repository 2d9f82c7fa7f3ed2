"""-Inf that the whole model or function gives: told once if arithmetic made it, never if placed."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import anynan
from tests.flat import split

FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")


def library(name: str) -> Any:
    if name == "tensorflow":
        pytest.importorskip("torch")  # it is imported first
    return pytest.importorskip("jax.numpy" if name == "jax" else name)


def computed(xp: Any, x: Any) -> Any:
    return (xp.math if xp.__name__ == "tensorflow" else xp).log(x)


def placed(xp: Any, x: Any) -> Any:
    return xp.where(x > 1, x, -float("inf"))


def array(name: str, values: list[Any]) -> Any:
    xp, held = library(name), np.array(values, np.float32)
    make = {"torch": "from_numpy", "tensorflow": "constant"}.get(name, "asarray")
    return getattr(xp, make)(held)


def tracked(name: str, body: Callable[[Any, Any], Any], **options: Any) -> tuple[Any, Any]:
    """Track a model where the framework has one, a function where it has none."""
    xp = library(name)
    if name == "torch":
        model = type("Model", (xp.nn.Module,), {"forward": lambda _, x: body(xp, x)})()
        return anynan.torch.track(model, **split(options)), model
    if name == "tensorflow":
        module = type("Module", (xp.Module,), {"__call__": lambda _, x: body(xp, x)})()
        return anynan.tensorflow.track(module, **split(options)), module
    track = anynan.jax.track if name == "jax" else anynan.track
    function = track(lambda x: body(xp, x), **split(options))
    return function, function


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def run(call: Any, x: Any, times: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            call(x)
    return [str(w.message) for w in caught if issubclass(w.category, anynan.AnynanWarning)]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_computed_neginf_at_the_end_is_told_once_with_operation_and_line(name: str) -> None:
    tracker, call = tracked(name, computed)
    (text,) = run(call, array(name, [1.0, 0.0]))
    assert text.startswith("Suspect: -Inf first appeared")
    assert "test_left.py" in text
    assert "[log_of_zero]" in text
    (event,) = [event for event in tracker.events if event.operation is not None]
    assert (event.severity, event.operation.name) == ("suspect", "log")
    assert "nothing went bad" not in tracker.report()


def test_a_neginf_by_which_the_step_fails_is_told_with_it_alone() -> None:
    jnp = library("jax")
    jax = pytest.importorskip("jax")

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.log(w * x).sum())(w), jnp.log(w * x)

    def fails(x: Any) -> None:
        with pytest.raises(anynan.NonFiniteError):
            anynan.jax.track(step)(jnp.ones(2), x)

    assert run(fails, jnp.zeros(2), times=1) == []


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_batch_of_inf_that_becomes_neginf_is_told_once(name: str) -> None:
    _, call = tracked(name, lambda xp, x: x * -1)
    (text,) = run(call, array(name, [float("inf")] * 3))
    assert text.startswith("Suspect: +Inf came in with the batch")
    assert "test_left.py" in text


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_placed_neginf_at_the_end_stays_silent(name: str) -> None:
    tracker, call = tracked(name, placed)
    assert run(call, array(name, [2.0, 0.0]), times=5) == []
    assert "nothing went bad" in tracker.report()


def test_a_computed_neginf_is_told_after_a_placed_one() -> None:
    def density(x: Any) -> Any:
        return -np.inf if x[0] < 0 else np.log(x).sum()

    tracker = anynan.track(density)
    assert run(tracker, np.array([-1.0])[:1], times=1) == []
    (text,) = run(tracker, np.array([0.0, 1.0]))
    assert "[log_of_zero]" in text


def test_masks_at_the_end_are_looked_at_a_few_times_only() -> None:
    calls = []

    def masked(x: Any) -> Any:
        calls.append(anynan.replaying())
        return np.where(x > 1, x, -np.inf)

    tracker = anynan.track(masked)
    run(tracker, np.zeros(3), times=20)
    assert sum(calls) <= 3


def test_what_the_policy_allows_is_not_looked_into() -> None:
    allow = anynan.Allow("model", "neginf", "log probabilities")
    _, call = tracked("numpy", computed, policy=anynan.Policy(allow=(allow,)))
    assert run(call, np.zeros(3)) == []
    with anynan.expect(neginf=True, reason="the edge of the support"):
        assert run(tracked("numpy", computed)[1], np.zeros(3)) == []
