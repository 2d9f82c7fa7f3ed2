"""GRIST's programs as they are, under ``anynan run`` and ``anynan.stress``, against RANUM's labels.

``python -m tests.benchmarks.grist GRIST RANUM`` takes checkouts of Jacob-yen/GRIST and of
llylly/RANUM, and prints the tables of docs/stress-measured.md; ``--only 26 20`` does so for some
programs, ``--no-hunt`` and ``--no-run`` one table alone, ``--seconds`` bounds the benchmark's own
search. A program runs in a process of its own. RANUM says which operations are defective; a line is
right if the operation is written on it.
"""

import argparse
import ast
import functools
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.grist_programs import TENSORFLOW, TORCH, arguments, path_of, stand_in

CLEAN = 300  # iterations of a program as it is
# What RANUM calls operations, in anynan's words, and how programs write them.
WORDS = {
    "Div": ("divide", "/"), "LogSoftMax": ("softmax_cross_entropy_with_logits", "softmax_cross"),
    "Log": ("log", "log"), "Exp": ("exp", "exp"), "Sqrt": ("sqrt", "sqrt"),
}  # fmt: skip
_EVENT = re.compile(r"^  event .*?, (\w+) at (.+?):(\d+): ", re.MULTILINE)


class Mend(ast.NodeTransformer):
    """Put a fix in the place of each call of an operation."""

    def __init__(self, operation: str, fix: str) -> None:
        self._operation, self._fix = operation, fix

    def visit_Call(self, node: ast.Call) -> Any:
        """Change one call: ``log(x)`` becomes ``log(x + 1e-8)``, say."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.func.attr != self._operation:
            return node
        method = not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch")
        if method == bool(node.args):  # a function of the program's own
            return node
        x = ast.unparse(node.func.value if method else node.args[0])
        inner = re.sub(r"\bx\b", f"({x})", self._fix)
        words = {"minimum": "clamp_max", "maximum": "clamp_min"}
        inner = re.sub(
            r"(minimum|maximum)\((.*), ([-\d.e]+)\)",
            lambda m: f"({m[2]}).{words[m[1]]}({m[3]})",
            inner,
        )
        inner = inner.replace(f"{self._operation}(", f"torch.{self._operation}(", 1)
        return ast.copy_location(ast.parse(inner, mode="eval").body, node)


def hunt(grist: Path, path: Path, fixes: list[list[str]]) -> None:
    """Hunt in one program, and print what was found as JSON."""
    stand_in(grist, iterations=0, seconds=0, silent=True, torch=True)
    from anynan._apps.run.program import load
    from anynan._apps.stress.hunt import stress
    from anynan._apps.stress.script import hunt_in

    os.chdir(path.parent)
    sys.path[0] = str(path.parent)
    if fixes:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for operation, fix in fixes:
            tree = Mend(operation, fix).visit(tree)
        path = path.with_name(f"{path.stem}_mended.py")
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    try:
        program = functools.partial(load, str(path), [], module=False)
        report = hunt_in(str(path), stress, lambda code, scope: program(code=code, scope=scope)())
    finally:
        sys.stdout = out
        if fixes:
            path.unlink()
    told = []
    for finding in report.findings:
        operation = finding.event.operation
        source = None if operation is None else operation.source
        told.append(
            {
                "words": finding.what, "group": finding.group, "name": operation and operation.name,
                "line": source and source.line, "text": source and source.text,
                "tried": finding.event.tried and asdict(finding.event.tried),
            }
        )  # fmt: skip
    said = {"found": told, "seconds": report.seconds, "runs": report.runs}
    print(json.dumps(said))


def run(grist: Path, path: Path, iterations: int, seconds: float) -> int:
    """Run one program under ``anynan run``, and end it after so many iterations or seconds."""
    torch = "import torch" in path.read_text(encoding="utf-8")
    stand_in(grist, iterations=iterations, seconds=seconds, silent=False, torch=torch)
    from anynan._cli.commands import main

    os.chdir(path.parent)
    return main(["run", str(path), *arguments(path)])


def labels(ranum: Path, number: str) -> list[str]:
    folder = ranum / "empirical_study/precond/immediate"
    plain = number.rstrip("bcd")
    return [
        name
        for file in sorted(folder.glob(f"{plain}*_ranum.txt"))
        if re.fullmatch(rf"{plain}[a-y]?_ranum\.txt", file.name)
        for name in re.findall(r"optype (\w+)", file.read_text(encoding="utf-8"))
    ]


def ended(*words: object) -> "subprocess.CompletedProcess[str]":
    call = [sys.executable, "-m", "tests.benchmarks.grist", *map(str, words)]
    return subprocess.run(call, capture_output=True, encoding="utf-8", check=False)


def told(grist: Path, path: Path, iterations: int, seconds: float) -> tuple[str, str]:
    """Run a program, and give what ended it and what was told: operation and line of the first."""
    done = ended("--run", grist, path, iterations, seconds)
    events = _EVENT.findall(done.stderr)
    if re.search(r"Success to find NaN", done.stdout):
        how = "NaN after " + re.findall(r"Iteration: <(\d+)>", done.stdout)[-1]
    elif found := re.search(r"GRIST: ended after (\d+) iterations", done.stderr):
        how = f"no NaN in {found[1]}"
    else:
        return f"not run: {_last(done.stderr)}", ""
    if events:
        name, file, line = events[0]
        text = (path.parent / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        return how, f"{name} at {line}: {text.strip()}"
    if not re.search(r"AnynanWarning|^anynan: .*\d bad in", done.stderr, re.MULTILINE):
        return how, "no word"
    return how, f"told otherwise: {_last(done.stderr)}"


def _last(text: str) -> str:
    lines = [x for x in text.strip().splitlines() if re.match(r"[\w.]*(Error|Exception)", x)]
    return (lines or ["nothing was written"])[-1][:90]


def run_row(grist: Path, ranum: Path, number: str, seconds: float) -> tuple[str, list[bool | None]]:
    """Give a program's line of the first table, and whether it was silent and then right."""
    path, wanted = path_of(grist, number), sorted(set(labels(ranum, number)))
    how, said = told(grist, path, CLEAN, 300)
    clean = None if how.startswith("not run") else how.startswith("no NaN") and said == "no word"
    before = "no word" if clean else how if clean is None else f"{how}; {said}"
    how, said = told(grist, path.with_name(f"{path.stem}_grist.py"), 10**9, seconds)
    name, _, where = said.partition(" at ")
    words = [WORDS[label] for label in wanted]
    right = any(name == word and written in where for word, written in words)
    reached = how.startswith("NaN")
    cells = (
        f"ID_{number} {path.stem}", ", ".join(wanted), before, how,
        (said.partition(": ")[0] if right else said) if reached else "",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |", [clean, right if reached else None]


def hunted(grist: Path, path: Path, fixes: list[list[str]]) -> dict[str, Any] | str:
    done = ended("--hunt", grist, path, json.dumps(fixes))
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2]
    read: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return read


