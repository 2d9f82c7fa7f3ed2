"""Tracked arrays in the hands of code that asks for a class, or brings its own array_api_compat."""

import functools
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import anynan
from tests.failing import failure

# The recorder itself; what the default makes of it is in test_recorder_ends.
track: Any = functools.partial(anynan.track, level="layer")
pytestmark = pytest.mark.filterwarnings("ignore::anynan.AnynanWarning", "ignore::RuntimeWarning")

# SciPy reads its switch when it is imported.
SCIPY = """
import numpy as np, scipy.signal as sg, scipy.stats as st, scipy.linalg as la
import anynan
x = np.random.default_rng(0).normal(size=50)
programs = [
    lambda s: sg.convolve(s, np.ones(5)),
    lambda s: sg.convolve(np.ones(5), s),
    lambda s: sg.lfilter([1.0, 0.5], [1.0, 0.2], s),
    lambda s: la.solve_banded((0, 0), np.ones((1, 50)), s),
    lambda s: st.pearsonr(s, s**2 + np.arange(50)).statistic,
]
for i, program in enumerate(programs):
    assert np.array_equal(anynan.track(program, level="layer")(x), program(x)), i
"""


@pytest.mark.tier(2)
def test_beside_a_plain_array_under_a_vendored_array_api_compat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCIPY], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_at_writes_where_arrays_cannot_be_written_to() -> None:
    extra = pytest.importorskip("scipy._lib.array_api_extra")
    jnp = pytest.importorskip("jax.numpy")
    plain = track(lambda x: extra.at(x)[0].set(5.0))(jnp.zeros(2))
    assert plain.tolist() == [5.0, 0.0]
    event = failure(track(lambda x: extra.at(x.sum(), x.sum() > 1).set(np.log(-x[0]))), np.ones(2))
    assert event.operation.name == "log"


def test_code_that_takes_no_other_class_is_not_watched_closely() -> None:
    """As libraries do that look a class up: what the second run met would end the program."""

    def takes(x: Any) -> Any:
        return {np.ndarray: np.log}[type(x)](x) * np.sqrt(x)

    step = anynan.track(takes, action="warn")
    for _ in range(3):
        assert np.isnan(step(np.full(2, -1.0))).all()
    (event,) = step.events
    assert event.times == 3
    assert any("the second run failed: KeyError" in note for note in event.notes)


@pytest.mark.parametrize(
    "program", [lambda x: json.dumps(x), lambda x: memoryview(x)], ids=["json", "memoryview"]
)  # fmt: skip
def test_an_exception_of_code_that_refused_it_says_so(program: Any) -> None:
    with pytest.raises(TypeError) as error:
        track(program)(np.ones(3))
    (note,) = error.value.__notes__
    assert "a stand-in (TrackedArray), which this code did not take" in note
    assert "test_recorder_foreign.py:" in note
