"""Programs under ``anynan run``, in forks of one process that has PyTorch imported already."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

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


def run(folder: Path, program: str, *options: str) -> tuple[int, str, str]:
    """Run a program as it is, and give its status, its output and what anynan said."""
    script = folder / "script.py"
    script.write_text(dedent(program), encoding="utf-8")
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([str(folder), ["run", *options, str(script)]]), file=server.stdin, flush=True)
    status = int(server.stdout.readline())
    out, said = ((folder / name).read_text("utf-8") for name in ("out", "err"))
    return status, out, " ".join(said.split())
