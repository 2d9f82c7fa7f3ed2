"""A run as a file: written while it goes on, read back whole, cut off or damaged."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anynan
from anynan._apps.runfile.messages import LINES_UNREADABLE
from anynan._steps.tracked import inside
from tests.fake_adapter import track
from tests.fake_steps import BAD, GOOD, training
from tests.processes import python

PAGE = Path(__file__).parents[1] / "docs" / "files.md"


def tracked(**options: Any) -> Any:
    model, step = training()
    return track(step, model=model, **options)


def written(path: Path, **options: Any) -> Any:
    """Write three good steps and a bad one, and end the run."""
    tracker = tracked(action="record", **options)
    tracker.to_jsonl(path)
    for batch in (GOOD, GOOD, GOOD, BAD):
        tracker(batch)
    tracker.remove()
    return tracker


def same(one: anynan.reports.History, other: anynan.reports.History) -> None:
    assert len(one)
    for a, b in zip(one, other, strict=True):
        assert (a.step, a.order, a.call, a.kind) == (b.step, b.order, b.call, b.kind)
        assert replace(a.site, index=0, limit=0.0) == replace(b.site, index=0, limit=0.0)
        assert repr((a.absmax, a.norm)) == repr((b.absmax, b.norm))


def test_what_is_read_back_is_what_was_seen(tmp_path: Path) -> None:
    tracker = written(tmp_path / "run.jsonl", stats=("mean",))
    run = anynan.load(tmp_path / "run.jsonl")
    same(tracker.history, run.history)
    assert [r.stats for r in run.history][:9] == [r.stats for r in tracker.history][:9]
    assert run.events == tracker.events
    assert (run.counts["bad"], run.damage, run.name) == (1, (), tracker.name)
    assert run.versions["anynan"] == anynan.__version__
    told = re.findall(r"^  headroom.*$", tracker.report(), re.MULTILINE)
    assert told and all(line in run.report() for line in told)
    tracker.to_jsonl(tmp_path / "after.jsonl")  # a run that is over
    run = anynan.load(tmp_path / "after.jsonl")
    same(tracker.history, run.history)
    assert (run.events, run.damage) == (tracker.events, ())


def test_a_step_that_raises_is_in_the_file_with_its_event(tmp_path: Path) -> None:
    tracker = tracked()
    tracker(GOOD)  # what was seen before is written too
    tracker.to_jsonl(tmp_path / "run.jsonl")
    tracker(GOOD)
    with pytest.raises(anynan.NonFiniteError):
        tracker(BAD)
    run = anynan.load(tmp_path / "run.jsonl")
    (event,) = run.events
    assert event.operation is not None
    seen = [*run.history.steps(), *([] if run.open is None else [run.open.number])]
    assert seen == [0, 1, 2]
    assert "the file has no end" in run.report()


def test_every_writes_one_step_in_so_many_and_the_bad_ones(tmp_path: Path) -> None:
    tracker = tracked(action="record")
    tracker.to_jsonl(tmp_path / "run.jsonl", every=4)
    for batch in (*[GOOD] * 6, BAD):
        tracker(batch)
    tracker.remove()
    assert anynan.load(tmp_path / "run.jsonl").history.steps() == [0, 4, 6]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number"):
            tracker.to_jsonl(tmp_path / "no.jsonl", every=wrong)


def test_damage_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    written(tmp_path / "run.jsonl")
    texts = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    at = next(i for i, text in enumerate(texts) if '"type": "step"' in text)
    texts[at] = texts[at].replace('"low": [', '"low": ["!", ')
    texts.insert(at, json.dumps({"type": "weather", "sun": True}))  # of a later version
    (tmp_path / "run.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    run = anynan.load(tmp_path / "run.jsonl")
    assert run.history.steps() == [1, 2, 3]
    assert run.damage == (LINES_UNREADABLE(lines=at + 2),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("hello\n", "its first line does not say so"),
        ('{"type": "run", "schema": 99}\n', "a newer anynan, in schema 99"),
        ('{"type": "run", "schema": 1}\n', "an older anynan, in schema 1; this one reads schema 2"),
        ("\0\1\2\xff" * 99, "its first line does not say so"),
        ("[" * 100_000, "its first line does not say so"),
    ],
)
def test_a_file_of_something_else_is_one_clear_line(
    tmp_path: Path, text: str, says: str, command: Any
) -> None:
    (tmp_path / "run.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        anynan.load(tmp_path / "run.jsonl")
    status, _, error = command("report", tmp_path / "run.jsonl")
    assert (status, error.count("\n"), says in error) == (2, 1, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk here")
def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    tracker = tracked(action="record")
    tracker.to_jsonl(tmp_path / "run.jsonl")
    tracker(GOOD)
    writer = inside(tracker).judge.record.listeners[0]
    writer._file.close()
    writer._file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115
    with pytest.warns(anynan.AnynanWarning, match="because it could not be written: OSError"):
        tracker(BAD)
    tracker(GOOD)
    tracker.remove()
    assert len(tracker.history) == 3
    assert anynan.load(tmp_path / "run.jsonl").history.steps() == [0]


KILLED = """
import os, signal, sys, torch, anynan
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
anynan.torch.track(model).to_jsonl(sys.argv[1])
for step in range(30):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if os.fork() == 0:  # a worker that inherits the tracker writes nothing
    model(torch.ones(2, 4))
    model(torch.ones(2, 4))
    os._exit(0)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no SIGKILL here")
@pytest.mark.tier(2)
def test_a_killed_run_can_be_read(tmp_path: Path, command: Any) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "run.jsonl"
    done = python("-W", "ignore", "-c", KILLED, path, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = anynan.load(path)
    assert run.history.steps() == list(range(30))
    assert list(run.history.norms("0"))
    status, shown, _ = command("report", path)
    assert status == 0
    assert "0 to 29 in the history, 4 layers" in shown
    assert "the run was killed, or is not over" in shown


def test_the_page_names_every_line_and_field(tmp_path: Path) -> None:
    tracker = written(tmp_path / "run.jsonl", stats=("mean",))
    inside(tracker).judge.remark("of no matter")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    fields = {name: said for names, said in rows for name in re.findall(r"\w+", names)}
    found = list(map(json.loads, (tmp_path / "run.jsonl").read_text("utf-8").splitlines()))
    assert {line["type"] for line in found} >= {"run", "slots", "order", "step", "event", "end"}
    for line in found:
        for field in line.keys() - {"type"}:
            assert f"`{field}`" in fields[line["type"]], (line["type"], field)
    slots = next(line["slots"] for line in found if line["type"] == "slots")
    assert all(f"`{field}`" in fields["slots"] for field in slots[0])
