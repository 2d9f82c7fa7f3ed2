"""transformers' Trainer, which owns the step: a callback, and ``track`` for a Trainer."""

import importlib
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402

import anynan  # noqa: E402


class Net(nn.Module):
    """Go bad at the fifth batch, in one of several places."""

    def __init__(self, where: str = "") -> None:
        torch.manual_seed(0)
        super().__init__()
        self.where, self.linear = where, nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return out / 0 if self.now("forward") else out

    def now(self, where: str) -> bool:
        return self.where == where and self.training and int(self.seen) == 4


FAULTS = {
    "forward": ("", "forward", "divide"),
    "loss": (None, "loss", "log"),
    "backward": (None, "backward", "sqrt"),
}


def arguments_of(folder: Any, **more: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, **more,
    )  # fmt: skip


def trainer(net: Net, folder: Any, callbacks: Any = (), **arguments: Any) -> Any:
    # Here, and not when the tests are collected: what a Trainer imports takes seconds.
    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            net = self.accelerator.unwrap_model(model)
            out = model(inputs["x"])
            loss = out.square().mean()
            if net.now("loss"):
                loss = (-1 - loss).log()
            if net.now("backward"):
                loss = loss + (out - out).square().sum().sqrt()
            net.seen += 1
            return loss

    chosen = arguments_of(folder, num_train_epochs=2, **arguments)
    data = [{"x": row} for row in torch.randn(16, 4)]
    return Trainer(net, chosen, train_dataset=data, callbacks=list(callbacks))


@pytest.mark.parametrize("where", FAULTS)
@pytest.mark.parametrize("arguments", [
    {}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    {"logging_nan_inf_filter": True, "logging_steps": 1},
])  # fmt: skip
def test_the_monitor_names_the_operation_and_stops_with_good_weights(where, arguments, tmp_path):
    net, monitor = Net(where), anynan.transformers.Monitor(save=not arguments)
    made = trainer(net, tmp_path, [monitor], **arguments)
    made.train()
    event = monitor.events[0]
    assert (event.layer, event.phase, event.operation.name) == FAULTS[where]
    assert event.operation.source.file == __file__
    assert event.step == 4  # each batch is one
    assert all(p.isfinite().all() for p in net.parameters())
    assert "training_step" not in vars(made)
    if not arguments:
        assert "global_step 4 of train" in event.notes and made.state.global_step == 5
        assert (tmp_path / "checkpoint-5").is_dir()


def test_a_trainer_that_is_tracked_names_its_own_step_beside_that_of_the_batch(tmp_path) -> None:
    made = trainer(Net("loss"), tmp_path, gradient_accumulation_steps=2)
    with anynan.transformers.track(made, action="record") as tracker:
        made.train()
    event = tracker.events[0]
    assert event.step == 4 and "global_step 2 of train" in event.notes  # 4 batches
    assert " bad in 16 steps" in tracker.report()  # the batches of two epochs
    assert tracker.where == f"global_step {made.state.global_step} of train"


@pytest.mark.parametrize("arguments", [
    {}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, {"bf16": True},
])  # fmt: skip
def test_a_clean_training_is_as_if_nobody_watched(arguments: Any, tmp_path: Any) -> None:
    weights = []
    for callbacks in ([], [monitor := anynan.transformers.Monitor("raise")]):
        net = Net()
        trainer(net, tmp_path, callbacks, **arguments).train()
        weights.append(net.linear.weight.clone())
    assert torch.equal(*weights)
    assert (monitor.events, monitor.tracker.notes) == ((), ())
    assert "Trainer.training_step: nothing went bad in 1" in monitor.tracker.report()


def test_what_is_no_trainer_is_refused(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"track\(\) takes a transformers.Trainer, not Net"):
        anynan.transformers.track(Net())
    made = trainer(Net(), tmp_path)
    tracker = anynan.transformers.track(made)
    with pytest.raises(ValueError, match="tracked already"):
        anynan.transformers.track(made)
    tracker.remove()
    with pytest.raises(ValueError, match="action='nothing' is unknown"):
        anynan.transformers.Monitor("nothing")


LIBRARY = """
import collections, torch, transformers
class Tuner(transformers.Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tokens, self.kept = 0, {"train": collections.defaultdict(list)}
    def compute_loss(self, model, inputs, **_):
        self.tokens += inputs["x"].numel()
        self.kept["train"]["tokens"].append(self.tokens)
        return (-1 - model(inputs["x"]).square().mean()).log()
"""


def test_what_a_trainer_of_another_library_counts_is_put_back(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_tuner.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    library = importlib.import_module("a_tuner")

    counted = []
    for watch in (False, True):
        chosen = arguments_of(tmp_path, max_steps=4)
        made = library.Tuner(Net(), chosen, train_dataset=[{"x": torch.ones(4)}] * 16)
        if watch:
            tracker = anynan.transformers.track(made, action="record")
        made.train()
        counted.append((made.tokens, made.kept))
    assert tracker.events[0].operation.name == "log"
    assert counted[0] == counted[1] == (32, {"train": {"tokens": [8, 16, 24, 32]}})
