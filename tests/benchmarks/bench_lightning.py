"""Time Lightning's ``detect_anomaly`` and a tracked model in Lightning's own loop.

A Trainer cannot take turns with another step by step, so short fits do, and the medians of their
steps are compared.
"""

import contextlib
import itertools
import logging
import time
import warnings
from typing import Any

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anynan
from tests.benchmarks.bench_torch import GOALS
from tests.benchmarks.gpt import GPT, LARGE, SMALL, Size
from tests.benchmarks.timing import machine, options, over, publish, table

BASE = "Trainer, no tracking"
ENDS = 'Trainer, anynan track(module, level="step")'


class Module(lightning.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(size)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Clock(lightning.Callback):
    """Note the time of every step but the first three."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *details: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *details: Any) -> None:
        if details[-1] > 2:
            self.times.append(time.perf_counter() - self._start)


def measure(size: Size, rounds: int, steps: int) -> dict[str, float]:
    """Fit again and again, the variants in turn; return each median step over the untracked."""
    shape = (size.batch * steps, size.length)
    data = TensorDataset(*(torch.randint(0, size.vocabulary, shape) for _ in range(2)))
    loader: DataLoader[Any] = DataLoader(data, batch_size=size.batch)
    names = BASE, ENDS, "Trainer, anynan track(module)", "Trainer(detect_anomaly=True)"
    times: dict[str, list[float]] = {name: [] for name in names}
    for _, name in itertools.product(range(rounds), names):
        module, clock = Module(size), Clock()
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", callbacks=[clock], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            detect_anomaly="detect" in name,
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            if "anynan" in name:
                level: Any = "step" if name == ENDS else "layer"
                stack.enter_context(anynan.torch.track(module.gpt, level=level))
            trainer.fit(module, loader)
        times[name] += clock.times
    return over(BASE, times)


def main() -> None:
    chosen = options(__doc__)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    results = {
        SMALL.name: measure(SMALL, 4, chosen.rounds),
        LARGE.name: measure(LARGE, 3, max(chosen.rounds // 3, 6)),
    }
    software = (
        f"{torch.get_num_threads()} threads",
        f"PyTorch {torch.__version__}",
        f"Lightning {lightning.__version__}",
    )
    text = (
        f"{machine(*software)}; medians of the steps of short fits in turn.\n\n"
        f"{table(results, 'variant', GOALS)}\n"
    )
    publish("lightning", text, chosen.write)


if __name__ == "__main__":
    main()
