"""What went into an operation, looked at only when its result is bad."""

import cmath
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from anynan._base.summary import Summary
from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.records import SOFTMAX, Given, before, makers
from anynan._trace.op import RerunError
from anynan.errors import reason
from anynan.torch.private import arguments_of, functional
from anynan.torch.read.probes import local, measure, plain, read_ends
from anynan.torch.replay.names import node_name

_KEEP = (
    "dim",
    "exponent",
    "eps",
    "correction",
    "unbiased",
    "keepdim",
    "ord",
    "p",
    "value",
    "alpha",
)

# Before the name of what an operation inside of a backward node took.
INNER = "inner "


def flat(value: Any) -> Iterator[torch.Tensor]:
    """Walk the tensors of an operator's argument or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)


def without_unread_statistics(
    named: list[tuple[str, Any]], arguments: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Leave out running statistics that a batch normalisation writes and does not read."""
    training = arguments.get("training", arguments.get("train", "momentum" in arguments))
    return [(name, x) for name, x in named if not (training and name.startswith("running_"))]


def named(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """List tensor operands and non-finite number operands with their schema names."""
    found: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        if name == "out":
            continue
        if isinstance(value, torch.Tensor):
            # A divisor is often a count.
            if value.dtype.is_floating_point or value.dtype.is_complex or name == "other":
                found.append((name, value))
        elif isinstance(value, float | int) and not isinstance(value, bool):
            if name in ("self", "other", "exponent", "value") or not math.isfinite(value):
                found.append((name, value))
        elif isinstance(value, list | tuple):
            found.extend(
                (f"{name}[{i}]", item)
                for i, item in enumerate(value)
                if isinstance(item, torch.Tensor) and item.dtype.is_floating_point
            )
    return found


def given(name: str, x: Any, before: Mapping[int, torch.Tensor]) -> Given:
    """Give what went in, as it was before it was overwritten."""
    if not isinstance(x, torch.Tensor):
        return Given(name, number=float(x))
    held = before.get(id(x), x)
    return Given(name, held, light(held), x)


def params(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the plain arguments that a cause rule may need."""
    found = {
        name: value
        for name, value in arguments.items()
        if name in _KEEP and isinstance(value, int | float | list | tuple)
    }
    if "dim" in found:
        found["dim"] = list(found["dim"]) if isinstance(found["dim"], tuple) else found["dim"]
    return found


def node_params(node: Any) -> dict[str, Any]:
    """Return the plain arguments that a backward node saved, and what made its operand."""
    found: dict[str, Any] = {}
    for name in dir(node):
        short = name.removeprefix("_saved_")
        if short != name and short in _KEEP:
            try:
                value = getattr(node, name, None)
            except Exception:  # noqa: BLE001, S112
                continue
            if isinstance(value, int | float):
                # A negative dimension is kept as an unsigned number.
                found[short] = value - 2**64 if value > 2**63 else value
            elif isinstance(value, list | tuple):
                found[short] = list(value)
    return found | makers(node_name(made.name()) for made in before(node, _made))


def _made(node: Any) -> Any:
    """Give the node that made what a node takes first."""
    return next((item for item, _ in node.next_functions if item is not None), None)


def light(x: torch.Tensor) -> Summary:
    """Summarise by flags only: which kinds are there, not how many."""
    values = plain(x)
    shape, dtype = tuple(x.shape), str(x.dtype).removeprefix("torch.")
    if values is None:
        return Summary(shape, dtype, str(x.device), int(x.numel()))
    low, high = read_ends(values)
    return Summary(
        shape, dtype, str(x.device), int(x.numel()),
        nan=int(low != low),
        posinf=int(high == math.inf),
        neginf=int(low == -math.inf),
        min=low if math.isfinite(low) else None,
        max=high if math.isfinite(high) else None,
        absmax=max(abs(low), abs(high)) if math.isfinite(low) and math.isfinite(high) else None,
    )  # fmt: skip


def measure_bad(x: torch.Tensor) -> Summary:
    """Summarise a bad result, and point at its first NaN where it holds an Inf before that."""
    summary = measure(x)
    values = plain(x)
    mixed = summary.nan and summary.posinf + summary.neginf
    if not mixed or values is None or values.shape != x.shape:
        return summary
    at = int(values.isnan().reshape(-1).to(torch.uint8).argmax())
    first = np.unravel_index(at, values.shape)
    return replace(summary, first_bad=tuple(int(i) for i in first))


def of_node(
    node: Any,
    incoming: Iterable[Any],
    taken: Sequence[torch.Tensor],
    inner: list[Given],
    *,
    look: bool,
) -> list[Given]:
    """Give a backward node's operands: gradients, what it saved, and what is bad inside of it.

    Args:
        node: The node.
        incoming: Gradients that came in.
        taken: What its operations took apart from these.
        inner: Operands of the operation that runs inside of it.
        look: List more than these.
    """
    items = []
    if look:
        for i, grad in enumerate(incoming):
            if isinstance(grad, torch.Tensor) and plain(grad) is not None:
                items.append(given(f"grad{i or ''}", grad, {}))
        saved, locked = _saved(node)
        if not saved and len(locked) == len(taken) == 1:
            saved = [(locked[0], taken[0])]
        items += [given(name, x, {}) for name, x in saved]
    names = {item.name for item in items}
    for item in inner:
        bad = item.known.bad if item.known is not None else not _finite(item.number)
        if bad:
            if item.name in names:
                item.name = INNER + item.name
            items.append(item)
    return items


def _finite(number: complex | None) -> bool:
    return number is None or cmath.isfinite(number)


def _saved(node: Any) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    """List the float tensors that a backward node saved, and name what can not be read any more."""
    found: list[tuple[str, Any]] = []
    locked: list[str] = []
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        short = name.removeprefix("_saved_")
        try:
            found.append((short, getattr(node, name)))
        except Exception:  # noqa: BLE001  released already, or unpacked once by a checkpoint
            locked.append(short)
    if hasattr(node, "saved_tensors"):
        with suppress(Exception):
            found += [(f"saved[{i}]", x) for i, x in enumerate(node.saved_tensors)]
    tensors = [(name, local(x)) for name, x in found if isinstance(x, torch.Tensor)]
    return [(name, x) for name, x in tensors if plain(x) is not None], locked


def add_counts(record: OpRecord, named: list[tuple[str, Any]], arguments: dict[str, Any]) -> None:
    """Count what a cause rule asks of a softmax and of a loss over classes."""
    if record.name in SOFTMAX:
        _add_masked_rows(record, named)
    elif record.name == "nll_loss" and record.phase != "backward":
        _add_ignored(record, arguments)
    elif record.name == "ctc_loss":
        _add_alignment(record, arguments)


def _add_masked_rows(record: OpRecord, named: list[tuple[str, Any]]) -> None:
    """Count the rows of a softmax that are -Inf throughout."""
    dim = record.params.get("dim")
    for _, x in named:
        if isinstance(x, torch.Tensor) and isinstance(dim, int) and x.dim():
            rows = int((x == -math.inf).all(dim).sum())
            if rows:
                record.params["masked_rows"] = rows
            return


def _add_ignored(record: OpRecord, arguments: dict[str, Any]) -> None:
    """Count the targets of a loss, where every one of them is ignored."""
    target, index = arguments.get("target"), arguments.get("ignore_index")
    if isinstance(target, torch.Tensor) and isinstance(index, int) and (target == index).all():
        record.params.update(ignored=target.numel(), ignore_index=index)


def _add_alignment(record: OpRecord, arguments: dict[str, Any]) -> None:
    """Find the first target of a CTC loss that is longer than its input."""
    lengths = [arguments.get(name) for name in ("input_lengths", "target_lengths")]
    frames, sizes = ([int(x) for x in given] if given is not None else [] for given in lengths)
    targets, start = arguments.get("targets"), 0
    for i, (room, size) in enumerate(zip(frames, sizes, strict=False)):
        needed = size
        if isinstance(targets, torch.Tensor):
            own = targets[i, :size] if targets.dim() > 1 else targets[start : start + size]
            needed += int((own[1:] == own[:-1]).sum())  # a blank goes between two of the same
        start += size
        if needed > room:
            record.params.update(sample=i, needed=needed, frames=room)
            return


def rerun(
    func: Any, arguments: dict[str, Any], before: dict[int, torch.Tensor],
    inputs: Mapping[str, Any], dtype: str | None,
) -> list[torch.Tensor]:  # fmt: skip
    """Run an operation again, writing nothing, and give the tensors it makes.

    Args:
        func: The operator.
        arguments: By their names in its schema.
        before: What those held that it wrote to, by identity.
        inputs: Others in the place of some, by name; ``name[i]`` is one of a list.
        dtype: What to cast the operands to; None for none.

    Raises:
        RerunError: If it draws random numbers, or PyTorch cannot run it so.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:
        msg = f"{func} draws random numbers"
        raise RerunError(msg)
    target = None if dtype is None else getattr(torch, dtype)

    def new_of(name: str, x: Any) -> Any:
        if name in inputs:
            x = inputs[name]
        elif type(x) in (list, tuple):
            return type(x)(new_of(f"{name}[{i}]", item) for i, item in enumerate(x))
        elif isinstance(x, torch.Tensor):
            x = before.get(id(x), x)
        x = x.detach() if isinstance(x, torch.Tensor) else x
        return x if target is None else _cast(x, target)

    try:
        with torch.no_grad():
            schema = arguments_of(func)
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema)
            new = {name: new_of(name, x) for name, x in arguments.items() if name != "out"}
            positional = [a.name for a in schema if not a.kwarg_only]
            args = [new.pop(name) for name in positional if name in new]
            return list(flat((functional(func) if writes else func)(*args, **new)))
    except Exception as error:
        msg = f"{func} cannot be run again: {reason(error)}"
        raise RerunError(msg) from error


def _cast(value: Any, target: torch.dtype) -> Any:
    """Cast tensors with a fraction, and what says which dtype to make, to another."""
    if isinstance(value, torch.Tensor):
        return value.to(target) if value.dtype.is_floating_point else value
    if isinstance(value, torch.dtype):
        return target if value.is_floating_point else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, target) for item in value)
    return value
