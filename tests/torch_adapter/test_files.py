"""What a watched program writes is byte for byte what it writes without anynan."""

import copy
import copyreg
import io
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anynan
from tests.processes import python

pytestmark = pytest.mark.tier(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.out = nn.Linear(4, 1)
        self.inner[0].register_forward_hook(nothing, with_kwargs=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))


def nothing(*_: Any) -> None:
    """Stand for a hook of the user's own."""


def without_addresses(data: bytes) -> bytes:
    """Leave out of a file where a storage lies in memory: in plain pickles PyTorch names it so."""
    return re.sub(rb"\d{8,16}", b"", data)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def train(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    return optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Write a model and its optimizer in every way there is."""
    written = [
        *(pickle.dumps(model, protocol) for protocol in range(6)),
        pickle.dumps(copy.deepcopy(model)), pickle.dumps(copy.copy(model)),
        pickle.dumps(copy.copy(vars(model))), saved(model), saved(model.state_dict()),
        pickle.dumps(optimizer), saved(optimizer), saved(optimizer.state_dict()),
        saved({"model": model, "optimizer": optimizer}), pickle.dumps(model.out.weight),
    ]  # fmt: skip
    return [without_addresses(data) for data in written]


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
@pytest.mark.parametrize("tracked", ["model", "step"])
def test_a_watched_model_is_written_as_any_other(tracked: str, level: Any) -> None:
    model, inside = Net(), list[bytes]()
    tracker: Any = anynan.torch.track(model if tracked == "model" else train, level=level)
    optimizer = train(model) if tracked == "model" else tracker(model)
    written = everything(model, optimizer)
    handle = model.register_forward_hook(lambda *_: inside.append(saved(model.inner)))
    model(torch.ones(2, 4))
    handle.remove()
    tracker.remove()
    assert written == everything(model, optimizer)
    assert inside == [saved(model.inner)]


def test_a_file_of_a_watched_model_loads_with_weights_only() -> None:
    model = Net()
    known = [Net, nn.Sequential, nn.Linear, nn.Tanh, nothing]
    with anynan.torch.track(model), torch.serialization.safe_globals(known):
        model(torch.ones(2, 4))
        loaded = torch.load(io.BytesIO(saved(model)), weights_only=True)
        assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_what_is_noted_of_dicts_goes_with_the_last_tracker() -> None:
    trackers = [anynan.torch.track(Net()), anynan.torch.track(kept := Net())]
    assert OrderedDict in copyreg.dispatch_table
    for tracker in trackers:
        tracker.remove()
    assert OrderedDict not in copyreg.dispatch_table
    anynan.torch.track(kept)
    del kept
    assert OrderedDict not in copyreg.dispatch_table


WRITES = """
import pickle, anynan, made, torch
loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2)
things = anynan.torch.track(made.step), anynan.watch(loader)
open("things", "wb").write(pickle.dumps(things))
"""
READS = """
import pickle, sys
sys.modules["anynan"] = None  # importing it now fails
step, loader = pickle.load(open("things", "rb"))
print(step(1), [x.tolist() for x in loader])
"""


def test_a_tracked_function_and_a_watched_loader_load_without_anynan(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2)
    (tmp_path / "made.py").write_text("def step(x): return x + 1\n")
    assert python("-c", WRITES, cwd=tmp_path).returncode == 0
    done = python("-c", READS, cwd=tmp_path)
    assert done.stdout == f"2 {[x.tolist() for x in loader]}\n", done.stderr


PROGRAM = """
import pickle, sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for i in range(3):
    optimizer.zero_grad()
    criterion(model(torch.ones(2, 4) / (1 if i < 2 else 0)), torch.zeros(2, 1)).backward()
    optimizer.step()
    scheduler.step()
    torch.save({"model": model, "optimizer": optimizer, "criterion": criterion}, f"all{i}.pt")
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], f"state{i}.pt")
    open(f"model{i}.pickle", "wb").write(pickle.dumps([model, optimizer, criterion]))
"""

LIGHTNING = """
import lightning, torch
from lightning.pytorch.demos.boring_classes import BoringModel
torch.manual_seed(0)
module, quiet = BoringModel(), dict(enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(
    accelerator="cpu", logger=False, max_epochs=2, limit_train_batches=2, default_root_dir=".",
    **quiet
)
trainer.fit(module)
trainer.save_checkpoint("end.ckpt")
torch.save(module.layer, "net.pt")
"""

TRANSFORMERS = """
import torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config)
arguments = transformers.TrainingArguments(
    "run", max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_steps=1, seed=0
)
data = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 8
trainer = transformers.Trainer(model, arguments, train_dataset=data)
trainer.train()
trainer.save_model("end")
torch.save(model, "model.pt")
"""


PROGRAMS = {"torch": PROGRAM, "lightning": LIGHTNING, "transformers": TRANSFORMERS}


@pytest.mark.parametrize("library", PROGRAMS)
def test_an_unedited_program_writes_the_same_files(library, tmp_path, monkeypatch) -> None:
    pytest.importorskip(library)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    written = []
    for words in (["train.py"], ["-m", "anynan", "run", "train.py"]):
        folder = tmp_path / str(len(words)) / "run"  # files name the folder's last part at most
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(PROGRAMS[library])
        done = python("-W", "ignore", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
        written.append({
            str(path.relative_to(folder)): without_addresses(path.read_bytes())
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and "runs" not in path.parts
        })  # fmt: skip
    assert written[0] == written[1]
