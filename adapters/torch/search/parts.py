"""Look at a whole training state, without hooks: is anything bad in it now?"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anynan._arrays.containers import leaves
from anynan._readings.policy import Policy, reading_kind
from anynan.events import Event, Kind
from anynan.torch.read.probes import all_ends, measure, plain


@dataclass(frozen=True, slots=True)
class Part:
    """Point at one tensor of a state: its phase, its words, and the weight it belongs to."""

    phase: Any
    tensor: str
    value: torch.Tensor
    weight: str | None = None
    buffer: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Tell it from the others."""
        return self.phase, self.weight, self.tensor

    @property
    def may_be_meant(self) -> bool:
        """Tell whether a program may keep NaN or Inf in it on purpose."""
        return self.buffer or self.phase == "optimizer"


# What is kept on purpose, by its key, and what it holds.
Meant = Mapping[tuple[Any, ...], Kind]


def parts(objects: Iterable[Any], losses: Iterable[Any] = ()) -> Iterator[Part]:
    """Walk losses, weights, gradients, buffers and optimizer states."""
    objects = list(objects)
    for loss in losses:
        for name, x in leaves(loss, "loss"):
            if isinstance(x, float):
                yield Part("loss", name, torch.tensor(x, dtype=torch.float64, device="cpu"))
            elif isinstance(x, torch.Tensor) and x.numel() == 1:
                yield Part("loss", name, x)
    names: dict[int, str] = {}
    for model in objects:
        if isinstance(model, torch.nn.Module):
            for name, p in model.named_parameters():
                names.setdefault(id(p), name)
                yield Part("parameter", name.rpartition(".")[2], p, name)
                if p.grad is not None:
                    yield Part("backward", f"grad of {name.rpartition('.')[2]}", p.grad, name)
            for name, x in model.named_buffers():
                yield Part("parameter", name.rpartition(".")[2], x, name, buffer=True)
    yield from moments(objects, names)


def moments(objects: Iterable[Any], names: dict[int, str]) -> Iterator[Part]:
    """Walk the tensors that optimizers keep for their weights."""
    for optimizer in objects:
        if isinstance(optimizer, torch.optim.Optimizer):
            for p, held in optimizer.state.items():
                for name, x in leaves(held, "state"):
                    if isinstance(x, torch.Tensor):
                        yield Part("optimizer", name, x, names.get(id(p)))


def meant(found: Iterable[Part]) -> Meant:
    """Find the state that is bad before anything ran: it may be so by design."""
    kinds = ((part, reading_kind(lo, hi)) for part, lo, hi in _read(found) if part.may_be_meant)
    return {part.key: kind for part, kind in kinds if kind is not None}


def first_bad(
    found: Iterable[Part], policy: Policy, step: int, known: Meant, *, scaled: bool
) -> Event | None:
    """Describe the first bad tensor; one read for each device.

    Args:
        found: What to look at.
        policy: What is bad.
        step: The step to write into the event.
        known: What was there before, and may be meant: it is bad where it holds something else.
        scaled: Whether a loss scaler makes infinite gradients on purpose.
    """
    for part, low, high in _read(found):
        if -math.inf < low and high < math.inf:
            continue
        if scaled and part.phase == "backward":
            continue
        if part.may_be_meant and known.get(part.key) == reading_kind(low, high):
            continue
        layer = None if part.weight is None else part.weight.rpartition(".")[0]
        # A buffer of -Inf is a mask.
        judged = policy.judge("forward" if part.buffer else part.phase, low, high, layer=layer)
        if judged is not None and judged[1] == "bad":
            notes: tuple[str, ...] = ()
            if part.phase == "optimizer":
                kept = f"{part.tensor}, which the optimizer keeps for this weight"
                notes = (f"what is bad is {kept}: the weight follows at its next update",)
            return Event(
                backend="torch", layer=layer, phase=part.phase, kind=judged[0], severity="bad",
                step=step, tensor=part.tensor, parameter=part.weight,
                summary=measure(part.value), notes=notes,
            )  # fmt: skip
    return None


def _read(found: Iterable[Part]) -> list[tuple[Part, float, float]]:
    """Give both ends of every tensor that can hold something bad, in order."""
    kept = [(part, x) for part in found if (x := plain(part.value)) is not None]
    read = all_ends([x for _, x in kept])
    return [(part, *both) for (part, _), both in zip(kept, read, strict=True)]
