"""Functions of scikit-learn, SciPy, statsmodels, pandas and xarray, called in tracked functions."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import anynan
from tests.wild.library_calls import CALLS
from tests.wild.rows import LEVELS, YES, Fault, Row, alarm, marked, placed

SUITE = "libraries"
INPUT = ("bad_input", "bad_label")  # an argument called y is a label
SAMPLE = [
    "sklearn.LogisticRegression",
    "sklearn.StandardScaler",
    "scipy.special.gammaln",
    "scipy.signal.welch",
    "scipy.linalg.solve",
    "scipy.minimize.BFGS",
    "scipy.sparse.cg",
    "statsmodels.OLS",
    "statsmodels.ARIMA",
    "pandas.groupby",
    "xarray.DataArray",
]


def cases() -> list[str]:
    return list(CALLS)


def difference(one: Any, other: Any, place: str = "result") -> str | None:
    """Say where two results differ in class, shape, type or bits."""
    if type(one) is not type(other):
        return f"{place} is a {type(other).__name__}, not a {type(one).__name__}"
    if isinstance(one, pd.DataFrame | pd.Series | xr.DataArray):
        return difference(one.to_numpy(), other.to_numpy(), place)
    if isinstance(one, dict):
        one, other = list(one.items()), list(other.items())
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{place} has {len(other)} parts, not {len(one)}"
        parts = zip(one, other, strict=True)
        found = (difference(a, b, f"{place}[{n}]") for n, (a, b) in enumerate(parts))
        return next((said for said in found if said), None)
    a, b = np.asarray(one), np.asarray(other)
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{place} is {b.dtype} {b.shape}, not {a.dtype} {a.shape}"
    if a.dtype.kind == "O":
        return None
    if a.tobytes() != b.tobytes():
        by = f" by {np.nanmax(abs(a - b)):.1e}" if a.dtype.kind in "fc" else ""
        return f"{place} differs{by}"
    return None


def real(value: Any) -> bool:
    """Tell whether a value is made of floats; asked of plain values only."""
    kinds = np.ndarray | np.floating | float | pd.DataFrame | pd.Series | xr.DataArray
    return isinstance(value, kinds) and np.asarray(value).dtype.kind == "f"


def way_to(value: Any) -> tuple[int, ...] | None:
    """Give the indices that lead to the first floats of a result."""
    if real(value) and not isinstance(value, float):
        return ()
    parts = enumerate(value) if isinstance(value, list | tuple) else ()
    found = ((number, way_to(part)) for number, part in parts)
    return next(((number, *way) for number, way in found if way is not None), None)


def finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(finite, value))
    return not real(value) or bool(np.isfinite(np.asarray(value)).all())


class Run:
    """A call in a tracked function, or in the function as it is."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], level: str | None
    ) -> None:
        self.args = copy.deepcopy(args)
        self.event: anynan.Event | None = None
        self.result: Any = None
        self.error: Exception | None = None
        self.left = YES
        before = np.geterr(), np.geterrcall(), list(warnings.filters)
        with warnings.catch_warnings(record=True) as self.warnings:
            warnings.simplefilter("always")
            tracker = None if level is None else anynan.track(function, level=level)
            try:
                self.result = (tracker or function)(*self.args)
            except Exception as error:
                self.error = error
            if tracker is not None:
                if isinstance(self.error, anynan.AnomalyError):
                    self.event = self.error.event
                elif tracker.events:
                    self.event = tracker.events[0]
                tracker.remove()
                alive = weakref.ref(tracker)
                del tracker
                if self.error is not None:
                    self.error = self.error.with_traceback(None)
                    if isinstance(self.error, anynan.AnomalyError):
                        self.error.tracker = None
                gc.collect()
                wrong = ["the tracker"] if alive() is not None and self.error is None else []
                if (np.geterr(), np.geterrcall()) != before[:2]:
                    wrong.append("NumPy's error state")
                self.left = f"no: {', '.join(wrong)}" if wrong else YES
        if list(warnings.filters) != before[2] and self.left == YES:
            self.left = "no: filters of warnings"


def zero_before(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    def faulty(*args: Any) -> Any:
        zero = args[place] - args[place]
        spoilt = zero / zero  # fault: 0/0 before
        return function(*args[:place], spoilt, *args[place + 1 :])

    return faulty


def zero_after(function: Callable[..., Any], way: tuple[int, ...]) -> Callable[..., Any]:
    def faulty(*args: Any) -> Any:
        values = function(*args)
        for number in way:
            values = values[number]
        zero = values - values
        return zero / zero  # fault: 0/0 after

    return faulty


def divided(kind: str, function: Callable[..., Any], args: tuple[Any, ...], level: str) -> Fault:
    """Call a function that divides 0 by 0 beside the library's call."""
    fault = Fault(kind, "an own line beside the call")
    with np.errstate(all="ignore"):
        ran = Run(function, args, level)
    event = ran.event
    if event is None:
        fault.said = f"ended with {ran.error!r}"[:200]
        if ran.error is None and finite(ran.result):
            fault.left_out = "the library takes it away again"
        return fault
    fault.judge(event, "divide", marked(__file__, kind), "divide_by_zero")
    return fault


def given(function: Callable[..., Any], args: tuple[Any, ...], place: int, level: str) -> Fault:
    fault = Fault("NaN argument", f"argument {place}")
    args = copy.deepcopy(args)
    if isinstance(args[place], pd.DataFrame):
        args[place].iloc[1, 1] = np.nan
    else:
        args[place][(-1,) * args[place].ndim] = np.nan
    ran = Run(function, args, level)
    if ran.event is None:
        fault.said = f"ended with {ran.error!r}"[:200]
        return fault
    fault.detected, fault.said = True, placed(ran.event)
    fault.layer = ran.event.phase == "input"
    if ran.event.severity == "bad":  # else the library refuses it, and its exception is the news
        fault.cause = ran.event.cause is not None and ran.event.cause.tag in INPUT
    return fault


def run(case: str) -> Iterator[Row]:
    function, args = CALLS[case]
    plain = Run(function, args, None)
    if plain.error is not None:
        yield Row(SUITE, case, skipped=repr(plain.error)[:200])
        return
    again = Run(function, args, None)
    if difference(plain.result, again.result):
        yield Row(SUITE, case, skipped="not the same twice without anynan")
        return
    heard = {str(warning.message) for warning in plain.warnings}
    for level in LEVELS:
        row = Row(SUITE, case, level)
        tracked = Run(function, args, level)
        if tracked.error is not None and tracked.event is None:
            row.error = f"{type(tracked.error).__name__}: {tracked.error}"[:400]
        elif tracked.event is None:
            differs = difference(plain.result, tracked.result)
            differs = differs or difference(plain.args, tracked.args, "arguments")
            row.identical = f"no: {differs}" if differs else YES
        row.silent = alarm(tracked.event, (), {str(w.message) for w in tracked.warnings} - heard)
        row.clean = tracked.left
        place = next((number for number, arg in enumerate(args) if real(arg)), None)
        if place is not None:
            row.faults.append(given(function, args, place, level))
            row.faults.append(divided("0/0 before", zero_before(function, place), args, level))
        way = way_to(plain.result)
        if way is not None:
            row.faults.append(divided("0/0 after", zero_after(function, way), args, level))
        yield row
