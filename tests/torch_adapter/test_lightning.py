"""A model in Lightning's Trainer, which calls the model's training_step and never the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.tier(2),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_lightning"),
]

import lightning  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import anynan  # noqa: E402
from anynan import NonFiniteError  # noqa: E402
from tests.failing import failure  # noqa: E402
from tests.processes import python  # noqa: E402


class Encoder(nn.Linear):
    shift = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(super().forward(x) + self.shift)


class Lit(lightning.LightningModule):
    """Go bad at batch 4, in one of several places."""

    def __init__(self, where: str | None = None) -> None:
        super().__init__()
        self.where = where
        self.encoder = Encoder(4, 4)
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
        if now == "finite":  # NaN, and its slope is not
            return (-1 - out.square().mean()).log()
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Manual(Lit):
    automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def trainer_of(*callbacks: Any, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=list(callbacks),
        enable_progress_bar=False, enable_model_summary=False, **{"max_epochs": 1, **options},
    )  # fmt: skip


def loader(rows: int) -> Any:
    data = torch.utils.data.TensorDataset(torch.ones(rows, 4))
    return torch.utils.data.DataLoader(data, batch_size=4)


def fit(module: Lit, *callbacks: Any, **options: Any) -> lightning.Trainer:
    trainer = trainer_of(*callbacks, **options)
    trainer.fit(module, loader(24))
    return trainer


FAULTS = {
    "forward": ("encoder", "forward", "log"),
    "between": (None, "loss", "divide"),
    "loss": (None, "backward", "sqrt"),
    "finite": (None, "loss", "log"),
}


def half() -> dict[str, Any]:
    """Give what "16-mixed" is on a GPU: on a CPU Lightning puts bfloat16 in its place."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return {"plugins": lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)}


WAYS: list[tuple[str, type[Lit], Callable[[], dict[str, Any]]]] = [
    *((where, Lit, dict) for where in FAULTS),
    ("forward", Manual, dict),
    ("loss", Manual, dict),
    ("forward", Lit, half),
    ("between", Lit, half),
    ("between", Lit, lambda: {"accumulate_grad_batches": 2}),  # batch 4 is a first half
    ("finite", Lit, lambda: {"precision": "bf16-mixed"}),
]


@pytest.mark.parametrize(("where", "kind", "make"), WAYS)
def test_the_monitor_names_the_operation_and_stops_with_good_weights(where, kind, make, tmp_path):
    module, monitor = kind(where), anynan.lightning.Monitor()
    trainer = fit(module, monitor, default_root_dir=tmp_path, max_epochs=2, **make())
    (event,) = monitor.events
    layer, phase, name = FAULTS[where]
    assert (event.layer, event.phase, event.operation.name, event.step) == (layer, phase, name, 4)
    assert event.operation.source.file == __file__
    assert "epoch 0, batch 4 of fit" in event.notes
    assert trainer.fit_loop.epoch_loop.total_batch_idx == 4
    assert all(p.isfinite().all() for p in module.parameters())
    saved = torch.load(monitor.saved, weights_only=True)["state_dict"]
    assert monitor.saved == str(tmp_path / f"anynan-step={trainer.global_step}.ckpt")
    assert all(value.isfinite().all() for value in saved.values())
    loops = trainer.fit_loop.epoch_loop
    assert "run" not in {**vars(loops.automatic_optimization), **vars(loops.manual_optimization)}


def test_the_monitor_raises_and_the_traceback_ends_in_the_users_line(tmp_path: Any) -> None:
    module, monitor = Lit("between"), anynan.lightning.Monitor("raise")
    with pytest.raises(NonFiniteError) as caught:
        fit(module, monitor, default_root_dir=tmp_path)
    assert "loss" not in vars(module)
    last = caught.traceback[-1]
    assert (str(last.path), last.name) == (__file__, "training_step")
    assert monitor.saved


