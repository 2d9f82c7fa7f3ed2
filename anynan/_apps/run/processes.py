"""The processes that a program starts: they are watched, too."""

import multiprocessing.spawn
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import anynan
from anynan._apps.run.messages import PROCESS_UNWATCHED
from anynan._apps.run.telling import tell
from anynan._apps.run.told import NOBODY, SILENT, Heard, Told, heard
from anynan._apps.run.watching import Asked, Watch
from anynan._base.escaping import name as printed
from anynan._base.patches import Patches
from anynan._base.sources import is_library

_ROOT = str(Path(anynan.__file__).parents[1])
# Python's own options that change nothing of what can be imported.
_PLAIN = re.compile(r"-[bBdOquv]+")
_PATH = "PYTHONPATH"
_PYTHON = re.compile(r"\bpython[\d.]*\b|\.py\b|\b(torchrun|accelerate|deepspeed)\b")
_inside: list["Processes"] = []


class Processes:
    """Have what this process starts watched while inside.

    What starts a script of the user's by this interpreter starts it under ``anynan run``: a rank
    that is watched waits for the others to agree on each step, and they would never come. What
    `multiprocessing` starts watches itself, and leaves it to the program to tell what came of it.

    Args:
        asked: How.
        watch: What watches this process; a fork of it holds the same.
        own: The name by which the running program starts itself again.
    """

    def __init__(self, asked: Asked, watch: Watch, own: str = "") -> None:
        self._asked, self._watch, self._own = asked, watch, own
        self._first, self._process = asked.within is None, os.getpid()
        self._patches, self._others = Patches(), dict[str, None]()

    def __enter__(self) -> Self:
        """Begin."""
        _inside.append(self)
        self._patches.change(multiprocessing.spawn, "get_preparation_data", self._prepared)
        self._patches.change(BaseProcess, "start", self._start)
        self._patches.change(BaseProcess, "_bootstrap", self._bootstrap)
        self._patches.change(subprocess.Popen, "__init__", self._popen)
        return self

    def __exit__(self, *_: object) -> None:
        """Go back to what was."""
        self._patches.undo()
        _inside.remove(self)

    def _prepared(self, given: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
        """Have a process begin to watch before it imports the program."""
        return lambda name: {**given(name), **self._sent()}

    def _sent(self) -> dict[str, Any]:
        self._have_folder()
        same = os.fsdecode(multiprocessing.spawn.get_executable()) == sys.executable
        return {"_anynan": _Watched(self._asked)} if same else {}

    def _start(self, start: Callable[[Any], None]) -> Callable[[Any], None]:
        def begin(process: Any) -> None:
            vars(process).update(self._sent())  # joblib's prepare by themselves
            try:
                start(process)
            finally:
                vars(process).pop("_anynan", None)

        return begin

    def _bootstrap(self, bootstrap: Callable[..., int]) -> Callable[..., int]:
        def run(process: Any, *rest: Any, **given: Any) -> int:
            if os.getpid() != self._process:
                self._process = os.getpid()
                self._watch.forked()
            told = self._watch.telling(str(self._asked.within), process.name)
            try:
                with self._watch.errors:
                    return bootstrap(process, *rest, **given)
            finally:
                with suppress(Exception):  # its own end is the user's, whatever we fail at
                    self._end(process.name, told)

        return run

    def _end(self, name: str, told: Told) -> None:
        """Tell how a process ended, without a look at anything where nothing ran."""
        if self._watch.idle():
            return
        ending = self._watch.close(None, SILENT)
        lines = tell(self._asked, self._watch, ending, name=name)
        shown = ending.harmed or not self._watch.found.minor
        told.ended(lines if shown else [], harmed=ending.harmed)

    def _popen(self, start: Callable[..., None]) -> Callable[..., None]:
        def begin(process: Any, args: Any, *rest: Any, **given: Any) -> None:
            with suppress(Exception):  # what cannot be read as a command is the user's business
                args = self._command(args, given)
            return start(process, args, *rest, **given)

        return begin

    def _command(self, args: Any, given: dict[str, Any]) -> Any:
        """Give the command that is run in the place of one, which stays where it is another's."""
        at = program_in(args, own=self._own, **given)
        if at:
            self._have_folder()
            return [*args[:at], "-m", "anynan", "run", *self._asked.words(), *args[at:]]
        words = args if isinstance(args, list | tuple) else [args]
        other = _PYTHON.search(" ".join(map(str, words)))
        if other is not None:
            self._others[printed(other[0])] = None
        return args

    def _have_folder(self) -> None:
        if self._asked.within is None:
            self._asked = self._asked._replace(within=tempfile.mkdtemp(prefix="anynan-"))

    def heard(self) -> Heard:
        """Give what came of them, and note what ran unwatched; the first process is asked, once."""
        if self._asked.within is None or not self._first or os.getpid() != self._process:
            told = NOBODY
        else:
            told = heard(self._asked.within)
            shutil.rmtree(self._asked.within, ignore_errors=True)
        if not (told.any or self._watch.found.added):
            for name in self._others:
                self._watch.found.unwatched(PROCESS_UNWATCHED(what=name))
        return told


def program_in(args: Any, *, own: str = "", **given: Any) -> int:
    """Find the user's program in a command that starts it by this interpreter.

    Args:
        args: The command.
        own: The name by which the running program starts itself again.
        given: What else `subprocess.Popen` is given.

    Returns:
        Where it begins; 0 where there is none, or where the process would not find anynan.
    """
    words = [*map(os.fsdecode, args)] if isinstance(args, list | tuple) else []
    at, folder, there = 1, given.get("cwd"), given.get("env")
    while at < len(words) and _PLAIN.fullmatch(words[at]):
        at += 1
    apart = there is not None and there.get(_PATH) != os.environ.get(_PATH)
    apart = apart or (folder is not None and os.getcwd() == _ROOT)
    if apart or given.get("executable") or at >= len(words) or words[0] != sys.executable:
        return 0
    if words[at] == "-m":
        module = (words[at + 1 :] or [""])[0]
        theirs = module == own or (folder is None and _is_users(module))
    else:
        path = os.path.abspath(os.path.join(os.fsdecode(folder or ""), words[at]))
        theirs = not words[at].startswith("-") and os.path.isfile(path) and not is_library(path)
    return at if theirs else 0


def _is_users(module: str) -> bool:
    """Tell whether a module is of the user's own."""
    package = module.partition(".")[0]
    spec = find_spec(package) if package.isidentifier() else None
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    file = next((place for place in places if place), None)
    return file is not None and not is_library(os.path.join(file, ""))


class _Watched:
    """Begin to watch a process that does not share this one's memory, as it is sent there."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, (self._asked,)


def _begin(asked: Asked) -> None:
    """Watch the process of `multiprocessing` that this is, which is about to run."""
    if not _inside:
        Processes(asked, Watch(asked)).__enter__()
