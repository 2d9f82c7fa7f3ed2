"""A finding as a test: its inputs stand in the code, or beside it where they are large."""

import keyword
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np

from anynan._apps.stress.inputs import Array
from anynan._apps.stress.lab import Lab

_INLINE = 64  # numbers up to which an array stands in the code
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LARGE = "LARGE"
_IN, _WIDTH = "    ", 88


@dataclass(frozen=True, slots=True)
class Origin:
    """Say what was run, so that a test can run it again.

    Attributes:
        target: A target, or the path of a script.
        example: What it was called with, or the script's arguments.
        lab: Runs it.
        arrays: The arrays of the example that a hunt changes, by name.
    """

    target: Any
    example: tuple[Any, ...]
    lab: Lab
    arrays: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """Hold what one test needs.

    Attributes:
        words: What was done to the example.
        said: What it came to, in a line.
        inputs: By name.
        steps: Of training on the example before it.
        mode: How it was run.
    """

    words: str
    said: str
    inputs: Mapping[str, Array]
    steps: int
    mode: str


def write(path: str, origin: Origin, kept: Sequence[Kept], target: str | None) -> None:
    """Write a test for each finding, and large arrays to a file beside it.

    Raises:
        ValueError: If no name leads to the target, or an argument cannot be written.
        FileExistsError: If there is a file already.
    """
    module, name = _named(origin.target, target)
    tests = _Tests(origin, name)
    body = [tests.of(number, found) for number, found in enumerate(kept, 1)]
    imports = ["import numpy as np", *origin.lab.imports]
    used = [
        line
        for line in imports
        if tests.large or any(f"{line.split()[-1]}." in text for text in body)
    ]
    head = ["from pathlib import Path", ""] if tests.large else []
    head += [*sorted(used), *([f"from {module} import {name}"] if module else [])]
    head += ["", "import anynan", ""]
    if tests.large:
        head += ['with np.load(Path(__file__).with_suffix(".npz")) as file:']
        head += [f"    {_LARGE} = dict(file)", ""]
    about = '"""Inputs that anynan.stress found: a test fails until its fault is mended."""\n'
    with open(path, "x", encoding="utf-8") as file:
        file.write("\n".join([about, *head, *(f"\n{text}" for text in body)]))
    if tests.large:
        np.savez(f"{os.path.splitext(path)[0]}.npz", allow_pickle=False, **tests.large)


def _named(found: Any, target: str | None) -> tuple[str, str]:
    """Say from where to import a target, and what it is called there."""
    if isinstance(found, str):
        return "", repr(found)
    if target is not None:
        module, _, name = target.partition(":")
        return module, name
    module, name = getattr(found, "__module__", None) or "", getattr(found, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not found:
        msg = (
            "to_pytest() knows no module to import the target from: put it into one, and name "
            'it, as in target="module:name"'
        )
        raise ValueError(msg)
    return module, name


class _Tests:
    """Write the tests of one target.

    Attributes:
        large: Arrays that do not stand in the code.
    """

    def __init__(self, origin: Origin, name: str) -> None:
        self._origin, self._name = origin, name
        self._names = {id(x): name for name, x in origin.arrays.items()}
        self.large: dict[str, Array] = {}

    def of(self, number: int, kept: Kept) -> str:
        """Write one test."""
        lab = self._origin.lab
        # The training before it is on the example; else what was found is the argument itself.
        start = {name: lab.host(x) for name, x in self._origin.arrays.items()}
        given, lines = {**start, **({} if kept.steps else kept.inputs)}, list[str]()
        local: dict[str, str] = {}

        def array(x: Any) -> str:
            known = self._names.get(id(x))
            name = f"x{len(local)}" if known is None or not _free(known, self._name) else known
            key = f"x{id(x)}" if known is None else known
            if key not in local:
                numbers = self._array(f"{number}.{name}", given[known] if known else lab.host(x))
                lines.append(f"{name} = {lab.code(x).format(numbers)}")
                local[key] = name
            return local[key]

        args = [_value(x, array, lab) for x in self._origin.example]
        found = {
            name: self._array(f"{number}.found.{name}", x)
            for name, x in kept.inputs.items()
            if (kept.steps or name not in local)
            and not (name in start and np.array_equal(x, start[name]))
        }
        keys = [f'"{name}": {code}' for name, code in found.items()]
        parts = [f'"inputs": {{{", ".join(keys)}}}'] if keys else []
        parts += [f'"steps": {kept.steps}'] if kept.steps else []
        parts += [f'"mode": "{kept.mode}"'] if kept.mode else []
        call = ", ".join([self._name, *args, f"found={{{', '.join(parts)}}}"])
        lines += [f"report = anynan.stress({call})", "assert report.ok, report"]
        title = "_".join("".join(c if c.isalnum() else " " for c in kept.words).split()).lower()
        about = kept.said.replace("\\", "\\\\").replace('"', "'")
        about = fill(f'"""{about}"""', _WIDTH, initial_indent=_IN, subsequent_indent=_IN)
        code = [f"def test_{number}_{title}():", about]
        return "\n".join([*code, *(f"{_IN}{line}" for line in lines), ""])

    def _array(self, key: str, x: Array) -> str:
        """Write an array of NumPy's."""
        if x.size and (x == x.flat[0]).all():
            return f'np.full({x.shape}, {_number(x.flat[0].item())}, dtype="{x.dtype}")'
        if not x.size:
            return f'np.zeros({x.shape}, dtype="{x.dtype}")'
        if x.size > _INLINE:
            self.large[key] = x
            return f'{_LARGE}["{key}"]'
        with np.printoptions(nanstr="np.nan", infstr="np.inf", floatmode="unique"):
            rows = np.array2string(x, separator=", ", max_line_width=_WIDTH, prefix=" " * 8)
        return f'np.array(\n        {rows},\n        dtype="{x.dtype}",\n    )'


def _free(name: str, target: str) -> bool:
    taken = (target, "np", "anynan", "report", _LARGE)
    return name.isidentifier() and not keyword.iskeyword(name) and name not in taken


def _number(x: Any) -> str:
    text = repr(x)
    return f'float("{text}")' if text.strip("-") in ("nan", "inf") else text


def _value(x: Any, array: Any, lab: Lab) -> str:
    """Write an argument."""
    if lab.changes(x):
        return str(array(x))
    if isinstance(x, dict):
        return f"{{{', '.join(f'{k!r}: {_value(v, array, lab)}' for k, v in x.items())}}}"
    if type(x) in (list, tuple):
        items = "".join(f"{_value(item, array, lab)}, " for item in x)
        return f"[{items}]" if isinstance(x, list) else f"({items})"
    if isinstance(x, _PLAIN):
        return _number(x)
    msg = f"to_pytest() cannot write the argument {x!r:.60}: give stress() a function of arrays"
    raise ValueError(msg)
