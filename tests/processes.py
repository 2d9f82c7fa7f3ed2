"""Python programs in processes of their own, which find the anynan that is tested."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import anynan

ROOT = Path(anynan.__file__).parents[1]
# Not the folder alone: a checkout is called that too, and an environment lies in it.
_OURS = re.compile(
    rf"\banynan/(?:{'|'.join(path.name for path in (ROOT / 'anynan').iterdir())})\b.*"
)


def python(*words: object, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run Python with these words; what it printed and how it ended is the caller's to judge."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True, encoding="utf-8", check=False, cwd=cwd, timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )  # fmt: skip


def ran(folder: Path, program: str, *words: str, options: tuple[str, ...] = ()) -> Any:
    """Run a program under ``anynan run``, if the framework that it imports first is here."""
    if needed := re.match(r"\s*import (torch|jax)\b", program):
        pytest.importorskip(needed[1])
    (folder / "p.py").write_text(program)
    return python("-m", "anynan", "run", *options, "p.py", *words, cwd=folder)


def frames_of_ours(said: str) -> list[str]:
    """Return what a traceback shows of anynan's own files."""
    return _OURS.findall(said)
