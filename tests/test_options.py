"""The options every adapter shares: one clear error for each thing that cannot be."""

import inspect
import re
from typing import Any

import numpy as np
import pytest

import anynan
from anynan import Policy
from anynan.options import ADVANCED, EVERYDAY, Advanced, Options, TrackOptions, environment
from tests.flat import split

REFUSED: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"action": "rise"}, "action='rise' is unknown; choose from raise, warn, record"),
    (ValueError, {"read": "steps"}, "read='steps' is unknown; choose auto, immediate or end"),
    (ValueError, {"level": "op"}, "level='op' is unknown; choose from step, layer, operation"),
    (ValueError, {"stats": ("std",)}, "stats: 'std' is unknown; choose from absmax, min, max"),
    (ValueError, {"history": -1}, "history=-1 is too small: it must be at least 0"),
    (TypeError, {"policy": "strict"}, "policy= takes an anynan.Policy, not str"),
    (TypeError, {"policy": Policy}, "policy= takes an anynan.Policy, not the class"),
    (TypeError, {"backward": 1}, "backward= takes True or False, not 1"),
    (TypeError, {"history": 1.5}, "history= takes a whole number, not float: 1.5"),
    (TypeError, {"read": 2.0}, "read= takes a whole number, not float: 2.0"),
    (TypeError, {"keep": "whole"}, "keep= takes a number of bytes or 'all', not str: 'whole'"),
    (TypeError, {"stats": None}, "stats= takes names of statistics, not NoneType: None"),
]


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_words(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        Options(**options)


def test_an_override_is_read_in_any_case_and_an_unknown_one_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for word in ("off", "WARN", " Record ", "raise"):
        monkeypatch.setenv("ANYNAN", word)
        assert environment() == word.strip().lower()
    for word in ("skip", "1", "raise,warn"):
        monkeypatch.setenv("ANYNAN", word)
        with pytest.raises(ValueError, match=f"ANYNAN='{word}' in the environment is unknown; use"):
            environment()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backward": False}, "backward= has no meaning for array code; Advanced has replay"),
        ({"skip": "a"}, "patterns of layers to leave out are exclude="),
        ({"colour": 1}, "track() has no option 'colour'; the options are action, level"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        anynan.track(lambda x: x, **split(given))
    assert words in str(caught.value)


def test_an_option_of_advanced_that_stands_alone_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"now track\(advanced=anynan.Advanced\(history"):
        tracker = anynan.track(lambda x: x, history=3)  # type: ignore[call-overload]
    for x in range(5):
        tracker(np.ones(1) * x)
    assert len(tracker.history) == 3


@pytest.mark.parametrize(("name", "old", "new"), [("read", "step", "end"), ("keep", "step", "all")])
def test_an_old_value_works_with_a_warning(name: str, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{name}='{old}' is now {name}='{new}'"):
        assert getattr(anynan.Advanced(**{name: old}), name) == new  # type: ignore[arg-type]


def test_each_option_is_described_where_its_class_is_and_in_the_signature_of_track() -> None:
    said = f"{inspect.getdoc(Advanced)} {inspect.getdoc(TrackOptions)}"
    for name in (*EVERYDAY, *ADVANCED):
        assert f"    {name}: " in said
    assert list(inspect.signature(anynan.track).parameters) == ["target", *EVERYDAY]


ADAPTERS: dict[str, dict[str, Any]] = {
    "torch": {"keep_inputs": True, "lag": 1},
    "jax": {"keep": 1, "across_ranks": False},
    "tensorflow": {"keep": 1, "across_ranks": False, "read": "end"},
    "cupy": {"keep": 1, "backward": False},
    "mlx": {"keep": 1, "across_ranks": False, "read": "end"},
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_takes_what_it_can_honour_alone(adapter: str) -> None:
    pytest.importorskip(adapter)
    module = pytest.importorskip(f"anynan.{adapter}")
    for name, value in ADAPTERS[adapter].items():
        with pytest.raises(TypeError, match=f"{name}"):
            module.track(lambda x: x, **split({name: value}))
