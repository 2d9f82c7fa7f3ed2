"""What counts as bad: the defaults, the limits, the whitelist, and what is refused."""

import copy
import math
import pickle
import re
from typing import Any

import pytest

from anynan import Allow, Policy
from anynan._readings.policy import DEFAULT
from anynan.events import PHASES

NAN, INF = math.nan, math.inf
HALF = 65504.0


def pickled(policy: Policy) -> Any:
    return pickle.loads(pickle.dumps(policy))


@pytest.mark.parametrize("phase", PHASES)
def test_by_default_nan_and_inf_are_bad_and_neginf_is_a_suspect_where_masks_are_made(
    phase: Any,
) -> None:
    for end in (0.0, 5e-324, HALF, 1e308):
        assert DEFAULT.judge(phase, -end, end, layer="a", dtype_max=HALF) is None
    assert DEFAULT.judge(phase, NAN, NAN) == ("nan", "bad")
    assert DEFAULT.judge(phase, 0.0, INF) == ("posinf", "bad")
    severity = "suspect" if phase in ("input", "forward") else "bad"
    assert DEFAULT.judge(phase, -INF, 0.0) == ("neginf", severity)


@pytest.mark.parametrize(("kind", "value"), [("nan", NAN), ("posinf", INF), ("neginf", -INF)])
@pytest.mark.parametrize("level", ["bad", "suspect", "ignore"])
def test_a_level_decides_the_severity_in_every_phase(kind: str, value: float, level: Any) -> None:
    policy = Policy(**{kind: level})
    for phase in PHASES:
        told = policy.judge(phase, value, value)
        assert told == (None if level == "ignore" else (kind, level))


def test_large_is_a_suspect_above_its_limit_and_nothing_at_it() -> None:
    policy = Policy(large=10)
    assert policy.judge("forward", -10.0, 10.0) is None
    assert Policy(large=INF).judge("forward", 0.0, INF) == ("posinf", "bad")
    assert policy.judge("forward", 0.0, 10.5) == ("large", "suspect")
    assert policy.judge("forward", -10.5, 0.0) == ("large", "suspect")


def test_headroom_counts_bits_to_the_dtypes_own_overflow() -> None:
    policy = Policy(headroom=2)
    assert policy.judge("forward", 0.0, HALF / 4, dtype_max=HALF) is None
    assert policy.judge("forward", 0.0, HALF / 3, dtype_max=HALF) == ("large", "suspect")
    assert policy.judge("forward", 0.0, HALF / 3, dtype_max=3.4e38) is None
    assert policy.judge("forward", 0.0, 1e300, dtype_max=None) is None


def test_the_last_matching_override_wins() -> None:
    overrides = {"enc*": Policy(large=10), "encoder.head": Policy(large=100)}
    policy = Policy(large=1, overrides=overrides)
    limits = {layer: policy.limit(layer, None) for layer in ("dec", "encoder.a", "encoder.head")}
    assert limits == {"dec": 1, "encoder.a": 10, "encoder.head": 100}


def test_an_override_leaves_what_it_does_not_set_as_it_is() -> None:
    policy = Policy(nan="ignore", large=5, bad=("large",), overrides={"head": Policy(large=9)})
    assert policy.judge("forward", 0, 7, layer="head") is None
    assert policy.judge("forward", 0, 10, layer="head") == ("large", "bad")
    assert policy.judge("forward", NAN, NAN, layer="head") is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_an_override_sets_the_same(copied: Any) -> None:
    policy = copied(Policy(nan="ignore", overrides={"head": Policy(large=9)}))
    assert policy.judge("forward", NAN, NAN, layer="head") is None
    assert policy.judge("forward", 0, 10, layer="head") == ("large", "suspect")


def test_the_whitelist_holds_inside_overrides_and_theirs_adds_to_it() -> None:
    inner = Policy(large=5, allow=(Allow("head", "posinf", "inner", "forward"),))
    policy = Policy(allow=(Allow("head", "nan", "outer"),), overrides={"head": inner})
    assert policy.allowed("nan", "forward", "head") == "outer"
    assert policy.allowed("posinf", "forward", "head") == "inner"
    assert policy.allowed("posinf", "forward", "other") is None
    assert policy.allowed("posinf", "input", "head") is None


def test_one_entry_need_not_be_wrapped() -> None:
    entry = Allow("a", "nan", "why")
    assert Policy(allow=entry).allow == (entry,)  # type: ignore[arg-type]
    assert Policy(large=1, bad="large").bad == ("large",)  # type: ignore[arg-type]


REFUSED: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"nan": "fatal"}, "Policy(nan='fatal'): choose from bad, suspect, ignore"),
    (ValueError, {"large": 0}, "Policy(large=0): the limit must be positive"),
    (ValueError, {"spike": 1}, "Policy(spike=1): the ratio to the running median must be above 1"),
    (ValueError, {"bad": ("nan",)}, "Policy(bad=...): 'nan' is not one of large, spike, vanishing"),
    (ValueError, {"scale_streak": 0}, "Policy(scale_streak=0): a streak is at least 1 step"),
    (ValueError, {"scale_floor": -1.0}, "Policy(scale_floor=-1.0): a loss scale is never below 0"),
    (TypeError, {"large": "10"}, "Policy(large='10'): expected a number or None, not str"),
    (TypeError, {"scale_streak": "5"}, "Policy(scale_streak='5'): expected a whole number, not s"),
    (TypeError, {"allow": ("head",)}, "takes anynan.Allow entries, not 'head'"),
    (TypeError, {"bad": 3}, "Policy(bad=...) takes kinds, not 3"),
    (TypeError, {"overrides": {"a": 3}}, "maps globs to Policy objects, not 'a': 3"),
]


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_words(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        Policy(**options)
