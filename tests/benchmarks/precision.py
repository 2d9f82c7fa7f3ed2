"""What ``anynan.precision`` says breaks first, against what really breaks in PyTorch's own float16.

``python -m tests.benchmarks.precision PART OUT.jsonl [ARCHITECTURE...]`` adds the pairs of a part
to a file; ``table OUT.jsonl...`` counts them and ``cost`` times a report, both into
docs/precision-measured.md. The judge knows nothing of anynan: it looks at every operation of a
model after ``.half()``, or of a step under ``torch.autocast``, and notes the first that makes NaN
or Inf of finite numbers, with the module that runs and the line that called PyTorch.
"""

import copy
import itertools
import json
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import anynan
from anynan._apps.precision.precision import _Asking
from anynan.torch.replay.names import canonical
from tests.benchmarks.gpt import LARGE, SMALL, training
from tests.benchmarks.timing import machine, publish
from tests.wild.suites import transformers as suite

PAGE = Path("docs/precision-measured.md")
WAYS = {"cast": "`.half()`", "autocast": "autocast"}
FACTORS = [4.0**k for k in range(1, 14)]
PLACING = ("full", "fill", "masked_fill", "where", "scalar_tensor", "triu", "tril", "pad")


@dataclass
class Found:
    operator: str
    layer: str
    line: str


def outside(file: str) -> bool:
    return f"{os.sep}torch{os.sep}" not in file and file != __file__


def forward_line(node: Any) -> str:
    """Find the line of the forward operation, which PyTorch's anomaly mode keeps."""
    for text in reversed(node.metadata.get("traceback_", [])):
        match = re.match(r'\s*File "(.*)", line (\d+)', text)
        if match and (outside(match[1]) or match[1] == __file__):
            return f"{os.path.basename(match[1])}:{match[2]}"
    return ""


def caller() -> str:
    """Find the innermost line outside of PyTorch and this file."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if outside(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Judge(TorchDispatchMode):
    """Note the first operation of each pass that makes NaN or Inf of finite numbers.

    What does so in float32, too, as the logarithm of a mask, is meant.
    """

    def __init__(self, model: Any, meant: Any = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Found] = {}
        self.bad: set[tuple[str, str]] = set()
        self.meant = meant
        self.stack: list[str] = []
        self.model = model
        self.layers: dict[int, str] = {}

    def __enter__(self) -> Any:
        self.handles = []
        for path, module in self.model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self.into(path)))
            self.handles.append(module.register_forward_hook(self.out, always_call=True))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> Any:
        for handle in self.handles:
            handle.remove()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def into(self, path: str) -> Callable[..., None]:
        return lambda *_: self.stack.append(path)

    def out(self, *_: Any) -> None:
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        node = torch._C._current_autograd_node()
        phase = "forward" if node is None else "backward"
        if node is None and self.stack:
            number = torch._C._autograd._get_sequence_nr() - 1
            self.layers.setdefault(number, self.stack[-1])  # what makes no node finds the last one
        if phase in self.found or name.startswith(("empty", "new_empty")):
            return func(*args, **kwargs)
        finite = all(good(x) for x in tree_leaves((args, kwargs)))
        out = func(*args, **kwargs)
        if finite and name.rstrip("_") not in PLACING and not all(map(good, tree_leaves(out))):
            if node is None:
                found = Found(name, self.stack[-1] if self.stack else "", caller())
            else:
                here = self.layers.get(node._sequence_nr(), "")
                found = Found(name, here, forward_line(node))
            self.bad.add((phase, found.line))
            if self.meant is not None and (phase, found.line) not in self.meant:
                self.found[phase] = found
        return out


def good(x: Any) -> bool:
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return True
    return bool(torch.isfinite(x).all())


def half(value: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, value
    )


def in_float32(step: Callable[..., Any], model: Any) -> set[tuple[str, str]]:
    """Tell where float32 itself makes NaN or Inf of finite numbers: passes and lines."""
    model = copy.deepcopy(model)  # no gradient of this run is added to another's
    exact = Judge(model, None)
    with exact:
        step(model)
    return exact.bad


def judged(step: Callable[..., Any], model: Any, how: str) -> dict[str, Found] | None:
    """Run for real, and tell what broke; None if it cannot run."""
    meant = in_float32(step, model)
    model = copy.deepcopy(model)
    judge = Judge(model, meant)
    try:
        if how == "autocast":
            with judge:
                step(model, autocast=True)
        else:
            model.half()
            with judge:
                step(model, cast=True)
    except Exception:
        return None
    return judge.found


class Case:
    """One architecture: a step of it, forward alone or with a scaled loss."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model, self.given = suite.made(kind, 3e6)
        self.model.eval()
        self.factor: float | None = None

    def __call__(self, model: Any, *, cast: bool = False, autocast: bool = False) -> Any:
        given = half(self.given, torch.float16) if cast else self.given
        torch.manual_seed(0)  # what it draws is the same in every run
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.factor is not None))
            if self.factor is not None:
                stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                out = model(**given)
            if self.factor is not None:
                (suite.loss_of(out) * self.factor).backward()


