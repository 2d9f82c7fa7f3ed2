"""A model in Lightning's Trainer, which calls the model's training_step and never the model."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")

import lightning  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import anynan  # noqa: E402
from anynan import NonFiniteError  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.linear(x) + self.shift)


class Lit(lightning.LightningModule):
    """Go bad at batch 4, in one of several places."""

    def __init__(self, where: str | None = None) -> None:
        super().__init__()
        self.where = where
        self.encoder = Encoder()
        self.parts = nn.ModuleDict({"head": nn.Linear(4, 1)})

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        now = self.where if index == 4 else None
        self.encoder.shift = -10.0 if now == "forward" else 10.0
        hidden = self.encoder(batch[0])
        if now == "between":
            hidden = hidden / 0
        out = self.parts["head"](hidden)
        if now == "loss":
            return (out - out).square().sum().sqrt()
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(module: Lit, **options: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_operation_is_named(precision: Any) -> None:
    module = Lit("forward")
    with anynan.torch.track(module), pytest.raises(NonFiniteError) as caught:
        fit(module, precision=precision)
    event = caught.value.event
    assert (event.layer, event.phase, event.step) == ("encoder", "forward", 4)
    assert event.operation.name == "log"
    assert event.cause.tag == "log_of_negative"


def test_what_goes_bad_between_the_parts_is_not_blamed_on_the_batch() -> None:
    module = Lit("between")
    with anynan.torch.track(module), pytest.raises(NonFiniteError) as caught:
        fit(module)
    event = caught.value.event
    assert (event.layer, event.phase) == (None, "loss")
    assert event.cause.tag == "made_between_layers"
    assert "and parts.head" in event.cause.text


def test_a_loss_that_sends_back_nan_is_told_from_the_model() -> None:
    module = Lit("loss")
    with anynan.torch.track(module), pytest.raises(NonFiniteError) as caught:
        fit(module)
    event = caught.value.event
    assert (event.layer, event.phase) == (None, "loss")
    assert event.cause.tag == "outside_the_model"


def test_a_bad_batch_is_named() -> None:
    class Spoilt(Lit):
        def on_train_batch_start(self, batch: list[torch.Tensor], index: int) -> None:
            if index == 2:
                batch[0][1, 3] = torch.nan

    module = Spoilt()
    with anynan.torch.track(module), pytest.raises(NonFiniteError) as caught:
        fit(module)
    event = caught.value.event
    assert (event.phase, event.step) == ("input", 2)
    assert "1 of 4 rows is bad: 1" in str(caught.value)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 6), (2, 3)])
def test_a_clean_fit_is_as_if_nobody_watched(accumulate: int, steps: int) -> None:
    weights = []
    for tracked in (False, True):
        torch.manual_seed(0)
        module = Lit()
        tracker = anynan.torch.track(module) if tracked else None
        fit(module, accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
        weights.append([p.clone() for p in module.parameters()])
        if tracker is not None:
            tracker.remove()
            assert (len(tracker.history), tracker.events) == (steps, ())
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
