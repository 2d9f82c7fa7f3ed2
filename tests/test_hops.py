"""How often a failure crosses the border between the core and an adapter."""

import pytest

from tests.benchmarks.hops import STEPS, walk

ASKED = {"evidence", "memory", "bad_weights", "rank"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", STEPS)
def test_the_core_asks_an_adapter_few_things(framework: str) -> None:
    pytest.importorskip(framework)
    assert set(walk(framework, replay=False).asked) <= ASKED | {"made_before"}
    assert set(walk(framework, replay=True).asked) <= ASKED | {"replay", "attempt"}
