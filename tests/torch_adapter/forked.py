"""Programs under ``anynan run``, in forks of one process that has PyTorch imported already."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import NamedTuple

from tests.processes import ROOT

# A fork that took its modules apart as it ends would copy all that they hold.
_SERVER = """
import atexit, gc, json, os, sys
import torch, torch._dynamo  # which the first optimizer's step asks for
import anynan.arrays, anynan.torch, anynan._apps.run.command
from anynan._cli.commands import main

gc.freeze()
for line in sys.stdin:
    folder, words = json.loads(line)
    child = os.fork()
    if not child:
        torch.manual_seed(0)  # a process of its own draws other numbers each time
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
        status = main(words)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start what forks; it ends with this process, which holds its input."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


class Ran(NamedTuple):
    """Say what came of a program."""

    status: int
    out: str
    said: str

    @property
    def first(self) -> str:
        """Give the first report alone."""
        return self.said.partition("AnynanWarning")[2].partition("anynan: ")[0]

    def tells(self, *texts: str) -> None:
        """Hold that each of the texts was said."""
        for text in texts:
            assert text in self.said

    def fails(self, *texts: str) -> None:
        """Hold that ``--fail`` ended the program so, and that each of the texts was said."""
        assert self.status == 1
        self.tells(*texts)


def run(folder: Path, program: str, *options: str) -> Ran:
    """Run a program as it is, and give its status, its output and what anynan said."""
    script = folder / "script.py"
    script.write_text(dedent(program), encoding="utf-8")
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([str(folder), ["run", *options, str(script)]]), file=server.stdin, flush=True)
    status = int(server.stdout.readline())
    out, said = ((folder / name).read_text("utf-8") for name in ("out", "err"))
    return Ran(status, out, " ".join(said.split()))


SGD, LINEAR = "SGD(model.parameters(), lr=0.1)", "model = torch.nn.Linear(4, 3)"


def training(loss: str, before=LINEAR, after="", *, steps=4, optimizer=SGD) -> str:
    """Write a program that makes a model, trains it on a loss, and does more in each step."""
    return f"""import torch
{dedent(before).strip()}
optimizer = torch.optim.{optimizer}
for i in range({steps}):
    loss = {loss}
    optimizer.zero_grad(); loss.backward(); optimizer.step()
{indent(dedent(after).strip(), "    ")}
"""
