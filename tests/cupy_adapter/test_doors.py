"""What needs no device: options, the words of ``errstate``, and its logic on host arrays."""

from typing import Any

import numpy as np
import pytest

import anynan

pytest.importorskip("cupy")
from anynan.arrays.session import ArraySession
from anynan.cupy import tracking

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class HostState(tracking.errstate):
    """Watch NumPy arrays instead: the flags are the core's then, the rest is the same."""

    session_type = ArraySession


def test_check_takes_cupy_arrays() -> None:
    with pytest.raises(TypeError, match=r"check\(x=...\) takes CuPy arrays, not ndarray"):
        anynan.cupy.check(x=np.ones(3))


def test_a_function_of_host_arrays_is_tracked_all_the_same() -> None:
    tracker = anynan.cupy.track(
        lambda x: x / x, advanced=anynan.Advanced(read="immediate"), action="record"
    )
    tracker(np.zeros(2))
    (event,) = tracker.events
    assert event.cause.tag == "divide_by_zero"


def test_words_are_checked() -> None:
    with pytest.raises(ValueError, match=r"errstate\(nan='stop'\): choose from raise, warn"):
        anynan.cupy.errstate(nan="stop")
    with pytest.raises(RuntimeError, match="entered first"):
        anynan.cupy.errstate()(1)


def test_nan_raises_at_the_end_with_operation_and_line() -> None:
    with pytest.raises(anynan.NonFiniteError) as caught, HostState() as watch:
        x, y = watch(np.zeros(3), np.ones(3))
        ratio = x / x  # here
        done = np.where(ratio > 0, ratio, y)
        assert done is not None
    event = caught.value.event
    assert event.kind == "nan"
    assert event.operation.name == "divide"
    assert event.operation.source.text.endswith("# here")


def test_inf_warns_and_what_is_ignored_is_let_be() -> None:
    with pytest.warns(anynan.AnynanWarning, match="Inf"), HostState() as watch:
        y = 1 / watch(np.zeros(3))
    assert np.isinf(watch.plain([y])[0]).all()
    assert type(watch.plain(y)) is np.ndarray
    with HostState(nan="ignore", inf="ignore") as watch:
        x: Any = watch(np.zeros(3))
        assert np.isnan(np.asarray(watch.plain(x / x))).all()


def test_an_error_of_the_users_own_goes_first() -> None:
    with (
        pytest.warns(anynan.AnynanWarning, match="NaN"),
        pytest.raises(KeyError, match="mine"),
        HostState() as watch,
    ):
        x = watch(np.zeros(3))
        _ = x / x
        raise KeyError("mine")
