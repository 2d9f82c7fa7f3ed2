"""The public names: few at the top, the rest in named modules, and the old ones for a release."""

import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import anynan
from anynan import _MOVED
from anynan._cli.commands import _parser
from anynan._steps.tracked import inside
from anynan.tracker import _OLD


def test_the_top_has_the_names_that_programs_need() -> None:
    assert anynan.__all__ == [
        *("Advanced", "Allow", "AnomalyError", "AnynanWarning", "Event", "NonFiniteError"),
        *("Policy", "Summary", "Tracker", "check", "compare", "expect", "load", "precision"),
        *("replaying", "scope", "stress", "summarize", "track", "untrack", "watch"),
    ]
    for name in anynan.__all__:
        assert getattr(anynan, name).__doc__


def test_track_takes_six_everyday_options_and_the_rest_together() -> None:
    options = anynan.options.TrackOptions.__annotations__
    assert [*options] == ["action", "level", "layers", "exclude", "policy", "save", "advanced"]


def test_the_level_is_layer_but_in_array_code_and_under_run() -> None:
    assert anynan.options.Options().level == "layer"
    assert inside(anynan.track(np.log)).judge.subject.options.level == "step"
    assert _parser().parse_args(["run", "train.py"]).level == "step"


def test_a_tracker_shows_what_a_user_needs() -> None:
    assert sorted(name for name in dir(anynan.Tracker) if not name.startswith("_")) == [
        *("clear", "count", "events", "flush", "history", "metrics", "name", "notes", "pause"),
        *("remove", "report", "resume", "save", "step", "to_html", "to_jsonl", "where"),
    ]


@pytest.mark.parametrize("name", _MOVED)
def test_a_name_that_moved_warns_and_is_the_same(name: str) -> None:
    room = _MOVED[name]
    with pytest.warns(DeprecationWarning, match=f"anynan.{name} is now anynan.{room}.{name}"):
        old = getattr(anynan, name)
    assert old is getattr(getattr(anynan, room), name)


@pytest.mark.parametrize("name", _OLD)
def test_a_name_of_the_tracker_that_changed_warns_and_works(name: str) -> None:
    tracker = anynan.track(np.log)
    tracker(np.ones(2))
    with pytest.warns(DeprecationWarning, match=f"Tracker.{name} is now ") as warned:
        value = getattr(tracker, name)
    assert warned[0].filename == __file__
    expected = {"fn": np.log, "paused": False, "remarks": (), "target": "function log"}
    assert value == expected[name] if name in expected else callable(value)


def test_the_table_of_old_names_is_complete() -> None:
    changelog = Path(__file__).parents[1] / "CHANGELOG.md"
    if not changelog.exists():
        pytest.skip("not a checkout")
    rows = re.findall(r"^  \| (`.*?) \|", changelog.read_text(encoding="utf-8"), re.MULTILINE)
    old = set(re.findall(r"\w+", " ".join(rows)))
    options = {each.name for each in fields(anynan.Advanced)} - {"ignore"}
    assert {*_MOVED, *_OLD, *options, "untrack"} - old == set()


def test_untrack_ends_what_any_framework_tracks_and_gives_it_back() -> None:
    fn = partial(np.log)
    assert anynan.untrack(anynan.track(fn)) is fn
    with pytest.raises(ValueError, match="is not tracked"):
        anynan.untrack(fn)


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "keras"])
def test_the_untrack_of_a_framework_warns_and_works(framework: str) -> None:
    adapter = pytest.importorskip(f"anynan.{framework}", exc_type=ImportError)
    if framework == "keras":
        import keras

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    else:
        model = lambda x: x  # noqa: E731
    _tracked = adapter.track(model)  # what nobody holds is gone with the next collection
    with pytest.warns(DeprecationWarning, match="untrack is now anynan.untrack"):
        assert adapter.untrack(model) is model


def test_the_history_is_a_view_with_a_text_form() -> None:
    tracker = anynan.track(np.log, level="layer")
    assert str(tracker.history) == "no steps"
    for x in (1.0, 100.0):
        tracker(np.full(2, x))
    assert str(tracker.history).split() == [
        *("2", "steps,", "from", "step", "0"),
        *("phase", "layer", "smallest", "largest"),
        *("input", "-", "1", "100", "forward", "-", "0", "4.61"),
    ]
    assert [reading.hi for reading in tracker.history.select(phase="input")] == [1.0, 100.0]
    with pytest.raises(ValueError, match="phase='forwards' is unknown; choose from input"):
        tracker.history.select(phase="forwards")
