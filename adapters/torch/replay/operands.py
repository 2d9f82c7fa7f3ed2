"""One operation that ran below autograd: what it is, and what went into it."""

import cmath
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import FrameType
from typing import Any

import torch

from anynan._diagnosis.lineage import OpRecord
from anynan._diagnosis.operands import light
from anynan._diagnosis.records import Given, before, called, makers
from anynan._trace.op import Op, RerunError
from anynan.errors import reason
from anynan.events import Source
from anynan.torch.private import arguments_of, functional, nodes_before, tree_map
from anynan.torch.read.probes import local, plain
from anynan.torch.replay.names import canonical, node_name

_KEEP = (
    "dim", "exponent", "eps", "correction", "unbiased", "keepdim", "ord", "p", "value", "alpha",
)  # fmt: skip

# What was there before is no operand of these.
OVERWRITING = frozenset({"copy", "fill", "zero", "random"})
# Before the name of what an operation inside of a backward node took.
INNER = "inner "


def flat(value: Any) -> Iterator[torch.Tensor]:
    """Walk the tensors of an operator's argument or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)


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
        elif isinstance(value, float | int):
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
    return found | makers(map(_called, before(node, _made)))


def _called(node: Any) -> str:
    return called(node_name(node.name()), [x for x, _ in node.next_functions])


def _made(node: Any) -> Any:
    """Give the node that made what a node takes first."""
    return next(iter(nodes_before(node)), None)


def of_node(
    node: Any, incoming: Iterable[Any], taken: Sequence[torch.Tensor], inner: list[Given], *,
    look: bool,
) -> list[Given]:  # fmt: skip
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


def add_masked_rows(record: OpRecord, named: list[tuple[str, Any]]) -> None:
    """Count the rows of a softmax that are -Inf throughout."""
    dim = record.params.get("dim")
    for _, x in named:
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


def add_alignment(record: OpRecord, arguments: dict[str, Any]) -> None:
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
        RerunError: If PyTorch cannot run it so.
    """
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
            plain, out, positional = _unwriting(func)
            new = {name: new_of(name, x) for name, x in arguments.items() if name not in out}
            args = [new.pop(name) for name in positional if name in new]
            return list(flat(plain(*args, **new)))
    except Exception as error:
        msg = f"{func} cannot be run again: {reason(error)}"
        raise RerunError(msg) from error


@lru_cache(maxsize=4096)
def _unwriting(func: Any) -> tuple[Any, frozenset[str], tuple[str, ...]]:
    """Give what computes the same and writes nothing, and which arguments that takes no more.

    The last are the names of those that are given by their place.
    """
    schema = arguments_of(func)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema)
    out = frozenset(a.name for a in schema if a.is_out)  # a gradient may take one of that name
    positional = tuple(a.name for a in schema if not a.kwarg_only)
    return functional(func) if writes else func, out, positional


def _cast(value: Any, target: torch.dtype) -> Any:
    """Cast tensors with a fraction, and what says which dtype to make, to another."""
    if isinstance(value, torch.Tensor):
        return value.to(target) if value.dtype.is_floating_point else value
    if isinstance(value, torch.dtype):
        return target if value.is_floating_point else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, target) for item in value)
    return value


@dataclass(slots=True)
class Made:
    """Remember where a forward operation ran, for the backward node it made.

    Attributes:
        number: By what the operation is known: as a record, or in the order they are shown.
    """

    name: str
    layer: str | None
    call: int
    source: Source | None
    expected: dict[str, str] | None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """Say what an operator writes and whether its results are views."""

    name: str
    written: tuple[str, ...]
    view: bool
    argument_names: tuple[str, ...]


@lru_cache(maxsize=4096)
def shape_of(func: Any) -> Shape:
    """Read an operator's schema once."""
    schema = func._schema
    # Batch normalisation updates these and its schema does not say so.
    written = tuple(
        argument.name
        for argument in schema.arguments
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in ("running_mean", "running_var")
    )
    view = any(
        item.alias_info is not None and not item.alias_info.is_write for item in schema.returns
    )
    names = tuple(argument.name for argument in schema.arguments)
    return Shape(canonical(schema.name), written, view, names)


