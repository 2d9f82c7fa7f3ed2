"""``anynan.stress`` on the PyTorch programs of GRIST, as they are, against RANUM's labels.

``python -m tests.benchmarks.grist GRIST RANUM`` takes checkouts of Jacob-yen/GRIST and of
llylly/RANUM, and prints the table of docs/stress-measured.md. A program runs in a process of its
own up to its training loop, whose body is hunted in. RANUM says which operations are defective;
the line is right if it is in the loop, or in what the loop calls, and the operation is written on
it. Then the fix that the report names is put into the program, and the hunt must not find it again.
"""

import ast
import functools
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

PROGRAMS = {
    "22": "My_pytorch1", "23": "ch5.3_softmax", "26": "0401_logistic_regression",
    "27": "0503_softmax_regression_cost", "32": "0504_softmax_regression",
    "33": "logistic_classification", "34": "softmax_classification",
    "37": "lab-05-1-logistic_regression", "38": "lab-09-1-xor", "46": "torch20_softmax",
    "47": "torch21_Softmax_Reg1", "51": "rbm", "53": "h02_20191644", "54": "h03_20191644",
    "56": "01_Logistic_Regression", "57": "03_softmax_cost", "62": "denoising_RBM", "63": "main",
}  # fmt: skip
# Vendored copies of old libraries, whose extensions no current PyTorch loads.
LEFT_OUT = ("4", "5", "12", "13")
_IMAGES, _LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


def stand_in(grist: Path) -> None:
    """Put stubs in the place of what the programs import and the search does not need."""
    import torch

    class Scheduler:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def loss_checker(self, *args: Any) -> None: ...

        def check_time(self) -> None: ...

    class Images(torch.utils.data.Dataset[Any]):
        """The images that are in the checkout."""

        def __init__(self, *args: Any, **options: Any) -> None:
            folder = grist / "scripts/study_case/data/MNIST/raw"
            held = [gzip.decompress((folder / name).read_bytes()) for name in (_IMAGES, _LABELS)]
            raw = torch.frombuffer(bytearray(held[0][16:]), dtype=torch.uint8)
            self.images = raw.reshape(-1, 1, 28, 28).float() / 255
            self.labels = list(held[1][8:])

        def __getitem__(self, i: int) -> tuple[Any, int]:
            return self.images[i], self.labels[i]

        def __len__(self) -> int:
            return len(self.labels)

    modules = {name: types.ModuleType(name) for name in ("scripts", "scripts.utils")}
    utils: Any = types.ModuleType("scripts.utils.torch_utils")
    utils.TorchScheduler = Scheduler
    vision: Any = types.ModuleType("torchvision")
    vision.datasets = MagicMock(MNIST=Images, FashionMNIST=Images)
    vision.transforms, vision.utils = MagicMock(), MagicMock()
    sys.modules.update(modules)
    sys.modules.update({"scripts.utils.torch_utils": utils, "torchvision": vision})
    for name in ("datasets", "transforms", "utils"):
        sys.modules[f"torchvision.{name}"] = getattr(vision, name)
    for name in ("matplotlib", "matplotlib.pyplot", "seaborn"):
        sys.modules.setdefault(name, MagicMock())


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


def child(grist: Path, path: Path, fixes: dict[str, str]) -> None:
    """Hunt in one program, and print what was found as JSON."""
    stand_in(grist)
    from anynan._apps.run.program import load
    from anynan._apps.stress.hunt import stress
    from anynan._apps.stress.script import hunt_in

    os.chdir(path.parent)
    sys.path[0] = str(path.parent)
    if fixes:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for operation, fix in fixes.items():
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


def labels(ranum: Path, number: str) -> list[str]:
    """Give the operations that RANUM names defective."""
    folder = ranum / "empirical_study/precond/immediate"
    return [
        name.lower()
        for file in sorted(folder.glob(f"{number}*_ranum.txt"))
        if re.fullmatch(rf"{number}[a-y]?_ranum\.txt", file.name)
        for name in re.findall(r"optype (\w+)", file.read_text())
    ]


def hunted(grist: Path, path: Path, fixes: dict[str, str]) -> dict[str, Any] | str:
    """Run a child."""
    words = [sys.executable, "-m", "tests.benchmarks.grist", "--child", str(grist), str(path)]
    done = subprocess.run(
        [*words, json.dumps(fixes)], capture_output=True, encoding="utf-8", check=False, timeout=300
    )
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2]
    read: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return read


def row(grist: Path, ranum: Path, number: str, name: str) -> tuple[str, Any]:
    """Give a program's line of the table."""
    path = grist / "scripts/study_case" / f"ID_{number}" / f"{name}.py"
    wanted = labels(ranum, number)
    said = hunted(grist, path, {})
    if isinstance(said, str):
        return f"| ID_{number} {name} | {len(wanted)} | not run: {said} | | | |", None
    mine = [x for x in said["found"] if x["name"] in wanted]
    right = [x for x in mine if f"{x['name']}(" in (x["text"] or "")]
    fixes = {x["name"]: x["tried"]["repair"] for x in mine if x["tried"] and x["tried"]["repair"]}
    again = hunted(grist, path, fixes) if fixes else "no fix was tried"
    left: Any = again
    if not isinstance(again, str):
        left = len([x for x in again["found"] if x["name"] in wanted])
    how = mine[0]["words"].partition(":")[2].strip() if mine else ""
    how = re.sub(r"towards (\w+) at .*?: [\w ]+", r"towards \1", how)
    count = min(len(right), len(wanted))
    cells = (
        f"ID_{number} {name}", len(wanted), count, how,
        f"{said['seconds']:.1f}", left,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |", (len(wanted), count, said, left)


def main() -> None:
    """Print the table."""
    grist, ranum = (Path(word).resolve() for word in sys.argv[1:3])
    only = sys.argv[3:]
    print("| program | labelled defects | found, right line | by | seconds | after the fix |")
    print("| --- | --- | --- | --- | --- | --- |")
    every = []
    for number, name in PROGRAMS.items():
        if only and number not in only:
            continue
        line, known = row(grist, ranum, number, name)
        print(line, flush=True)
        every += [] if known is None else [known]
    seconds = [said["seconds"] for _, _, said, _ in every]
    total, found = (sum(item[i] for item in every) for i in (0, 1))
    print(
        f"\n{len(every)} programs, {found} of {total} defects; seconds: median "
        f"{statistics.median(seconds):.1f}, most {max(seconds):.1f}"
    )


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        main()
