"""Array code shows each operation of a call, and the call leaves no trace."""

from typing import Any

import numpy as np
import pytest

from anynan._trace.op import Op
from anynan.arrays.observe import observe


def test_a_run_that_is_observed_leaves_no_trace() -> None:
    weights, drawn = np.ones(2), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002

    def fn(x: Any) -> Any:
        x[0] = 5
        weights[0] = np.random.rand()  # noqa: NPY002
        return x * weights

    x = np.ones(2)
    observed = observe(fn, (x,), {}, lambda op: None)
    assert observed.value.tolist() != [1, 1]
    assert (x.tolist(), weights.tolist()) == ([1, 1], [1, 1])
    assert np.random.get_state()[1].tolist() == drawn  # type: ignore[index]  # noqa: NPY002


def test_an_operation_runs_again_in_another_dtype_and_with_other_operands() -> None:
    found: list[Any] = []

    def rerun(op: Op) -> None:
        found.append(op.rerun(dtype="float16")[0].dtype)
        found.append(op.rerun({"self": np.full(2, 4.0)})[0].tolist())

    observe(np.sqrt, (np.ones(2),), {}, rerun)
    assert found == [np.float16, [2, 2]]


def test_what_the_program_raises_is_told_and_what_the_observer_raises_goes_on() -> None:
    observed = observe(lambda x: x @ np.ones(3), (np.ones(2),), {}, lambda op: None)
    assert isinstance(observed.error, ValueError)

    def broken(op: Op) -> None:
        raise KeyError(op.name)

    with pytest.raises(KeyError, match="log"):
        observe(np.log, (np.ones(2),), {}, broken)
