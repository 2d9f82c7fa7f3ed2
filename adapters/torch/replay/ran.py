"""One operation that ran below autograd: what it is, what it worked on, what it is told as."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import FrameType
from typing import Any

import torch

from anynan._base.sources import is_anynans
from anynan._trace.op import Op
from anynan.events import Source
from anynan.torch.private import tree_map
from anynan.torch.read.probes import plain
from anynan.torch.replay import operands
from anynan.torch.replay.names import canonical

_WRAPPERS = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "utils/_python_dispatch.py")
# What was there before is no operand of these.
OVERWRITING = frozenset({"copy", "fill", "zero", "random"})


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
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    view: bool
    argument_names: tuple[str, ...]


@lru_cache(maxsize=4096)
def shape_of(func: Any) -> Shape:
    """Read an operator's schema once."""
    schema = func._schema
    written, names = [], []
    for i, argument in enumerate(schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        # Batch normalisation updates these and its schema does not say so.
        if marked or argument.name in ("running_mean", "running_var"):
            written.append(i)
            names.append(argument.name)
    view = any(
        item.alias_info is not None and not item.alias_info.is_write for item in schema.returns
    )
    return Shape(
        canonical(schema.name), tuple(written), tuple(names), view,
        tuple(argument.name for argument in schema.arguments),
    )  # fmt: skip


def caller() -> FrameType | None:
    """Return the frame that called the operation, past the watcher's own frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.endswith(_WRAPPERS) or is_anynans(file)):
            return frame
        frame = frame.f_back
    return None


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
        found: list[torch.Tensor] = []
        args, shape = self.args, self.shape
        for i, name in zip(shape.written, shape.written_names, strict=True):
            found.extend(operands.flat(args[i] if i < len(args) else self.kwargs.get(name)))
        return found

    @cached_property
    def source(self) -> Source | None:
        """Give the user's line; ask while it is shown."""
        known = None if self.made is None or not self.native else self.made.source
        return known or self.line(self.frame)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Walk the tensors among its arguments."""
        return operands.flat([*self.args, *self.kwargs.values()])

    @property
    def arguments(self) -> dict[str, Any]:
        """Give every argument by its schema name."""
        return {**dict(zip(self.shape.argument_names, self.args, strict=False)), **self.kwargs}

    def named(self) -> list[tuple[str, Any]]:
        """List what it worked on by schema name, without what it only writes."""
        found = operands.named(self.arguments)
        if self.shape.name == "subtract" and "rsub" in str(self.func):
            found.reverse()
        if self.shape.name in OVERWRITING:
            return [(name, x) for name, x in found if not any(x is w for w in self.overwritten)]
        if self.shape.name == "batch_norm":
            return operands.without_unread_statistics(found, self.arguments)
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
        made = [x for x in operands.flat(self.out) if not any(x is w for w in written)]
        return [*made, *written]

    @property
    def params(self) -> dict[str, Any]:
        """Give its plain arguments; of a backward node, those that it saved."""
        return operands.node_params(self.node) if self.of_node else operands.params(self.arguments)

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
        return operands.rerun(self.func, self.arguments, self.before, inputs or {}, dtype)
