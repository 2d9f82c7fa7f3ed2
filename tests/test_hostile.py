"""Objects that raise at any question: they stop neither a tracked program nor a check."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import anynan
from tests.failing import failure

NAN = float("nan")


class Handle:
    """Stand for a remote handle: whatever is asked of it fails, but not as an attribute does."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("remote attribute", name)


class Proxy:
    """Stand for a lazy proxy that is bound to nothing: even its class is not known."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError("unbound")


class Closed:
    """Answer no question at all."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("closed", name)


class Stream(list[Any]):
    """Be a list whose iteration fails."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("gone")


class Computed:
    """Hold an array whose attributes fail."""

    dtype = np.dtype("float32")
    shape = (2,)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not now")


class Nameless:
    """Be a key that cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("repr")


@pytest.fixture(params=[Handle, Proxy, Closed, Stream, Computed])
def hostile(request: pytest.FixtureRequest) -> Any:
    """Return an object that raises."""
    return request.param([1.0]) if request.param is Stream else request.param()


pytestmark = pytest.mark.filterwarnings("ignore::anynan.AnynanWarning", "ignore::RuntimeWarning")


def test_check_finds_what_lies_beside_it(hostile: Any) -> None:
    fine = [hostile, np.ones(2)]
    assert anynan.check(fine) is fine
    event = failure(anynan.check, {"bad": [hostile, NAN]})
    assert event.tensor == "array['bad'][1]"


def test_a_key_without_a_name_is_reported() -> None:
    assert failure(anynan.check, {Nameless(): NAN}).tensor == "array[<Nameless>]"


def test_what_could_not_be_opened_is_said() -> None:
    said = r"x\[0\] \(a Stream\) could not be read: .*gone"
    with pytest.warns(anynan.AnynanWarning, match=said) as seen:
        anynan.check([Stream([NAN])], "x")
    assert seen[0].filename == __file__


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_a_tracked_function_runs_on(hostile: Any, read: Any, bad: bool) -> None:
    def program(x: Any, thing: Any) -> Any:
        inner = SimpleNamespace(thing=thing, y=np.log(x - 2.0 * bad))
        return {"y": inner.y, "thing": thing, "inner": inner}

    tracker = anynan.track(program, action="record", advanced=anynan.Advanced(read=read))
    result = tracker(np.ones(3), hostile)
    assert result["thing"] is hostile
    assert result["inner"].thing is hostile
    assert type(result["y"]) is np.ndarray
    assert [event.operation.name for event in tracker.events if event.operation] == ["log"] * bad


@pytest.mark.parametrize("bad", [False, True])
def test_a_tracked_model_runs_on(hostile: Any, bad: bool) -> None:
    torch: Any = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def forward(self, x: Any, thing: Any) -> Any:
            return {"y": torch.log(self.linear(x).abs() * (not bad)), "thing": thing}

    model = Model()
    model.linear = torch.nn.Linear(2, 2)
    object.__setattr__(model, "held", hostile)
    with anynan.torch.track(model, action="record", policy=anynan.Policy(neginf="bad")) as tracker:
        result = model(torch.ones(1, 2), hostile)
        result["y"].sum().backward()
    assert result["thing"] is hostile
    assert bool([event for event in tracker.events if event.severity == "bad"]) is bad
