"""``anynan scan``: bad values in files of weights and arrays."""

import argparse
import json
import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self

from anynan._base.messages import left
from anynan._cli.statuses import BAD, FINE, TOLD, UNREADABLE, refuse, takes_ignore

if TYPE_CHECKING:
    from anynan._apps.scan.scan import File, Scanned

SHOWN = 5  # tensors of a file that are listed for their headroom
_TARGETS = ("float16", "bfloat16", "float8", "float8_e4m3fn", "float8_e5m2")
_HEADS = ("tensor", "dtype", "shape", "nan", "inf", "first", "min", "max", "headroom")


def add(commands: Any) -> None:
    """Enter the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "scan",
        help="find NaN and Inf in files of weights: anynan scan model.safetensors",
        description=(
            "Find NaN and Inf in safetensors, torch.save, npy, npz, HDF5, keras, GGUF and Orbax "
            "files. Nothing in them is run, and they may be larger than the memory."
        ),
        epilog=f"example: anynan scan checkpoints/ --as float16\n{TOLD}",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder of them")
    parser.add_argument(
        "--as",
        dest="target",
        choices=_TARGETS,
        help="also count what would overflow, or become zero, in this dtype",
    )
    parser.add_argument("--all", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each file")
    takes_ignore(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Look at files, and print what is in them.

    Args:
        chosen: The words of the command line.

    Returns:
        The exit status: 2 if something could not be read, else 1 if something is bad.
    """
    from anynan._apps.scan.scan import scan
    from anynan._files.formats import TARGETS

    status, seen = FINE, 0
    target = None if chosen.target is None else TARGETS[chosen.target]
    with _Bar() if sys.stderr.isatty() else nullcontext() as bar:
        for file in scan(chosen.paths, target, None if bar is None else bar.read):
            seen += 1
            if bar is not None:
                bar.clear()
            print(_as_json(file) if chosen.json else _as_text(file, chosen), flush=True)
            status = max(status, UNREADABLE if file.unread else BAD if file.bad else FINE)
    return status if seen else refuse("scan", "no file of weights or arrays in there")


class _Bar:
    """Show on the terminal how far the present file is."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()

    def read(self, path: str, nbytes: int, total: int) -> None:
        """Note what was read of a file."""
        with self._lock:
            if path not in self._tasks:
                self._tasks[path] = self._progress.add_task(path[-40:], total=total)
            self._progress.advance(self._tasks[path], nbytes)

    def clear(self) -> None:
        """Take the present file's bar away."""
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks.clear()


def _as_json(file: "File") -> str:
    from anynan.events import plain

    said = {
        "path": file.path,
        "format": file.format,
        "error": file.error,
        "tensors": [found.to_dict() for found in file.tensors],
    }
    return json.dumps(plain(said), allow_nan=False)


def _as_text(file: "File", chosen: argparse.Namespace) -> str:
    from anynan._base.escaping import name as printed
    from anynan._diagnosis.rules.evidence import group

    if file.error:
        return f"{printed(file.path)}: not read: {printed(file.error)}"
    looked = [found for found in file.tensors if found.tally is not None]
    bad = [found for found in looked if found.tally is not None and found.tally.bad]
    count = sum(found.tally.size for found in looked if found.tally is not None)
    many = f"{group(len(looked))} tensor{'' if len(looked) == 1 else 's'} of floats"
    lines = [
        f"{printed(file.path)}: {file.format}, {many}, {group(count)} numbers, "
        + (f"{group(file.bad)} not finite" if file.bad else "all finite")
    ]
    listed = file.tensors if chosen.all else _chosen(looked, bad, of_target=bool(chosen.target))
    if listed:
        lines += _table(listed, chosen.target)
    lines += [
        f"  {printed(found.tensor.name)}: not read: {printed(found.error)}"
        for found in file.tensors
        if found.error
    ]
    notes: dict[str, list[str]] = {}
    for found in file.tensors:
        if found.tensor.note and not found.error:
            notes.setdefault(found.tensor.note, []).append(found.tensor.name)
    for note in left(notes, chosen.ignore):
        names = notes[note]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"  {printed(names[0])}{more}: {printed(note)}")
    return "\n".join(lines)


def _chosen(looked: "list[Scanned]", bad: "list[Scanned]", *, of_target: bool) -> "list[Scanned]":
    """Choose what is listed: what is bad, else what is nearest to its limits."""
    if of_target:
        hit = [x for x in looked if x.tally and (x.tally.overflow or x.tally.flushed)]
        ranked = sorted(hit, key=lambda x: -(x.tally.overflow if x.tally else 0))
        return [*bad, *[x for x in ranked if x not in bad][:20]]
    ranked = sorted((x for x in looked if x.headroom is not None), key=lambda x: x.headroom or 0.0)
    return bad or ranked[:SHOWN]


def _table(listed: "tuple[Scanned, ...] | list[Scanned]", target: str | None) -> list[str]:
    from anynan._base.escaping import name as printed
    from anynan._base.tables import table

    heads = [*_HEADS, *([f"beyond {target}", f"0 in {target}"] if target else [])]
    rows = [[printed(cell) for cell in _row(found, target)] for found in listed]
    return [f"  {line}" for line in table([heads, *rows])]


def _row(found: "Scanned", target: str | None) -> list[str]:
    from anynan._diagnosis.rules.evidence import group, magnitude

    tensor, tally = found.tensor, found.tally
    row = [tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)) or "one number"]
    if tally is None:
        return [*row, *[""] * (len(_HEADS) - 3 + (2 if target else 0))]
    first = "" if found.first is None else f"[{', '.join(map(str, found.first))}]"
    ends = ["" if x is None else magnitude(x) for x in (tally.min, tally.max)]
    headroom = "" if found.headroom is None else f"{found.headroom:.1f} bits"
    row += [group(tally.nan), group(tally.posinf + tally.neginf), first, *ends, headroom]
    return [*row, *([group(tally.overflow), group(tally.flushed)] if target else [])]
