"""``anynan doctor``: what is installed here, and what of it can be watched."""

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anynan._base.about import ADAPTERS, __version__, installed
from anynan._cli.statuses import BAD, FINE

# Each framework is asked in a process of its own: one that crashes or hangs is a line too.
SECONDS = 120
_ASK = """
import json, sys, warnings
warnings.simplefilter("ignore")
import {name}
from anynan._base.about import version_of
from anynan.{name} import doctor
said = version_of({name}), doctor.devices(), doctor.WATCHED, doctor.UNWATCHED
print("\\n" + json.dumps(said))
"""
_READERS = ("h5py", "tensorstore")


def add(commands: Any) -> None:
    """Enter the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="show what is installed and what can be watched: anynan doctor",
        description="Show frameworks, versions and devices, and what can be watched. "
        "Paste it into an issue.",
        epilog="example: anynan doctor\n"
        "exit status: 0 all that is installed works, 1 something of it does not",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print what is here.

    Returns:
        The exit status: 1 if a framework is installed and cannot be used.
    """
    print(f"anynan {__version__}, Python {platform.python_version()}, {platform.platform()}")
    set_to = os.environ.get("ANYNAN")
    _say("ANYNAN", "not set" if set_to is None else f"{set_to!r} overrides every action")
    _say("numpy", f"{installed('numpy')}, array-api-compat {installed('array-api-compat')}")
    _say("", "watched: functions over arrays, and single arrays")
    status = FINE
    with ThreadPoolExecutor() as pool:  # each waits for a process
        for name, (lines, works) in zip(ADAPTERS, pool.map(_asked, ADAPTERS), strict=True):
            for i, line in enumerate(lines):
                _say(name if i == 0 else "", line)
            status = status if works else BAD
    readers = [f"{name} {installed(name) or 'not installed'}" for name in _READERS]
    _say("scan", ", ".join(readers))
    return status


def _say(name: str, text: str) -> None:
    print(f"  {name.ljust(11)} {text}", flush=True)


def _asked(name: str) -> tuple[list[str], bool]:
    """Tell of one framework, and whether it works or is not there."""
    from importlib.util import find_spec

    if find_spec(name) is None:
        return [f'not installed: pip install "anynan[{name}]"'], True
    try:
        done = subprocess.run(  # noqa: S603  this interpreter, and code of ours
            [sys.executable, "-c", _ASK.format(name=name)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return [f"installed, but did not answer within {SECONDS} s"], False
    try:
        version, devices, watched, unwatched = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return [f"installed, but cannot be used: {said}"], False
    told = [f"{version}, {', '.join(devices)}", f"watched: {watched}", f"not watched: {unwatched}"]
    return told, True
