"""The reports, as golden files: run with ANYNAN_OVERWRITE_GOLDEN=1 to write them anew."""

import io
import itertools
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._base.summary import Summary
from anynan._diagnosis.causes import Situation, explain
from anynan._diagnosis.investigation import operation
from anynan._diagnosis.lineage import Operand, OpRecord
from anynan._readings.history import Cleared, Ring
from anynan._readings.readings import Site
from anynan._reports.report import (
    headline,
    render,
    render_html,
    render_line,
    render_markdown,
    render_rich,
)
from anynan.events import KINDS, PHASES, Cause, Event, Operation, Source, Spread, Trial
from tests.test_left import FRAMEWORKS
from tests.test_left import array as array_of

GOLDEN = Path(__file__).parent / "golden"
OVERWRITE = os.environ.get("ANYNAN_OVERWRITE_GOLDEN") == "1"


def array(shape: tuple[int, ...], dtype: str = "float32", **fields: Any) -> Summary:
    ends = [abs(fields[key]) for key in ("min", "max") if key in fields]
    largest = {"absmax": max(ends, default=None), **fields}
    return Summary(shape, dtype, "cpu", math.prod(shape), **largest)


def line(number: int, function: str, text: str, via: str | None = None) -> Source:
    return Source("model.py", number, function, text, via)


def event(record: OpRecord | None = None, **fields: Any) -> Event:
    """Build an event as the diagnosis does, its cause from the table."""
    known = {key: fields.pop(key) for key in ("rows", "growth", "gradient") if key in fields}
    then = fields.pop("then", None)
    whole = {
        "backend": "numpy",
        "layer": None if record is None else record.layer,
        "phase": "forward" if record is None else record.phase,
        "kind": "nan" if record is None or record.output is None else record.output.kind,
        "severity": "bad",
        "step": 412,
        "operation": None if record is None else operation(record),
        "then": None if then is None else operation(then),
        **fields,
    }
    made = Event(**whole)
    if "cause" in fields:
        return made
    situation = Situation(
        made.phase, made.kind, made.layer, made.tensor, made.parameter, made.summary,
        record, then, made.since, **known,
    )  # fmt: skip
    return replace(made, cause=explain(situation))


SOFTMAX = OpRecord(
    9, "softmax", "softmax", "encoder.layers.3.attn", "forward", None,
    (Operand("self", array((8, 12, 128, 128), "float16", neginf=24576, min=-7.0, max=41.2)),),
    line(87, "attend", "w = scores.softmax(-1)"), {"masked_rows": 2},
)  # fmt: skip
EXP = OpRecord(
    3, "exp", "exp", "head", "forward", array((4, 3), posinf=2, min=0.1, max=3.2e5,
                                              first_bad=(1, 2)),
    (Operand("self", array((4, 3), min=-2.1, max=104.2), 104.2),),
    line(31, "forward", "e = exp(x)"), value=float("inf"),
)  # fmt: skip
DIVIDE = OpRecord(
    4, "divide", "divide", "head", "forward", array((4, 3), nan=2, min=0.0, max=0.9),
    (Operand("self", array((4, 3), posinf=2, min=0.1, max=3.2e5)),
     Operand("other", array((4, 1), posinf=2, min=1.3, max=3.2e5))),
    line(32, "forward", "return e / e.sum(-1, keepdims=True)"),
)  # fmt: skip
LOG = OpRecord(
    5, "log", "log", None, "loss", array((32, 10), neginf=17, min=-9.1, max=-0.01,
                                         first_bad=(3, 7)),
    (Operand("self", array((32, 10), min=0.0, max=0.99, zero=17), 0.0),),
    line(12, "loss_fn", "return -(y * log(softmax(logits))).sum(-1).mean()"),
)  # fmt: skip
SQRT = OpRecord(
    7, "sqrt", "SqrtBackward0", "encoder.norm", "backward",
    array((32, 64), nan=5, min=-0.2, max=0.3, first_bad=(2, 0)),
    (Operand("grad", array((32, 64), min=-0.4, max=0.6, zero=5), 0.0),
     Operand("result", array((32, 64), min=0.0, max=2.0, zero=5), 0.0)),
    line(55, "forward", "y = where(x > 0, sqrt(x), 0)"), feeds=("where",),
)  # fmt: skip
MATMUL = OpRecord(
    6, "linear", "addmm", "decoder.layers.11.mlp.up", "forward",
    array((16, 4096), "float16", posinf=3, min=-6.1e4, max=6.5e4, first_bad=(0, 9)),
    (Operand("bias", array((4096,), "float16", min=-1.0, max=1.0)),
     Operand("mat1", array((16, 1024), "float16", min=-411.0, max=512.0)),
     Operand("mat2", array((1024, 4096), "float16", min=-0.9, max=1.1))),
    line(140, "forward", "x = self.up(x)", "linear.py:125 in forward"), wide=81920.0,
)  # fmt: skip
TRAIL = (
    ("encoder.embed", 0.9), ("encoder.layers.0", 3.1), ("encoder.layers.1", 9.8),
    ("encoder.layers.2", 41.2), ("encoder.layers.3.attn", None),
)  # fmt: skip
LONG = (
    ("embed", 0.9), *((f"decoder.layers.{i}", 1.9**i) for i in range(11)),
    ("decoder.layers.11.mlp.up", None),
)  # fmt: skip
IMAGE = array((32, 3, 8, 8), nan=192, min=-2.1, max=2.6, first_bad=(3, 0, 0, 0))
WEIGHT = array((64, 10), nan=640)

