"""How much chaos: the same little in the gate each time, or as much as one asks for."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def chosen(config: pytest.Config, examples: int, steps: int = 50) -> settings:
    """Give Hypothesis's settings: with ``--chaos`` more examples, other ones each time.

    Only then is a failing walk made smaller: that may take minutes.
    """
    times = config.getoption("--chaos")
    return settings(
        max_examples=examples * max(times, 1),
        stateful_step_count=steps,
        derandomize=not times,
        deadline=None,
        database=None,
        print_blob=bool(times),
        phases=[Phase.generate, *([Phase.shrink] if times else [])],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def amount(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return what walks a machine as often as is asked for."""

    def walk(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
        run_state_machine_as_test(machine, settings=chosen(request.config, examples, steps))

    return walk


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[Any]:
    if find_spec("torch") is None:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
