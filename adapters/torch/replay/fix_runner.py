"""Operations repaired while a call runs again: their results, and their gradients."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anynan._diagnosis.rules import repair as repairs
from anynan._diagnosis.rules.repair import BaseFixRunner, Repair, RepairError, around
from anynan.torch.private import arguments_of, functional, node_number
from anynan.torch.read.probes import bring
from anynan.torch.replay.operands import Operation, flat

_grad = torch.autograd.grad  # as it is while nothing stands before it
_TENSORS = ("Tensor", "Optional[Tensor]")


class _Namespace(repairs.Namespace):
    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, x, y)

    def reduce(self, name: str, x: torch.Tensor, axis: Any, *, keepdims: bool) -> torch.Tensor:
        axes = list(range(x.ndim)) if axis in (None, []) else axis
        if name == "any":
            return torch.any(x, axes, keepdim=keepdims)
        function: Any = torch.sum if name == "sum" else torch.amax
        reduced: torch.Tensor = function(x, axes, keepdims)
        return reduced

    def eye(self, x: torch.Tensor) -> torch.Tensor:
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


_WORDS = _Namespace(torch)


@dataclass(slots=True)
class _Repaired:
    """Remember an operation that was repaired, for its gradient."""

    func: Any
    arguments: dict[str, Any]
    repairs: list[Repair]


class FixRunner(BaseFixRunner):
    """Put repaired operations in the place of those that made bad values.

    It works below autograd, as the watcher does, and so meets what composite functions run. The
    node that autograd makes for a repaired operation is its own: what it gives is replaced by the
    gradient of the repair.

    Args:
        repairs: What to repair; one that is named later stands inside of one named before.

    Attributes:
        bad: Whether the gradient of a repair was bad where what came in was not.
        losses: Losses that were seen, the last one that which was returned.
        gradient_norm: Over the gradients of all weights, once the run has ended.
    """

    def __init__(self, repairs: Sequence[Repair]) -> None:
        super().__init__(repairs)
        self.losses: list[float] = []
        self.gradient_norm: float | None = None
        self.bad = False
        self._made: dict[int, _Repaired] = {}

    @property
    def loss(self) -> float | None:
        """Give the loss, None where there were several."""
        return self.losses[-1] if len(set(self.losses)) == 1 else None

    # The forward pass.

    def mend(self, found: list[Repair], op: Operation, number: int | None) -> Any:
        """Repair the result of an operation.

        Args:
            found: How.
            op: The operation, which has run.
            number: Of the node that autograd makes for it.
        """
        arguments, out, written = op.arguments, op.out, op.overwritten
        taken = [*arguments.values(), *written]
        if number is None and torch.is_grad_enabled() and any(map(_has_gradient, taken)):
            self.lost = "its node is not known"  # in place, where what was there is saved
            return out

        def run() -> tuple[_Repaired, Any]:
            # What is overwritten later is still needed for the gradient.
            given = {
                name: op.before.get(id(x), x).detach().clone() if _is_float(x) else x
                for name, x in arguments.items()
                if not (written and name == "out")
            }
            made = _Repaired(functional(op.func) if written else op.func, given, found)
            forward = [item for item in found if item.phase != "backward" or item.expression]
            return made, self._run(made, given, forward, out) if forward else out

        ran = self.made(found, run)
        if ran is None:
            return out
        made, new = ran
        if number is not None:
            self._made[number] = made
        if new is out:
            return out
        if written:
            if len(written) != 1:
                self.lost = "it writes several tensors"
                return out
            written[0].copy_(new)
            return out
        return new

    def _run(
        self, made: _Repaired, arguments: dict[str, Any], found: list[Repair], out: Any = None
    ) -> Any:
        """Run an operation as repaired.

        Args:
            made: What it is.
            arguments: What it is given.
            found: The repairs.
            out: What it gave unrepaired, where that is known.
        """
        given = {name: x for name, x in arguments.items() if x is not None}
        own = functools.partial(_own, made.func, arguments)
        new = around(found, own, functools.partial(_expression, given), _filled)()
        if out is None:
            return new
        return _like(new, out)

    # The backward pass.

    def stand_behind(self, node: Any, watcher: Any) -> Any:
        """Have what a repaired operation's node gives replaced, out of the watcher's sight.

        Returns:
            The handle of the hook; None for the node of another operation.
        """
        made = self._made.get(node_number(node))
        if made is None:
            return None
        return node.register_hook(functools.partial(self._behind, made, watcher))

    def _behind(self, made: _Repaired, watcher: Any, gradients: Any, incoming: Any) -> Any:
        busy, watcher.busy = watcher.busy, True
        found = self.made((), lambda: self._gradients(made, gradients, incoming))
        watcher.busy = busy
        return found

    def _gradients(self, made: _Repaired, gradients: Any, incoming: Any) -> Any:
        if torch.is_grad_enabled():
            msg = "a gradient of a gradient"
            raise RepairError(msg)
        if not all(item.expression for item in made.repairs):
            # What came in bad is another fault's.
            clean = _clean(incoming)
            return tuple(_fill(x) if clean and x is not None else x for x in gradients)
        places = list(_places(made))
        if len(places) != len(gradients):
            msg = "the node takes other operands"
            raise RepairError(msg)
        leaves = {
            name: made.arguments[name].detach().requires_grad_()
            for name, wanted in zip(places, gradients, strict=True)
            if wanted is not None
        }
        with torch.enable_grad():
            out = self._run(made, {**made.arguments, **leaves}, made.repairs)
        pairs = [
            (x, grad)
            for x, grad in zip(flat(out), incoming, strict=False)
            if grad is not None and x.requires_grad
        ]
        found = _grad(
            [x for x, _ in pairs], list(leaves.values()),
            [grad.to(x.dtype) for x, grad in pairs], allow_unused=True,
        ) if pairs else [None] * len(leaves)  # fmt: skip
        self.bad = self.bad or (_clean(incoming) and not _clean(found))
        known = dict(zip(leaves, found, strict=True))
        return tuple(
            None if old is None
            else torch.zeros_like(old) if (new := known[name]) is None
            else new.to(old.dtype).reshape(old.shape)
            for name, old in zip(places, gradients, strict=True)
        )  # fmt: skip


def _own(func: Any, arguments: dict[str, Any], *new: Any) -> Any:
    """Run an operator with others in the place of its first operands."""
    declared = arguments_of(func)
    operands = [a.name for a in declared if _takes_operand(a)]
    arguments = {**arguments, **dict(zip(operands, new, strict=False))}
    positional = [a.name for a in declared if not a.kwarg_only]
    args = [arguments[name] for name in positional if name in arguments]
    rest = {name: x for name, x in arguments.items() if name not in positional}
    return func(*args, **rest)


def _takes_operand(argument: Any) -> bool:
    """Tell whether an argument is an operand: a tensor, or the number in the place of one."""
    return str(argument.type) in _TENSORS or argument.name in ("other", "exponent")


def _expression(given: dict[str, Any], item: Repair, own: Callable[..., Any], *new: Any) -> Any:
    if "rounding_mode" in given:
        raise RepairError(item.operation)
    names = [name for name in given if name in ("self", "A", "input", "other", "exponent")]
    given = {**given, **dict(zip(names, new, strict=False))}
    params = {**given, "keepdim": given.get("keepdim", False)}
    return repairs.run(item, _WORDS, own, given, params)


def _filled(_: Repair, own: Callable[..., Any], *new: Any) -> Any:
    out = own(*new)
    if isinstance(out, tuple | list):
        return type(out)(_fill(x) for x in out)
    return _fill(out)


def _fill(x: Any) -> Any:
    return repairs.neutral(_WORDS, x) if _is_float(x) else x


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _clean(gradients: Any) -> bool:
    return all(x is None or bool(torch.isfinite(x).all()) for x in gradients)


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _like(new: Any, out: Any) -> Any:
    """Give the repaired result the form of the operator's own.

    Raises:
        RepairError: If it has another one.
    """
    if isinstance(out, tuple | list):
        return type(out)(_like(a, b) for a, b in zip(new, out, strict=True))
    if not isinstance(out, torch.Tensor):
        return out
    if not isinstance(new, torch.Tensor) or new.shape != out.shape:
        msg = "its result has another shape"
        raise RepairError(msg)
    return new.to(out.dtype)


def _places(made: _Repaired) -> Iterator[str]:
    """Name the operands that a node has a gradient for, in order."""
    for argument in arguments_of(made.func):
        x = made.arguments.get(argument.name)
        number = isinstance(x, float | int) and not isinstance(x, bool)
        if str(argument.type) in _TENSORS and (_is_float(x) or number):
            yield argument.name


def norm_of(gradients: Sequence[torch.Tensor]) -> float | None:
    """Give the L2 norm over gradients, None where there are none or it is not finite."""
    found = [x.detach().to_dense() if x.layout != torch.strided else x.detach() for x in gradients]
    if not found:
        return None
    norms = bring([torch.linalg.vector_norm(x.double()) for x in found])
    total = math.hypot(*(norm for (norm,) in norms))
    return total if math.isfinite(total) else None
