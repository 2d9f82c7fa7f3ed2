"""A watched loader in the hands of libraries that prepare and shard loaders."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import anynan


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
    with pytest.raises(anynan.NonFiniteError) as caught:
        list(anynan.watch(accelerator.prepare(loader(bad=True))))
    assert caught.value.event.step == 2


@pytest.mark.filterwarnings("ignore")
def test_lightning_takes_a_watched_loader_in_one_process_only(
    monkeypatch: pytest.MonkeyPatch, quiet_lightning: Any
) -> None:
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0])

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
