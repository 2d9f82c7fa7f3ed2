"""What went into an operation, looked at only when its result is bad."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anynan._arrays.summary import Summary
from anynan._diagnosis.lineage import Operand, OpRecord
from anynan.torch.read.probes import local, measure, nonfinite, plain, read_ends
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


def flat(value: Any) -> Iterator[torch.Tensor]:
    """Walk the tensors of an operator's argument or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)


def plain_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return every argument by its schema name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def without_unread_statistics(
    named: list[tuple[str, Any]], names: tuple[str, ...], args: tuple[Any, ...], kwargs: Any
) -> list[tuple[str, Any]]:
    """Leave out running statistics that a batch normalisation writes and does not read."""
    given = plain_arguments(names, args, kwargs)
    training = given.get("training", given.get("train", "momentum" in given))
    return [(name, x) for name, x in named if not (training and name.startswith("running_"))]


def named(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """List tensor operands and non-finite number operands with their schema names."""
    found: list[tuple[str, Any]] = []
    for name, value in plain_arguments(names, args, kwargs).items():
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


def params(named_all: dict[str, Any]) -> dict[str, Any]:
    """Return the plain arguments that a cause rule may need."""
    found = {
        name: value
        for name, value in named_all.items()
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
    before = next((item for item, _ in node.next_functions if item is not None), None)
    if before is not None:
        found["of"] = node_name(before.name())
        terms = next((item for item, _ in before.next_functions if item is not None), None)
        if terms is not None:
            found["terms"] = node_name(terms.name())
    return found


def name_constant(items: list[Operand]) -> None:
    """Say of a tensor made of host numbers whether it is a constant of the code or data."""
    for item in items:
        held = item.summary
        # Nobody writes an array with NaN among its numbers into a program. It came in by itself,
        # and is not the batch.
        data = held is not None and held.nan and held.size > 1
        item.name = "data" if data else "value"
        item.source, item.label = ("unknown" if data else "constant"), item.name


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
    flat_index = values.isnan().reshape(-1).to(torch.uint8).argmax()
    first = torch.unravel_index(flat_index, values.shape)
    return replace(summary, first_bad=tuple(int(i) for i in first))


def saved(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk the float tensors that a backward node saved in the forward pass."""
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            value = getattr(node, name)
        except Exception:  # noqa: BLE001, S112  released already, or unpacked once by a checkpoint
            continue
        if isinstance(value, torch.Tensor) and plain(value) is not None:
            yield name.removeprefix("_saved_"), local(value)
    if hasattr(node, "saved_tensors"):
        try:
            values = node.saved_tensors
        except Exception:  # noqa: BLE001
            return
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and plain(value) is not None:
                yield f"saved[{i}]", local(value)


def locked(node: Any) -> list[str]:
    """Name the saved tensors of a backward node that can not be read any more."""
    found = []
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                getattr(node, name)
            except Exception:  # noqa: BLE001
                found.append(name.removeprefix("_saved_"))
    return found


def add_masked_rows(record: OpRecord, operands: list[tuple[str, Any]]) -> None:
    """Count the rows of a softmax that are -Inf throughout."""
    dim = record.params.get("dim")
    for _, x in operands:
        if isinstance(x, torch.Tensor) and isinstance(dim, int) and x.dim():
            rows = int((x == -math.inf).all(dim).sum())
            if rows:
                record.params["masked_rows"] = rows
            return


def add_ignored(record: OpRecord, arguments: dict[str, Any]) -> None:
    """Count the targets of a loss, where every one of them is ignored."""
    target, index = arguments.get("target"), arguments.get("ignore_index")
    if isinstance(target, torch.Tensor) and isinstance(index, int) and (target == index).all():
        record.params.update(ignored=target.numel(), ignore_index=index)


def wide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Run an operation again in a wider dtype; give its largest magnitude if that is finite."""
    tensors = [x for x in flat([*args, *kwargs.values()]) if x.dtype.is_floating_point]
    if not tensors or any(nonfinite(x) for x in tensors):
        return None
    # bfloat16 ends where float32 does, so only a cast to it shows in float32.
    narrow = all(x.element_size() <= 2 and x.dtype != torch.bfloat16 for x in tensors) or (
        kwargs.get("dtype") in (torch.float16, torch.bfloat16)
    )
    target = torch.float32 if narrow else torch.float64

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(target) if value.dtype.is_floating_point else value
        if isinstance(value, torch.dtype):
            return target if value.is_floating_point else value
        if isinstance(value, list | tuple):
            return type(value)(widen(item) for item in value)
        return value

    try:
        out = func(*[widen(a) for a in args], **{k: widen(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError, ValueError):
        return None
    largest = 0.0
    for x in flat(out):
        values = plain(x)
        if values is None:
            continue
        low, high = read_ends(values)
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        largest = max(largest, abs(low), abs(high))
    return largest or None
