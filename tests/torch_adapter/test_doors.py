"""Every way in tells of the same fault what ``track(step)`` tells of it."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from anynan._everywhere import Found, watch_everything
from anynan.options import Options

pytestmark = [
    pytest.mark.tier(2),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_lightning"),
]

BATCHES = torch.arange(6.0).repeat_interleave(2)[:, None] * torch.ones(12, 4) / 10
BAD = 2  # the batch, and so the step


class Root(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return (-1 - x.square()).sqrt() if is_now(self.where, "layer", at) else x


class Net(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where, self.linear, self.root = where, nn.Linear(4, 4), Root(where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.root(self.linear(x), x)


def is_now(where: str, wanted: str, x: torch.Tensor) -> bool:
    return where == wanted and bool((x == BAD / 10).all())


def loss_of(net: nn.Module, x: torch.Tensor, where: str) -> torch.Tensor:
    loss = net(x).square().mean()
    if is_now(where, "loss", x):  # NaN, and the gradient that it sends back is finite
        loss = (-1 - loss).log()
    return loss * 100 if where == "update" else loss


def optimizers(net: nn.Module, where: str) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: 3e38 if (where, i) == ("update", BAD) else 1e-4
    )
    return optimizer, rates


def batches() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(BATCHES, batch_size=2)


def loop(where: str, folder: Any, *, tracked=True, whole=False, prepare=lambda *given: given):
    net = Net(where)
    net, loader, optimizer, rates = prepare(net, batches(), *optimizers(net, where))

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(net, x, where)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    tracker: Any = tracked and anynan.torch.track(train if whole else net, action="record")
    for x in loader:
        (tracker if whole else train)(x)
        rates.step()
    if not tracked:
        return None
    tracker.remove()
    return tracker.events


step = functools.partial(loop, whole=True)


def accelerate(where: str, folder: Any) -> Any:
    library = pytest.importorskip("accelerate")
    return step(where, folder, prepare=library.Accelerator(cpu=True).prepare)


def unedited(door: Any) -> Any:
    def watched(where: str, folder: Any) -> Any:
        found = Found()
        end = watch_everything(Options(action="record"), found)
        try:
            door(where, folder, tracked=False)
        finally:
            end()
        return found.events

    return watched


def lightning(where: str, folder: Any, *, tracked: bool = True) -> Any:
    library = pytest.importorskip("lightning")

    class Lit(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(where)

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return loss_of(self.net, x, where)

        def configure_optimizers(self) -> Any:
            optimizer, rates = optimizers(self, where)
            return [optimizer], [{"scheduler": rates, "interval": "step"}]

    monitor = anynan.lightning.Monitor("record")
    library.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[monitor] if tracked else [],
    ).fit(Lit(), batches())  # fmt: skip
    return monitor.events


def transformers(where: str, folder: Any, *, tracked=True, prepare=lambda net: net) -> Any:
    library = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(library.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            return loss_of(model, inputs["x"], where)

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(BATCHES)

    net, monitor = prepare(Net(where)), anynan.transformers.Monitor("record")
    arguments = library.TrainingArguments(
        str(folder), per_device_train_batch_size=2, num_train_epochs=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        max_grad_norm=0.0,
    )  # fmt: skip
    Trainer(
        net, arguments, train_dataset=[{"x": x} for x in BATCHES],
        callbacks=[monitor] if tracked else [],
        optimizers=optimizers(net, where),
    ).train()  # fmt: skip
    return monitor.events


def lora(where: str, folder: Any) -> Any:
    library = pytest.importorskip("peft")
    settings = library.LoraConfig(target_modules=["linear"], r=2)
    return transformers(where, folder, prepare=lambda net: library.get_peft_model(net, settings))


FAULTS = {
    "layer": ("root", "forward", "sqrt", "sqrt_of_negative"),
    "loss": (None, "loss", "log", "log_of_negative"),
    "update": ("linear", "optimizer", None, "optimizer_step_too_large"),
}
DOORS = {
    "step": step,
    "accelerate": accelerate,
    "loop": loop,
    "everywhere": unedited(loop),
    "lightning": lightning,
    "lightning_unedited": unedited(lightning),
    "transformers": transformers,
    "transformers_unedited": unedited(transformers),
    "lora": lora,
}
# Where the trainer's model has it.
INSIDE = {"lightning": "net.", "lightning_unedited": "net.", "lora": "base_model.model."}


@pytest.mark.parametrize("where", FAULTS)
@pytest.mark.parametrize("door", DOORS)
def test_the_event_is_that_of_a_tracked_step(door: str, where: str, tmp_path: Any) -> None:
    event = DOORS[door](where, tmp_path)[0]
    operation = event.operation
    found = event.layer, event.phase, operation and operation.name, event.cause.tag
    wanted = FAULTS[where]
    if wanted[0] is not None:
        wanted = (INSIDE.get(door, "") + wanted[0], *wanted[1:])
        if (door, where) == ("lora", "update"):  # the linear layer itself is frozen
            wanted = (f"{wanted[0]}.lora_B.default", *wanted[1:])
    # What an update spoilt is seen in the step after it.
    assert (*found, event.step) == (*wanted, BAD + (where == "update"))
    if operation is not None:
        assert operation.source.file == __file__
    if door.startswith("transformers") and where != "update":
        assert not any("weights had been updated" in note for note in event.notes)


@pytest.mark.parametrize("door", DOORS)
def test_a_healthy_training_is_silent(door: str, tmp_path: Any) -> None:
    assert list(DOORS[door]("", tmp_path)) == []