def hunt_row(grist: Path, ranum: Path, number: str) -> tuple[str, Any]:
    """Give a program's line of the second table."""
    path = path_of(grist, number)
    wanted = [label.lower() for label in labels(ranum, number)]
    said = hunted(grist, path, [])
    if isinstance(said, str):
        return f"| ID_{number} {path.stem} | {len(wanted)} | not run: {said} | | | |", None
    mine = [x for x in said["found"] if x["name"] in wanted]
    right = [x for x in mine if f"{x['name']}(" in (x["text"] or "")]
    fixes, found, left = list[list[str]](), mine, "no fix was tried"
    for _ in range(2):  # a fix of the first fault may leave a second
        tried = {x["name"]: x["tried"]["repair"] for x in found if x["tried"]}
        fixes += [[name, repair] for name, repair in tried.items() if repair]
        again = hunted(grist, path, fixes) if any(tried.values()) else left
        if isinstance(again, str):
            left = again
            break
        found = [x for x in again["found"] if x["name"] in wanted]
        left = str(len(found))
        if not found:
            break
    how = mine[0]["words"].partition(":")[2].strip() if mine else ""
    how = re.sub(r"towards (\w+) at .*?: [\w ]+", r"towards \1", how)
    count = sum(_counted(path, name, wanted, right) for name in set(wanted))
    cells = (
        f"ID_{number} {path.stem}", len(wanted), count, how,
        f"{said['seconds']:.1f}", said["runs"], left,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |", (len(wanted), count, said, left)


def _counted(path: Path, name: str, wanted: list[str], right: list[dict[str, Any]]) -> int:
    """Count the labels of an operation that are found; all of them, where every call of it is.

    A call in a function that runs twice has two labels.
    """
    found, labelled = sum(x["name"] == name for x in right), wanted.count(name)
    calls = sum(
        isinstance(node, ast.Call)
        and name in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    return labelled if 0 < calls <= found else min(found, labelled)


def runs(grist: Path, ranum: Path, numbers: list[str], seconds: float) -> None:
    """Print what ``anynan run`` says of programs, as they are and driven to their NaN."""
    print(f"| program | label | {CLEAN} iterations | the benchmark's search | told of its NaN |")
    print("| --- | --- | --- | --- | --- |")
    every = []
    for number in numbers:
        line, known = run_row(grist, ranum, number, seconds)
        print(line, flush=True)
        every.append(known)
    silent, right = ([known[i] for known in every if known[i] is not None] for i in (0, 1))
    print(
        f"\nno word of {sum(map(bool, silent))} of {len(silent)} that run; right operation and "
        f"line of {sum(map(bool, right))} of {len(right)} that reached a NaN\n"
    )


def hunts(grist: Path, ranum: Path, numbers: list[str]) -> None:
    """Print what ``anynan.stress`` finds in programs as they are."""
    print("| program | labels | found, right line | by | seconds | runs | after the fix |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    every = []
    for number in numbers:
        line, known = hunt_row(grist, ranum, number)
        print(line, flush=True)
        every += [] if known is None else [known]
    seconds = [said["seconds"] for _, _, said, _ in every]
    total, found = (sum(item[i] for item in every) for i in (0, 1))
    print(
        f"\n{len(every)} programs, {found} of {total} labels; seconds: median "
        f"{statistics.median(seconds):.1f}, most {max(seconds):.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("grist", type=Path)
    parser.add_argument("ranum", type=Path)
    parser.add_argument("--only", nargs="+", default=[*TORCH, *TENSORFLOW])
    parser.add_argument("--seconds", type=float, default=400, help="of a search")
    parser.add_argument("--no-run", action="store_true")
    parser.add_argument("--no-hunt", action="store_true")
    chosen = parser.parse_args()
    grist, ranum = chosen.grist.resolve(), chosen.ranum.resolve()
    if not chosen.no_run:
        runs(grist, ranum, chosen.only, chosen.seconds)
    if not chosen.no_hunt:
        hunts(grist, ranum, [number for number in chosen.only if number in TORCH])


if __name__ == "__main__":
    if sys.argv[1] == "--hunt":
        hunt(Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
    elif sys.argv[1] == "--run":
        words = sys.argv[2:]
        sys.exit(run(Path(words[0]), Path(words[1]), int(words[2]), float(words[3])))
    else:
        main()
