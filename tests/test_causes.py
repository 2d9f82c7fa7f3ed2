"""Every row of the table fires on what it is about, and stays silent on its near misses."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._base.summary import Summary
from anynan._diagnosis.causes import RULES, UNKNOWN, Situation, advise, explain, table
from anynan._diagnosis.lineage import Operand, OpRecord
from anynan._diagnosis.rules.evidence import rising, told
from anynan._diagnosis.rules.repair import Namespace, Repair, run
from tests.cause_cases import CLIMB, FIRES, INF, MISSES, NAN, case, held, op

FRAMEWORKS = ("torch", "jax", "jnp", "tensorflow", "tf.", "keras", "cupy", "numpy", "np.")


UNSURE = {rule.tag for rule in RULES if not rule.sure}
NAMED = [
    pytest.param(tag, situation, id=f"{tag}-{i}")
    for tag, situations in FIRES.items()
    for i, situation in enumerate(situations)
]


@pytest.mark.parametrize(("tag", "situation"), NAMED)
def test_fires(tag: str, situation: Situation) -> None:
    cause = explain(situation)
    assert cause.tag == tag, cause
    assert all((cause.text, cause.fix, cause.evidence))
    assert "probably" in cause.text or tag not in UNSURE
    said = f"{cause.text}\n{cause.fix}\n{cause.evidence}"
    assert not [word for word in FRAMEWORKS if word in said.lower()], said
    assert "{" not in said, "every name in a format string is filled in"


@pytest.mark.parametrize(("tag", "situation"), MISSES)
def test_near_miss_stays_silent(tag: str, situation: Situation) -> None:
    assert explain(situation).tag != tag


def test_every_row_has_a_case() -> None:
    assert set(FIRES) == {rule.tag for rule in RULES} | {"unknown"}


@pytest.mark.parametrize(("tag", "situation"), NAMED)
def test_the_code_of_a_fix_runs(tag: str, situation: Situation) -> None:
    cause, code = advise(situation)
    assert "`" not in cause.fix
    if not code:
        return
    assert code in cause.fix
    assert situation.record is not None
    x = np.full((2, 2), 0.25)
    operands = dict.fromkeys(("self", "other", "exponent"), x)
    repair = Repair.of(situation.record, code)
    found = run(repair, Namespace(np), lambda *new: (new or (x,))[0], operands, {"dim": -1})
    assert np.shape(found)[0] == 2
    assert np.isfinite(found).all()


def test_no_situation_breaks_a_rule() -> None:
    """An adapter may know little, or strange things, of an operation."""
    names = sorted({name for rule in RULES for name in rule.operations})
    odd: list[Operand] = [
        Operand("self", None),
        Operand("self", held(), None),
        Operand("self", held(NAN), NAN),
        Operand("self", held(INF, -INF, 0.0), INF),
        Operand("self", Summary((2,), "complex64", "cpu", 2), 1 + 2j),
        Operand("self", Summary((), "int64", "cpu", 1, min=3, max=3), 3),
    ]
    params = {"eps": "auto", "correction": None, "exponent": 2j, "masked_rows": True}
    outputs = (None, held(NAN), held(INF, dtype="float4_unheard_of"), held())
    for name, phase, item, output in product(names, ("forward", "backward"), odd, outputs):
        others = tuple(replace(item, name=other) for other in ("other", "exponent", "grad"))
        for operands in ((), (item,), (item, *others)):
            record = OpRecord(0, name, name, None, phase, output, operands, params=params)  # type: ignore[arg-type]
            cause = explain(Situation(phase, "nan", record=record))  # type: ignore[arg-type]
            assert cause.text


def test_zero_over_zero_and_a_number_over_zero_read_differently() -> None:
    nothing = explain(case(op("divide", self=0.0, other=0.0)))
    number = explain(case(op("divide", INF, self=1.0, other=0.0)))
    assert (nothing.text, nothing.evidence) == ("0/0 is NaN", "0.0 / 0.0 at [0]")
    assert (number.text, number.evidence) == ("a number divided by 0 is Inf", "1.0 / 0.0 at [0]")


LOGS = [
    ("return -(y * log(softmax(logits))).sum()", "log_softmax"),
    ("p = logits.softmax(-1).log()", "log_softmax"),
    ("loss = -log(nn.sigmoid(x)).mean()", "logsigmoid"),
    ("z = log(exp(x).sum(-1))", "logsumexp"),
    ("y = log(x) * softmax(z)", "maximum"),
    ("y = log_softmax(x).exp() + log(y)", "maximum"),
]


@pytest.mark.parametrize(("line", "word"), LOGS)
def test_the_fix_of_a_log_knows_what_it_is_taken_of(line: str, word: str) -> None:
    assert word in explain(case(op("log", -INF, self=0.0, text=line))).fix


def test_a_fix_fits_its_dtype() -> None:
    assert "1e-8" in explain(case(op("log", -INF, self=0.0))).fix
    assert "1e-4" in explain(case(op("log", -INF, self=0.0, dtype="float16"))).fix
    assert "minimum(x, 9)" in explain(case(op("exp", INF, self=12.0, dtype="float16"))).fix
    assert "-1e4" in explain(case(op("add", self=INF, other=-INF, dtype="float16"))).fix
    assert "-1e9" in explain(case(op("add", self=INF, other=-INF))).fix


def test_growth_is_told_from_its_foot_to_its_end() -> None:
    assert told(CLIMB) == "size 0.9 at step 396, 3.1, 48, 7,200 at step 399"
    long = tuple((step, 2.0**step) for step in range(30))
    assert told(long).startswith("size 1,024 at step 10, ")
    assert told(long).endswith("5.369e+08 at step 29")
    assert rising(long)
    assert not rising(long[:2])


def test_every_tag_that_a_report_can_show_is_an_anchor_of_the_table() -> None:
    package = Path(anynan.__file__).parent
    said = (file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
    tags = {tag for text in said for tag in re.findall(r'\bCause\(\s*"(\w+)"', text)}
    assert tags > {"made_by_another"}
    tags |= {rule.tag for rule in RULES} | {UNKNOWN}
    assert sorted(tags) == sorted(re.findall(r'<a id="(\w+)"></a>`\1`', table()))


@pytest.mark.parametrize("rest", [(), (("saved[18]", 2.0), ("args[0]", 1.0))])
def test_evidence_names_operands_by_their_role_and_never_by_an_internal_name(rest: Any) -> None:
    held = Summary((), "float32", "cpu", 1, min=1.0, max=1.0, absmax=1.0)
    named = (("grad", 6.0), ("self", 1.0), ("other", 0.0), ("weight", 3.0), *rest)
    record = OpRecord(
        1, "frobnicate", "frob", None, "backward", Summary((), "float32", "cpu", 1, nan=1),
        tuple(Operand(name, held, value) for name, value in named), None,
    )  # fmt: skip
    assert explain(Situation("backward", "nan", record=record)).evidence == (
        "incoming gradient = 6.0; first input = 1.0; second input = 0.0; weight = 3.0"
    )
    alone = replace(record, operands=record.operands[1:2])
    assert explain(Situation("backward", "nan", record=alone)).evidence == "input = 1.0"
