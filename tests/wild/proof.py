"""Make tables of the rows."""

from collections import defaultdict
from collections.abc import Iterable

from tests.wild.rows import ANSWERS, YES, Fault, Known, Row, reason_for
from tests.wild.suites import SUITES

HEAD = """
`make wild` makes this page. Each program is trained for a few steps without `anynan` and with it,
at each level. Losses, gradients, weights, buffers and random states are compared bit for bit.
*Silent* means no event and no warning on clean steps. *Nothing left* means that hooks, patches
and attributes are gone after `remove()`. Then faults are injected at known places, and the
reports are compared with them: of the detected ones, how many have the right layer, operation,
line and cause. Not counted: a fault that another layer removes before it does harm, and at the
level `step` a fault that reaches no output of the model, no loss and no gradient.

The faults of PyTorch models: a weight is set to NaN after the first step; the output of an inner
layer is divided by 0; a 0 with an infinite slope is added to one (`root`); the weights of one are
multiplied by 1e30 (`scale`). For the last, a second watcher says what is right: any layer and
operation that makes a NaN or Inf of finite operands, with any cause but `unknown`. PyTorch's own
tables hold samples whose result is NaN or Inf by itself (`by nature`).

A PyTorch model gets all faults at the level `layer`, and half of them at each other level. A
Keras model and a program of JAX get their bad weights at the level `layer`. Of the other faults,
a Keras model gets half at each other level, and half of JAX's programs get their first. Programs
of JAX are compiled with few optimisations, except for the first one at the level `layer`. A call
of a library gets all faults at each level.
"""
BESIDE = "```{toctree}\n:hidden:\n\nproof-scripts\nproof-which\n```"
CANNOT = (
    "*Cannot run*: the program fails without `anynan` too, or needs what is not here. The minutes "
    "are those of one core, {:.0f} together. *States*: how many of the sources, of the core and "
    "of the adapters that a suite runs, its rows are of."
)
COLUMNS = (
    "suite",
    "level",
    "programs",
    "identical",
    "silent",
    "nothing left",
    "faults",
    "detected",
    *(f"right {answer}" for answer in ANSWERS),
    "errors",
)


def _of(rows: list[Row], what: str) -> str:
    said = [getattr(row, what) for row in rows if getattr(row, what)]
    good = sum(one == YES or one.startswith("within ") for one in said)
    return f"{good} of {len(said)}" if said else "-"


def _answers(faults: list[Fault], answer: str) -> str:
    asked = [found for fault in faults if (found := getattr(fault, answer)) is not None]
    return f"{sum(asked)} of {len(asked)}" if asked else "-"


def _line(suite: str, level: str, rows: list[Row]) -> tuple[str, ...]:
    faults = [fault for row in rows for fault in row.faults if not fault.left_out]
    return (
        suite,
        level,
        str(len(rows)),
        *(_of(rows, what) for what in ("identical", "silent", "clean")),
        str(len(faults)) if faults else "-",
        _answers(faults, "detected") if faults else "-",
        *(_answers([fault for fault in faults if fault.detected], a) for a in ANSWERS),
        str(sum(bool(row.error) for row in rows)),
    )


def _lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if not row.skipped:
            groups[row.suite, row.level].append(row)
    order = [*SUITES, *(suite for suite, _ in groups)]  # as they are listed, others behind
    return [
        _line(suite, level or "(none)", groups[suite, level])
        for suite, level in sorted(groups, key=lambda group: (order.index(group[0]), group[1]))
    ]


def _markdown(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    table = [head, ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def table(rows: Iterable[Row]) -> str:
    lines = [COLUMNS, *_lines(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


PYTORCH = (
    "transformers", "timm", "diffusers", "torch_geometric", "torchvision", "peft",
    "torch_modules", "torch_operators",
)  # fmt: skip


def sentence(rows: Iterable[Row]) -> str:
    """Make the sentence that the README quotes."""
    ran = [row for row in rows if row.suite in PYTORCH and row.level == "layer"]
    same = [row.identical for row in ran if row.identical]
    loud = sum(row.silent.startswith("alarm") for row in ran)
    faults = [fault for row in ran for fault in row.faults if not fault.left_out]
    return (
        f"Of {len(same)} third-party PyTorch programs (transformers, timm, diffusers, PyTorch's "
        f"own tables), {same.count(YES)} gave bit-for-bit identical results under anynan, "
        f"{loud or 'no'} clean step{'s' * (loud > 1)} raised an alarm, and "
        f"{sum(fault.detected for fault in faults)} of {len(faults)} injected faults were found"
    )


def _minutes(rows: list[Row]) -> float:
    return sum(row.seconds for row in rows) / 60


def _ran(rows: list[Row], cases: dict[str, int]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for suite in dict.fromkeys([*SUITES, *(row.suite for row in rows)]):
        mine = [row for row in rows if row.suite == suite]
        if not mine:
            known = f", of {cases[suite]} cases" if suite in cases else ""
            lines.append((suite, f"not run{known}", "", "", "", ""))
            continue
        ran = {row.case for row in mine}
        skipped = {row.case for row in mine if row.skipped}
        total = max(cases.get(suite, 0), len(ran))
        lines.append(
            (
                suite,
                f"{len(ran)} of {total}",
                str(len(skipped)),
                f"{_minutes(mine):.1f}",
                str(len({row.anynan for row in mine})),
                ", ".join(sorted({row.versions for row in mine})),
            )
        )
    return lines


def _listed(rows: list[Row], known: list[Known]) -> list[tuple[str, ...]]:
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        for what, said in row.differences():
            reason = reason_for(known, row, what, said) or "**not listed**"
            found[row.suite, what, reason].append(row.case)
    lines: list[tuple[str, ...]] = []
    for (suite, what, reason), cases in sorted(found.items(), key=lambda item: item[0]):
        names = sorted(set(cases))
        shown = ", ".join(f"`{name}`" for name in names[:6])
        shown += f" and {len(names) - 6} more" if len(names) > 6 else ""
        lines.append((suite, what, str(len(cases)), shown, reason))
    return lines


def page(rows: list[Row], cases: dict[str, int], known: list[Known], notes: dict[str, str]) -> str:
    dates = sorted({row.date for row in rows})
    ran = {row.suite for row in rows}
    parts = [
        "# Third-party programs",
        HEAD.strip(),
        f"Run {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
        f"{sentence(rows)}.",
        "Scripts that ran under `anynan run`, by hand: [public scripts](proof-scripts.md).",
        _markdown(COLUMNS, _lines(rows)),
        *(f"*{name}*: {note}" for name, note in notes.items() if name in ran),
        "## What ran",
        CANNOT.format(_minutes(rows)),
        _markdown(
            ("suite", "cases", "cannot run", "minutes of a core", "states", "versions"),
            _ran(rows, cases),
        ),
        "## Differences",
        _markdown(("suite", "what", "times", "cases", "why"), _listed(rows, known)),
        BESIDE,
    ]
    return "\n\n".join(parts) + "\n"
