"""Bundles: what is saved, what is refused, and that nothing of a bundle is believed unseen."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import load_file

import anynan
from anynan._apps.bundle.bundle import FACTS, SCRIPT, _facts, _script, dialect_of, load
from anynan._apps.bundle.script import TENSORS
from anynan._calls.calls import BundleError
from anynan._cli.commands import main
from tests.bundles import again, run_alone


def saved(folder: Path, fn: Any, x: Any) -> None:
    with pytest.raises(anynan.NonFiniteError) as caught, np.errstate(all="ignore"):
        anynan.track(fn, save=folder)(x)
    assert f"saved in {folder}" in str(caught.value)


X = np.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "bundle"
    saved(folder, lambda x: np.log(x) + 1, X)
    return folder


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def test_the_script_shows_the_operation_and_needs_no_anynan(bundle: Path) -> None:
    text = (bundle / SCRIPT).read_text(encoding="utf-8")
    assert "anynan" not in re.sub("^#.*$", "", text, flags=re.MULTILINE)
    assert "np.log(tensors['x'])" in text
    printed = run_alone(bundle)
    assert "before x: (2, 3) float64: 0 NaN" in printed
    assert "after  result: (2, 3) float64: 3 NaN, 0 Inf, 0 -Inf, first at [0, 0]" in printed


def test_replay_says_that_it_is_the_same(bundle: Path, command: Any) -> None:
    status, out, _ = command("replay", bundle)
    assert status == 0
    assert "the same operation gives the same NaN here: 3 NaN, first at [0, 0]" in out


def test_it_holds_facts_and_tensors_and_no_secrets(bundle: Path) -> None:
    assert {path.name for path in bundle.iterdir()} == {FACTS, SCRIPT, TENSORS}
    facts = json.loads((bundle / FACTS).read_text(encoding="utf-8"))
    assert anynan.Event.from_dict(facts["event"]).operation.name == "log"
    arrays = {name for name in facts["tensors"] if not name.startswith("random.")}
    assert arrays == {"operation.x", "call.args[0]"}
    np.testing.assert_array_equal(load_file(bundle / TENSORS)["operation.x"], X)
    text = (bundle / FACTS).read_text(encoding="utf-8")
    # The folder of a clone is in the environment too, as PWD, and in the path of the line.
    secrets = [value for value in os.environ.values() if len(value) > 20 and value not in __file__]
    assert not any(value in text for value in secrets)


def test_the_home_folder_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path(__file__).parents[1])
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("USERPROFILE", home)
    saved(tmp_path / "b", np.log, X)
    for name in (FACTS, SCRIPT):
        text = (tmp_path / "b" / name).read_text(encoding="utf-8")
        assert home not in text
        assert "~" in text


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (lambda x: x / (x - x), "np.divide("),
        (lambda x: (x * 1e6).astype(np.float16), "np.astype("),
        (lambda x: x[:, :1].var(axis=1, ddof=1), "np.var("),
    ],
)
@pytest.mark.filterwarnings("ignore:Degrees of freedom")
def test_operators_and_methods(tmp_path: Path, fn: Any, code: str) -> None:
    saved(tmp_path / "b", fn, X)
    script, outcome = again(tmp_path / "b")
    assert code in script
    assert outcome.same, outcome


def test_save_after_the_call_says_what_to_do(tmp_path: Path) -> None:
    tracked = anynan.track(np.log, action="record")
    with pytest.raises(ValueError, match="nothing was bad yet"):
        tracked.save(tmp_path / "b")
    with np.errstate(all="ignore"):
        tracked(X)
    with pytest.raises(ValueError, match="Give track\\(\\) save=folder"):
        tracked.save(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine", encoding="utf-8")

    def act(event: anynan.Event) -> None:
        with pytest.raises(FileExistsError, match="overwrites nothing"):
            tracked.save(tmp_path / "b")

    tracked = anynan.track(np.log, action=act, save=tmp_path / "b")
    with np.errstate(all="ignore"):
        tracked(X)
        tracked(X)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["mine.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "b-2"]  # the first event's
    assert again(tmp_path / "b-2")[1].same


def test_a_folder_that_cannot_be_written_is_refused_and_later_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match="cannot be written: .*file: it is no folder"):
        anynan.track(np.log, save=tmp_path / "file" / "b")
    tracked = anynan.track(np.log, save=tmp_path / "later" / "b")
    (tmp_path / "later").write_text("", encoding="utf-8")
    told = "no bundle was saved: (FileExists|NotADirectory)Error"
    with pytest.raises(anynan.NonFiniteError, match=told), np.errstate(all="ignore"):
        tracked(X)


def small(folder: Path, fn: Any, x: Any, limit: int) -> Any:
    """Save a bundle of few bytes; give what is in it."""
    tracked: Any = anynan.track(fn, action=lambda event: tracked.save(folder, limit=limit))
    with np.errstate(all="ignore"):
        tracked(x)
    return load(str(folder))


def test_large_elementwise_operands_are_cut_around_the_first_bad_index(tmp_path: Path) -> None:
    x = np.ones((50, 4000))
    x[31, 2000] = -1.0
    found = small(tmp_path / "b", lambda x: np.log(x), x, 100_000)
    assert (tmp_path / "b" / TENSORS).stat().st_size < 100_000
    assert [item["name"] for item in found.left_out] == ["call.args[0]"]
    assert "cut" in found.call.cut
    _, outcome = again(tmp_path / "b")
    assert "bad here, too: 1 NaN" in outcome.text
    assert outcome.same


def test_other_large_operands_are_left_out_and_said(tmp_path: Path) -> None:
    found = small(tmp_path / "b", lambda x: x @ x, np.full((50, 50), 1e200), 1000)
    assert "larger than the limit" in found.call.unwritable
    outcome = again(tmp_path / "b")[1]
    assert outcome.same is None
    assert "not run" in outcome.text
    assert {item["name"] for item in found.left_out} >= {"operation.x1"}


def refused(folder: Path, match: str) -> None:
    """Require that nothing of the folder is run."""
    with pytest.raises(BundleError, match=match):
        load(str(folder))
    assert main(["replay", str(folder)]) == 2


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    refused(tmp_path / "none", "no bundle")
    (tmp_path / FACTS).write_text('{"format": "other"}', encoding="utf-8")
    refused(tmp_path, "something else")
    (tmp_path / FACTS).write_text("[" * 10_000, encoding="utf-8")
    refused(tmp_path, "no JSON")


@pytest.mark.parametrize("name", [FACTS, SCRIPT, TENSORS])
def test_a_missing_or_cut_file(copy: Path, name: str) -> None:
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole[: len(whole) // 2])
    refused(copy, "bundle|script|tensors|cut|changed|JSON")
    (copy / name).unlink()
    refused(copy, "cannot be read")


def test_a_changed_script_is_not_run(copy: Path) -> None:
    with (copy / SCRIPT).open("a", encoding="utf-8") as file:
        file.write(f"open({str(copy / 'ran')!r}, 'w')\n")
    refused(copy, "reproduce.py is not what bundle.json makes")
    assert not (copy / "ran").exists()


def change(folder: Path, edit: Any) -> None:
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    edit(facts)
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


FUNCTIONS = ("save", "load", "os.system", "__import__", "log); import os; (", "lib.npyio.save")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_other_function_is_called(copy: Path, function: str) -> None:
    change(copy, lambda facts: facts["operation"]["lines"][0].update(function=function))
    refused(copy, "is not run|is no function")


@pytest.mark.parametrize(
    "value",
    [
        "__import__('os')", {"tensor": "x']; import os; ["}, {"value": "os"}, {"name": "os"},
        {"dtype": "float64'); import os; ('"}, {"object": "eval", "fields": {}}, {"a": 1, "b": 2},
        "../../etc/passwd", {"float": "1); import os; (1"}, [[[[[[[[[[1]]]]]]]]]],
    ],
)  # fmt: skip
def test_no_other_argument_is_given(copy: Path, value: Any) -> None:
    change(copy, lambda facts: facts["operation"]["lines"][0].update(arguments=[value]))
    refused(copy, "argument|dtype")


def test_texts_stay_in_their_comments(copy: Path) -> None:
    def edit(facts: dict[str, Any]) -> None:
        facts["event"]["layer"] = "a\nimport os"
        facts["versions"]["numpy"] = "1\r\nimport os\u2028import os"
        facts["operation"]["cut"] = "x\nimport os"

    change(copy, edit)
    refused(copy, "is not what")  # and the script that would be made of it:
    text = _script(_facts(str(copy)), dialect_of("numpy"))
    assert not any(line.startswith("import os") for line in text.splitlines())


@hypothesis.settings(max_examples=60)
@hypothesis.given(at=st.integers(0, 2000), byte=st.integers(0, 255), size=st.integers(0, 3))
def test_tampered_tensors_never_get_further(bundle: Path, at: int, byte: int, size: int) -> None:
    folder = bundle.parent / "fuzz"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bundle, folder)
    held = bytearray((bundle / TENSORS).read_bytes())
    at %= len(held)
    held[at : at + size] = bytes([byte])
    (folder / TENSORS).write_bytes(held)
    if bytes(held) != (bundle / TENSORS).read_bytes():
        with pytest.raises(BundleError):
            load(str(folder))