EVENTS: dict[str, Event] = {
    "forward_nan": event(SOFTMAX, kind="nan", trail=TRAIL, spread=Spread(37)),
    "forward_posinf_then_nan": event(
        EXP, then=DIVIDE, trail=(("embed", 0.9), ("head", None)), spread=Spread(1)
    ),
    "forward_overflow": event(
        MATMUL, trail=LONG, rank=3, spread=Spread(1234, "the loss"), call=1,
        notes=("2 layers ran inside a compiled region and were not watched",),
    ),
    "forward_without_replay": event(
        layer="", kind="posinf", tensor="output['logits']",
        summary=array((8, 10), posinf=80), notes=(
            ("the second run did not reproduce this, so the report names no operation: the step "
            "may have used other data, drawn other random numbers, or started from another state"),
        ),
    ),
    "forward_tried": event(
        EXP, then=DIVIDE, trail=(("embed", 0.9), ("head", None)), spread=Spread(1),
        tried=Trial("exp(x - max(x, axis=-1, keepdims=True))", "finite", "step", 2.3104, 0.8377),
    ),
    "loss_others": event(
        LOG, step=5, spread=Spread(3), tried=Trial("log(x + 1e-8)", "another"),
        others=(
            event(SQRT, step=5, tensor="grad", tried=Trial("sqrt(x + 1e-8)", "another")),
            event(MATMUL, step=5, tried=Trial("", "finite", "step", 2.31, 0.84)),
        ),
    ),
    "forward_suspect": event(
        layer="encoder.mask", kind="neginf", severity="suspect", cause=None,
        summary=array((1, 128), neginf=64, min=0.0, max=0.0),
    ),
    "forward_unknown": event(
        OpRecord(1, "frobnicate", "frobnicate", "block", "forward", array((4,), nan=4),
                 (Operand("x", array((4,), min=-1.0, max=2.0)),
                  Operand("y", array((), min=3.0, max=3.0), 3.0)), None)
    ),
    "forward_iteration": event(OpRecord(
        1, "multiply", "mul", "rnn.cell", "forward",
        array((8, 16), posinf=1, min=-1e38, max=3.1e38, first_bad=(4, 4)),
        (Operand("self", array((8, 16), min=-2e19, max=3e19), 3e19),
         Operand("other", array((8, 16), min=-2e19, max=3e19), 3e19)),
        line(20, "<lambda>", "h = h * h"), wide=9e38), iteration=17,
        growth=((409, 2e3), (410, 4e9), (411, 3e18)),
    ),
    "loss_neginf": event(LOG, step=5),
    "backward_nan": event(SQRT, step=5, tensor="grad", spread=Spread(3)),
    "backward_parameter": event(
        layer="fc", phase="backward", kind="posinf", parameter="fc.weight", step=399,
        tensor="grad", summary=array((64, 10), posinf=640),
        growth=((395, 0.9), (396, 3.1), (397, 48.0), (398, 7200.0)),
    ),
    "backward_spike": event(
        layer="fc", phase="backward", kind="spike", severity="suspect", step=7, tensor="grad",
        summary=array((64, 10), min=-80.0, max=310.0), growth=((5, 1.1), (6, 0.9), (7, 310.0)),
    ),
    "backward_vanishing": event(
        layer="stem", phase="backward", kind="vanishing", severity="suspect", step=7,
        tensor="grad", summary=array((64, 10), min=-1e-22, max=1e-22),
    ),
    "backward_expected": event(
        layer="fc", phase="backward", kind="posinf", severity="suspect", step=3, tensor="grad",
        cause=None, expected="the loss scale is being found: the scaler skips this update "
        "(scale now 32768)",
    ),
    "input_batch": event(
        phase="input", step=3, tensor="batch['image']", summary=IMAGE, rows=(3,),
        spread=Spread(12, "forward stem.conv"),
    ),
    "input_used": event(
        OpRecord(0, "linear", "addmm", "stem", "forward", array((32, 8), nan=8),
                 (Operand("mat1", array((32, 4), nan=1, min=-1.0, max=1.0), source="input"),),
                 line(3, "forward", "x = self.stem(x)")),
        phase="input", layer=None, step=3, tensor="args[0]",
        summary=array((32, 4), nan=1, min=-1.0, max=1.0, first_bad=(6, 2)), rows=(6,),
    ),
    "parameter_since": event(
        layer="fc", phase="parameter", parameter="fc.weight", tensor="weight", summary=WEIGHT,
        since=(400, 412),
    ),
    "optimizer_posinf": event(
        layer="fc", phase="optimizer", kind="posinf", parameter="fc.weight", step=11,
        tensor="weight", summary=array((64, 10), "float16", posinf=31, min=-6e4, max=6e4),
        since=(10, 11), gradient=array((64, 10), "float16", min=-9e3, max=2e4),
    ),
    "value_nan": event(
        phase="value", step=0, tensor="batch['x']", cause=None,
        summary=array((3, 4), nan=1, min=0.5, max=2.0, first_bad=(2, 1)),
        operation=Operation(
            "check", "anynan.check", (), None,
            line(4, "load", "check(batch, 'batch')"), None, "value",
        ),
        notes=("also bad: batch['y'] (posinf)",),
    ),
    "forward_large": event(
        layer="encoder.layers.2", kind="large", severity="suspect", step=90,
        summary=array((8, 64), "float16", min=-3.1e4, max=2e4, headroom=1.08),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EVENTS)
def test_report_is_as_agreed(name: str) -> None:
    text = render(EVENTS[name]) + "\n\n" + render_line(EVENTS[name]) + "\n"
    path = GOLDEN / f"{name}.txt"
    if OVERWRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(EVENTS)


@pytest.mark.parametrize("name", EVENTS)
def test_a_narrow_terminal_breaks_no_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = render(EVENTS[name])
    monkeypatch.setenv("COLUMNS", "60")
    narrow = render(EVENTS[name])
    assert all(len(row) <= 60 for row in narrow.splitlines()[1:]), narrow
    # A long line of code is cut, with dots where it was; evidence may get a row of its own.
    words = {*whole.replace(":", " ").split(), *whole.split(), "...", "seen"}
    made: Any = EVENTS[name].operation
    code = made.source.text if made and made.source else ""
    assert [word for word in narrow.split() if word not in words and word not in code] == []


def printed(event: Event, **options: Any) -> str:
    """Give what rich prints of a report."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, legacy_windows=False, **options).print(render_rich(event))
    return out.getvalue()


@pytest.mark.parametrize("name", EVENTS)
def test_rich_says_the_same(name: str) -> None:
    assert printed(EVENTS[name], width=40, soft_wrap=True) == render(EVENTS[name]) + "\n"


def test_only_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m" in printed(EVENTS["forward_nan"], force_terminal=True)
    assert "\x1b[" not in printed(EVENTS["forward_nan"], force_terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in printed(EVENTS["forward_nan"], force_terminal=True)


def test_markdown_can_be_pasted_into_an_issue() -> None:
    title, _, rest = render(EVENTS["forward_nan"]).partition("\n\n")
    assert render_markdown(EVENTS["forward_nan"]) == f"**{title}**\n\n```text\n{rest}\n```\n"
    made: Any = operation(SOFTMAX)
    code = replace(made, source=line(1, "f", "exec('```')"))  # it ends no fence
    assert "\n````text\n" in render_markdown(replace(EVENTS["forward_nan"], operation=code))


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_and_kind_has_a_sentence(phase: Any) -> None:
    cases: Any = itertools.product(KINDS, ("bad", "suspect"), (None, "meant"))
    for kind, severity, expected in cases:
        bare = Event("numpy", None, phase, kind, severity, 5, expected=expected)
        text, whole = render(bare), headline(bare)
        assert text.splitlines()[1] == ""
        assert "None" not in text
        assert "\n" not in render_line(bare)
        assert ("step 5" in whole) == (phase != "value")
        assert whole.startswith("Expected: ") == (expected is not None)
        assert whole.startswith("Suspect: ") == (severity == "suspect" and expected is None)


LOSS = {"phase": "loss"}
MADE, TARGET = {"operation": operation(LOG)}, {"target": "function preprocess"}
MEAN = {"phase": "parameter", "parameter": "norm.running_mean"}
HEADLINES: dict[str, dict[str, Any]] = {
    "NaN first appeared in the forward pass of step 5": {},
    "NaN first appeared in the loss of step 5": LOSS | {"tensor": "loss"},
    "NaN first appeared outside every layer": LOSS | {"step": 0},
    "NaN first appeared in `loss_fn`, outside every layer, at step 5": LOSS | MADE,
    "NaN first appeared in `preprocess`, outside every layer, at step 5": LOSS | TARGET,
    "NaN first appeared in `loss_fn`, at step 5": {"layer": "", **TARGET, **MADE},
    "NaN first appeared in the backward pass of step 5": {"phase": "backward"},
    "NaN came in with the batch of step 5": {"phase": "input"},
    "NaN was already in a weight at step 5": {"phase": "parameter"},
    "NaN was already in a running statistic at step 5": MEAN,
    "NaN was written into a weight by the optimizer at step 5": {"phase": "optimizer"},
    "NaN found in x": {"phase": "value", "tensor": "x"},
}


@pytest.mark.parametrize("sentence", HEADLINES)
def test_headlines(sentence: str) -> None:
    bare = Event("numpy", None, "forward", "nan", "bad", 5)
    assert headline(replace(bare, **HEADLINES[sentence])) == sentence


def test_where_it_surfaced_is_no_second_place() -> None:
    loss = replace(EVENTS["loss_neginf"], spread=Spread(0, "forward"))
    assert "spread" not in render(loss)
    assert "layer" not in render(replace(loss, cause=None)).split("\n", 1)[1]
    assert "it surfaced at the loss" in render(replace(loss, spread=Spread(0, "the loss")))
    itself = Spread(0, "forward (the model itself)")
    own = Event("numpy", "", "forward", "nan", "bad", 5, target="function f", spread=itself)
    assert "the model itself" not in render(own) + render_line(own)
    elsewhere = replace(loss, spread=Spread(2, "forward head"))
    assert "it surfaced in the forward pass at head" in render(elsewhere)


def test_which_model_it_is_about_is_said_where_it_is_asked() -> None:
    made = Event("torch", "1", "forward", "nan", "bad", 5, target="model Generator")
    assert "Generator" not in render(made) + render_line(made)
    assert render(made, which=True).split("\n")[2:4] == ["  model   Generator", "  layer   1"]
    assert "step 5, model Generator, layer 1" in render_line(made, which=True)
    assert Event.from_json(made.to_json()) == made


LONG_LINE = (
    'return {"one": a.sum(), "two": b.sum(), "three": c.mean(axis=0), "four": x / (x - x), '
    '"five": a + b + c, "six": a - b - c, "seven": (a * b * c).sum(axis=0)}'
)


def quoted(source: Source) -> list[str]:
    """Give what a report prints of a line of code."""
    made: Any = operation(LOG)
    text = render(replace(EVENTS["loss_neginf"], operation=replace(made, source=source)))
    rows = [row.strip() for row in text.split("\n")]
    start = next(i for i, row in enumerate(rows) if re.search(r"\.py:\d+ in \w+$", row)) + 1
    return rows[start : next(i for i, row in enumerate(rows) if row.startswith("input"))]


@pytest.mark.parametrize("part", ["a.sum()", "x / (x - x)", "(a * b * c).sum(axis=0)"])
def test_of_a_long_line_the_part_that_ran_is_shown(part: str) -> None:
    at = LONG_LINE.index(part)
    source = Source("a.py", 3, "step", LONG_LINE, None, at, at + len(part))
    (row,) = quoted(source)
    assert part in row
    assert row.startswith("... ") == (at > 40)
    assert row.endswith(" ...") == ("seven" not in row)
    words = row.removeprefix("... ").removesuffix(" ...").split(" ")
    assert set(words) <= set(LONG_LINE.split(" "))


def test_the_line_of_a_file_that_was_changed_is_not_told() -> None:
    (row,) = quoted(Source("a.py", 3, "step", "", changed=True))
    assert row == "(not quoted: the file was changed since it was imported)"


def test_the_library_line_is_quoted_below_its_place() -> None:
    via = "transformers/models/llama/modeling_llama.py:164 in forward"
    source = Source("loops.py", 93, "main", "trainer.train()", via, via_text="return x * self.w")
    assert quoted(source) == ["trainer.train()", f"via {via}", "return x * self.w"]


def test_another_ranks_event_is_told_in_short() -> None:
    there = replace(EVENTS["forward_nan"], rank=3)
    text = """\
NaN first appeared in the forward pass of step 412 on rank 3

  layer   encoder.layers.3.attn
  op      softmax                 model.py:87 in attend
                                  w = scores.softmax(-1)
  cause   fully masked row: softmax over a row of -inf is 0/0 [softmax_fully_masked]
  rank    3, which has the full report; this is rank 0"""
    assert render(there, here=0) == text


def test_a_cause_ends_with_its_tag_and_an_unknown_one_with_none() -> None:
    event = EVENTS["forward_nan"]
    for form in (render, render_markdown, render_html):
        assert "softmax over a row of -inf is 0/0 [softmax_fully_masked]\n" in form(event)
    unknown = replace(event, cause=Cause("unknown", "softmax made NaN", "compare"))
    assert "cause   softmax made NaN\n" in render(unknown)
    hostile = replace(event, cause=Cause("a\n  fix  lies", "softmax made NaN", "compare"))
    assert "\n  fix  lies" not in render(hostile)


def test_a_notebook_shows_each_result_without_scripts_and_colours_of_its_own() -> None:
    summary = anynan.summarize(np.array([1.0, np.nan, 3.0], np.float32))
    history = Ring(4)
    assert "none yet" in history._repr_html_()
    site = Site(0, "<b>", "forward", "output", "float32", 3.4e38, 3.4e38)
    history.add(Cleared(3, [site], [64.0]))
    for thing, word in (
        (EVENTS["forward_nan"], "<b>NaN first appeared in the forward pass of step 412</b>"),
        (summary, "float32 (3,)  min 1  max 3   1 x NaN"),
        (history, "3 to 3 in the history, 1 layer,"),
    ):
        page = thing._repr_html_()
        assert word in page
        assert page.startswith('<pre style="white-space:pre-wrap">')
        # Text takes the page's colours, dark or light.
        assert not re.search("<script|<link|<img|color|background|http", page)
    assert "first bad at [1]" in summary._repr_html_()
    event = replace(EVENTS["forward_nan"], layer="<script>", notes=("a < b",))
    page = event._repr_html_()
    assert "&lt;script&gt;" in page and "a &lt; b" in page
    assert "&lt;b&gt;" in history._repr_html_() and "<b>" not in history._repr_html_()


def normalise(x: Any) -> Any:
    return x / (x - x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_function_without_layers_has_no_loss_and_no_step(name: str) -> None:
    track = (
        anynan.track
        if name == "numpy"
        else pytest.importorskip(f"anynan.{name}", exc_type=ImportError).track
    )

    def preprocess(x: Any) -> Any:
        return normalise(x) + 1.0

    with pytest.raises(anynan.NonFiniteError) as caught:
        track(preprocess)(array_of(name, [[1.0, 2.0], [0.0, 4.0]]))
    title, *rows = str(caught.value).split("\n")
    assert title.removesuffix(", outside every layer") == "NaN first appeared in `normalise`"
    for word in ("loss", "step", "layer", "surfaced"):
        assert not any(word in row for row in rows), word
    event = caught.value.event
    assert event.target == "function preprocess"
    assert Event.from_dict(json.loads(event.to_json())).target == event.target


@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_code_between_the_layers_of_a_step_is_named_by_its_function() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 1)

    def log_density(x: Any) -> Any:
        return torch.log(x * 0).sum()

    def step(x: Any) -> Any:
        return log_density(model(x))

    title = "-Inf first appeared in `log_density`, outside every layer\n"
    with pytest.raises(anynan.NonFiniteError, match=title):
        anynan.torch.track(step)(torch.ones(2, 3))
