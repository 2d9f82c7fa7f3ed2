"""What was seen of one program, as a line of JSON."""

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
YES = "yes"
LEVELS = ("step", "layer", "operation")


def placed(event: Any) -> str:
    """Say in a line what an event says: phase, layer, weight, operation, line and cause."""
    operation, cause = event.operation, event.cause
    where = operation.source if operation is not None else None
    words = [
        event.phase,
        f"layer {event.layer}",
        event.parameter,
        operation.name if operation is not None else "no operation",
        where.text if where is not None else "no line",
        cause.tag if cause is not None else "no cause",
    ]
    return ", ".join(word for word in words if word)


def alarm(event: Any, events: Iterable[Any], new: Iterable[str]) -> str:
    """Say what a clean run was told: what ended it, what is bad, and the warnings that are new."""
    bad = next((event for event in events if event.severity == "bad"), None)
    if event is not None or bad is not None:
        return f"alarm: {placed(event or bad)}"
    return next((f"warning: {text[:300]}" for text in sorted(new)), YES)


def marked(file: str, fault: str) -> set[int]:
    """Find the lines of a file that a fault was put in: they end in ``# fault: <its name>``."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return {number for number, text in enumerate(lines, 1) if text.endswith(f"# fault: {fault}")}


@dataclass
class Fault:
    """A fault put at a known place, and what was said of it.

    Each answer is True, False, or None where there is nothing to be right about: the line of an
    overflow inside a library, the layer of code without layers.
    """

    kind: str
    place: str
    detected: bool = False
    layer: bool | None = None
    operation: bool | None = None
    line: bool | None = None
    cause: bool | None = None
    said: str = ""
    left_out: str = ""  # why it was not put there: nothing overflows, no layer has a weight

    def judge(self, event: Any, operation: str, lines: set[int], cause: str) -> None:
        """Compare what was said with the operation, its line and the cause that are right."""
        self.detected, self.said = True, placed(event)
        made = event.operation
        source = made.source if made is not None else None
        self.operation = made is not None and made.name == operation
        self.line = source is not None and source.line in lines
        self.cause = event.cause is not None and event.cause.tag == cause


ANSWERS = ("layer", "operation", "line", "cause")


@dataclass
class Row:
    """What one program did at one level.

    ``identical``, ``silent`` and ``clean`` are empty where they do not apply, ``yes``, or what was
    wrong; ``identical`` may also be ``within ...``. With ``skipped`` the program could not run
    even without `anynan`; with ``error`` it ended otherwise than it does without.
    ``seconds`` are those of the processor, so that a busy machine changes nothing.
    """

    suite: str
    case: str
    level: str = ""
    identical: str = ""
    silent: str = ""
    clean: str = ""
    faults: list[Fault] = field(default_factory=list)
    error: str = ""
    skipped: str = ""
    seconds: float = 0.0
    versions: str = ""
    anynan: str = ""
    date: str = ""

    def differences(self) -> Iterator[tuple[str, str]]:
        """Give what went wrong as ``(what, said)``: ``silent``, ``divide.layer``, ``error``."""
        if self.error:
            yield "error", self.error
        for what in ("identical", "silent", "clean"):
            said = getattr(self, what)
            if said and said != YES and not said.startswith("within "):
                yield what, said
        for fault in self.faults:
            if fault.left_out:
                continue
            where = f"{fault.place}: {fault.said}"
            if not fault.detected:
                yield f"{fault.kind}.detected", where
                continue
            for answer in ANSWERS:
                if getattr(fault, answer) is False:
                    yield f"{fault.kind}.{answer}", where


@dataclass(frozen=True)
class Known:
    """A difference that is listed; ``case``, ``level`` and ``what`` are globs."""

    suite: str
    case: str
    what: str
    reason: str
    level: str = "*"
    said: str = "*"

    def covers(self, row: Row, what: str, said: str) -> bool:
        """Tell whether a row's difference is this one."""
        pairs = zip(
            (row.suite, row.case, row.level, what, " ".join(said.split())),
            (self.suite, self.case, self.level, self.what, self.said),
            strict=True,
        )
        return all(fnmatchcase(value, pattern) for value, pattern in pairs)


def wanted(case: str, level: str, kind: str) -> bool:
    """Tell whether a fault is put at a level: all at `layer`, half of them at each other."""
    return level == "layer" or zlib.crc32(f"{case} {level} {kind}".encode()) % 2 == 0


def reason_for(known: Iterable[Known], row: Row, what: str, said: str) -> str | None:
    return next((entry.reason for entry in known if entry.covers(row, what, said)), None)


def versions_of(packages: Iterable[str]) -> str:
    """Name the versions of packages, as ``torch 2.13.0, timm 1.0.31``."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package).split('+')[0]}")
        except PackageNotFoundError:
            found.append(f"{package} missing")
    return ", ".join(found)


def state_of_anynan(adapters: Iterable[str]) -> str:
    """Tell one state of the sources from another: of the core, and of what a suite adapts to."""
    digest = hashlib.sha256()
    for folder in ("anynan", *(f"adapters/{name}" for name in adapters)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def write(path: Path, row: Row) -> None:
    """Append a row; ``date`` is today's."""
    row.date = datetime.now(UTC).date().isoformat()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def from_dict(data: dict[str, Any]) -> Row:
    return Row(**{**data, "faults": [Fault(**fault) for fault in data["faults"]]})


def read(path: Path) -> list[Row]:
    """Read the newest rows of every case: those of its last run."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for line in lines:
        try:
            row = from_dict(json.loads(line))
        except (ValueError, TypeError, KeyError):
            continue  # the last line of a run that was stopped
        of_case = rows.setdefault((row.suite, row.case), {})
        made = {(other.versions, other.anynan) for other in of_case.values()}
        # A row without a level is the last of its run.
        if {row.level, ""} & of_case.keys() or made - {(row.versions, row.anynan)}:
            of_case.clear()
        of_case[row.level] = row
    return [row for of_case in rows.values() for row in of_case.values()]