@pytest.mark.parametrize("make", [
    dict, half, lambda: {"precision": "bf16-mixed"}, lambda: {"accumulate_grad_batches": 2},
    lambda: {"gradient_clip_val": 1.0},
])  # fmt: skip
def test_a_monitored_fit_is_as_if_nobody_watched(make: Any) -> None:
    weights = []
    for callbacks in ([], [monitor := anynan.lightning.Monitor("raise")]):
        torch.manual_seed(0)
        module = Lit()
        fit(module, *callbacks, **make())
        weights.append([p.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert monitor.events == ()
    assert monitor.tracker.notes == ()
    assert "nothing went bad in" in monitor.tracker.report()


def counters(trainer: lightning.Trainer) -> Any:
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    return trainer.global_step, progress.state_dict()


def test_a_replay_calls_no_callback_logs_nothing_and_leaves_the_counters() -> None:
    class Logging(Lit):
        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            self.log("seen", torch.tensor(float(index)), on_epoch=True)
            self.log_dict({"calls": 1.0}, on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

    class Counting(lightning.Callback):
        calls = 0

        def on_before_backward(self, *_: Any) -> None:
            self.calls += 1

    counting, monitor = Counting(), anynan.lightning.Monitor("record")
    plain = fit(Logging("between"))
    trainer = fit(Logging("between"), counting, monitor)
    assert counters(trainer) == counters(plain)
    assert monitor.events[0].operation.name == "divide"
    assert counting.calls == 6
    assert trainer.callback_metrics["calls"] == 6
    assert trainer.callback_metrics["seen_epoch"] == 2.5


def test_every_trainer_gets_one_where_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert anynan.lightning.callbacks() == []
    monkeypatch.setenv("ANYNAN_LIGHTNING", "warn")
    assert [monitor.action for monitor in anynan.lightning.callbacks()] == ["warn"]
    with pytest.raises(ValueError, match="action='nothing' is unknown"):
        anynan.lightning.Monitor("nothing")


RANKS = r"""
import lightning, torch, anynan
from lightning.pytorch.demos.boring_classes import BoringModel

class Module(BoringModel):
    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        bad = index == 2 and self.global_rank == 1
        return torch.log(-1 - loss) if bad else loss

if __name__ == "__main__":
    module, monitor = Module(), anynan.lightning.Monitor("stop")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[monitor], default_root_dir=".", limit_val_batches=0,
    )
    trainer.fit(module)
    (event,) = monitor.events
    good = all(p.isfinite().all() for p in module.parameters())
    batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
    # In one piece: both ranks write there.
    print(f"said {batches} {event.rank} {event.operation.name} {good}\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_all_ranks_stop_at_the_batch_that_one_of_them_went_bad_in(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = python("ranks.py", cwd=tmp_path)
    # PyTorch may write there itself, without ending its lines.
    assert done.stdout.count("said 3 1 log True") == 2, done.stdout + done.stderr
    assert (tmp_path / "anynan-step=3.ckpt").exists()


class Evaluated(Lit):
    """Make an Inf in the evaluations, which no training batch sees."""

    def validation_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x = batch[0] if self.where != "evaluation" else batch[0] / (batch[0] * 0)
        return self.parts["head"](x).mean()

    def test_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.validation_step(batch, index)

    predict_step = test_step


def test_a_fault_of_the_validation_is_told_as_one_and_the_training_goes_on() -> None:
    monitor = anynan.lightning.Monitor(action="stop", save=False)
    trainer = trainer_of(monitor, max_epochs=2)
    with pytest.warns(anynan.AnynanWarning) as said:
        trainer.fit(Evaluated("evaluation"), loader(16), loader(16))
    assert trainer.global_step == 8
    (event,) = monitor.events
    assert event.operation.name == "divide"
    assert event.target == "function Evaluated.validation_step"
    assert event.notes[-1] == "batch 0 of validation, in the sanity check before the training"
    assert event.times == 2 + 2 * 4
    assert all("update" not in str(w.message) for w in said)
    assert not monitor.tracker.events
    assert len(monitor.tracker.history) == 8
    assert trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.completed == 4


def test_a_fault_of_a_validation_between_epochs_says_where() -> None:
    module, monitor = Evaluated(), anynan.lightning.Monitor(action="record")
    module.on_train_epoch_end = lambda: setattr(module, "where", "evaluation")
    trainer_of(monitor, max_epochs=2).fit(module, loader(16), loader(16))
    assert monitor.events[0].notes[-1] == "epoch 1, batch 0 of validation"


@pytest.mark.parametrize("word", ["validation", "test", "predict"])
def test_evaluations_alone_are_watched_too(word: str) -> None:
    monitor = anynan.lightning.Monitor(action="raise")
    evaluate = getattr(trainer_of(monitor), word.replace("validation", "validate"))
    event = failure(evaluate, Evaluated("evaluation"), loader(16))
    assert event.operation.name == "divide"
    assert event.target == f"function Evaluated.{word}_step"
    assert monitor.events == (event,)
    evaluate(Evaluated(), loader(16))
    assert monitor.events == ()


@pytest.mark.parametrize("log", ["log", "log_dict"])
def test_what_an_evaluation_only_logs_is_told_with_its_operation(log: str) -> None:
    class Logged(Lit):
        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            made = (self.parts["head"](batch[0]) * 0).log().mean()
            self.log("loss", made) if log == "log" else self.log_dict({"loss": made})

    module, monitor = Logged(), anynan.lightning.Monitor(action="record")
    trainer = trainer_of(monitor)
    trainer.validate(module, loader(16), verbose=False)
    (event,) = monitor.events
    assert (event.operation.name, event.times) == ("log", 4)
    assert trainer.callback_metrics["loss"] == -torch.inf
    assert "log" not in vars(module)
