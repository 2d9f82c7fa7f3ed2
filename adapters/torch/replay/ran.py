"""One operation that ran below autograd: what it is, what it worked on, what it is told as."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import FrameType
from typing import Any, Protocol

import torch

from anynan._base.summary import Summary
from anynan._trace.op import Op
from anynan.events import Phase, Source
from anynan.torch.private import node as _node
from anynan.torch.private import tree_map
from anynan.torch.replay import operands
from anynan.torch.replay.names import canonical, node_name

# What was there before is no operand of these.
OVERWRITING = frozenset({"copy", "fill", "zero", "random"})


@dataclass(slots=True)
class Made:
    """Remember where a forward operation ran, for the backward node it made."""

    name: str
    layer: str | None
    call: int
    source: Source | None
    expected: dict[str, str] | None
    record: int | None = None
    shown: int | None = None


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


@dataclass(frozen=True, slots=True)
class Ran:
    """Hold an operation that ran and whose result is bad.

    Attributes:
        func: The operator.
        shape: What its schema says.
        args: Positional arguments.
        kwargs: Arguments by name.
        written: Tensors that it wrote to.
        before: What these held before, by their identity.
        backward: A backward pass ran it.
        native: Autograd itself ran it, and no code of the user's.
        frame: Who called it in a backward pass.
    """

    func: Any
    shape: Shape
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: list[Any]
    before: dict[int, torch.Tensor]
    backward: bool
    native: bool
    frame: FrameType | None

    @property
    def arguments(self) -> dict[str, Any]:
        """Give every argument by its schema name."""
        return operands.plain_arguments(self.shape.argument_names, self.args, self.kwargs)

    def named(self) -> list[tuple[str, Any]]:
        """List what it worked on by schema name, without what it only writes."""
        found = operands.named(self.arguments)
        if self.shape.name == "subtract" and "rsub" in str(self.func):
            found.reverse()
        if self.shape.name in OVERWRITING:
            return [(name, x) for name, x in found if not any(x is w for w in self.written)]
        if self.shape.name == "batch_norm":
            return operands.without_unread_statistics(found, self.arguments)
        return found

    def wide(self, output: Summary) -> float | None:
        """Run it again in a wider dtype; give its largest magnitude if that is finite."""
        if output.nan or self.written:
            return None
        return operands.wide(self.func, self.args, self.kwargs)


class Place(Protocol):
    """Say where in the program an operation runs: the watcher does."""

    updating: bool

    def place(self) -> tuple[str | None, int]:
        """Give the layer path and call that run now."""

    def line(self, frame: FrameType | None = None) -> Source | None:
        """Find the user's line."""

    def made_by(self, node: Any) -> Made | None:
        """Find what made a backward node."""


class ShownOp(Op):
    """Show one operation to an observer: what costs something is found out when it is asked for.

    Args:
        watcher: Who saw it.
        ran: What ran.
        out: What it gave.
        number: Its place in the run.
        frame: Who called it, while it is shown.
    """

    def __init__(
        self, watcher: Place, ran: Ran, out: Any, number: int, frame: FrameType | None
    ) -> None:
        node = _node() if ran.backward else None
        made = None if node is None else watcher.made_by(node)
        self.number, self._ran, self._out, self._watcher = number, ran, out, watcher
        self.name = self.kernel = ran.shape.name
        self.raw, self.written = str(ran.func), bool(ran.written)
        self.layer, self.call = watcher.place()
        if ran.native and node is not None:
            self.name = node_name(node.name()) if made is None else made.name
            self.raw = f"{node.name()} ({ran.func})"
        if made is not None:
            self.layer, self.call, self.forward = made.layer, made.call, made.shown
        self.phase: Phase = "backward" if ran.backward else "forward"
        if watcher.updating:
            self.phase = "optimizer"
        elif not ran.backward and self.layer is None:
            self.phase = "loss"
        self._made, self.frame = made if ran.native else None, frame

    @cached_property
    def source(self) -> Source | None:
        """Give the user's line; ask while it is shown."""
        known = None if self._made is None else self._made.source
        return known or self._watcher.line(self.frame)

    @property
    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """Give the tensors that it works on, by the names of its schema."""
        before = self._ran.before
        return [
            (name, before.get(id(x), x))
            for name, x in self._ran.named()
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
        ]

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Give what it made, and what it wrote to."""
        written = self._ran.written
        made = [x for x in operands.flat(self._out) if not any(x is w for w in written)]
        return made + written

    @property
    def params(self) -> dict[str, Any]:
        """Give its plain arguments."""
        return operands.params(self._ran.arguments)

    def replaced(self, instead: Sequence[Any]) -> Any:
        """Give its results with others in their place."""
        new = {id(x): y for x, y in zip(self.outputs, instead, strict=True)}
        for x in self._ran.written:
            if new[id(x)] is not x:
                x.copy_(new[id(x)])
            new[id(x)] = x
        return tree_map(lambda x: new.get(id(x), x), self._out)

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> list[torch.Tensor]:
        """Run it once more, outside of autograd.

        Raises:
            RerunError: If PyTorch has no kernel for it, or it draws random numbers.
        """
        ran = self._ran
        return operands.rerun(ran.func, ran.arguments, ran.before, inputs or {}, dtype)