def targets(model: Any) -> list[str]:
    """Choose modules whose weights are scaled: spread over the model."""
    names = [n for n, m in model.named_modules() if getattr(m, "weight", None) is not None
             and isinstance(m.weight, torch.nn.Parameter) and m.weight.ndim >= 1]  # fmt: skip
    names = names or [n for n, m in model.named_modules() if m._parameters]
    return [names[i] for i in sorted({0, len(names) // 3, 2 * len(names) // 3, len(names) - 1})]


def weight_of(model: Any, name: str) -> Any:
    module = model.get_submodule(name)
    return module.weight if hasattr(module, "weight") else next(module.parameters(recurse=False))


def scaled(case: Case, name: str, how: str) -> tuple[float, dict[str, Found]] | None:
    """Scale a module's weight until the real run fails in the forward pass, and no further."""
    weight = weight_of(case.model, name)
    held = weight.data.clone()
    for factor in FACTORS:
        weight.data = held * factor
        if not good(weight.half()):  # its cast is what breaks
            break
        found = judged(case, case.model, how)
        if found is None:
            break
        if "forward" in found:
            return factor, found
    weight.data = held
    return None


def predicted(case: Case, how: Any, *, plan: bool = False) -> Any:
    torch.manual_seed(0)
    model, factor = case.model, case.factor
    if factor is None:
        with torch.no_grad():
            return anynan.precision(model, inputs=case.given, how=how, plan=plan)

    def step(**given: Any) -> None:
        (suite.loss_of(model(**given)) * factor).backward()

    return anynan.precision(step, inputs=case.given, how=how, plan=plan)


def verdict(report: Any, found: Found, phase: str, way: str) -> str:
    phases = ("backward",) if phase == "backward" else ("forward", "loss")
    if way == "ranges":  # of the float32 run alone: the first result beyond the dtype
        rows = [row for row in report.rows if row.phase in phases and report.runs(row)]
        said = next((row for row in rows if row.result.bits(report.form) <= 0), None)
    else:
        said = report.first(*phases)
        if said is None and phase == "forward" and report.first("parameter", "input"):
            said = report.first("parameter", "input")
    if said is None:
        return "fits"
    source = said.source
    via = "" if source is None else source.via or ""
    if source is not None and (not via or via.startswith("torch/")):
        via = f"{source.file}:{source.line}"
    line_ = os.path.basename(via.partition(" ")[0])
    kernel = said.place[4] if len(said.place) > 4 else said.name
    same = canonical(found.operator) == kernel and found.layer == (said.layer or "")
    if same and line_ == found.line:
        return "right"
    return f"{kernel} in {said.layer} at {line_}"


def forward_pairs(kind: str) -> Iterator[dict[str, Any]]:
    case = Case(kind)
    if judged(case, case.model, "cast") != {}:
        return  # it does not run in float16, or fails as it is
    for name in targets(case.model):
        case = Case(kind)
        held = scaled(case, name, "cast")
        if held is not None:
            factor, found = held
            yield told(case, kind, "cast", "forward", f"{name} * {factor:g}", found["forward"])
            weight = weight_of(case.model, name)
            weight.data = weight.data / 4  # the real run is fine so
            if name == targets(case.model)[-1] and judged(case, case.model, "cast") == {}:
                yield sound(case, kind, f"{name} * {factor / 4:g}")


def backward_pairs(kind: str) -> Iterator[dict[str, Any]]:
    """Scale the loss until the backward pass breaks, and ask what does."""
    for how in WAYS:
        case = Case(kind)
        for exponent in range(4, 40, 2):
            case.factor = 2.0**exponent
            found = judged(case, case.model, how)
            if found != {}:
                break
        if found and "forward" not in found:
            name = f"loss * 2**{exponent}"
            yield told(case, kind, how, "backward", name, found["backward"])


def told(case: Case, kind: str, how: str, phase: str, what: str, found: Found) -> dict[str, Any]:
    started = time.perf_counter()
    said = {}
    with mock.patch.object(_Asking, "kernels", (False,)):  # from float32 arithmetic alone
        report = predicted(case, how)
    said["alone"] = said["whole"] = verdict(report, found, phase, how)
    said["ranges"] = verdict(report, found, phase, "ranges")
    if said["alone"] == "fits":  # then the kernels of the dtype are run, too
        said["whole"] = verdict(predicted(case, how), found, phase, how)
    seconds = time.perf_counter() - started
    return {"kind": kind, "how": how, "phase": phase, "what": what, "found": asdict(found),
            "said": said, "notes": list(report.notes), "seconds": round(seconds, 2)}  # fmt: skip


def sound(case: Case, kind: str, what: str) -> dict[str, Any]:
    report = predicted(case, "cast")
    first = report.first("forward", "loss", "parameter", "input")
    said = "not known" if not report.ran else "fits"
    said = said if first is None else f"{first.name} in {first.layer}"
    return {"kind": kind, "how": "cast", "phase": "sound", "what": what, "said": said}


def works(case: Case, code: str) -> bool:
    """Put a plan in by the code that is printed, and tell whether the real run is finite."""
    meant = in_float32(case, case.model)
    model = copy.deepcopy(case.model).half()
    judge = Judge(model, meant)
    exec(code, {"model": model, "torch": torch})
    with judge:
        case(model, cast=True)
    return not judge.found


def plans(kind: str) -> Iterator[dict[str, Any]]:
    """Break a model, ask for a plan, put it in by the code that is printed, and run for real."""
    case = Case(kind)
    if judged(case, case.model, "cast") != {}:
        return
    for name in targets(case.model)[1:]:
        case = Case(kind)
        if scaled(case, name, "cast") is None:
            continue
        report = predicted(case, "cast", plan=True)
        plan = report.plan
        row = {"kind": kind, "phase": "plan", "what": name, "finite": False}
        if plan is not None:
            try:
                row["finite"] = works(case, report.code)
            except Exception as error:
                row["error"] = repr(error)[:200]
            row |= {"said": plan.finite, "layers": dict(plan.layers), "lines": len(plan.lines),
                    "runs": plan.runs}  # fmt: skip
        yield row
        break


def counted(paths: list[str]) -> None:
    """Count the pairs of files, and write the table into the page."""
    texts = [text for path in paths for text in Path(path).read_text().splitlines()]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, texts):
        if row["phase"] in ("forward", "backward"):
            groups.setdefault(f"{row['phase']}, {WAYS[row['how']]}", []).append(row)
    lines = [
        "| pairs | models | in float32 arithmetic | and in kernels | by size | called fits |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in sorted(groups.items()):
        said = [row["said"] for row in rows]
        right = [sum(each[way] == "right" for each in said) for way in ("alone", "whole", "ranges")]
        fits = sum(each["whole"] == "fits" for each in said)
        models = len({row["kind"] for row in rows})
        cells = [f"{count} of {len(rows)}" for count in (*right, fits)]
        lines.append(f"| {name} | {models} | {' | '.join(cells)} |")
    packages = f"torch {torch.__version__}", f"transformers {transformers.__version__}"
    publish("pairs", "\n".join([*lines, "", machine(*packages) + ".", ""]), PAGE)


class _HandsOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def cost(rounds: int = 15) -> None:
    """Time a report in eager steps of a GPT: without a plan and with one, where it breaks and fits.

    A step is a forward and a backward pass; an update breaks in float16 whatever the weights are.
    Step and report take turns, and the medians are compared. Beside them are two steps under a
    dispatch mode that only hands on: no report of two watched runs takes less.
    """
    lines = [
        "| step | forward and backward | two in an empty mode | without a plan | with one | runs |",
        "|---|---|---|---|---|---|",
    ]
    for size, what in itertools.product((LARGE, SMALL), ("breaks", "fits")):
        model, _ = training(size)
        tokens = torch.randint(0, size.vocabulary, (size.batch, size.length))
        with torch.no_grad():
            model.head.weight.mul_(1e7 if what == "breaks" else 1.0)

        def step(model: Any = model, tokens: Any = tokens) -> None:
            logits = model(tokens).flatten(0, 1).float()
            torch.nn.functional.cross_entropy(logits, tokens.flatten()).backward()

        def handed_on(step: Any = step) -> None:
            for _ in range(2):
                with _HandsOn():  # type: ignore[no-untyped-call]
                    step()

        ways: list[Callable[[], Any]] = [
            step, handed_on, lambda: anynan.precision(step, plan=False),
            lambda: anynan.precision(step),
        ]  # fmt: skip
        found: list[list[float]] = [[] for _ in ways]
        for turn in range(rounds + 1):
            for way, times in zip(ways, found, strict=True):
                started = time.process_time()
                report = way()
                if turn:  # the first one warms up
                    times.append(time.process_time() - started)
        eager, empty, without, planned = map(statistics.median, found)
        runs = 0 if report.plan is None else report.plan.runs
        lines.append(
            f"| {size.name}, {what} | {1000 * eager:.1f} ms | {empty / eager:.1f} steps "
            f"| {without / eager:.1f} steps, "
            f"{1000 * without:.0f} ms | {planned / eager:.1f} steps | {runs} |"
        )
    publish("cost", "\n".join([*lines, "", machine(f"torch {torch.__version__}") + ".", ""]), PAGE)


PARTS = {"forward": forward_pairs, "backward": backward_pairs, "plans": plans}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1] in ("cost", "table"):
        cost(*map(int, sys.argv[2:])) if sys.argv[1] == "cost" else counted(sys.argv[2:])
        return
    part, name, *kinds = sys.argv[1:]
    path = Path(name)
    known = path.read_text().splitlines() if path.exists() else []
    done = {json.loads(text)["kind"] for text in known}
    with path.open("a") as file:
        for kind in kinds or suite.cases():
            if kind in done:
                continue
            try:
                rows = list(PARTS[part](kind))
            except Exception as error:
                rows = [{"kind": kind, "phase": "none", "why": repr(error)[:300]}]
            rows = rows or [{"kind": kind, "phase": "none", "why": "no pair"}]
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()


if __name__ == "__main__":
    main()
