"""The demo: each bug strikes, and the report names its line."""

import re
import warnings

import keras
import pytest

import anynan
from anynan._cli.commands import main
from anynan._diagnosis.sources import is_library
from anynan.keras import demo
from anynan.tensorflow import demo as same

pytestmark = pytest.mark.tier(2)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Train less of a model, with an optimizer whose graph is small."""
    monkeypatch.setattr(keras.optimizers, "AdamW", lambda rate: keras.optimizers.SGD(100 * rate))
    monkeypatch.setattr(demo, "WIDTH", 16)


@pytest.mark.slow
def test_a_bug_is_named():
    model, tracker, text = demo.setup("length", 0)
    with tracker, pytest.raises(anynan.NonFiniteError) as caught:
        for batch in (0, 39):
            model.train_on_batch(*text[batch])
    event = caught.value.event
    operation = event.operation
    assert (event.layer, event.phase, operation.name, event.cause.tag, operation.source.text) == (
        "regulariser", "backward", "sqrt", "norm_gradient_at_zero", "size = ops.sqrt(square)"
    ), str(caught.value)  # fmt: skip
    assert not is_library(operation.source.file)


def test_both_names_run_the_same_demo():
    assert (same.BUGS, same.main) == (demo.BUGS, demo.main)
    assert set(demo.BUGS) == {"length", "mask"}  # each has a test here


@pytest.fixture
def _short(monkeypatch):
    monkeypatch.setattr(demo, "EPOCH", 4)  # an empty paragraph comes soon


@pytest.mark.usefixtures("_short")
def test_the_demo_finds_its_bug(capsys):
    assert main(["demo", "--framework", "keras", "--bug", "mask"]) == 0
    printed = capsys.readouterr().out
    assert "layer   attention_0" in printed
    assert "weights = ops.softmax(scores, axis=-1)" in printed
    assert "cause   fully masked row" in printed
    assert "Found at step 3. Run again with --fixed" in printed


@pytest.mark.usefixtures("_short")
def test_without_the_bug_it_trains_on(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["demo", "--framework", "tensorflow", "--fixed", "--steps", "5"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"5 steps, \d+ layers, no reading went bad", printed), printed
    fell = re.search(r"The loss of the first batch fell from (\S+) to (\d+\.\d+)\.", printed)
    assert float(fell[2]) < float(fell[1]) - 0.5


def test_too_few_steps_are_said(capsys):
    assert demo.main("mask", steps=2) == 1
    assert "--steps" in capsys.readouterr().out
