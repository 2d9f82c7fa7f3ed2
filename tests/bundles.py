"""Run the scripts of bundles: beside the test, or alone in a process that has no anynan."""

import contextlib
import io
import runpy
from pathlib import Path

import numpy as np

from anynan._apps.bundle.bundle import SCRIPT, load
from anynan._apps.bundle.replay import Outcome, compare
from tests.processes import python

# The script must not need anynan: an import of it would end here.
ALONE = """
import runpy, sys

class No:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "anynan":
            raise ImportError("anynan is not to be needed")

sys.meta_path.insert(0, No())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_alone(folder: Path) -> str:
    """Run the script in a process of its own; give what it printed."""
    done = python("-P", "-c", ALONE, folder / SCRIPT, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def again(folder: Path) -> tuple[str, Outcome]:
    """Run the script here, where the framework is loaded; give it, and what came of it."""
    found = load(str(folder))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), np.errstate():
        runpy.run_path(str(folder / SCRIPT))
    return found.script, compare(found, printed.getvalue())
