"""The ways people train, each with a fault somewhere."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.torch_adapter.training import Fault, Net


class Program:
    """One way to train: models, optimizers, a fault somewhere, and a step."""

    # Where the fault is, which turn of it is armed, and which call that is.
    layer = "fault"
    turn: int | None = None
    call = 0

    def __init__(self) -> None:
        self.fault = Fault()
        self.model = self.build()
        self.optimizer = self.update()

    def build(self) -> Any:
        return Net(self.fault)

    def update(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def batch(self) -> Tensor:
        return torch.randn(3, 4)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.passes()
        self.clip()
        self.optimizer.step()
        return loss

    def passes(self) -> Tensor:
        loss = self.model(self.batch()).square().mean()
        loss.backward()
        return loss

    def clip(self) -> None:
        """Change the gradients before the update."""

    def models(self) -> list[nn.Module]:
        return [self.model]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def arm(self, how: str | None) -> None:
        """Let the fault make a bad value from now on."""
        self.fault.armed, self.fault.at = how, self.turn


PROGRAMS: dict[str, type[Program]] = {}


def program(cls: type[Program]) -> type[Program]:
    PROGRAMS[cls.__name__] = cls
    return cls


@program
class Plain(Program):
    """One forward, one backward, one update; the other programs change a part of it."""


@program
class Accumulation(Program):
    turn = call = 1

    def passes(self) -> Tensor:
        for turn in range(3):
            loss = self.model(self.batch(), turn).square().mean() / 3
            loss.backward()
        return loss


class Heads(nn.Module):
    """One trunk, two results."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.trunk, self.fault = nn.Linear(4, 4), fault
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.left(x), self.right(self.fault(x))


@program
class TwoLosses(Program):
    """Two losses of one forward, each with its own backward pass; the second has the fault."""

    def build(self) -> nn.Module:
        return Heads(self.fault)

    def passes(self) -> Tensor:
        left, right = self.model(self.batch())
        left.square().mean().backward(retain_graph=True)
        loss = right.square().mean()
        loss.backward()
        return loss


@program
class Gan(Program):
    """A critic and a generator, each with an optimizer; the fault is in the critic."""

    turn = call = 1

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        self.second = torch.optim.Adam(self.generator.parameters(), lr=0.01)

    def step(self) -> Tensor:
        fake = self.generator(torch.randn(3, 2))
        self.optimizer.zero_grad()
        real = self.model(self.batch(), 0).mean()
        (self.model(fake.detach(), 1).mean() - real).backward()
        self.optimizer.step()
        self.second.zero_grad()
        loss = -self.model(fake, 2).mean()
        loss.backward()
        self.second.step()
        return loss

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, self.second]

    def models(self) -> list[nn.Module]:
        return [self.model, self.generator]


@program
class Penalty(Program):
    """The gradient of a gradient."""

    def passes(self) -> Tensor:
        x = self.batch().requires_grad_()
        out = self.model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + (grad.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss


@program
class Lbfgs(Program):
    """A closure that the optimizer calls several times."""

    def update(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.model.parameters(), max_iter=3, history_size=2)

    def step(self) -> Tensor:
        x = self.batch()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

        return self.optimizer.step(closure)


@program
class ClipNorm(Program):
    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)


@program
class ClipStrict(Program):
    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)


class Cell(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.inner, self.fault = nn.GRUCell(4, 4), fault

    def forward(self, x: Tensor, h: Tensor, turn: int) -> Tensor:
        return self.fault(self.inner(x, h), turn)


class Loop(nn.Module):
    """A cell called once for each time step."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.cell, self.head = Cell(fault), nn.Linear(4, 2)

    def run(self, x: Tensor, turns: int = 0) -> Tensor:
        h = torch.zeros(x.shape[0], 4)
        for turn in range(x.shape[1]):
            h = self.cell(x[:, turn], h, turns + turn)
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(x))


@program
class Recurrent(Program):
    layer = "cell.fault"
    turn = call = 2

    def build(self) -> nn.Module:
        return Loop(self.fault)

    def batch(self) -> Tensor:
        return torch.randn(3, 5, 4)


class Kept(nn.Module):
    """A checkpointed body behind a stem."""

    def __init__(self, body: nn.Module, **how: Any) -> None:
        super().__init__()
        self.stem, self.body, self.how = nn.Linear(4, 4), body, how

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, self.stem(x), **self.how)


class Checkpointed(Program):
    layer = "body.fault"
    how: ClassVar[dict[str, Any]]

    def build(self) -> nn.Module:
        return Kept(Net(self.fault), **self.how)


class Nested(Checkpointed):
    layer = "body.body.fault"

    def build(self) -> nn.Module:
        return Kept(Kept(Net(self.fault), **self.how), **self.how)


class LoopKept(Loop):
    """All turns of the cell inside one checkpointed region."""

    def __init__(self, fault: Fault, **how: Any) -> None:
        super().__init__(fault)
        self.how, self.stem = how, nn.Linear(4, 4)

    def forward(self, x: Tensor, turns: int = 0) -> Tensor:
        return self.head(checkpoint(self.run, self.stem(x), turns, **self.how))


class CellsInRegion(Recurrent):
    how: ClassVar[dict[str, Any]]

    def build(self) -> nn.Module:
        return LoopKept(self.fault, **self.how)


class WholeModel(Program):
    """The tracked model's own call is the region."""

    how: ClassVar[dict[str, Any]]

    def passes(self) -> Tensor:
        x = self.batch().requires_grad_()
        loss = checkpoint(self.model, x, **self.how).square().mean()
        loss.backward()
        return loss


_CHOSEN = [torch.ops.aten.addmm.default]
_HOW: dict[str, dict[str, Any]] = {
    "Reentrant": {"use_reentrant": True},
    "NonReentrant": {"use_reentrant": False},
    "Selective": {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(_CHOSEN),
    },
}
for _base in (Checkpointed, Nested, CellsInRegion, WholeModel):
    for _name, _how in _HOW.items():
        if _name != "Selective" or _base is Checkpointed:
            program(type(f"{_base.__name__}{_name}", (_base,), {"how": _how}))
