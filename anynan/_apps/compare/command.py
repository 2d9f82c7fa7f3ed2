"""``anynan compare``: two files of weights, or what two runs wrote."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anynan._base import products
from anynan._cli.statuses import BAD, FINE, refuse, says, takes_ignore
from anynan._diagnosis.rules.evidence import plural

if TYPE_CHECKING:
    from anynan._apps.compare.checkpoints import Weights

SHOWN = 12


def add(commands: Any) -> None:
    """Enter the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="find where two files of weights, or two runs, differ: anynan compare a b",
        description=(
            "Compare two files of weights tensor by tensor, or two runs step by step, from what "
            "tracker.to_jsonl(path) wrote. Two models are compared in Python: "
            "anynan.compare(a, b, batch)."
        ),
        epilog=(
            "example: anynan compare before.safetensors after.safetensors\n"
            "exit status: 0 no difference, 1 a difference, 2 a file that cannot be read"
        ),
    )
    parser.add_argument("first", help="safetensors, torch.save, npz, ..., or a run's .jsonl")
    parser.add_argument("second", help="the same kind of file")
    parser.add_argument(
        "--max-ratio",
        type=float,
        metavar="N",
        help="times what rounding to the coarser dtype explains; more is a difference (8)",
    )
    takes_ignore(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Compare two files, and print where they part.

    Args:
        chosen: The words of the command line.

    Returns:
        The exit status: 1 if they differ, 2 if one cannot be read.
    """
    from anynan._apps.compare.checkpoints import compare_weights
    from anynan._apps.compare.comparison import BEYOND
    from anynan._apps.compare.runs import compare_runs
    from anynan._files.tensors import UnreadableError

    load = products.part("runfile", "reading").load
    try:
        if _is_run(chosen.first) and _is_run(chosen.second):
            found = compare_runs(load(chosen.first), load(chosen.second))
            print(found.report(chosen.ignore))
            return FINE if found.step is None else BAD
        limit = BEYOND if chosen.max_ratio is None else chosen.max_ratio
        return _told(compare_weights(chosen.first, chosen.second), limit)
    except (OSError, ValueError, UnreadableError) as error:
        return refuse("compare", says(error))


def _is_run(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == b"{"


def _told(rows: "Sequence[Weights]", limit: float) -> int:
    compared = [row for row in rows if row.ratio is not None]
    beyond = [row for row in compared if _size(row) > limit]
    alone = [row for row in rows if row.note.startswith(("only", "shape"))]
    if beyond:
        first = beyond[0]
        explains = f"{_ratio(first.ratio)} what rounding to {_coarser(first)} explains"
        print(
            f"{len(beyond)} of {plural(len(compared), 'tensor')} differ; first {first.name}: "
            f"{first.note or explains}"
        )
        width = max(len(row.name) for row in beyond[:SHOWN])
        fars = (row.note or f"apart {row.error:.1e}  {_ratio(row.ratio)}" for row in beyond)
        _list([f"{row.name.ljust(width)}  {far}" for row, far in zip(beyond, fars, strict=True)])
    elif compared:
        worst = max(map(_size, compared))
        same = "identical" if not worst else f"within {_ratio(worst)} what rounding explains"
        verb = "is" if len(compared) == 1 else "are"
        print(f"No difference: {plural(len(compared), 'tensor')} {verb} {same}")
    else:
        print("Nothing could be compared: no tensor is in both")
    _list([f"{row.name}: {row.note}" for row in alone], " that only one of them has")
    return BAD if beyond or alone else FINE


def _size(row: "Weights") -> float:
    return row.ratio or 0.0


def _list(lines: list[str], what: str = "") -> None:
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  and {len(lines) - SHOWN} more{what}")


def _ratio(ratio: float | None) -> str:
    from anynan._apps.compare.comparison import times

    return times(ratio)


def _coarser(row: "Weights") -> str:
    from anynan._files.formats import format_of

    found = [format_of(dtype) for dtype in row.dtypes if dtype is not None]
    return min((kind.mantissa, kind.name) for kind in found if kind is not None)[1]
