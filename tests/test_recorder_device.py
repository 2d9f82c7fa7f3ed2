"""``anynan.track`` on arrays of a device that is not the CPU: nothing of theirs leaves it early.

The device is the second one of array-api-strict, which refuses what mixes devices and what takes
its arrays for NumPy's. Its DLPack would hand out host memory; here that is closed, as on a device.
"""

from typing import Any

import numpy as np
import pytest

import anynan
from anynan._arrays.probe import probe
from tests.failing import failure
from tests.recording import LEVELS, NAN, attention

strict: Any = pytest.importorskip("array_api_strict")
xp: Any = anynan.arrays.namespace(strict)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HERE, THERE = (strict.Device(name) for name in ("CPU_DEVICE", "device1"))
EXTENSION = 12  # kDLExtDev


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the sizes of what is copied off the device, or looked at from the host."""
    kind, found = type(strict.ones(1)), []

    def counted(name: str) -> None:
        really = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            away = self.device == THERE
            if away and name == "__dlpack_device__":
                return EXTENSION, 0
            if away and name == "__dlpack__":
                raise BufferError(name)
            moved = really(self, *args, **kwargs)
            found.extend([self.size] * away)
            return moved

        monkeypatch.setattr(kind, name, method)

    for question in ("bool", "float", "int", "dlpack", "dlpack_device"):
        counted(f"__{question}__")
    counted("to_device")
    return found


def there(values: Any) -> Any:
    return xp.asarray(np.asarray(values, np.float64), device=THERE)


def batch() -> Any:
    return there(np.linspace(-1, 1, 12).reshape(3, 4))


@pytest.mark.parametrize("level", ["step", "layer"])
def test_a_clean_call_brings_one_small_copy_and_its_result_stays(
    moves: list[int], level: Any
) -> None:
    tracker = anynan.track(attention, level=level)
    for _ in range(3):
        result = tracker(batch())
        assert result.device == THERE
    assert len(moves) == 3
    assert all(size % 3 == 0 and size < 40 for size in moves)
    assert not tracker.notes


@LEVELS
def test_a_fault_is_named_with_cause_and_line(moves: list[int], level: Any) -> None:
    event = failure(anynan.track(attention, level=level), batch(), scale=1e4)
    assert (event.operation.name, event.cause.tag) == ("exp", "exp_overflow")
    assert event.operation.source.text == "grown = xp.exp(scores)"
    assert event.operation.inputs[0].device == "device1"
    assert event.operation.inputs[0].max is not None
    assert moves


def test_what_is_written_in_place_is_read_where_it_is() -> None:
    def fill(x: Any) -> None:
        x[0] = NAN

    tracker, x = anynan.track(fill, action="record"), there([1.0, 0.0, 2.0])
    tracker(x)
    assert tracker.events
    assert x.device == THERE


def test_direct_checks_look_where_the_array_is(moves: list[int]) -> None:
    anynan.check({"x": there([1.0, 2.0])})
    assert all(size == 1 for size in moves)
    assert probe(there([[1.0, -2.0], [NAN, 0.0]]))[0] != 0.0  # type: ignore[index]
    with pytest.raises(anynan.NonFiniteError, match="2 x NaN"):
        anynan.check(there([NAN, 1.0, NAN]))
    summary = anynan.summarize(there([[1.0, -3.0], [NAN, 0.0]]))
    assert (summary.first_bad, summary.device) == ((1, 0), "device1")


def test_a_second_run_begins_on_the_device_where_its_memory_is_the_hosts() -> None:
    def step(x: Any, y: Any) -> Any:
        x[0] = -1.0
        return xp.log(x) + y

    event = failure(anynan.track(step), there([1.0, 2.0]), there([0.0, 0.0]))
    assert event.operation.inputs[0].min == -1.0
