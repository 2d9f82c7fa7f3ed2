"""A watched loader in the hands of libraries that prepare and shard loaders."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import anynan
from tests.failing import failure
from tests.torch_adapter.training import assert_same, everything


def loader(*, bad: bool = False) -> DataLoader[Any]:
    data = torch.ones(16, 4)
    if bad:
        data[9, 1] = torch.nan
    return DataLoader(TensorDataset(data), batch_size=4)


def test_accelerate_prepares_before_a_loader_is_watched_or_says_so() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(TypeError, match="once it is watched: do that first"):
        accelerator.prepare(torch.nn.Linear(4, 1), anynan.watch(loader()))
    event = failure(list, anynan.watch(accelerator.prepare(loader(bad=True))))
    assert event.step == 2


@pytest.mark.filterwarnings("ignore")
def test_lightning_takes_a_watched_loader_in_one_process_only(monkeypatch, quiet_lightning) -> None:
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def predict_step(self, batch: Any, index: int) -> Any:
            return batch[0]

    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    assert len(trainer.predict(Lit(), anynan.watch(loader()))) == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TypeError, match="once it is watched"):
        trainer.predict(Lit(), anynan.watch(loader()))


def test_a_watched_loader_is_its_own_class_to_everybody_else() -> None:
    watched = anynan.watch(loader())
    assert not isinstance(watched, DataLoader)
    assert isinstance(watched, type(watched))
    assert len(watched.dataset) == 16


@pytest.mark.parametrize("every", [1, 2])
def test_the_first_bad_batch_of_a_loader_is_found_and_the_training_left_as_it_was(every) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    gradient, before = model.weight.grad, everything([model], [optimizer])

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch[0]) * torch.rand(())).mean()
        loss.backward()
        optimizer.step()
        return loss

    found = anynan.torch.first_bad_batch(step, loader(bad=True), every=every)
    assert found.index == 2
    assert model.weight.grad is gradient
    assert_same(everything([model], [optimizer]), before)
