"""The demo: each bug strikes, and the report names its line."""

import warnings

import pytest

import anynan
from anynan._base.sources import is_library

pytestmark = pytest.mark.tier(2)

demo = pytest.importorskip("anynan.jax.demo")

FOUND = {
    "where": (None, "backward", "where_gradient_trap", "sqrt", "size = jnp.where(real,"),
    "mask": ("block_0.attention", "forward", "softmax_fully_masked", "softmax", "weights = jax"),
}


# Each compiles a transformer, and once more for the replay.
ALL = ["mask", *(pytest.param(bug, marks=pytest.mark.long) for bug in demo.BUGS if bug != "mask")]


@pytest.mark.slow
@pytest.mark.parametrize("bug", ALL)
def test_a_bug_is_named(bug):
    tracked, *state, text = demo.setup(bug, 0)
    with pytest.raises(anynan.NonFiniteError) as caught:
        for step in (0, 39):
            *state, _ = tracked(*state, *demo.batch(text, step))
    event, *expected, text = caught.value.event, *FOUND[bug]
    assert [event.layer, event.phase, event.cause.tag, event.operation.name] == expected
    assert event.operation.source.text.startswith(text)
    assert not is_library(event.operation.source.file)


@pytest.mark.long
def test_without_the_bug_it_trains_on(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert demo.main("where", fixed=True, steps=41) == 0
    assert "no reading went bad" in capsys.readouterr().out
