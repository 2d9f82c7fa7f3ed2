"""Run a bundle's operation again, in a process of its own, and compare it with the event."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from anynan._apps.bundle.bundle import SCRIPT, Bundle
from anynan._apps.bundle.script import TENSORS, results
from anynan._base.about import installed, versions

SECONDS = 300
_WORDS = {"nan": "NaN", "posinf": "Inf", "neginf": "-Inf"}


@dataclass(frozen=True)
class Outcome:
    """Say what came of it.

    Attributes:
        text: In a sentence.
        same: Whether it is as in the event; None where nothing could be compared.
        printed: What the script printed.
    """

    text: str
    same: bool | None
    printed: str = ""


def replay(bundle: Bundle) -> Outcome:
    """Run the script that was made from the bundle's facts, on the tensors whose hash was right."""
    with tempfile.TemporaryDirectory(prefix="anynan-") as folder:
        with open(os.path.join(folder, TENSORS), "wb") as tensors:
            tensors.write(bundle.tensors)
        path = os.path.join(folder, SCRIPT)
        with open(path, "w", encoding="utf-8") as file:
            file.write(bundle.script)
        try:
            done = subprocess.run(  # noqa: S603  this interpreter, and code made here
                [sys.executable, path],
                cwd=folder, capture_output=True, encoding="utf-8", errors="replace",
                timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(f"the operation did not end within {SECONDS} s", None)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Outcome(f"the operation could not be run here: {last}", None, done.stdout)
    return compare(bundle, done.stdout)


def compare(bundle: Bundle, printed: str) -> Outcome:
    """Compare what the script printed with what the event tells."""
    call, found = bundle.call, results(printed)
    if call is None:
        text = "no operation is known to have made it, so none was run: its tensors are shown"
        return Outcome(text, None, printed)
    if call.unwritable:
        return Outcome(f"the operation was not run: {call.unwritable}", None, printed)
    seen = next((item for item in found if _told(item)), None)
    if seen is None:
        text = f"the same operation gives finite numbers here{_apart(bundle)}"
        return Outcome(text, False, printed)
    now, expected = _told(seen), call.expected
    kind = "NaN" if seen["nan"] else "Inf"
    if expected is None:
        part = f" ({call.cut})" if call.cut else ""
        what = (
            "gradient of the same operation is" if call.gradient else "same operation's result is"
        )
        alike = kind == "NaN" or bundle.event.kind != "nan"  # Inf may become NaN
        return Outcome(f"the {what} bad here, too: {now}{part}", alike, printed)
    if seen["first"] == expected["first"] and _counts(seen) == _counts(expected):
        return Outcome(f"the same operation gives the same {kind} here: {now}", True, printed)
    text = f"the same operation is bad here, too, but gives {now}, and gave {_told(expected)}"
    return Outcome(text + _apart(bundle), False, printed)


def _counts(item: dict[str, Any]) -> tuple[int, ...]:
    return tuple(item[key] for key in _WORDS)


def _told(item: dict[str, Any]) -> str:
    """Say how many are bad, in words; nothing if none is."""
    counts = [f"{item[key]} {word}" for key, word in _WORDS.items() if item[key]]
    return f"{', '.join(counts)}, first at {item['first']}" if counts else ""


def _apart(bundle: Bundle) -> str:
    """Say what is not the same here."""
    here = {**versions(None), bundle.framework: installed(bundle.framework)}
    other = [
        f"{name} was {text} and is {here[name]}"
        for name, text in bundle.versions.items()
        if here.get(name) and here[name] != text
    ]
    output = None if bundle.event.operation is None else bundle.event.operation.output
    if output is not None and output.device not in ("", "cpu"):
        other.append(f"it was seen on {output.device}")
    return f" ({'; '.join(other)})" if other else ""