class Operation(Op):
    """Tell of one operation; what costs something to find out is found out when it is asked for.

    Args:
        func: The operator.
        shape: What its schema says.
        args: Positional arguments.
        kwargs: Arguments by name.
        seq: Number of the node that autograd made for it, if it made one.
        backward: A backward pass ran it.

    Attributes:
        overwritten: Tensors that it wrote to.
        before: What these held before, by their identity.
        out: What it gave.
        native: Autograd itself ran it, and no code of the user's.
        frame: Who called it, where that is known: it holds what the program has there.
        line: Finds the user's line by that.
        node: The backward node that ran it.
        of_node: It is what that node computes, for the forward operation.
        made: What remembers the forward operation that made the node.
        incoming: The gradients that came into the node.
        taken: What the node worked on apart from these.
        feeds: Names of the operations whose nodes gave these.
        again: It recomputes the forward pass, under activation checkpointing.
    """

    overwritten: Sequence[torch.Tensor] = ()
    out: Any = None
    native = again = of_node = False
    frame: FrameType | None = None
    line: Callable[[FrameType | None], Source | None]
    node: Any = None
    made: Made | None = None
    incoming: Sequence[Any] = ()
    taken: Sequence[torch.Tensor] = ()
    feeds: Sequence[str] = ()

    def __init__(
        self, func: Any, shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any], seq: int, *,
        backward: bool,
    ) -> None:  # fmt: skip
        self.func, self.shape, self.args, self.kwargs = func, shape, args, kwargs
        self.seq, self.backward = seq, backward
        self.before: dict[int, torch.Tensor] = {}

    def keep(self) -> None:
        """Copy what is about to be overwritten: an operand's health is that from before."""
        if self.overwritten and self.shape.name not in OVERWRITING:
            self.before = {
                id(x): x.detach().clone() for x in self.overwritten if plain(x) is not None
            }

    def writes(self) -> list[torch.Tensor]:
        """List what it is about to write to."""
        if not self.shape.written:
            return []
        arguments = self.arguments
        return [x for name in self.shape.written for x in flat(arguments.get(name))]

    @cached_property
    def source(self) -> Source | None:
        """Give the user's line; ask while it is shown."""
        known = None if self.made is None or not self.native else self.made.source
        return known or self.line(self.frame)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Walk the tensors among its arguments."""
        return flat([*self.args, *self.kwargs.values()])

    @property
    def arguments(self) -> dict[str, Any]:
        """Give every argument by its schema name."""
        return {**dict(zip(self.shape.argument_names, self.args, strict=False)), **self.kwargs}

    def named(self) -> list[tuple[str, Any]]:
        """List what it worked on by schema name, without what it only writes."""
        arguments = self.arguments
        found = named(arguments)
        if self.shape.name == "subtract" and "rsub" in str(self.func):
            found.reverse()
        if self.shape.name in OVERWRITING:
            return [(name, x) for name, x in found if not any(x is w for w in self.overwritten)]
        trains = arguments.get("training", arguments.get("train", "momentum" in arguments))
        if self.shape.name == "batch_norm" and trains:  # its running statistics are not read
            return [(name, x) for name, x in found if not name.startswith("running_")]
        return found

    @property
    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """Give the tensors that it works on, by the names of its schema."""
        return [
            (name, self.before.get(id(x), x))
            for name, x in self.named()
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
        ]

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Give what it made, and what it wrote to."""
        written = self.overwritten
        made = [x for x in flat(self.out) if not any(x is w for w in written)]
        return [*made, *written]

    @property
    def params(self) -> dict[str, Any]:
        """Give its plain arguments; of a backward node, those that it saved."""
        return node_params(self.node) if self.of_node else params(self.arguments)

    def replaced(self, instead: Sequence[Any]) -> Any:
        """Give its results with others in their place."""
        new = {id(x): y for x, y in zip(self.outputs, instead, strict=True)}
        for x in self.overwritten:
            if new[id(x)] is not x:
                x.copy_(new[id(x)])
            new[id(x)] = x
        return tree_map(lambda x: new.get(id(x), x), self.out)

    @property
    def wider(self) -> str:
        """Name the dtype in which the operation would show what did not fit."""
        tensors = [x for x in self.tensors() if x.dtype.is_floating_point]
        # bfloat16 ends where float32 does, so only a cast to it shows in float32.
        narrow = all(x.element_size() <= 2 and x.dtype != torch.bfloat16 for x in tensors)
        cast = self.kwargs.get("dtype") in (torch.float16, torch.bfloat16)
        return "float32" if narrow or cast else "float64"

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> list[torch.Tensor]:
        """Run it once more, outside of autograd.

        Raises:
            RerunError: If PyTorch has no kernel for it, or it draws random numbers.
        """
        if torch.Tag.nondeterministic_seeded in self.func.tags:
            msg = f"{self.func} draws random numbers"
            raise RerunError(msg)
        return rerun(self.func, self.arguments, self.before, inputs or {}, dtype)
